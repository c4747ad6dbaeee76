"""Which device of `stage` runs which of its layers on which micro-batch, and when.

The layers are cut into `stages * rounds` runs of equal length; run r · stages + s is the r-th of
device s. A micro-batch goes through them in turn: once round the devices, with one round; with more
it comes back to the first device (the interleaved schedule: Narayanan et al., arXiv 2104.04473).

All devices work in ticks. In a tick a device takes one micro-batch forward through one of its runs,
and takes another, whose loss is known, backward through one: as in one-forward-one-backward, work
on a micro-batch ends soon after it began, and what is kept for it does not grow with the number of
micro-batches (GPipe, Huang et al., arXiv 1811.06965, keeps all of them until the last is done). Of
a micro-batch in flight only what came into the run is kept; its backward tick runs it forward
again. So at most `kept` inputs are alive, and all other activations of one micro-batch.

Items, what a device does in a tick in one direction, are numbered alike on all devices; device s
is s ticks later than the first. In groups of as many micro-batches as there are stages:
`stages` items of the first round, `stages` of the second, and so on; backward the last round comes
first. The first `lag` ticks go only forward, the last `lag` only backward, so that the devices are
idle for (stages - 1) / (rounds · micro-batches) of the time that the work alone would take.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jax import Array


class Item(NamedTuple):
    """What a device does in a tick, in one direction; traced or plain integers."""

    number: Any
    micro_batch: Any
    round: Any
    valid: Any
    """False where there is nothing to do: the micro-batch does not exist."""


@dataclass(frozen=True)
class Schedule:
    """The ticks of an update, or of one loop over micro-batches in it.

    Args:
      stages: devices of `stage`.
      rounds: runs of layers of each.
    """

    stages: int
    rounds: int = 1

    @property
    def runs(self) -> int:
        """Runs of layers."""
        return self.stages * self.rounds

    @property
    def lag(self) -> int:
        """Ticks from the first forward to the first loss."""
        return self.runs - 1

    @property
    def kept(self) -> int:
        """Inputs of runs that are alive at once, at most."""
        return 2 * self.runs - 1

    def items(self, micro_batches: Array | int) -> Array | int:
        """Items of each device, with those that fill up the last group of several rounds."""
        if self.rounds == 1:
            return micro_batches
        groups = (micro_batches + self.stages - 1) // self.stages
        return groups * self.runs

    def forward(self, tick: Array | int, stage: Array | int, micro_batches: Array | int) -> Item:
        """What a device takes forward in a tick."""
        number = tick - stage
        return self._item(number, number // self.stages % self.rounds, micro_batches)

    def backward(self, tick: Array | int, stage: Array | int, micro_batches: Array | int) -> Item:
        """What a device takes backward in a tick, with its forward item's number."""
        order = tick - self.lag - (self.stages - 1 - stage)
        turn = order // self.stages % self.rounds
        return self._item(
            order + (self.rounds - 1 - 2 * turn) * self.stages,
            self.rounds - 1 - turn,
            micro_batches,
        )

    def _item(self, number: Array | int, round: Array | int, micro_batches: Array | int) -> Item:
        micro_batch = number // self.runs * self.stages + number % self.stages
        valid = (number >= 0) & (micro_batch < micro_batches)
        return Item(number, micro_batch, round, valid)

    def bubble(self, micro_batches: int) -> float:
        """Idle time of a device, as a share of the time that its work takes."""
        items = self.items(micro_batches)
        assert isinstance(items, int)
        return (items + self.stages - 1) / (micro_batches * self.rounds) - 1

    def layers(self, layers: int) -> np.ndarray:
        """Numbers of the layers of each device: int32 [stages, rounds, layers of a run]."""
        runs = np.arange(layers, dtype=np.int32).reshape(self.rounds, self.stages, -1)
        return runs.swapaxes(0, 1)


WHOLE = Schedule(1)
"""One device has all layers."""
