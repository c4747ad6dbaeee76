"""Threads that nobody waits for when the process is to stop."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


class Threads:
    """A pool of daemon threads.

    A process that ends waits for the threads of `concurrent.futures.ThreadPoolExecutor`, for as
    long as what they are doing takes. It does not wait for these. Once closed, each of them ends
    after what it is doing, and nobody waits for that either.
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
        """What `work` will return or raise; if the pool is closed before it begins, nothing."""
        found: Future[Result] = Future()

        def run() -> None:
            try:
                found.set_result(work(*args, **kwargs))
            except BaseException as error:
                found.set_exception(error)

        self._waiting.put(run)
        return found

    def close(self) -> None:
        """Begin nothing more; what has not begun never will, and its future stays pending."""
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
