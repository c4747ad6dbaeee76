"""Updates as a function of (seed, step).

Rows of one length make an endless stream: the epochs one after the other, each in an order of its
own; with weights, rows of the sources in even turns. Update `step` (from 0) takes the next rows of
the stream, or, with rows of several lengths, the next micro-batches of their streams in even turns.
There is no state: resuming is asking for another step. Grain prepares updates ahead of the step.
"""

import copy
import sys
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int64

from shardlm.config import Config
from shardlm.data.balance import Speeds, WorkModel, deal, deal_micro_batches
from shardlm.data.buckets import Buckets
from shardlm.data.corpus import Corpus, Tokens
from shardlm.data.errors import DataError
from shardlm.data.layout import lay_rows, row_lengths
from shardlm.data.mixture import LAST_PLACE, Mixture
from shardlm.data.rows import Batch, Segments, lay_out, ranges
from shardlm.data.stream import Stream
from shardlm.data.summary import Summary, check_predictable, summarize
from shardlm.validation import batch_key, batch_of, batch_said
from shardlm.words import many


@dataclass(frozen=True)
class Share:
    """The part of every update that a process reads: the `index`-th of `count` equal ones."""

    index: int = 0
    count: int = 1


class Update(NamedTuple):
    """What one update is made of."""

    batch: Batch | Buckets
    """Of the process's share: a flat batch, or one of rows of several lengths."""
    work: Float64[np.ndarray, "ways"]
    """Estimated FLOPs of each device's rows."""
    time: Float64[np.ndarray, "ways"]
    """What is dealt level: the work, with `data.balance` dynamic over the speed of the device."""
    tokens: Int64[np.ndarray, "sources"]
    """Predicted tokens of the whole update by source."""
    speeds: tuple[float, ...] | None
    """Of the devices, by which the update was dealt, with `data.balance` dynamic."""


class Shape(NamedTuple):
    """Of a micro-batch."""

    length: int
    """Tokens of a row."""
    rows: int
    """Rows, over all devices."""

    @property
    def places(self) -> int:
        """Places of all rows."""
        return self.rows * self.length

    def __str__(self) -> str:
        return f"{many(self.rows, 'row')} of {self.length:,}"


TOGETHER, PLACES = 32, 1 << 16
"""Updates that are prepared together, and the places that they have, at most."""


class Loader:
    """Training updates: every token once an epoch, in an order given by (seed, epoch)."""

    def __init__(self, corpora: Sequence[Corpus], config: Config, work: WorkModel) -> None:
        """
        Args:
          corpora: the training text of each source, all with the same `tokens`.
          config: `data`, the batch, and the seed.
          work: what a row costs the model.

        Raises:
          DataError: fewer rows than a batch, or no token to predict.
        """
        data, self.corpora = config.data, list(corpora)
        check_predictable(self.corpora, "training")
        self._tokens: Tokens = corpora[0].tokens
        # Sources lie one after the other in the common array of ids.
        self._bases = np.array([c.base for c in corpora])
        self._balance: str = data.balance
        self._prefetch, self._places = data.prefetch, config.batch * data.length
        self._micro_batches, self._work = config.micro_batches, work
        pools = self.corpora if data.weights else [Corpus.join(self.corpora)]
        weights = np.array(data.weights or (1.0,))
        if lacking := [pool.name for pool in pools if not pool.size]:
            raise DataError(
                f"data.sources: {lacking[0]} has a weight and no document for training (data.split "
                f"{data.split}, data.validation {data.validation:g}): give it more text, leave it "
                "out, or lower data.validation"
            )
        laid = lay_rows(pools, data)
        lengths = row_lengths(data)
        places = np.array([[rows.rows for rows in of_kind] for of_kind in laid], float)
        places *= np.array(lengths)[:, None]
        # The share of each pool's places that rows of each length have, times the pool's weight.
        shares = places / places.sum(0) * (weights / weights.sum())
        self.streams, self.shapes, of_shapes = [], [], []
        for kind, length in enumerate(lengths):
            if not places[kind].any():
                continue
            used = np.flatnonzero(places[kind]).tolist()
            self.streams.append(
                Stream(
                    [laid[kind][p] for p in used],
                    shares[kind][used].tolist(),
                    config.run.seed,
                    kind,
                )
            )
            self.shapes.append(Shape(length, config.micro_batch * data.length // length))
            of_shapes.append(float(shares[kind].sum()))
        self._turns = Mixture(of_shapes)
        self.rows_per_epoch = sum(stream.rows for stream in self.streams)
        self.padding = 1 - sum(c.size for c in self.corpora) / places.sum()
        self.updates_per_epoch = float(places.sum()) / (config.batch * data.length)
        if self.updates_per_epoch < 1:
            raise DataError(_too_few_rows(self.corpora, self.shapes, self.rows_per_epoch, config))
        self.deal_to(1)

    def deal_to(self, ways: int, speeds: Speeds | None = None) -> None:
        """Deal the rows of every update to so many devices. With `data.balance` dynamic, by their
        speeds, which may be set anew while updates are prepared; default: all alike."""
        self.ways, self.speeds = ways, speeds or Speeds.level(ways)

    def balanced(self, how: str) -> "Loader":
        """The same rows, dealt as another `data.balance` says."""
        loader = copy.copy(self)
        loader._balance = how
        return loader

    @property
    def buckets(self) -> bool:
        """Whether batches are `Buckets`: rows of several lengths, or more for some devices."""
        return len(self.streams) > 1 or self.dynamic

    @property
    def dynamic(self) -> bool:
        """Whether devices need not make as many micro-batches as one another."""
        return self._balance == "dynamic"

    @property
    def ahead(self) -> int:
        """Updates after the one that is being made which may be prepared already, at most."""
        # Those under way when the figures of the one before are known, and as many to spare.
        return (-(-self._prefetch // self._together) + 2) * self._together

    @property
    def _together(self) -> int:
        """Updates that are prepared together. One, where how they are dealt is decided while they
        are prepared."""
        if self.dynamic:
            return 1
        return max(1, min(TOGETHER, PLACES // self._places))

    @property
    def reach(self) -> int:
        """Updates that can be asked for: no run gets further, whatever it is set to."""
        return LAST_PLACE // (self._places // self.shapes[0].length) - 1

    def summary(self) -> Summary:
        """Documents, tokens and rows of an epoch."""
        return summarize(self.corpora, self.rows_per_epoch, self.shapes[-1].length)

    def at(self, step: int, share: Share = Share()) -> Update:
        """Update `step`, from 0.

        Which rows it has depends on the seed and the step only; which device gets which, on the
        number of devices too. A row's number in the update, `rows`, is the same for any of them.
        """
        return self.several(step, 1, share)[0]

    def several(self, step: int, count: int, share: Share = Share()) -> list[Update]:
        """The `count` updates from `step` on, in arrays that they share: where they are small,
        together they take a fraction of the time."""
        firsts, counts = self._spans(step, count)
        rows = counts * [shape.rows for shape in self.shapes]
        found = [s.segments(*span) for s, span in zip(self.streams, firsts, strict=True)]
        costs = [
            self._work.rows(segments.row, segments.size, np.full(n, shape.length))
            for segments, n, shape in zip(found, rows.sum(0), self.shapes, strict=True)
        ]
        # Once, since they may be set anew meanwhile.
        learnt = self.speeds
        speeds = [learnt.at(step + u) if self.dynamic else None for u in range(count)]
        made = np.array([self._micro_batches_of(c, s) for c, s in zip(counts, speeds, strict=True)])
        each = made * (np.array([[shape.rows] for shape in self.shapes]) // self.ways)
        orders = self._deal(found, costs, rows, each, speeds)
        parts, before = [], 0
        for i, (segments, shape) in enumerate(zip(found, self.shapes, strict=True)):
            room = self._room * shape.rows // self.ways
            of_length = self._part(segments, orders[i], each[:, i], before, room, shape, share)
            parts.append(of_length)
            before += self._micro_batches * shape.rows
        work = self._of_devices(costs, orders, each)
        tokens = np.sum([self._predicted(*of) for of in zip(found, rows.T, strict=True)], axis=0)
        updates = []
        for u in range(count):
            mine = tuple({key: values[u] for key, values in part.items()} for part in parts)
            batch: Batch | Buckets = mine[0]
            if self.dynamic:
                ways = self.ways // share.count
                used = made[u, :, share.index * ways : (share.index + 1) * ways]
                batch = Buckets(used.T.astype(np.int32), mine)
            elif self.buckets:
                batch = Buckets(counts[u].astype(np.int32), mine)
            dealt_by = speeds[u]
            time = work[u] if dealt_by is None else work[u] / np.array(dealt_by)
            updates.append(Update(batch, work[u], time, tokens[u], dealt_by))
        return updates

    def iterate(self, start_step: int = 0, share: Share = Share()) -> Generator[Update, None, None]:
        """The updates from `start_step` on, without end, prepared ahead in a thread, which ends
        when the generator is closed or dropped."""
        # Imported only for those who train, and not when the first batch is drawn in a thread:
        # importing it changes `__import__` for a while, for every thread (etils.epy.lazy_imports).
        import grain

        count = self._together
        ahead = -(-self._prefetch // count)
        drawn = iter(
            grain.MapDataset.range(start_step, sys.maxsize, count)
            .map(lambda step: self.several(step, count, share))
            .to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=ahead))
        )

        def iterate() -> Generator[Update, None, None]:
            try:
                for updates in drawn:
                    yield from updates
            finally:
                drawn.close()

        return iterate()

    def rows_of(self, step: int) -> list[Int64[np.ndarray, "rows 4"]]:
        """Of each length, the rows of update `step` as (stream, pool, epoch, row within the epoch):
        their names, which no other row of the run has."""
        named = []
        for kind, (stream, (start, count)) in enumerate(
            zip(self.streams, self._spans(step)[0], strict=True)
        ):
            pool, epoch, row, _ = stream.draw(start, count)
            named.append(np.stack([np.full_like(pool, kind), pool, epoch, row], axis=1))
        return named

    def epochs(self, step: int) -> Float64[np.ndarray, "sources"]:
        """How many epochs of each source the updates before `step`, which is at least 1, make, by
        rows."""
        read, whole = np.zeros((2, len(self.corpora)))
        end = min(step, self.reach)
        spans, _ = self._spans(end)
        for stream, (first, _), shape in zip(self.streams, spans, self.shapes, strict=True):
            for rows, count in stream.drawn(first):
                # Without weights there is one pool, of all sources.
                own = [rows.corpus is corpus for corpus in self.corpora]
                of = np.array(own) if any(own) else np.ones(len(own), bool)
                read[of] += count * shape.length
                whole[of] += rows.rows * shape.length
        return read / whole * (step / end)

    def _spans(
        self, step: int, count: int = 1
    ) -> tuple[list[tuple[int, int]], Int64[np.ndarray, "updates shapes"]]:
        """Of each stream, the first row of the `count` updates from `step` on and how many rows
        they have; and the micro-batches of each shape in each of them."""
        k = self._micro_batches
        if len(self.streams) == 1:
            each = k * self.shapes[0].rows
            return [(step * each, count * each)], np.full((count, 1), k)
        turn, _ = self._turns.draw(step * k, count * k)
        number = np.repeat(np.arange(count), k) * len(self.shapes) + turn
        counts = np.bincount(number, minlength=count * len(self.shapes)).reshape(count, -1)
        before, after = self._turns.counts(step * k), counts.sum(0)
        return [
            (int(a) * shape.rows, int(n) * shape.rows)
            for a, n, shape in zip(before, after, self.shapes, strict=True)
        ], counts

    @property
    def _room(self) -> int:
        """Micro-batches of each shape that a device has room for. Of a single length, every place
        of the room is used, unless devices may be given more than others: twice as much."""
        return self._micro_batches * (2 if self.dynamic else 1)

    def _micro_batches_of(
        self, counts: Int64[np.ndarray, "shapes"], speeds: tuple[float, ...] | None
    ) -> Int64[np.ndarray, "shapes devices"]:
        """Micro-batches that each device makes."""
        if speeds is not None:
            return deal_micro_batches(counts.tolist(), speeds, self._room)
        return np.repeat(counts[:, None], self.ways, axis=1)

    def _deal(
        self,
        found: list[Segments],
        costs: list[np.ndarray],
        rows: Int64[np.ndarray, "updates shapes"],
        each: Int64[np.ndarray, "updates shapes devices"],
        speeds: Sequence[tuple[float, ...] | None],
    ) -> list[Int64[np.ndarray, "_"]]:
        """Of each shape the order of its rows: update by update those of the first device, then
        those of the second, ..."""
        if self._balance == "none":
            return [np.arange(len(w)) for w in costs]
        if self._balance == "tokens":
            costs = [
                np.bincount(s.row, s.size, len(w)).astype(float)
                for s, w in zip(found, costs, strict=True)
            ]
        first = np.cumsum(rows, axis=0) - rows
        orders = []
        for u, (a, b) in enumerate(zip(first, first + rows, strict=True)):
            mine = [w[i:j] for w, i, j in zip(costs, a.tolist(), b.tolist(), strict=True)]
            dealt = deal(mine, self.ways, speeds[u], each[u])
            orders.append([order + i for order, i in zip(dealt, a, strict=True)])
        return [np.concatenate(of_shape) for of_shape in zip(*orders, strict=True)]

    def _part(
        self,
        segments: Segments,
        order: Int64[np.ndarray, "rows"],
        each: Int64[np.ndarray, "updates devices"],
        before: int,
        room: int,
        shape: Shape,
        share: Share,
    ) -> dict[str, np.ndarray]:
        """Arrays [updates, ...] of the share's rows of one length, of which device d has
        `each[u, d]` in update u, with room for `room` rows a device; `before` rows of other lengths
        have the numbers before theirs."""
        # A device has its rows first and then what it does not use of its room.
        ways = self.ways // share.count
        here = np.s_[:, share.index * ways : (share.index + 1) * ways]
        first = (np.cumsum(each) - each.reshape(-1)).reshape(each.shape)
        mine = order[ranges(first[here].reshape(-1), each[here].reshape(-1))]
        slots = ranges(np.arange(each[here].size) * room, each[here].reshape(-1))
        chosen = segments.of_rows(mine).renumbered(slots)
        batch = lay_out(self._tokens, chosen, each[here].size * room, shape.length)
        rows = np.zeros(each[here].size * room, np.int32)
        rows[slots] = before + mine - np.repeat(first[:, 0], each[here].sum(1))
        batch = {**batch, "rows": rows}
        return {k: v.reshape(len(each), ways * room, *v.shape[1:]) for k, v in batch.items()}

    def _of_devices(
        self, costs: list[np.ndarray], orders: list[np.ndarray], each: np.ndarray
    ) -> Float64[np.ndarray, "updates devices"]:
        """Work of each device in each update."""
        work = np.zeros(len(each) * self.ways)
        for i, (cost, order) in enumerate(zip(costs, orders, strict=True)):
            device = np.repeat(np.arange(len(work)), each[:, i].reshape(-1))
            work += np.bincount(device, cost[order], len(work))
        return work.reshape(-1, self.ways)

    def _predicted(
        self, segments: Segments, rows: Int64[np.ndarray, "updates"]
    ) -> Int64[np.ndarray, "updates sources"]:
        """Predicted tokens of each source in each update."""
        update = np.repeat(np.arange(len(rows)), rows)[segments.row]
        source = np.searchsorted(self._bases, segments.place, "right") - 1
        number, size = update * len(self._bases) + source, len(rows) * len(self._bases)
        found = np.bincount(number, segments.predicted, size)
        return found.reshape(len(rows), -1).astype(np.int64)


def _too_few_rows(
    corpora: Sequence[Corpus], shapes: Sequence[Shape], rows: int, config: Config
) -> str:
    tokens, length = sum(c.size for c in corpora), config.data.length
    if len(shapes) > 1 or shapes[0].length < length:
        return (
            f"{batch_said(config)} and data.length {length}, so that an update has "
            f"{config.batch * length} places: the training text ({many(tokens, 'token')}) fills "
            "fewer: give more text, or lower the batch or data.length"
        )
    message = (
        f"{batch_said(config)} and the training text has only {many(rows, 'row')} of data.length "
        f"{length} ({many(tokens, 'token')}): give more text, set {batch_key(config)} to "
        f"{batch_of(config, rows)} or less"
    )
    # The longest rows of which there are `batch`; of data.batch_tokens there would be more then.
    fixed = config.data.batch_tokens is None and config.batch > 1
    shorter = (tokens - 1) // (config.batch - 1) if fixed else 0
    if config.data.packing == "concat" and shorter >= 2:
        message += f", or data.length to {shorter} or less"
    return message
