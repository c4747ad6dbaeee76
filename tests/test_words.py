"""Counts with their nouns."""

import pytest

from shardlm.data.loader import Shape
from shardlm.data.summary import Summary
from shardlm.words import many


@pytest.mark.parametrize(
    "count, text",
    [(0, "0 rows"), (1, "1 row"), (1024, "1,024 rows"), (1.0, "1 row"), (2.34567, "2.346 rows")],
)
def test_one_and_many(count, text):
    assert many(count, "row") == text


def test_nouns_with_another_plural():
    assert [many(n, "batch", "es") for n in (1, 2)] == ["1 batch", "2 batches"]


def test_sizes_of_one():
    assert str(Summary(1, 1, 0, 1, 1024)) == "1 document, 1 token, 1 row of 1,024"
    assert str(Shape(256, 1)) == "1 row of 256"
