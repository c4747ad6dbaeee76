"""Progress of work on text, on standard error: a bar on a terminal, else a line now and then."""

import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TextIO

from shardlm.observe.console import count, duration

_LINE_SECONDS = 10.0
"""Between two lines of a log; work that is shorter has none."""
_BAR_SECONDS = 0.2
_FIRST_BAR_SECONDS = 1.0
_RATE_SECONDS = 30.0
"""Rates are of this long before now: what was done earlier, or skipped, says little of the rest."""


class Progress:
    """How many bytes of text are done and how many ids they became; a context manager."""

    def __init__(
        self,
        what: str,
        total: int,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
          what: is done; the first words of the line.
          total: bytes, 0 if nobody knows.
          stream: default: standard error.
          clock: seconds.
        """
        self._what, self._total, self._clock = what, total, clock
        self._stream = stream if stream is not None else sys.stderr
        # A process may have none.
        self._terminal = self._stream is not None and self._stream.isatty()
        self._terminal &= os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
        self._bytes = self._tokens = 0
        self._began = clock()
        self._next = self._began + (_FIRST_BAR_SECONDS if self._terminal else _LINE_SECONDS)
        self._seen = deque([(self._began, 0, 0)])
        self._bar: Any = None
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            # A thread that is left alone may still report.
            self._next = math.inf
            if self._bar is not None:
                self._bar.stop()

    def __call__(self, stored_bytes: int, tokens: int) -> None:
        """So many more are done. From any thread; both are 0 to say that the work goes on."""
        with self._lock:
            self._bytes += stored_bytes
            self._tokens += tokens
            now = self._clock()
            if now < self._next:
                return
            self._next = now + (_BAR_SECONDS if self._terminal else _LINE_SECONDS)
            while len(self._seen) > 1 and self._seen[1][0] <= now - _RATE_SECONDS:
                self._seen.popleft()
            text = self._text(now)
            self._seen.append((now, self._bytes, self._tokens))
            if self._terminal:
                self._draw(text)
            elif self._stream is not None:
                print(f"{self._what}: {text}", file=self._stream, flush=True)

    def _text(self, now: float) -> str:
        then, bytes_then, tokens_then = self._seen[0]
        seconds = max(now - then, 1e-9)
        known = f" of {count(self._total)}B" if self._total else ""
        # Of what is no work on text there is the time alone.
        parts = [f"{count(self._bytes)}B{known}"] if known or self._bytes or self._tokens else []
        if self._tokens:
            parts.append(f"{count((self._tokens - tokens_then) / seconds)} tokens/s")
        rate, left = (self._bytes - bytes_then) / seconds, self._total - self._bytes
        if left > 0 and rate > 0:
            parts.append(f"{duration(left / rate)} left")
        else:
            parts.append(duration(now - self._began))
        return ", ".join(parts)

    def _draw(self, text: str) -> None:
        if self._bar is None:
            # Here: it takes a tenth of a second to load, which short work has no use for.
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TextColumn("{task.fields[text]}", markup=False),
                console=Console(file=self._stream),
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._bar.add_task(self._what, total=self._total or None, text="")
            self._bar.start()
            # It hides the cursor, and a process that is killed would leave it so.
            self._bar.console.show_cursor(True)
        self._bar.update(self._bar.task_ids[0], completed=self._bytes, text=text, refresh=True)
