"""Progress on standard output: one short line of plain text, on a terminal or in a file."""

import sys
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TextIO


class Console:
    """Prints a line every so many updates, and at the last.

    The time left is the mean of the last updates, without the first one, which compiles.
    """

    def __init__(
        self,
        steps: int,
        every: int,
        stream: TextIO | None = None,
        closed: Callable[[], None] = lambda: None,
    ):
        """
        Args:
          steps: updates of the whole run.
          every: updates from one line to the next.
          stream: default: standard output.
          closed: called for each line that nobody can read any more (`| head`).
        """
        self._steps = steps
        self._every = every
        self._stream = sys.stdout if stream is None else stream
        self._closed = closed
        self._seconds: deque[float] = deque(maxlen=50)
        self._seen = 0

    def update(self, record: Mapping[str, Any]) -> None:
        """Take the record of an update (`shardlm.observe.update_record`)."""
        self._seen += 1
        if self._seen > 1:
            self._seconds.append(record["seconds"])
        step = record["step"]
        if step % self._every == 0 or step == self._steps or self._seen == 1:
            self.say(self._line(record))

    def evaluation(self, step: int, loss: float, bits_per_byte: float | None) -> None:
        """Take the loss over the validation split."""
        self.say(f"step {self._counted(step)}  validation loss {loss_text(loss, bits_per_byte)}")

    def say(self, text: str) -> None:
        """Print a line at once."""
        try:
            print(text, file=self._stream, flush=True)
        except BrokenPipeError:
            self._closed()

    def _line(self, record: Mapping[str, Any]) -> str:
        parts = [
            f"step {self._counted(record['step'])}",
            f"loss {loss_text(record['loss'])}",
            f"lr {record['learning_rate']:.2e}",
            f"{count(record['tokens_per_second'])} tokens/s",
        ]
        if record["mfu"] is not None:
            parts.append(f"mfu {record['mfu']:.1%}")
        if self._seconds:
            mean = sum(self._seconds) / len(self._seconds)
            parts.append(f"{duration(mean * (self._steps - record['step']))} left")
        if record["skipped"]:
            some = record["tokens_per_second"] > 0
            parts.append(f"skipped: {'gradients are not finite' if some else 'nothing to predict'}")
        return "  ".join(parts)

    def _counted(self, step: int) -> str:
        return f"{step:{len(str(self._steps))}d}/{self._steps}"


def loss_text(loss: float, bits_per_byte: float | None = None) -> str:
    """A loss with its unit, and in the one that tokenizers can be compared by where it is known."""
    bits = "" if bits_per_byte is None else f", {bits_per_byte:.4f} bits per byte"
    return f"{loss:.4f} nats per token{bits}"


def duration(seconds: float) -> str:
    """45s, 3m05s, 2h07m, 4d03h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def count(value: float) -> str:
    """Three digits and a unit: 987, 12.3k, 4.56M."""
    for unit in ("", "k", "M"):
        if value < 999.5:
            return f"{value:.3g}{unit}" if unit else f"{value:.0f}"
        value /= 1000
    return f"{value:.3g}G"
