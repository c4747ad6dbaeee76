"""Rows of one length without end, as a function of their number."""

import functools
from collections.abc import Sequence

import numpy as np

from shardlm.data.layout import Rows
from shardlm.data.mixture import Mixture
from shardlm.data.rows import Segments
from shardlm.data.shuffle import ROUNDS, shuffled


class Stream:
    """Rows of one length without end: of the pools in even turns, each pool's epochs in turn."""

    def __init__(self, pools: Sequence[Rows], weights: Sequence[float], seed: int, kind: int):
        """
        Args:
          pools: with rows. weights: how often they come.
          seed: of the run. kind: the number of the stream.
        """
        self._pools, self._mixture = list(pools), Mixture(weights)
        self._phases = [rows.corpus.size for rows in pools]
        self._seed, self._kind = seed, kind
        self.rows = sum(rows.rows for rows in pools)

    def draw(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Pool, epoch, row within the epoch, and phase, of the `count` rows from `start` on."""
        pool, nth = self._mixture.draw(start, count)
        sizes = np.array([rows.rows for rows in self._pools])
        epoch, place = np.divmod(nth, sizes[pool])
        row, phase = np.empty_like(place), np.empty_like(place)
        for p, e in np.unique(np.stack([pool, epoch]), axis=1).T.tolist():
            chosen = (pool == p) & (epoch == e)
            keys = self._keys(e, p)
            row[chosen] = shuffled(place[chosen], self._pools[p].rows, keys[1:])
            phase[chosen] = int(keys[0]) % self._phases[p]
        return pool, epoch, row, phase

    def segments(self, start: int, count: int) -> Segments:
        """The segments of the `count` rows from `start` on."""
        pool, _, row, phase = self.draw(start, count)
        parts = []
        for p in np.unique(pool).tolist():
            mine = np.flatnonzero(pool == p)
            parts.append(self._pools[p].segments(row[mine], phase[mine]).renumbered(mine))
        return Segments.merge(parts)

    def drawn(self, end: int) -> list[tuple[Rows, int]]:
        """Of each pool, its rows, and how many of them stand before row `end` of the stream."""
        return list(zip(self._pools, self._mixture.counts(end).tolist(), strict=True))

    @functools.lru_cache(64)  # noqa: B019 - a stream lives as long as its loader
    def _keys(self, epoch: int, pool: int) -> np.ndarray:
        entropy = [self._seed, int(epoch), int(pool), self._kind]
        return np.random.SeedSequence(entropy).generate_state(1 + ROUNDS, np.uint64)
