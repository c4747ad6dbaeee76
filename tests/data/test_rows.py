"""Rows against a reading of their definition that goes token by token."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlm.config import Config, DataConfig, TrainConfig
from shardlm.data.balance import WorkModel
from shardlm.data.corpus import Corpus
from shardlm.data.loader import Loader
from shardlm.data.rows import ConcatenatedRows, lay_out
from shardlm.data.validation_loader import ValidationLoader

KEYS = ("tokens", "targets", "segments", "positions")
PACKINGS = ("concat", "best_fit", "none", "padded_buckets")
LENGTHS = st.lists(st.integers(0, 12), min_size=1, max_size=9).filter(any)


def numbered(lengths):
    """Documents of the given lengths in which every token is another id: 0, 1, 2, ..."""
    bounds = np.cumsum([0, *lengths])
    stream = np.arange(bounds[-1])
    documents = [stream[a:b] for a, b in pairwise(bounds)]
    return Corpus.of(documents, max(len(stream), 2)), [d.tolist() for d in documents if len(d)]


def loader_of(corpus, length=8, batch=1, packing="concat", **data):
    """Of rows of `length`, or with buckets also of half and a quarter of it."""
    config = Config(
        data=DataConfig(length=length, packing=packing, buckets=3, **data),
        train=TrainConfig(batch=batch, micro_batch=1),
    )
    return Loader([corpus], config, WorkModel(1.0, 1.0, ((0, 1),)))


def expected_rows(documents, length, phase):
    """The rows of one epoch, from the definition, with lists only."""
    places = [(d, i) for d, ids in enumerate(documents) for i in range(len(ids))]
    places = places[phase:] + places[:phase]
    rows = []
    for start in range(0, len(places), length):
        row = {"tokens": [], "targets": [], "segments": [], "positions": []}
        segment, position, previous = 0, 0, None
        for d, i in places[start : start + length]:
            continues = previous == (d, i - 1)
            segment, position = (segment, position + 1) if continues else (segment + 1, 0)
            previous = (d, i)
            row["tokens"].append(documents[d][i])
            row["targets"].append(documents[d][i + 1] if i + 1 < len(documents[d]) else -1)
            row["segments"].append(segment)
            row["positions"].append(position)
        for key, padding in (("tokens", 0), ("targets", -1), ("segments", 0), ("positions", 0)):
            row[key] += [padding] * (length - len(row[key]))
        rows.append(row)
    return rows


@given(LENGTHS, st.integers(2, 9), st.integers(0, 10**6))
def test_rows_are_as_defined(lengths, length, phase):
    corpus, documents = numbered(lengths)
    phase %= corpus.size
    rows = ConcatenatedRows(corpus, length)
    segments = rows.segments(np.arange(rows.rows), np.full(rows.rows, phase))
    batch = lay_out(corpus.tokens, segments, rows.rows, length)
    expected = expected_rows(documents, length, phase)
    assert len(expected) == rows.rows
    for key in KEYS:
        assert batch[key].dtype == np.int32
        assert batch[key].flags.c_contiguous
        assert batch[key].tolist() == [row[key] for row in expected]


def parts_of(batch):
    """Its arrays of each length."""
    return [batch] if isinstance(batch, dict) else list(batch.parts)


@pytest.mark.parametrize("packing", PACKINGS)
@settings(max_examples=30)
@given(lengths=LENGTHS, seed=st.integers(0, 100), overlap=st.integers(0, 4))
def test_what_goes_in_comes_out_once_an_epoch(packing, lengths, seed, overlap):
    """Every token is there, as often as the overlap says, and every token but the first of a
    document is the target of one place, whose token is the one before it."""
    corpus, documents = numbered([*lengths, 8])
    overlap = 0 if packing == "concat" else overlap
    loader = loader_of(corpus, packing=packing, overlap=overlap)
    epoch = [s.segments(e * s.rows, s.rows) for e in range(2) for s in loader.streams]
    pairs = sorted(pair for ids in documents for pair in pairwise(ids))
    for half in range(2):
        tokens, found, predicted = [], [], 0
        for segments, shape in zip(
            epoch[half * len(loader.streams) :], loader.shapes, strict=False
        ):
            rows = int(segments.row.max()) + 1
            batch = lay_out(corpus.tokens, segments, rows, shape.length)
            tokens += batch["tokens"][batch["segments"] > 0].tolist()
            aims = batch["targets"] >= 0
            found += zip(
                batch["tokens"][aims].tolist(), batch["targets"][aims].tolist(), strict=True
            )
            predicted += int(segments.predicted.sum())
        assert sorted(found) == pairs
        assert predicted == len(pairs) == corpus.loss_tokens
        assert set(tokens) == set(range(corpus.size))
        if not overlap:
            assert sorted(tokens) == list(range(corpus.size))


@pytest.mark.parametrize("packing", PACKINGS[1:])
@settings(max_examples=30)
@given(lengths=LENGTHS)
def test_documents_that_fit_are_whole_and_alone_in_their_segment(packing, lengths):
    corpus, documents = numbered([*lengths, 8])
    loader = loader_of(corpus, packing=packing)
    whole = []
    for stream, shape in zip(loader.streams, loader.shapes, strict=True):
        segments = stream.segments(0, stream.rows)
        batch = lay_out(corpus.tokens, segments, stream.rows, shape.length)
        for tokens, numbers, positions in zip(
            batch["tokens"], batch["segments"], batch["positions"], strict=True
        ):
            assert numbers.max() >= 1
            for number in range(1, int(numbers.max()) + 1):
                segment = tokens[numbers == number].tolist()
                assert positions[numbers == number].tolist() == list(range(len(segment)))
                whole.append(segment)
    fits = [d for d in documents if len(d) <= 8]
    assert all(d in whole for d in fits)
    assert all(len({bool(set(s) & set(d)) for s in whole if set(s) & set(d)}) for d in documents)
    assert sorted(i for s in whole for i in s) == list(range(corpus.size))


@pytest.mark.parametrize("end_of_document", [True, False])
def test_documents_of_5_2_3_1_in_rows_of_4(end_of_document):
    lengths = [5, 2, 3, 1]
    corpus, documents = numbered([n + end_of_document for n in lengths])
    validation = ValidationLoader([corpus], length=4)
    batches = list(validation.batches(3))
    tokens = np.concatenate([b["tokens"][b["segments"] > 0] for b in batches])
    targets = np.concatenate([b["targets"].reshape(-1) for b in batches])
    assert tokens.tolist() == [i for ids in documents for i in ids]
    assert (targets >= 0).sum() == sum(lengths) - (0 if end_of_document else 4)
    assert all(b["tokens"].shape == (3, 4) for b in batches)
    assert validation.summary().tokens == 11 + 4 * end_of_document


def test_targets_are_shifted_once():
    vocab, count, length = 7, 100, 9
    corpus = Corpus.of([np.arange(count) % vocab], vocab)
    loader = loader_of(corpus, length, 5)
    successor = np.roll(np.eye(vocab), 1, axis=1) * 30.0  # all the weight of x on (x + 1) mod V
    for step in range(2 * loader.rows_per_epoch // 5 + 1):
        batch = loader.at(step).batch
        logits = successor[batch["tokens"]]
        valid = batch["targets"] >= 0
        picked = np.take_along_axis(logits, np.where(valid, batch["targets"], 0)[..., None], -1)
        losses = np.log(np.exp(logits).sum(-1)) - picked[..., 0]
        assert valid.any()
        assert losses[valid].mean() < 1e-3


@given(LENGTHS, st.integers(2, 9), st.integers(1, 5))
def test_validation_is_whole_in_order_and_filled_up(lengths, length, size):
    corpus, documents = numbered(lengths)
    if corpus.loss_tokens == 0:
        return
    batches = list(ValidationLoader([corpus], length=length).batches(size))
    rows = expected_rows(documents, length, 0)
    assert len(batches) == -(-len(rows) // size)
    for key, padding in (("tokens", 0), ("targets", -1), ("segments", 0), ("positions", 0)):
        whole = np.concatenate([b[key] for b in batches])
        assert whole[: len(rows)].tolist() == [row[key] for row in rows]
        assert (whole[len(rows) :] == padding).all()
