"""Rows against a reading of their definition that goes token by token."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlm.data.corpus import Corpus
from shardlm.data.loader import Loader, ValidationLoader
from shardlm.data.rows import cut_rows, rows_per_epoch

LENGTHS = st.lists(st.integers(0, 12), min_size=1, max_size=9).filter(any)


def numbered(lengths):
    """Documents of the given lengths in which every token is another id: 0, 1, 2, ..."""
    bounds = np.cumsum([0, *lengths])
    stream = np.arange(bounds[-1])
    documents = [stream[a:b] for a, b in pairwise(bounds)]
    return Corpus.of(documents, max(len(stream), 2)), [d.tolist() for d in documents if len(d)]


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
    size = len(corpus.tokens)
    phase %= size
    count = rows_per_epoch(corpus, length)
    batch = cut_rows(corpus, length, np.arange(count), np.full(count, phase))
    expected = expected_rows(documents, length, phase)
    assert len(expected) == count
    for key in ("tokens", "targets", "segments", "positions"):
        assert batch[key].dtype == np.int32
        assert batch[key].flags.c_contiguous
        assert batch[key].tolist() == [row[key] for row in expected]


@given(LENGTHS, st.integers(2, 9), st.integers(0, 100))
def test_what_goes_in_comes_out_once_an_epoch(lengths, length, seed):
    corpus, documents = numbered(lengths)
    if corpus.loss_tokens == 0:
        return
    # A batch is an epoch.
    loader = Loader(corpus, seed=seed, batch=rows_per_epoch(corpus, length), length=length)
    tokens_and_targets = [
        pair for ids in documents for pair in zip(ids, [*ids[1:], -1], strict=True)
    ]
    for epoch in range(3):
        batch = loader.batch_at(epoch)
        real = batch["segments"] > 0
        out = zip(batch["tokens"][real].tolist(), batch["targets"][real].tolist(), strict=True)
        assert sorted(out) == tokens_and_targets
        predicted = int((batch["targets"] >= 0).sum())
        assert predicted == sum(len(ids) - 1 for ids in documents) == corpus.loss_tokens


@pytest.mark.parametrize("end_of_document", [True, False])
def test_documents_of_5_2_3_1_in_rows_of_4(end_of_document):
    lengths = [5, 2, 3, 1]
    corpus, documents = numbered([n + end_of_document for n in lengths])
    validation = ValidationLoader(corpus, length=4)
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
    loader = Loader(corpus, seed=3, batch=5, length=length)
    successor = np.roll(np.eye(vocab), 1, axis=1) * 30.0  # all the weight of x on (x + 1) mod V
    for step in range(2 * loader.rows_per_epoch // 5 + 1):
        batch = loader.batch_at(step)
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
    batches = list(ValidationLoader(corpus, length=length).batches(size))
    rows = expected_rows(documents, length, 0)
    assert len(batches) == -(-len(rows) // size)
    for key, padding in (("tokens", 0), ("targets", -1), ("segments", 0), ("positions", 0)):
        whole = np.concatenate([b[key] for b in batches])
        assert whole[: len(rows)].tolist() == [row[key] for row in rows]
        assert (whole[len(rows) :] == padding).all()


def test_the_same_tokens_in_a_wider_type_have_the_same_fingerprint():
    ids = [np.arange(5), np.arange(3)]
    narrow, wide = Corpus.of(ids, 5), Corpus.of(ids, 70_000)
    assert (narrow.tokens.dtype, wide.tokens.dtype) == (np.uint8, np.uint32)
    assert narrow.fingerprint() == wide.fingerprint()
    assert Corpus.of([np.arange(4), np.r_[4, :3]], 5).fingerprint() != narrow.fingerprint()
