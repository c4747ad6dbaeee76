"""metrics.jsonl: one JSON object a line, ascending steps, the same after any number of resumes."""

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardlm.files import replace_text

if TYPE_CHECKING:
    import jax


class MetricsError(ValueError):
    """A metrics file that cannot be continued or read: file, line and what is wrong there."""


MIXTURE_METRICS = ("dropped", "expert_load", "router_entropy")
"""Of the layers with experts: the share of choices dropped for want of capacity; the load of the
busiest expert over the mean, in the layer where that is most; the mean entropy of the router, in
nats."""


def update_record(
    *,
    step: int,
    loss: float,
    grad_norm: float,
    learning_rate: float,
    tokens: int,
    seconds: float,
    data_seconds: float,
    tokens_per_second: float,
    mfu: float | None,
    balance: float,
    balance_run: float,
    source_tokens: Sequence[int],
    epochs: Sequence[float],
    device_seconds: Sequence[float] | None,
    device_speeds: Sequence[float] | None,
    skipped: bool,
    mixture: Mapping[str, float],
) -> dict[str, Any]:
    """The line of one update.

    Args:
      step: updates done, from 1.
      loss: mean over the loss tokens of the update, in nats.
      grad_norm: global norm before clipping.
      learning_rate: of this update.
      tokens: loss tokens since the beginning of the run.
      seconds: from the end of the update before to the end of this one.
      data_seconds: of them, those in which the host waited for the batch.
      tokens_per_second: loss tokens of this update over `seconds`.
      mfu: model FLOPs over the peak of the devices; None where the peak is unknown.
      balance: estimated time of the busiest device (its work; over its measured speed, if devices
        are dealt by that) over the mean: 1 where all are done at once.
      balance_run: the same over all updates so far, each counted by its mean.
      source_tokens: loss tokens of each source since the beginning of the run.
      epochs: how often each source has been read: its `source_tokens` over those of an epoch.
      device_seconds: that the devices of each share of the batch computed, without waiting; None
        where that is not measured.
      device_speeds: by which the update was dealt to them, of mean 1; None likewise.
      skipped: whether the update was left out: a gradient was not finite, or no row had a target.
      mixture: of mixtures of experts, a value for each of `MIXTURE_METRICS`.
    """
    return {
        "step": int(step),
        "loss": float(loss),
        "grad_norm": float(grad_norm),
        "learning_rate": float(learning_rate),
        "tokens": int(tokens),
        "seconds": float(seconds),
        "data_seconds": float(data_seconds),
        "tokens_per_second": float(tokens_per_second),
        "mfu": None if mfu is None else float(mfu),
        "balance": float(balance),
        "balance_run": float(balance_run),
        "source_tokens": list(source_tokens),
        "epochs": list(epochs),
        "device_seconds": None if device_seconds is None else list(device_seconds),
        "device_speeds": None if device_speeds is None else list(device_speeds),
        "skipped": int(skipped),
        **{key: float(value) for key, value in mixture.items()},
    }


class MetricsWriter:
    """Appends lines. A line is in the file, complete, when `write` returns.

    JSON has no NaN or infinity: such a value is written as null, and the line has a further key
    `not_finite` that says which it was, as in `{"loss": null, "not_finite": {"loss": "nan"}}`.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record; `step` must be in it."""
        assert isinstance(record["step"], int)
        values = dict(record)
        odd = {k: v for k, v in values.items() if isinstance(v, float) and not math.isfinite(v)}
        if odd:
            values |= dict.fromkeys(odd)
            values["not_finite"] = {key: str(value) for key, value in odd.items()}
        self._file.write(json.dumps(values, allow_nan=False) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Return when every line is on the disk, as a checkpoint of the same step will be."""
        os.fsync(self._file.fileno())

    def truncate_after(self, step: int) -> int:
        """Drop the lines of later steps, and a last line that was cut off in the middle.

        To be called on resume, with the step that was restored, before anything is written. The
        file is the old or the new one at any moment.

        Returns:
          The last update that has a line now, 0 for none.

        Raises:
          MetricsError: a line other than the last is not JSON, or the steps do not ascend.
        """
        text = self.path.read_text(encoding="utf-8", errors="replace")
        kept, last, last_update = [], 0, 0
        for number, (line, record) in enumerate(_parse(self.path, text), start=1):
            update = "loss" in record
            if record["step"] < last or (update and record["step"] == last_update):
                raise MetricsError(
                    f"{self.path}:{number}: step {record['step']} comes after step {last}: the "
                    "file has been edited, or two runs have written to it"
                )
            if record["step"] > step:
                break
            kept.append(f"{line}\n")
            last = record["step"]
            last_update = last if update else last_update
        if "".join(kept) != text:
            self._file.close()
            replace_text(self.path, "".join(kept))
            self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115
        return last_update

    def close(self) -> None:
        self._file.close()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """All complete lines, of updates (`loss`) and evaluations (`eval_loss`), in order.

    Values that were not finite are None, as they stand in the file.

    Raises:
      MetricsError: a line other than the last is not JSON.
      OSError: there is no such file.
    """
    text = Path(path).read_text(encoding="utf-8", errors="replace")
    return [record for _, record in _parse(Path(path), text)]


def _parse(path: Path, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Lines and their records. What stands after the last line end was cut off, or is being
    written; a last line that makes no sense was cut off too."""
    lines = text.split("\n")[:-1]
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            yield line, record
        elif number < len(lines):
            raise MetricsError(f"{path}:{number}: not a line of metrics: {line[:60]!r}")


@dataclass(frozen=True)
class Fetched:
    """The metrics of one update, on the host."""

    step: int
    values: dict[str, Any]
    """Python numbers, or lists of them."""
    seconds: float
    """From the end of the update before, or from `start`, to the end of this one."""


class DelayedMetrics:
    """Reads the metrics of update k when update k+1 has been dispatched.

    The host then never stalls the device: while it waits for k, k+1 is queued. Over any stretch the
    `seconds` add up to the wall clock between `start` and the end of the last update fetched.

    Before a checkpoint of step k is saved, `flush` must have been called and the line written, or a
    run that is killed in between resumes at k without the line of k.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._pending: tuple[int, Any] | None = None
        self._last = clock()

    def start(self) -> None:
        """Count time from now: at the start, and after work that is no part of an update."""
        self._last = self._clock()

    def push(self, step: int, metrics: "Mapping[str, jax.Array]") -> Fetched | None:
        """Hand in the metrics of an update just dispatched; returns those of the one before."""
        for array in metrics.values():
            array.copy_to_host_async()
        fetched = self.flush()
        self._pending = (step, metrics)
        return fetched

    def flush(self) -> Fetched | None:
        """Wait for the last update that was handed in; None when it was fetched before."""
        if self._pending is None:
            return None
        (step, metrics), self._pending = self._pending, None
        values = {name: array.tolist() for name, array in metrics.items()}
        now = self._clock()
        seconds, self._last = now - self._last, now
        return Fetched(step, values, seconds)
