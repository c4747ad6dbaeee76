"""How examples, updates and devices relate in a run."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardlm.config import Config
from shardlm.mesh.axes import batch_ways
from shardlm.words import many


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
    sources: tuple[tuple[str, float], ...] = ()
    """With weights: each source and the epochs that the run makes of it."""

    @classmethod
    def of(
        cls,
        config: Config,
        sizes: Mapping[str, int],
        examples: int,
        sources: Iterable[tuple[str, float]] = (),
    ) -> "Arithmetic":
        """The counts of a configuration on a mesh."""
        ways = batch_ways(sizes)
        return cls(
            examples,
            config.batch,
            config.micro_batch,
            config.micro_batches,
            ways,
            config.train.steps,
            tuple(sources),
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
        updates = f"{many(self.steps, 'update')} of {many(self.batch, 'row')}"
        if self.sources:
            epochs = ", ".join(f"{many(n, 'epoch')} of {name}" for name, n in self.sources)
            line = f"{updates}: {epochs}"
        else:
            line = (
                f"{many(self.examples, 'example')} an epoch, {updates}: "
                f"{many(self.epochs, 'epoch')} of {many(self.updates_an_epoch, 'update')}"
            )
        return (
            f"{line}\n"
            f"an update: {many(self.micro_batches, 'micro-batch', 'es')} of "
            f"{many(self.ways, 'device')} x {many(self.rows_a_device, 'row')} = "
            f"{many(self.device_batches, 'device batch', 'es')}"
        )
