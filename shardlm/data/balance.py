"""Level work: which rows of a batch go to which device.

Packed rows of one length differ in work, as attention within a document of n tokens costs n²/2
(Wang et al., "WLB-LLM", arXiv 2503.17924). Every device waits for the slowest one, so the batch is
dealt such that all have as many rows and, as far as the rows allow, as much work. A batch stays
the same set of rows: only the order of summation changes.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from heapq import heapify, heappop, heapreplace

import numpy as np
from jaxtyping import Float64, Int64, Integer

from shardlm.config import ModelConfig
from shardlm.data.errors import DataError

LEVEL = 1.005
"""Heaviest over mean from which on no more rows are swapped."""
SWAPS_A_DEVICE = 16
"""Bound of the swaps."""
AVERAGE = 0.05
"""Weight of the newest update in the measured speeds: they remember about 20 updates."""
HYSTERESIS = 0.03
"""Relative change of a measured speed from which on it is taken up."""


@dataclass(frozen=True)
class WorkModel:
    """Model FLOPs of segments, forward and backward, over all layers.

    `per_token`: of each token whatever it sees. `per_pair`: of a query and a key that it sees, in
    one layer. `windows`: (sliding window or 0, layers with it).
    """

    per_token: float
    per_pair: float
    windows: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, model: ModelConfig) -> "WorkModel":
        """The terms of `shardlm.model.flops`, kept apart: 6 a matrix parameter and token, and
        12 · heads · head_dim a pair. Here a query and its own key are a whole pair, there half a
        one: n tokens in a window of w have min(w, n) / 2 more pairs a layer here."""
        attention = 2 * model.embed * model.k_dim * (model.heads + model.kv)
        mlp = (3 if model.gated else 2) * model.embed * model.mlp
        matrices = model.layers * (attention + mlp) + model.embed * model.vocab_size
        windows = [model.windows[i % len(model.windows)] for i in range(model.layers)]
        return cls(
            per_token=6.0 * matrices,
            per_pair=12.0 * model.heads * model.k_dim,
            windows=tuple((w, windows.count(w)) for w in sorted({*windows})),
        )

    def pieces(self, sizes: Integer[np.ndarray, "segments"]) -> Float64[np.ndarray, "segments"]:
        """Work of causal segments of `sizes` tokens."""
        n = sizes.astype(np.float64)
        pairs = np.zeros_like(n)
        for window, layers in self.windows:
            w = np.minimum(n, window) if window else n
            pairs += layers * (w * (w + 1) / 2 + (n - w) * w)
        return self.per_token * n + self.per_pair * pairs

    def rows(
        self,
        sizes: Integer[np.ndarray, "segments"],
        starts: Int64[np.ndarray, "rows_and_1"],
        row_length: Int64[np.ndarray, "rows"],
    ) -> Float64[np.ndarray, "rows"]:
        """Work of rows: of row i the segments `sizes[starts[i] : starts[i + 1]]`, and of all its
        positions `per_token`, as padding goes through the matrices too."""
        count = np.diff(starts)
        row = np.repeat(np.arange(len(count)), count)
        padding = row_length - np.bincount(row, sizes, len(count))
        return np.bincount(row, self.pieces(sizes), len(count)) + self.per_token * padding


def imbalance(work: Float64[np.ndarray, "devices"]) -> float:
    """Heaviest over mean: 1 if all devices have the same, which is how long they take over how
    long they need to."""
    return float(work.max() / work.mean())


def deal(
    work: Sequence[Float64[np.ndarray, "_"]],
    ways: int,
    speeds: Float64[np.ndarray, "devices"] | None = None,
) -> list[Int64[np.ndarray, "_"]]:
    """Orders of the rows of which the d-th of `ways` equal parts go to device d.

    Longest processing time first (Graham, SIAM J. Appl. Math. 17, 1969): in falling order of work,
    each row goes to the device that would be done first and has a row of that shape to get. Then
    rows of the slowest device and of another one are swapped while that helps and the slowest is
    above `LEVEL` of the mean. Deterministic; of equal rows and devices, the first is taken.

    Args:
      work: of the rows of each shape, positive; their number a multiple of `ways`.
      ways: devices. One gets the rows as they are.
      speeds: of the devices, positive: what is levelled is work over speed.

    Returns:
      For each shape a permutation. The rows of a device are in falling order of work, so that its
      k-th micro-batch meets like work on the other devices.
    """
    assert all(len(w) % ways == 0 for w in work), ([len(w) for w in work], ways)
    assert speeds is None or len(speeds) == ways, (speeds, ways)
    if ways == 1:
        return [np.arange(len(w)) for w in work]
    speed = np.ones(ways) if speeds is None else speeds
    loads = np.zeros(ways)
    # Shapes with much work first; those with little fill the gaps.
    hands: list[np.ndarray] = [np.zeros((ways, 0), np.int64) for _ in work]
    for shape in sorted(range(len(work)), key=lambda i: -work[i].sum()):
        hands[shape] = _greedy(work[shape], loads, speed)
        loads += work[shape][hands[shape]].sum(axis=1)
    _swap(work, hands, loads, speed)
    return [_falling(w, hand).reshape(-1) for w, hand in zip(work, hands, strict=True)]


def _falling(work: np.ndarray, hand: np.ndarray) -> np.ndarray:
    """`hand` with each device's rows in falling order of work, equal ones by number."""
    hand = np.sort(hand, axis=1)
    return np.take_along_axis(hand, np.argsort(-work[hand], axis=1, kind="stable"), axis=1)


def _greedy(work: np.ndarray, loads: np.ndarray, speed: np.ndarray) -> np.ndarray:
    """Rows [devices, rows a device], for devices that have `loads` already."""
    ways, each = len(loads), len(work) // len(loads)
    hand: list[list[int]] = [[] for _ in range(ways)]
    slow = (1 / speed).tolist()
    queue = [(load * s, d) for d, (load, s) in enumerate(zip(loads.tolist(), slow, strict=True))]
    heapify(queue)
    order = np.argsort(-work, kind="stable")
    for row, w in zip(order.tolist(), work[order].tolist(), strict=True):
        time, device = queue[0]
        hand[device].append(row)
        if len(hand[device]) < each:
            heapreplace(queue, (time + w * slow[device], device))
        else:
            heappop(queue)
    return np.array(hand, np.int64).reshape(ways, each)


def _swap(
    work: Sequence[np.ndarray], hands: list[np.ndarray], loads: np.ndarray, speed: np.ndarray
) -> None:
    """Swap rows of the slowest device, in place, as `deal` says."""
    level = LEVEL * loads.sum() / speed.sum()
    for _ in range(SWAPS_A_DEVICE * len(loads)):
        times = loads / speed
        order = np.argsort(times, kind="stable").tolist()
        slowest = order.pop()
        if times[slowest] <= level or not any(
            _swap_pair(work, hands, loads, speed, slowest, other) for other in order
        ):
            return


def _swap_pair(
    work: Sequence[np.ndarray],
    hands: list[np.ndarray],
    loads: np.ndarray,
    speed: np.ndarray,
    a: int,
    b: int,
) -> bool:
    """Swap the rows of one shape after which the slower of `a` and `b` is done first; False if no
    swap makes it sooner than `a` is now."""
    time = loads[a] / speed[a]
    best, swap = time * (1 - 1e-12), None
    for shape, (w, hand) in enumerate(zip(work, hands, strict=True)):
        moved = w[hand[a]][:, None] - w[hand[b]]
        after = np.maximum((loads[a] - moved) / speed[a], (loads[b] + moved) / speed[b])
        if after.size and after.min() < best:
            best, swap = after.min(), (shape, *np.unravel_index(after.argmin(), after.shape))
    if swap is None:
        return False
    shape, i, j = swap
    hand = hands[shape]
    moved = work[shape][hand[a, i]] - work[shape][hand[b, j]]
    loads[a] -= moved
    loads[b] += moved
    hand[a, i], hand[b, j] = hand[b, j], hand[a, i]
    return True


@dataclass(frozen=True)
class Speeds:
    """Relative speeds of devices, of mean 1, learnt from how long they took.

    `shares`: in use, for `deal`. `measured`: the moving average, which is taken over as a whole
    once one of its speeds is more than `HYSTERESIS` off the one in use: noise must not deal the
    rows otherwise at every update.
    """

    shares: tuple[float, ...]
    measured: tuple[float, ...]

    @classmethod
    def level(cls, ways: int) -> "Speeds":
        """All of `ways` devices alike, before anything is measured."""
        return cls((1.0,) * ways, (1.0,) * ways)

    def update(self, seconds: Sequence[float], work: Sequence[float]) -> "Speeds":
        """The speeds after one more update.

        It is work over time that is averaged: a device that stalls once loses at most `AVERAGE` of
        its speed, however long it stalls.

        Args:
          seconds: that each device computed, without waiting for the others.
          work: that it had, in any unit.

        Raises:
          ValueError: not one of each for each device, or one that is not positive and finite.
        """
        for name, values in (("seconds", seconds), ("work", work)):
            if len(values) != len(self.shares) or not all(0 < v < math.inf for v in values):
                raise ValueError(
                    f"{name} of the devices is {list(values)}: it must be {len(self.shares)} "
                    "positive, finite numbers; leave out the update that was not measured whole"
                )
        rates = [w / s for w, s in zip(work, seconds, strict=True)]
        mean = math.fsum(rates) / len(rates)
        measured = tuple(
            m + AVERAGE * (r / mean - m) for m, r in zip(self.measured, rates, strict=True)
        )
        changes = [abs(m / s - 1) for m, s in zip(measured, self.shares, strict=True)]
        return Speeds(measured if max(changes) > HYSTERESIS else self.shares, measured)

    def to_json(self) -> str:
        """What `from_json` makes equal speeds of, to the last bit."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Speeds":
        """The speeds that `to_json` wrote.

        Raises:
          DataError: not such a text.
        """
        try:
            stored = {name: tuple(values) for name, values in json.loads(text).items()}
            speeds = cls(**stored)
            valid = all(0 < v < math.inf for v in speeds.shares + speeds.measured)
            if valid and len(speeds.shares) == len(speeds.measured) > 0:
                return speeds
            problem = "not as many positive numbers of both kinds"
        except (ValueError, AttributeError, TypeError) as error:
            problem = f"{type(error).__name__}: {error}"
        raise DataError(
            f"the stored speeds of the devices cannot be read ({problem}): restore the file that "
            "the run wrote"
        )
