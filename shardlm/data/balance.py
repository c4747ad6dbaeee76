"""Level work: which rows of a batch go to which device.

Packed rows of one length differ in work, as attention within a document of n tokens costs n²/2
(Wang et al., "WLB-LLM", arXiv 2503.17924). Every device waits for the slowest one, so the batch is
dealt such that all have as many rows and, as far as the rows allow, as much work. A batch stays
the same set of rows: only the order of summation changes.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from heapq import heapify, heappop, heapreplace
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64, Integer

from shardlm.config import ModelConfig

LEVEL = 1.005
"""Heaviest over mean from which on no more rows are swapped."""
SWAPS_A_DEVICE = 16
"""Bound of the swaps."""
AVERAGE = 0.05
"""Weight of the newest update in the measured speeds: they remember about 20 updates."""
FASTEST = 2.0
"""Bound of a device's speed over the median of all."""
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
        row: Int64[np.ndarray, "segments"],
        sizes: Integer[np.ndarray, "segments"],
        row_length: Int64[np.ndarray, "rows"],
    ) -> Float64[np.ndarray, "rows"]:
        """Work of rows: of the segments of `sizes` that row number `row` has, and of all its
        positions `per_token`, as padding goes through the matrices too."""
        count = len(row_length)
        padding = row_length - np.bincount(row, sizes, count)
        return np.bincount(row, self.pieces(sizes), count) + self.per_token * padding


def imbalance(work: Float64[np.ndarray, "devices"]) -> float:
    """Heaviest over mean: 1 if all devices have the same, which is how long they take over how
    long they need to."""
    return float(work.max() / work.mean())


def deal(
    work: Sequence[Float64[np.ndarray, "_"]],
    ways: int,
    speeds: Sequence[float] | None = None,
    rows: Int64[np.ndarray, "shapes devices"] | None = None,
) -> list[Int64[np.ndarray, "_"]]:
    """Orders of the rows in which those of device 0 come first, then those of device 1, ...

    Longest processing time first (Graham, SIAM J. Appl. Math. 17, 1969): in falling order of work,
    each row goes to the device that would be done first and has a row of that shape to get. Then
    rows of the slowest device and of another one are swapped while that helps and the slowest is
    above `LEVEL` of the mean. Deterministic; of equal rows and devices, the first is taken.

    Args:
      work: of the rows of each shape, positive.
      ways: devices. One gets the rows as they are.
      speeds: of the devices, positive: what is levelled is work over speed. Default: all alike.
      rows: how many rows of each shape each device gets. Default: as many as any other.

    Returns:
      For each shape a permutation. The rows of a device are in falling order of work, so that its
      k-th micro-batch meets like work on the other devices.
    """
    assert speeds is None or len(speeds) == ways, (speeds, ways)
    if ways == 1:
        return [np.arange(len(w)) for w in work]
    if rows is None:
        assert all(len(w) % ways == 0 for w in work), ([len(w) for w in work], ways)
        rows = np.array([[len(w) // ways] * ways for w in work])
    speed = np.ones(ways) if speeds is None else np.array(speeds)
    loads = np.zeros(ways)
    # Shapes with much work first; those with little fill the gaps.
    hands: list[list[np.ndarray]] = [[] for _ in work]
    for shape in sorted(range(len(work)), key=lambda i: -work[i].sum()):
        hands[shape] = _greedy(work[shape], loads, speed, rows[shape])
        loads += [np.add.reduce(work[shape][hand]) for hand in hands[shape]]
    if _swap(work, hands, loads, speed):
        hands = [[_falling(w, hand) for hand in each] for w, each in zip(work, hands, strict=True)]
    return [np.concatenate(of_devices) for of_devices in hands]


def _falling(work: np.ndarray, hand: np.ndarray) -> np.ndarray:
    """`hand` in falling order of work, equal ones by number."""
    hand = np.sort(hand)
    return hand[np.argsort(-work[hand], kind="stable")]


def _greedy(
    work: np.ndarray, loads: np.ndarray, speed: np.ndarray, rows: np.ndarray
) -> list[np.ndarray]:
    """Rows of each device, `rows` of them in falling order of work, equal ones by number, for
    devices that have `loads` already."""
    hands: list[list[int]] = [[] for _ in loads]
    slow, left = (1 / speed).tolist(), rows.tolist()
    queue = [
        (load * s, d)
        for d, (load, s, n) in enumerate(zip(loads.tolist(), slow, left, strict=True))
        if n
    ]
    heapify(queue)
    order = np.argsort(-work, kind="stable")
    for row, w in zip(order.tolist(), work[order].tolist(), strict=True):
        time, device = queue[0]
        hands[device].append(row)
        left[device] -= 1
        if left[device]:
            heapreplace(queue, (time + w * slow[device], device))
        else:
            heappop(queue)
    return [np.array(hand, np.int64) for hand in hands]


def _swap(
    work: Sequence[np.ndarray], hands: list[list[np.ndarray]], loads: np.ndarray, speed: np.ndarray
) -> bool:
    """Swap rows of the slowest device, in place, as `deal` says; whether any were."""
    level = LEVEL * loads.sum() / speed.sum()
    for swaps in range(SWAPS_A_DEVICE * len(loads)):
        times = loads / speed
        if times.max() <= level:
            return swaps > 0
        order = np.argsort(times, kind="stable").tolist()
        slowest = order.pop()
        if not any(_swap_pair(work, hands, loads, speed, slowest, other) for other in order):
            return swaps > 0
    return True


def _swap_pair(
    work: Sequence[np.ndarray],
    hands: list[list[np.ndarray]],
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
    moved = work[shape][hand[a][i]] - work[shape][hand[b][j]]
    loads[a] -= moved
    loads[b] += moved
    hand[a][i], hand[b][j] = hand[b][j], hand[a][i]
    return True


def deal_micro_batches(
    counts: Sequence[int], speeds: Sequence[float], most: int
) -> Int64[np.ndarray, "shapes devices"]:
    """How many micro-batches of each shape each device makes, where devices need not make as many
    as one another: each goes to the device that would then be done first.

    Args:
      counts: micro-batches of each shape a device, if all made as many; one at least in all.
      speeds: of the devices, positive.
      most: that a device makes, of all shapes; at least as many as the sum of `counts`.

    Returns:
      In sum over devices `counts` times the devices. Every device makes one at least, since one
      that made none would never be measured again.
    """
    ways = len(speeds)
    made = np.zeros((len(counts), ways), np.int64)
    total = [0] * ways
    queue = [(0.0, d) for d in range(ways)]
    for shape, count in enumerate(counts):
        for _ in range(count * ways):
            _, device = queue[0]
            made[shape, device] += 1
            total[device] += 1
            if total[device] < most:
                heapreplace(queue, ((total[device] + 1) / speeds[device], device))
            else:
                heappop(queue)
    return made


@dataclass(frozen=True)
class Speeds:
    """Relative speeds of devices, of mean 1, learnt from how long they took.

    `measured`: the moving average. `decisions`: (update, speeds): the updates from that one on are
    dealt by these speeds. The average is taken over as a whole once one of its speeds is more than
    `HYSTERESIS` off the last decision: noise must not deal the rows otherwise at every update.
    """

    measured: tuple[float, ...]
    decisions: tuple[tuple[int, tuple[float, ...]], ...]

    @classmethod
    def level(cls, ways: int) -> "Speeds":
        """All of `ways` devices alike, before anything is measured."""
        return cls((1.0,) * ways, ((0, (1.0,) * ways),))

    def at(self, step: int) -> tuple[float, ...]:
        """The speeds by which an update is dealt: `now` of the last `update`, or a later one."""
        found = [speeds for start, speeds in self.decisions if start <= step]
        assert found, (step, self.decisions)
        return found[-1]

    def update(
        self, seconds: Sequence[float], work: Sequence[float], now: int, start: int
    ) -> "Speeds":
        """The speeds after one more update.

        It is work over time that is averaged, and at most `FASTEST` times what is usual for the
        devices: one odd measurement changes a speed by some `AVERAGE`, whichever way it is off.

        Args:
          seconds: that each device computed, without waiting for the others.
          work: that it had, in any unit.
          now: the update that comes next: what was decided for earlier ones only is forgotten.
          start: the first update that is not prepared yet, at which a decision can begin.

        Raises:
          ValueError: not one of each for each device, or one that is not positive and finite.
        """
        for name, values in (("seconds", seconds), ("work", work)):
            if len(values) != len(self.measured) or not all(0 < v < math.inf for v in values):
                raise ValueError(
                    f"{name} of the devices is {list(values)}: it must be {len(self.measured)} "
                    "positive, finite numbers; leave out the update that was not measured whole"
                )
        rates = [w / s for w, s in zip(work, seconds, strict=True)]
        usual = statistics.median(rates)
        averages = [
            m + AVERAGE * (min(r / usual, FASTEST) - m)
            for m, r in zip(self.measured, rates, strict=True)
        ]
        mean = math.fsum(averages) / len(averages)
        measured = tuple(average / mean for average in averages)
        last = self.decisions[-1][1]
        decisions = self.decisions
        if max(abs(m / s - 1) for m, s in zip(measured, last, strict=True)) > HYSTERESIS:
            decisions = (*decisions, (start, measured))
        used = max(i for i, (first, _) in enumerate(decisions) if first <= now or i == 0)
        return Speeds(measured, decisions[used:])

    def to_json(self) -> dict[str, Any]:
        """What `from_json` makes equal speeds of, to the last bit."""
        return asdict(self)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "Speeds":
        """The speeds that `to_json` wrote."""
        return cls(
            tuple(stored["measured"]),
            tuple((start, tuple(speeds)) for start, speeds in stored["decisions"]),
        )
