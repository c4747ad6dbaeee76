"""The mixture against its definition in sorted items, and what holds at any place of it."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlm.data.errors import DataError
from shardlm.data.mixture import LAST_PLACE, Mixture

WEIGHTS = st.lists(
    st.one_of(st.sampled_from([1.0, 1.0, 2.0, 3.0, 0.1, 1e-6]), st.floats(1e-6, 1e3)),
    min_size=1,
    max_size=12,
)
PLACES = st.one_of(st.integers(0, 3000), st.integers(0, LAST_PLACE - 10_000))


def expected(weights, stop):
    """Streams and numbers of the places below `stop`: enough items of each stream, sorted."""
    total = math.fsum(weights)
    items = []
    for stream, weight in enumerate(weights):
        count = int(stop * weight / total) + len(weights) + 2
        items += [((k + 0.5) / (weight / total), stream, k) for k in range(count)]
    return [(stream, k) for _, stream, k in sorted(items)[:stop]]


@given(WEIGHTS, st.integers(0, 300), st.integers(0, 300))
def test_items_are_in_the_order_of_their_times(weights, start, count):
    mixture = Mixture(weights)
    stream, nth = mixture.draw(start, count)
    assert stream.dtype == nth.dtype == np.int64
    found = list(zip(stream.tolist(), nth.tolist(), strict=True))
    whole = expected(weights, start + count)
    assert found == whole[start:]
    counts = np.bincount([s for s, _ in whole[:start]], minlength=len(weights))
    assert mixture.counts(start).tolist() == counts.tolist()


@given(WEIGHTS, PLACES, st.lists(st.integers(0, 200), min_size=2, max_size=6))
def test_draws_agree_where_they_overlap(weights, start, steps):
    mixture = Mixture(weights)
    whole = mixture.draw(start, sum(steps))
    place = start
    for step in steps:
        here = slice(place - start, place - start + step)
        part = mixture.draw(place, step)
        assert part[0].tolist() == whole[0][here].tolist()
        assert part[1].tolist() == whole[1][here].tolist()
        wider = mixture.draw(max(place - 7, 0), step + 20)
        skip = min(place, 7)
        assert wider[1][skip : skip + step].tolist() == whole[1][here].tolist()
        place += step


@given(WEIGHTS, PLACES, st.integers(0, 1000))
def test_every_stream_goes_on_without_a_gap(weights, start, count):
    mixture = Mixture(weights)
    before, after = mixture.counts(start), mixture.counts(start + count)
    assert before.sum() == start
    assert after.sum() == start + count
    stream, nth = mixture.draw(start, count)
    for s in range(len(weights)):
        assert nth[stream == s].tolist() == list(range(before[s], after[s]))


@given(WEIGHTS, PLACES)
def test_counts_are_within_the_bound_of_their_shares(weights, place):
    mixture = Mixture(weights)
    shares = np.array(weights) / math.fsum(weights)
    off = np.abs(mixture.counts(place) - place * shares)
    bound = (1 + max(len(weights) - 2, -1) * shares) / 2
    rounding = 1e-3 * place / LAST_PLACE + 1e-9
    assert (off <= bound + rounding).all()
    if len(weights) == 1:
        assert off.tolist() == [0.0]


def test_the_bound_is_reached_before_many_small_streams_come_at_once():
    streams = 50
    mixture = Mixture([1.0] + [2e-5] * (streams - 1))
    share = mixture.shares[0]
    first = int(0.5 / mixture.shares[1]) - streams
    off = [abs(mixture.counts(p)[0] - p * share) for p in range(first, first + 2 * streams)]
    bound = (1 + (streams - 2) * share) / 2
    assert 0.999 * bound < max(off) <= bound


@pytest.mark.parametrize("start", [0, 1, 2**20 + 1, 2**40 - 999])
def test_equal_weights_take_turns_and_two_to_one_alternate(start):
    places = np.arange(start, start + 900)
    stream, nth = Mixture([0.2, 0.2, 0.2]).draw(start, 900)
    assert stream.tolist() == (places % 3).tolist()
    assert nth.tolist() == (places // 3).tolist()
    # Times 3/4, 9/4 and 3/2 of every three.
    stream, _ = Mixture([2.0, 1.0]).draw(start, 900)
    assert stream.tolist() == np.array([0, 1, 0])[places % 3].tolist()


def test_far_places_have_as_many_of_each_as_near_ones():
    shares = np.array([0.5, 0.3, 0.15, 0.05 - 1e-6, 1e-6])
    mixture = Mixture(shares.tolist())
    for start in (0, 2**30 + 12_345, 2**40 - 10**6):
        stream, nth = mixture.draw(start, 10**6)
        counts = np.bincount(stream, minlength=5)
        assert (np.abs(counts - 10**6 * shares) <= 1 + 3 * shares).all()
        assert counts[4] == 1
        assert nth[0] == mixture.counts(start)[stream[0]]


def test_one_stream_is_counted():
    stream, nth = Mixture([0.3]).draw(2**39, 5)
    assert stream.tolist() == [0] * 5
    assert nth.tolist() == list(range(2**39, 2**39 + 5))
    assert Mixture([0.3]).counts(2**39).tolist() == [2**39]


def test_the_scale_of_the_weights_does_not_matter():
    weights = [0.7, 0.2, 0.1]
    small, great = Mixture(weights), Mixture([w * 2**30 for w in weights])
    for a, b in zip(small.draw(10**9, 1000), great.draw(10**9, 1000), strict=True):
        assert a.tolist() == b.tolist()


@pytest.mark.parametrize(
    "weights",
    [[], [1.0, 0.0], [1.0, -1.0], [math.nan], [math.inf, 1.0], [1e301, 1e301], [1.0, 1e-13]],
)
def test_weights_that_make_no_mixture_are_refused(weights):
    with pytest.raises(
        DataError, match=r"the weights of a mixture are \[.*each at least 1e-12 of their sum"
    ):
        Mixture(weights)
