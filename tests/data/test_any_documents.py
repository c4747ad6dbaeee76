"""An epoch of any documents, as updates give it, against counts made from the documents alone."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlm.config import Config, DataConfig, RunConfig, TrainConfig
from shardlm.data import Buckets, Corpus, Loader
from shardlm.data.balance import WorkModel

LENGTH, VOCAB = 8, 50
PACKINGS = ("concat", "best_fit", "none", "padded_buckets")
# Up to three rows and a bit; ids come again within and across documents, 0 among them.
DOCUMENT = st.lists(st.integers(0, 3) | st.integers(0, VOCAB - 1), min_size=1, max_size=27)


class Example(NamedTuple):
    """Documents of each source, and how they are read."""

    sources: list[list[list[int]]]
    """Those of source k have ids from `VOCAB * k` on."""
    packing: str
    overlap: int = 0
    weights: tuple[float, ...] = ()
    seed: int = 0
    ways: int = 1


@st.composite
def examples(draw):
    packing, ways = draw(st.sampled_from(PACKINGS)), draw(st.integers(1, 2))
    documents = st.lists(DOCUMENT, max_size=6)
    sources = draw(st.lists(documents, min_size=1, max_size=2))
    # There is an update's worth, with a token to predict.
    sources = [[*source, *[list(range(LENGTH))] * ways] for source in sources]
    sources = [[[VOCAB * k + i for i in ids] for ids in s] for k, s in enumerate(sources)]
    weighted = len(sources) == 2 and draw(st.booleans())
    return Example(
        sources,
        packing,
        0 if packing == "concat" else draw(st.integers(0, LENGTH - 1)),
        (float(draw(st.integers(1, 3))), 1.0) if weighted else (),
        draw(st.integers(0, 2**64 - 1)),
        ways,
    )


def loader_of(example):
    """Updates of a row for each device, or with buckets as many places."""
    vocab = VOCAB * len(example.sources)
    whole = Corpus.of([np.array(ids) for source in example.sources for ids in source], vocab)
    corpora, document, base = [], 0, 0
    for source in example.sources:
        part = whole.select(slice(document, document + len(source)))
        corpora.append(replace(part, base=base))
        document, base = document + len(source), base + part.size
    config = Config(
        run=RunConfig(seed=example.seed),
        data=DataConfig(
            length=LENGTH,
            buckets=3,
            packing=example.packing,
            overlap=example.overlap,
            weights=example.weights,
        ),
        train=TrainConfig(batch=example.ways, micro_batch=example.ways),
    )
    loader = Loader(corpora, config, WorkModel(9.0, 1.0, ((0, 1),)))
    loader.deal_to(example.ways)
    return loader


def first_epoch(example):
    """Of each pool (a source, or all as one text), its rows in the first epoch, in their order by
    shape and number, as lists of (token, target, segment, position)."""
    loader = loader_of(example)
    found = [{} for _ in example.weights or (1,)]
    step = 0
    while sum(map(len, found)) < loader.rows_per_epoch:
        # The weights are 3 to 1 at most.
        assert step < 5 * loader.rows_per_epoch + 20, "rows are missing"
        update, names = loader.at(step), loader.rows_of(step)
        parts = update.batch.parts if isinstance(update.batch, Buckets) else [update.batch]
        predicted, before = [0] * len(example.sources), 0
        for shape, (part, named) in enumerate(zip(parts, names, strict=True)):
            for i, number in enumerate(part["rows"].tolist()):
                keys = ("tokens", "targets", "segments", "positions")
                row = list(zip(*(part[key][i].tolist() for key in keys), strict=True))
                if row[0][2] == 0:
                    assert set(row) == {(0, -1, 0, 0)}
                    continue
                for _, target, _, _ in row:
                    if target >= 0:
                        predicted[target // VOCAB] += 1
                _, _, epoch, index = named[number - before].tolist()
                if epoch == 0:
                    rows = found[row[0][0] // VOCAB if example.weights else 0]
                    assert (shape, index) not in rows
                    rows[shape, index] = row
            before += loader.shapes[shape].rows
        assert predicted == update.tokens.tolist()
        step += 1
    return [[rows[name] for name in sorted(rows)] for rows in found]


def segments_of(row):
    """Segments of a row as lists of (token, target), once the row is seen to be well formed."""
    found = []
    for token, target, segment, position in row:
        if segment == 0:
            assert (token, target, position) == (0, -1, 0)
            continue
        if position == 0:
            found.append([])
        found[-1].append((token, target))
        assert (segment, position) == (len(found), len(found[-1]) - 1)
    # Padding is at the end only.
    assert [s > 0 for _, _, s, _ in row] == sorted((s > 0 for _, _, s, _ in row), reverse=True)
    return found


def pieces_of(ids, overlap):
    """What of a document stands in a row at once, from the rule: cut if it is longer than a row,
    and then every piece repeats the last `overlap` tokens of the one before."""
    pieces = [ids[:LENGTH]]
    while sum(map(len, pieces)) - overlap * (len(pieces) - 1) < len(ids):
        start = len(pieces) * (LENGTH - overlap)
        pieces.append(ids[start : start + LENGTH])
    return pieces


def check(example):
    pools = (
        example.sources
        if example.weights
        else [[ids for source in example.sources for ids in source]]
    )
    for documents, rows in zip(pools, first_epoch(example), strict=True):
        segments = [segment for row in rows for segment in segments_of(row)]
        tokens = Counter(token for segment in segments for token, _ in segment)
        # What is predicted of what, each time that it stands so in a document.
        pairs = Counter(pair for ids in documents for pair in pairwise(ids))
        found = Counter((a, b) for segment in segments for a, b in segment if b >= 0)
        assert found == pairs
        assert sum(found.values()) == sum(len(ids) - 1 for ids in documents)
        for segment in segments:
            context = min(example.overlap, len(segment))
            for i, ((_, target), (following, _)) in enumerate(pairwise(segment)):
                assert target == following or (target == -1 and i < context)
        if example.packing == "concat":
            assert tokens == Counter(token for ids in documents for token in ids)
            # The text as a circle, cut at some place; only the last row may be short.
            text = [token for ids in documents for token in ids]
            read = [token for row in rows for token, _, segment, _ in row if segment]
            assert any(read == text[i:] + text[:i] for i in range(len(text)))
            assert len(rows) == -(-len(text) // LENGTH)
        else:
            expected = [piece for ids in documents for piece in pieces_of(ids, example.overlap)]
            assert tokens == Counter(token for piece in expected for token in piece)
            read = Counter(tuple(token for token, _ in segment) for segment in segments)
            assert read == Counter(map(tuple, expected))
            if not example.overlap:
                assert tokens == Counter(token for ids in documents for token in ids)
        if example.packing == "none":
            assert all(len(segments_of(row)) == 1 for row in rows)


@settings(max_examples=100)
@given(examples())
def test_what_goes_in_comes_out_and_is_predicted_once(example):
    check(example)


@pytest.mark.parametrize(
    "packing, overlap", [("concat", 0), *((p, o) for p in PACKINGS[1:] for o in (0, 3))]
)
def test_documents_of_5_2_3_1_and_longer_ones(packing, overlap):
    """Every id once: 5, 2, 3, 1, one that fills a row, one and two more than fill it or two."""
    documents, first = [], 0
    for size in (5, 2, 3, 1, 8, 9, 18):
        documents.append(list(range(first, first + size)))
        first += size
    for ways in (1, 2):
        check(Example([documents], packing, overlap, seed=ways, ways=ways))
