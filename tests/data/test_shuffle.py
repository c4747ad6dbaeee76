"""The permutation: one for every size, and as even as chance."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlm.data.shuffle import ROUNDS, shuffled


def keys(*seed):
    return np.random.SeedSequence(seed).generate_state(ROUNDS, np.uint64)


@given(st.integers(1, 3000), st.integers(0, 2**64))
def test_every_size_is_permuted(size, seed):
    values = shuffled(np.arange(size), size, keys(seed))
    assert values.dtype == np.int64
    assert sorted(values) == list(range(size))


@pytest.mark.parametrize("size", [10**12 + 39, 2**61 - 1])
def test_values_of_a_huge_permutation_differ(size):
    place = np.concatenate([np.arange(1000), np.arange(size - 1000, size)])
    values = shuffled(place, size, keys(1))
    assert len(set(values.tolist())) == 2000
    assert values.min() >= 0
    assert values.max() < size
    assert abs(values.mean() / size - 0.5) < 0.05  # 7 standard errors


def test_orders_of_four_are_equally_frequent():
    count = 4800
    orders = Counter(tuple(shuffled(np.arange(4), 4, keys(s)).tolist()) for s in range(count))
    assert len(orders) == 24
    expected = count / 24
    assert sum((n - expected) ** 2 / expected for n in orders.values()) < 50  # 23 +- 7


def test_places_and_values_and_neighbours_are_independent():
    size, count = 37, 2000
    orders = np.stack([shuffled(np.arange(size), size, keys(7, s)) for s in range(count)])
    table = np.zeros((size, size))
    np.add.at(table, (np.arange(size)[None], orders), 1)
    expected = count / size
    degrees = (size - 1) ** 2
    chi = ((table - expected) ** 2 / expected).sum()
    assert abs(chi - degrees) < 5 * np.sqrt(2 * degrees)
    steps = np.bincount((np.diff(orders) % size).reshape(-1), minlength=size)[1:]
    assert steps.sum() == count * (size - 1)
    assert abs(((steps - count) ** 2 / count).sum() - (size - 2)) < 5 * np.sqrt(2 * (size - 2))
