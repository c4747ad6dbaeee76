"""Which stream stands at which place of a mixture in fixed shares, for any place by itself.

The k-th item of stream s, k = 0, 1, 2, ..., has the time (k + 1/2) / w[s] with w the shares of sum
1, and the sequence is all items in order of (time, s): every stream comes as evenly as it can, and
there is nothing to draw and nothing to store (stride scheduling: Waldspurger and Weihl, MIT
TM-528, 1995).

Let P be a place, t the time reached there and e[s] = count[s] - t·w[s], which is the error of
rounding t·w[s] to a whole number and so within ±1/2. All counts sum to P, so all e sum to P - t,
and

    count[s] - P·w[s] = e[s] - w[s] · sum(e)

is at most (1 + (S - 2)·w[s]) / 2 in magnitude for S >= 2 streams: within 1/2 for two streams,
below 1 for equal shares, and below S/2 always. The bound is reached in the limit where many small
streams of equal shares are just about to come for the first time.
"""

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64

from shardlm.data.errors import DataError
from shardlm.validation import LEAST_SHARE, can_be_mixed

LAST_PLACE = 2**40
"""The end of the places that can be asked for: up to here a float64 time is right to 1/1000."""


class Mixture:
    """An endless sequence of items of streams in fixed shares.

    Times are float64 quotients, which IEEE 754 rounds the same way everywhere, and consecutive
    ones of a stream differ by 2^-41 of them or more. So the order is one and the same for every
    machine and every way of asking.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        """Streams in proportion to `weights`, which need not sum to 1.

        Raises:
          DataError: no weight, or weights that `can_be_mixed` does not allow, as some that are
            given together with rows of several lengths may come out.
        """
        given = list(weights)
        if not given or not can_be_mixed(given):
            raise DataError(
                f"the weights of a mixture are {given}: there must be at least one, and each at "
                f"least {LEAST_SHARE:g} of their sum: make data.weights less uneven, leave out "
                "what is not wanted, or use another data.packing than padded_buckets"
            )
        self.shares = np.array(given) / math.fsum(given)

    def draw(
        self, start: int, count: int
    ) -> tuple[Int64[np.ndarray, "count"], Int64[np.ndarray, "count"]]:
        """The items at the places from `start` to below `start + count`.

        The cost follows `count`, whatever `start` is.

        Returns:
          The stream of each place, and the how-manieth item of that stream it is, from 0.
        """
        assert 0 <= start <= start + count <= LAST_PLACE, (start, count)
        if len(self.shares) == 1:
            return np.zeros(count, np.int64), np.arange(start, start + count)
        before, stream, nth = self._items(start, start + count)
        here = slice(start - int(before.sum()), start - int(before.sum()) + count)
        return stream[here], nth[here]

    def counts(self, place: int) -> Int64[np.ndarray, "streams"]:
        """Items of each stream before `place`."""
        assert 0 <= place <= LAST_PLACE, place
        before, stream, _ = self._items(place, place)
        return before + np.bincount(
            stream[: place - int(before.sum())], minlength=len(self.shares)
        ).astype(np.int64)

    def _items(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Items in order around the places from `start` to below `stop`: how many of each stream
        are before the first of them, and the stream and the number of each.

        Up to time t there are t ± S/2 items. So all up to S before `start` are at earlier places
        and all up to S after `stop` include the last one, with S/2 to spare at both ends, so that
        it does not matter on which side of an end rounding puts an item.
        """
        streams = len(self.shares)
        first = self._until(start - streams)
        count = self._until(stop + streams) - first
        stream = np.repeat(np.arange(streams), count)
        nth = np.arange(len(stream)) + np.repeat(first - (np.cumsum(count) - count), count)
        # Equal times stay in the order of streams. Every stream is sorted, so this is a merge.
        order = np.argsort((nth + 0.5) / self.shares[stream], kind="stable")
        assert first.sum() <= start <= stop <= first.sum() + len(stream)
        return first, stream[order], nth[order]

    def _until(self, time: int) -> Int64[np.ndarray, "streams"]:
        """Items of each stream up to `time`, but for rounding."""
        return np.ceil(np.maximum(time * self.shares - 0.5, 0.0)).astype(np.int64)
