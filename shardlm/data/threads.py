"""Threads that nobody waits for when the process is to stop."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


class Threads:
    """So many threads, which do one thing after another.

    The end of a process waits for those of `concurrent.futures.ThreadPoolExecutor` and for all that
    they were given. These end with it, and when they are closed, after what they are doing.
    """

    def __init__(self, number: int) -> None:
        self._number, self._closed = number, False
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        for _ in range(number):
            threading.Thread(target=self._serve, daemon=True).start()

    def submit(
        self,
        work: Callable[Arguments, Result],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Future[Result]:
        """What `work` returns or raises."""
        found: Future[Result] = Future()

        def run() -> None:
            try:
                found.set_result(work(*args, **kwargs))
            except BaseException as error:
                found.set_exception(error)

        self._waiting.put(run)
        return found

    def close(self) -> None:
        """Leave what has not begun."""
        self._closed = True
        for _ in range(self._number):
            self._waiting.put(None)

    def __enter__(self) -> "Threads":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _serve(self) -> None:
        while (run := self._waiting.get()) is not None and not self._closed:
            run()
