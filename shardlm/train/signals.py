"""Stopping a run on request."""

import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self


class StopRequest:
    """Notes SIGTERM and SIGINT while it is entered, in the main thread.

    `signal` is the number of the first signal, 0 for none. A SIGINT after that does not wait.
    """

    def __init__(self, at_once: Callable[[], None]) -> None:
        """
        Args:
          at_once: called, in the signal handler, on a SIGINT that follows another signal.
        """
        self.signal = 0
        self._at_once = at_once
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal and number == signal.SIGINT:
            self._at_once()
        self.request(number)

    def request(self, number: int) -> None:
        """Stop as if this signal had come."""
        self.signal = self.signal or number
