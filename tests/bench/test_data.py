"""What `bench data` measures is what it says: the same texts, the same ids, all of the updates."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from shardlm import cli
from shardlm.bench import data, loading, opening, preparing, waiting
from shardlm.bench.synthetic import LONGEST, MEAN, cut, document_lengths, random_texts, write_rows
from shardlm.data import Corpus, open_store
from shardlm.data.loader import Shape
from shardlm.data.subwords import train_bpe
from shardlm.options import BENCHES

TINY = Shape(64, 16)


def no_words(line):
    pass


def test_lengths_of_documents_are_those_of_a_corpus():
    lengths = document_lengths(20_000)
    assert 0.9 * MEAN < lengths.mean() <= MEAN
    assert lengths.min() >= 1
    assert lengths.max() == LONGEST
    # A log-normal distribution of this spread: mean over median is exp(1.2**2 / 2) = 2.05 or more.
    assert 2 < lengths.mean() / np.median(lengths) < 3
    assert document_lengths(20_000).tolist() == lengths.tolist()


def test_a_cut_text_is_whole():
    text = "".join(map(str, range(1000)))
    pieces = cut(text, np.array([1, 10, 500, 100_000, 3]))
    assert [len(p) for p in pieces] == [1, 10, 500, len(text) - 511]
    assert "".join(pieces) == text


def test_the_store_has_the_documents(tmp_path):
    store = loading.synthetic_store(tmp_path, 50)
    assert (store.lengths - 1).tolist() == document_lengths(50).tolist()  # Each has its end.
    first = Corpus.of_stores([store], [""])[0].document(0)
    assert bytes(first[:-1].tolist()).decode() == next(random_texts(document_lengths(50)))


def test_padding_is_no_throughput(tmp_path, monkeypatch):
    """Of rows that are mostly padding, only what is not counts."""
    (corpus,) = Corpus.of_stores([loading.synthetic_store(tmp_path, 200)], [""])
    monkeypatch.setattr(loading, "_calls_per_second", lambda call, seconds: (call(), 1.0)[1])
    for packing in ("concat", "none"):
        loader = loading.loader_of(corpus, Shape(4096, 8), packing=packing)
        asked = []
        monkeypatch.setattr(loader, "at", asked.append)
        monkeypatch.setattr(loader, "iterate", lambda: (x for x in range(100)))
        found = loading.rates(loader, Shape(4096, 8), rounds=3, seconds=0.0)
        assert asked == [0, 1, 2, 3], "every update is another one"
        assert set(found) == {"at_tokens_per_second", "iterate_tokens_per_second"}
        for rate in found.values():
            assert rate == pytest.approx(8 * 4096 * (1 - loader.padding))
            assert (rate < 0.6 * 8 * 4096) == (packing == "none")


def test_balance_is_better_where_rows_are_dealt_by_work():
    figures = loading.balancing(no_words, documents=3000, updates=5, rows=(64,))
    found = {name.split()[-1]: f for name, f in figures["max_over_mean"].items()}
    assert set(found) == {"none", "tokens", "work"}
    assert 1 <= found["work"]["mean"] <= found["work"]["worst"] < found["none"]["mean"]
    padding = figures["padding"]
    assert 0 <= padding["best_fit"] < 0.02 < padding["none"] < 1
    assert padding["padded_buckets"] < 0.05


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("text")
    texts = [f"def f{i}(x):\n    return x + {i}  # größer\n" * (1 + i % 3) for i in range(200)]
    return write_rows(path / "rows.jsonl", texts), train_bpe(texts, 300), texts


def test_engine_and_library_make_the_same_ids_of_the_same_text(source, tmp_path, monkeypatch):
    path, tokenizer, texts = source
    before = os.environ.get(preparing.PARALLELISM)
    found = preparing.compare(path, tokenizer, 1, tmp_path / "store", rounds=2)
    assert os.environ.get(preparing.PARALLELISM) == before
    assert found["texts"] == len(texts)
    assert found["bytes"] == sum(len(t.encode()) for t in texts)
    assert found["ids"] == sum(len(tokenizer.encode(t)) for t in texts)
    assert found["library_batch"] in preparing.BATCHES
    assert found["library_seconds"] > 0
    # One whose ids are not the library's.
    other = train_bpe(texts, 290)
    monkeypatch.setattr(type(other), "encode_batch", lambda self, texts: other_ids(source, texts))
    with pytest.raises(RuntimeError, match="engine and library make"):
        preparing.compare(path, other, 1, tmp_path / "store", rounds=2)


def other_ids(source, texts):
    return [source[1].encode(t)[1:] for t in texts]


def test_both_sources_have_the_same_text(tmp_path):
    text = "".join(map(chr, range(97, 123))) * 400
    found = preparing.write_sources(tmp_path, text)
    rows = [json.loads(line)["text"] for line in found["rows"].read_text().splitlines()]
    files = [path.read_text() for path in sorted(found["files"].iterdir())]
    assert rows == files
    assert "".join(rows) == text
    assert len(rows) > 2


def test_a_sparse_store_is_a_store(tmp_path):
    path = opening.sparse_store(tmp_path / "sparse", 10_000_000, shard_documents=1000)
    store = open_store(path)
    size = sum(shard.ids.nbytes for shard in store.shards)
    assert 10_000_000 <= size < 12_000_000
    assert sum(f.stat().st_blocks * 512 for f in path.glob("*.tokens")) < size / 10
    (corpus,) = Corpus.of_stores([store], [""])
    assert not loading.loader_of(corpus, TINY).at(10**6).batch["tokens"].any()
    figures = opening.measure(path, 10**6)
    assert figures["bytes"] == size
    assert figures["documents"] == 1000 * len(store.shards)
    assert all(figures[f"{name}_seconds"] > 0 for name in ("open", "rows", "seek"))


def test_waiting_is_that_of_the_updates_after_the_first(tmp_path):
    lines = [
        {"step": 0, "eval_loss": 5.0},
        {"step": 1, "seconds": 9.0, "data_seconds": 5.0},
        {"step": 2, "seconds": 1.0, "data_seconds": 0.01},
        {"step": 2, "eval_loss": 4.0, "seconds": 50.0},
        {"step": 3, "seconds": 3.0, "data_seconds": 0.05},
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = waiting.share_of(path)
    assert found["updates"] == 2
    assert found["share"] == pytest.approx(0.06 / 4)


def test_a_run_that_fails_is_told(tmp_path):
    with pytest.raises(RuntimeError, match=r"train.py .* ended with 2: .*train.steps"):
        waiting.waiting(tmp_path, updates=0, say=no_words)


def test_the_parts_are_those_of_the_options():
    assert tuple(data.PARTS) == BENCHES["data"]


def test_one_part_and_the_last_line(monkeypatch, capsys):
    seen = []

    def part(name):
        return lambda path, options, say: seen.append((name, path)) or {"rounds": options.rounds}

    monkeypatch.setattr(data, "PARTS", {name: part(name) for name in BENCHES["data"]})
    assert cli.run(cli.bench, ["data", "--only", "opening", "--rounds", "3"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["bench"] == "data"
    assert found["figures"] == {"opening": {"rounds": 3}}
    assert cli.run(cli.bench, ["data"]) == 0
    assert [name for name, _ in seen] == ["opening", *BENCHES["data"]]
    assert not any(Path(path).exists() for _, path in seen)
