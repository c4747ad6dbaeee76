"""How examples, updates and devices relate in a run."""

from collections.abc import Mapping
from dataclasses import dataclass

from shardlm.config import Config
from shardlm.mesh.axes import batch_ways


@dataclass(frozen=True)
class Arithmetic:
    """The counts of a run.

    For example 1,024 examples with a batch of 1,024 in micro-batches of 1,024 over 4 devices: 256
    rows a device, 4 device batches in an update, 1 update in an epoch.
    """

    examples: int
    """Rows of an epoch."""
    batch: int
    """Rows of an update."""
    micro_batch: int
    """Rows that go through at once, over all devices."""
    micro_batches: int
    """Micro-batches of an update."""
    ways: int
    """Devices that the examples are split over."""
    steps: int
    """Updates of the run."""

    @classmethod
    def of(cls, config: Config, sizes: Mapping[str, int], examples: int) -> "Arithmetic":
        """The counts of a configuration on a mesh."""
        ways = batch_ways(sizes)
        return cls(
            examples,
            config.batch,
            config.micro_batch,
            config.micro_batches,
            ways,
            config.train.steps,
        )

    @property
    def rows_a_device(self) -> int:
        """Rows of one device's part of a micro-batch."""
        return self.micro_batch // self.ways

    @property
    def device_batches(self) -> int:
        """Device parts of micro-batches in an update."""
        return self.micro_batches * self.ways

    @property
    def updates_an_epoch(self) -> float:
        """Updates in which every example comes once."""
        return self.examples / self.batch

    @property
    def epochs(self) -> float:
        """Times that the run sees every example."""
        return self.steps * self.batch / self.examples

    def __str__(self) -> str:
        return (
            f"{_many(self.examples, 'example')} an epoch, {_many(self.steps, 'update')} of "
            f"{_many(self.batch, 'row')}: {_many(self.epochs, 'epoch')} of "
            f"{_many(self.updates_an_epoch, 'update')}\n"
            f"an update: {_many(self.micro_batches, 'micro-batch', 'es')} of "
            f"{_many(self.ways, 'device')} x {_many(self.rows_a_device, 'row')} = "
            f"{_many(self.device_batches, 'device batch', 'es')}"
        )


def _many(n: float, noun: str, plural: str = "s") -> str:
    number = f"{n:,}" if isinstance(n, int) else f"{n:.4g}"
    return f"{number} {noun}{'' if n == 1 else plural}"
