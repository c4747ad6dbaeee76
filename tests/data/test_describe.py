"""Figures of what a run reads, against counts made by hand and by brute force."""

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlm.arguments import override
from shardlm.config import Config
from shardlm.data import Buckets, load_data
from shardlm.data import describe as describing
from shardlm.data.balance import WorkModel
from shardlm.data.corpus import Tokens
from shardlm.data.describe import LengthClass, describe
from shardlm.data.shown import Piece, shorten, visible

PACKINGS = ("concat", "best_fit", "none", "padded_buckets")
BASE = {
    "model.layers": 1,
    "model.embed": 16,
    "model.heads": 2,
    "data.length": 16,
    "data.buckets": 2,
    "data.validation": 0.0,
    "train.batch": 4,
    "train.micro_batch": 2,
    "train.steps": 10,
    "optim.warmup_steps": 0,
}
LENGTHS = (3, 17, 16, 2, 40, 9, 7, 5, 31, 12, 2, 8, 33, 4, 16, 25)
"""Tokens of documents, the end among them."""


def write(folder, name, lengths, odd=()):
    """A source of documents of so many tokens, their characters telling them apart, and rows."""
    texts = ["".join(chr(97 + (i + j) % 26) for j in range(n - 1)) for i, n in enumerate(lengths)]
    path = folder / f"{name}.jsonl"
    path.write_bytes(b"\n".join([*(json.dumps({"text": t}).encode() for t in texts), *odd]))
    return str(path)


def loaded(*sources, **keys):
    config = override(Config(), BASE | {"data.sources": sources} | keys)
    return load_data(config), config


def found(*sources, ways=1, **keys):
    data, config = loaded(*sources, **keys)
    return describe(data, config, ways)


def test_a_source_counted_by_hand(tmp_path):
    odd = [b'{"text": ""}', b'{"text": "\xff"}', b'{"text": "\xfe\xfe"}']
    source = write(tmp_path, "a", (2, 3, 4, 9, 80), odd)
    got = found(source, **{"data.errors": "skip", "train.steps": 2})
    (s,) = got.sources
    assert (s.documents, s.tokens, s.empty, s.skipped, s.replaced) == (5, 98, 1, 2, 0)
    assert (s.training_tokens, s.share, s.bytes_per_token) == (98, 1.0, 93 / 98)
    # 98 tokens are 7 rows of 16, of which two updates take 8.
    assert (s.epochs, got.updates_per_epoch, got.places) == (8 / 7, 7 / 4, 64)
    assert got.lengths.classes == (
        LengthClass(2, 2, 5),
        LengthClass(4, 1, 4),
        LengthClass(8, 1, 9),
        LengthClass(16, 0, 0),
        LengthClass(32, 0, 0),
        LengthClass(64, 1, 80),
    )
    percentiles = {0: 2, 1: 2, 10: 2, 25: 3, 50: 4, 75: 9, 90: 80, 99: 80, 100: 80}
    assert got.lengths.percentiles == percentiles
    assert (got.lengths.mean, got.lengths.longer) == (98 / 5, 1)
    assert (got.training.documents, got.training.loss_tokens, got.validation) == (5, 93, None)


def test_bytes_a_token_are_those_of_all_places_and_not_of_starts(tmp_path):
    """Documents begin with a character of two bytes for one of their tokens in twelve; a long one
    counts for as much as it holds."""
    path = tmp_path / "a.jsonl"
    texts = ["é" * 1000 + "a" * 11_000, *["é"] * 50] * 10
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    (source,) = found(str(path), **{"data.tokenizer": "characters"}).sources
    assert source.training_tokens > describing.SAMPLES * describing.SAMPLE
    exact = sum(len(text.encode()) for text in texts) / sum(map(len, texts))
    assert source.bytes_per_token == pytest.approx(exact, rel=0.02)
    # Of starts alone it would be 2.


def test_a_run_of_the_sample_stays_in_its_document(tmp_path, monkeypatch):
    """Ids are of several arrays in places that are not those of the documents end to end."""
    source = write(tmp_path, "a", LENGTHS)
    data, _ = loaded(source)
    (corpus,) = data.train.corpora
    corpus = corpus.select(np.s_[1::2])
    runs = []
    gather = Tokens.gather

    def noted(self, starts, sizes):
        runs.extend(zip(starts.tolist(), sizes.tolist(), strict=True))
        return gather(self, starts, sizes)

    monkeypatch.setattr(Tokens, "gather", noted)
    size = sum(LENGTHS[1::2])
    for samples, sample in ((64, 1024), (5, 1024), (7, 6), (1, size)):
        monkeypatch.setattr(describing, "SAMPLES", samples)
        monkeypatch.setattr(describing, "SAMPLE", sample)
        runs.clear()
        describing._bytes_per_token(corpus, data.tokenizer)
        bounds = list(zip(corpus.firsts, corpus.firsts + corpus.lengths, strict=True))
        for first, count in runs:
            assert any(a <= first and first + count <= b for a, b in bounds)
        assert sum(count for _, count in runs) == min(size, samples * sample)


def pieces(lengths, length, overlap):
    """Sizes of the pieces of each document."""
    cut = []
    for n in lengths:
        starts = [0]
        while starts[-1] + length < n:
            starts.append(starts[-1] + length - overlap)
        cut.append([min(length, n - start) for start in starts])
    return cut


def rows_of(packing, lengths, length, overlap):
    """Lengths of the rows, and how many rows each document is in, by brute force."""
    if packing == "concat":
        owner = [i for i, n in enumerate(lengths) for _ in range(n)]
        rows = [owner[i : i + length] for i in range(0, len(owner), length)]
        return [length] * len(rows), Counter(i for row in rows for i in {*row})
    cut = pieces(lengths, length, overlap)
    allowed = [length // 2, length] if packing == "padded_buckets" else [length]
    room, sizes = [], []
    for size in sorted((size for sizes in cut for size in sizes), reverse=True):
        holding = [i for i, free in enumerate(room) if free >= size]
        if packing == "none" or not holding:
            sizes.append(min(n for n in allowed if n >= size))
            room.append(sizes[-1] - size)
        else:
            room[min(holding, key=lambda i: room[i])] -= size
    return sizes, Counter({i: len(sizes) for i, sizes in enumerate(cut)})


@pytest.mark.parametrize("overlap", [0, 5])
@pytest.mark.parametrize("configured", PACKINGS)
def test_waste_rows_and_cut_documents_of_each_packing(configured, overlap, tmp_path):
    source = write(tmp_path, "a", LENGTHS)
    overlap = 0 if configured == "concat" else overlap
    keys = {"data.packing": configured, "data.overlap": overlap}
    got = found(source, **keys)
    assert [p.name for p in got.packings if p.configured] == [configured]
    for packing in got.packings:
        rows, times = rows_of(packing.name, LENGTHS, 16, overlap)
        assert packing.rows == len(rows)
        assert packing.waste == pytest.approx(1 - sum(LENGTHS) / sum(rows))
        assert packing.updates == pytest.approx(sum(rows) / 64)
        assert packing.cut == sum(n > 1 for n in times.values())
        assert {shape.length for shape in packing.shapes} == {*rows}


def test_a_packing_that_cannot_be_is_said(tmp_path):
    source = write(tmp_path, "a", LENGTHS)
    packings = {p.name: p for p in found(source, **{"data.length": 15}).packings}
    assert "data.buckets is 2 and data.length 15" in packings["padded_buckets"].problem
    assert not any(packings[name].problem for name in ("concat", "best_fit", "none"))
    keys = {"data.packing": "none", "train.batch": 16}
    packings = {p.name: p for p in found(source, **keys).packings}
    assert "has only 15 rows" in packings["concat"].problem
    assert packings["none"].rows > 16


@pytest.mark.parametrize("packing", PACKINGS)
def test_epochs_of_a_mixture_are_those_of_its_rows(packing, tmp_path):
    sources = write(tmp_path, "a", LENGTHS), write(tmp_path, "b", LENGTHS[::2])
    keys = {"data.weights": (1.0, 3.0), "data.packing": packing, "train.steps": 37}
    data, config = loaded(*sources, **keys)
    got = describe(data, config, 1)
    assert [s.share for s in got.sources] == [0.25, 0.75]
    # Each row that the run reads, by source.
    read = np.zeros(2)
    for step in range(37):
        for kind, rows in enumerate(data.train.rows_of(step)):
            length = data.train.shapes[kind].length
            read += np.bincount(rows[:, 1], minlength=2) * length
    places = [sum(rows_of(packing, lengths, 16, 0)[0]) for lengths in (LENGTHS, LENGTHS[::2])]
    assert [s.epochs for s in got.sources] == pytest.approx((read / places).tolist())
    assert sum(s.epochs * n for s, n in zip(got.sources, places, strict=True)) == 37 * 64


def test_sources_without_weights_come_round_together(tmp_path):
    sources = write(tmp_path, "a", LENGTHS), write(tmp_path, "b", LENGTHS[:3])
    got = found(*sources, **{"train.steps": 50})
    rows = -(-(sum(LENGTHS) + sum(LENGTHS[:3])) // 16)
    assert [s.epochs for s in got.sources] == [200 / rows] * 2
    assert sum(s.share for s in got.sources) == 1


@pytest.mark.parametrize("packing", ["best_fit", "padded_buckets"])
def test_balance_is_that_of_the_rows_that_the_devices_get(packing, tmp_path):
    source = write(tmp_path, "a", np.random.default_rng(0).integers(2, 17, 200).tolist())
    keys = {"data.packing": packing, "train.batch": 16, "train.micro_batch": 8}
    got = found(source, ways=4, **keys)
    assert got.sampled == 10
    work = WorkModel.of(override(Config(), BASE | {"model.vocab": 257}).model)
    for balance in got.balances:
        data, _ = loaded(source, **keys | {"data.balance": balance.name})
        data.train.deal_to(4)
        ratios = []
        for step in range(10):
            batch = data.train.at(step).batch
            devices = np.zeros(4)
            for part in batch.parts if isinstance(batch, Buckets) else (batch,):
                for i, segments in enumerate(part["segments"]):
                    sizes = np.array([*Counter(segments[segments > 0].tolist()).values()], int)
                    if sizes.size:
                        device = i // (len(part["segments"]) // 4)
                        devices[device] += work.pieces(sizes).sum()
                        devices[device] += work.per_token * (segments == 0).sum()
            ratios.append(devices.max() / devices.mean())
        assert (balance.mean, balance.worst) == pytest.approx((np.mean(ratios), max(ratios)))
    assert [b.name for b in got.balances if b.configured] == ["work"]
    none, _, work_balance, _ = got.balances
    assert none.mean > work_balance.mean


@pytest.mark.parametrize("packing", PACKINGS)
def test_the_rows_are_those_of_the_first_updates(packing, tmp_path):
    """Character by character: of bytes, each is a place, and ⟨end⟩ is one."""
    source = write(tmp_path, "a", LENGTHS)
    keys = {"data.packing": packing, "data.overlap": 0 if packing == "concat" else 3}
    data, config = loaded(source, **keys)
    got = describe(data, config, 2)
    assert len(got.rows) == 10
    data.train.deal_to(1)
    for row in got.rows:
        batch = data.train.at(row.update - 1).batch
        parts = batch.parts if isinstance(batch, Buckets) else (batch,)
        used = [
            (part, i) for part in parts for i in range(len(part["rows"])) if part["segments"][i, 0]
        ]
        assert row.rows == len(used)
        part, i = used[row.number - 1]
        shown = []
        for number, segment in enumerate(row.segments, start=1):
            for piece in segment.pieces:
                signs = [256] if piece.kind == "id" else piece.text.encode()
                assert piece.text == "⟨end⟩" or piece.kind == "text"
                shown += [(token, piece.predicts, number) for token in signs]
        target, size = part["targets"][i], len(shown)
        arrays = part["tokens"][i], target >= 0, part["segments"][i]
        assert shown == list(zip(*(a[:size].tolist() for a in arrays), strict=True))
        assert not arrays[2][size:].any()
        assert (row.length, row.padding) == (target.size, target.size - size)
        assert row.predicted == (target >= 0).sum()
        ends = [segment.ends for segment in row.segments]
        assert ends == [segment.pieces[-1].text == "⟨end⟩" for segment in row.segments]


def test_of_a_large_source_little_is_read(tmp_path, monkeypatch):
    np.save(tmp_path / "ids.npy", np.full((1000, 5000), 7, np.uint16))
    data, config = loaded(str(tmp_path / "ids.npy"), **{"data.packing": "best_fit"})
    read = []
    gather = Tokens.gather

    def counted(self, starts, sizes):
        read.append(int(sizes.sum()))
        return gather(self, starts, sizes)

    monkeypatch.setattr(Tokens, "gather", counted)
    got = describe(data, config, 2)
    assert got.sources[0].tokens == 5_001_000
    # The sample, and ids of updates of 64 places.
    assert sum(read) < describing.SAMPLES * describing.SAMPLE + 100 * 64


def test_a_run_longer_than_any_place_of_a_mixture(tmp_path):
    source = write(tmp_path, "a", LENGTHS * 75)
    got = found(source, **{"train.steps": 2**31 - 1, "train.batch": 1024, "train.micro_batch": 64})
    assert got.sources[0].epochs == pytest.approx((2**31 - 1) / got.updates_per_epoch)


@given(st.text(st.characters(codec=None)))
def test_what_is_shown_is_printable(text):
    shown = visible(text)
    assert shown.isprintable()
    assert visible(shown) == shown
    shown.encode()
    assert len(shown) >= len(text)


def test_signs():
    assert visible("a\nb\t\x1b[0m\0\x7f") == "a↵b␉␛[0m␀␡"
    assert visible("\u202e\ud800\x85é日😀") == "⟨U+202E⟩⟨U+D800⟩⟨U+0085⟩é日😀"


def test_the_middle_is_left_out():
    parts = Piece("abcdef", True), Piece("⟨end⟩", False, "id"), Piece("ghij", False)
    assert shorten(parts, 15) == parts
    short = shorten(parts, 8)
    assert [(p.text, p.predicts, p.kind) for p in short] == [
        ("abcd", True, "text"),
        (" … 7 characters … ", True, "gap"),
        ("ghij", False, "text"),
    ]
