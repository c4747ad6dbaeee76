"""`shardlm prepare`: text into a store, and training from it."""

import contextlib
import errno
import gzip
import json
import os
import socket
import threading
from pathlib import Path

import numpy as np
import pytest

from shardlm import cli
from shardlm.config import Config, DataConfig, TrainConfig
from shardlm.data import DataError, load_data, open_store
from shardlm.data.directory import tokenizer_left
from shardlm.data.inputs import list_inputs
from shardlm.data.prepare import Interrupted, Preparation
from shardlm.data.readers import Reading
from shardlm.data.subwords import train_bpe
from shardlm.data.tokenizer import BytesTokenizer
from shardlm.files import lock


@pytest.fixture
def folder(tmp_path):
    """Texts and rows, 40 documents of all lengths and one that is empty."""
    random = np.random.default_rng(0)
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(20):
        size = int(random.integers(1, 3000))
        text = "".join(chr(c) for c in random.integers(97, 230, size))
        (folder / f"{i}.txt").write_text(text, encoding="utf-8")
    rows = [json.dumps({"text": f"row {i} " * i, "id": i}) for i in range(21)]
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")
    return folder


def documents(folder):
    texts = [p.read_text(encoding="utf-8") for p in sorted(folder.glob("*.txt"))]
    return texts + [f"row {i} " * i for i in range(1, 21)]


def preparation(folder, **kwargs):
    return Preparation(
        list_inputs(str(folder)), Reading(), BytesTokenizer(), shard_tokens=9000, **kwargs
    )


def contents(path):
    return {p.name: p.read_bytes() for p in path.iterdir() if p.name != ".lock"}


def test_what_went_in_is_there(folder, tmp_path):
    store = preparation(folder).into(tmp_path / "store")
    ends = np.cumsum(store.lengths)
    ids = np.concatenate([shard.ids for shard in store.shards])
    found = [ids[end - n : end] for n, end in zip(store.lengths, ends, strict=True)]
    assert all(part[-1] == 256 for part in found)
    assert sorted(store.tokenizer.decode(part) for part in found) == sorted(documents(folder))
    assert len(store.shards) == 2
    assert (store.manifest["empty"], store.manifest["skipped"]) == (1, 0)


def test_an_interrupted_preparation_goes_on_and_the_files_are_the_same(folder, tmp_path):
    for i in range(8):
        (folder / f"more{i}.jsonl").write_text(json.dumps({"text": "x" * 5000}))
    preparation(folder).into(tmp_path / "whole")
    asked = iter([False] * 4 + [True])
    with pytest.raises(Interrupted):
        preparation(folder, stopped=lambda: next(asked)).into(tmp_path / "store")
    first = (tmp_path / "store" / "00000.tokens").stat()
    done = []

    def shows(what, total):
        return contextlib.nullcontext(lambda size, tokens: done.append(tokens))

    preparation(folder, display=shows).into(tmp_path / "store")
    assert contents(tmp_path / "store") == contents(tmp_path / "whole")
    assert (tmp_path / "store" / "00000.tokens").stat().st_mtime_ns == first.st_mtime_ns
    assert sum(done) < sum(open_store(tmp_path / "whole").lengths)


@pytest.mark.parametrize("workers", [1, 2])
def test_of_two_faults_the_first_is_told(workers, tmp_path):
    """Though the second is found while the text of the first is still being looked at."""
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"text": "a"}\nnot JSON\n')
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "b"}\n' * 999)[:-9])
    with pytest.raises(DataError, match=r"a\.jsonl:2 is not JSON"):
        preparation(folder, workers=workers).into(tmp_path / "store")


def test_workers_make_the_same_files(folder, tmp_path):
    one = preparation(folder)
    one.into(tmp_path / "one")
    two = preparation(folder, workers=2)
    two.into(tmp_path / "two")
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


@pytest.mark.parametrize("name", ["00001.tokens", "00001.index"])
def test_an_altered_or_truncated_store_is_refused(name, folder, tmp_path):
    preparation(folder).into(tmp_path / "store")
    file = tmp_path / "store" / name
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(DataError, match=rf"{name} has {len(whole) - 1} bytes and was written with"):
        open_store(tmp_path / "store")
    file.write_bytes(whole[:7] + bytes([whole[7] ^ 1]) + whole[8:])
    with pytest.raises(DataError, match=rf"{name} was altered after it was written"):
        open_store(tmp_path / "store")


def test_another_tokenizer_or_dtype_is_refused(folder, tmp_path):
    path = tmp_path / "store"
    preparation(folder).into(path)
    config = Config(
        data=DataConfig(sources=(str(path),), tokenizer="characters", length=16),
        train=TrainConfig(batch=2),
    )
    with pytest.raises(DataError, match="tokenizer"):
        load_data(config)
    manifest = json.loads((path / "store.json").read_text())
    (path / "store.json").write_text(json.dumps(manifest | {"dtype": "uint32"}))
    with pytest.raises(DataError, match="says that ids are uint32"):
        open_store(path)
    (path / "tokenizer.json").write_text(train_bpe(["a b c"], 257).to_json())
    with pytest.raises(DataError, match="is another tokenizer"):
        open_store(path)


def test_a_store_of_other_text_is_not_written_over(folder, tmp_path):
    preparation(folder).into(tmp_path / "store")
    (folder / "0.txt").write_text("changed")
    with pytest.raises(DataError, match="finished store of other text"):
        preparation(folder).into(tmp_path / "store")
    with pytest.raises(DataError, match="is not empty and no store"):
        preparation(folder).into(folder)


def test_the_command_trains_a_tokenizer_and_its_store_is_a_source(folder, tmp_path, capsys):
    store = tmp_path / "store"
    arguments = [
        *(str(store), "--data.sources", str(folder)),
        *("--tokenizer.train", "bpe", "--tokenizer.vocab", "400"),
    ]
    for _ in range(2):
        assert cli.run(cli.prepare, arguments) == 0
        assert f"train from it with: --data.sources {store}" in capsys.readouterr().out
    data = load_data(
        Config(data=DataConfig(sources=(str(store),), length=16), train=TrainConfig(batch=2))
    )
    assert data.tokenizer.vocab_size == 400
    corpora = [data.train.corpora[0], data.validation.corpus]
    found = [data.tokenizer.decode(c.document(i)) for c in corpora for i in range(c.documents)]
    assert sorted(found) == sorted(documents(folder))


def test_ids_altered_in_a_large_store_are_refused_when_they_are_read(folder, tmp_path, monkeypatch):
    """One that is too large to be checked whole when it is opened."""
    monkeypatch.setattr("shardlm.data.store.CHECKED_AT_ONCE", 0)
    preparation(folder).into(tmp_path / "store")
    file = tmp_path / "store" / "00001.tokens"
    whole = file.read_bytes()
    # 511 is outside the vocabulary.
    file.write_bytes(whole[:200] + b"\xff\x01" + whole[202:])
    config = Config(
        data=DataConfig(sources=(str(tmp_path / "store"),), length=16, validation=0.0),
        train=TrainConfig(batch=1),
    )
    corpus = load_data(config).train.corpora[0]
    message = r"00001\.tokens was altered after it was written: its bytes from 0 on"
    with pytest.raises(DataError, match=message):
        [corpus.document(i) for i in range(corpus.documents)]


@pytest.mark.parametrize(
    "files, flags, parts",
    [
        ({"a.jsonl": '{"text": "x"}\n{"text": \n'}, [], ["a.jsonl:2 is not JSON"]),
        ({"a.jsonl": '{"body": "x"}\n'}, [], ["a.jsonl:1 has no field 'text' (it has body)"]),
        (
            {"a.jsonl": '{"text": ""}\n\n{"text": ""}\n', "b.txt": ""},
            [],
            ["a.jsonl and 1 more is empty or left out (3 documents empty and left out)"],
        ),
        ({"a.txt": b"ab\xff"}, [], ["a.txt is not UTF-8: byte 0xff at offset 2", "iconv"]),
        (
            {"a.jsonl": "\n"},
            [],
            ["every document of", "a.jsonl is empty or left out (there is none)"],
        ),
        (
            {"a.txt": b"ab\xff"},
            ["--data.errors", "skip"],
            ["a.txt is empty or", "(1 document not UTF"],
        ),
        ({"a.npy": np.array([1, 2, 300])}, [], ["a.npy: id 300 at place 2", "data.tokenizer"]),
        ({"a.txt": ""}, [], ["every file of", "is empty (a.txt): put text in one, or"]),
        ({}, [], ["has no text file"]),
    ],
)
def test_what_cannot_be_used_is_one_message_and_status_2(files, flags, parts, tmp_path, capsys):
    """And leaves nothing, so that the same command works with the text corrected."""
    folder, store = tmp_path / "texts", tmp_path / "stores" / "a"
    folder.mkdir()
    for name, content in files.items():
        if isinstance(content, np.ndarray):
            np.save(folder / name, content)
        else:
            (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    arguments = [str(store), "--data.sources", str(folder), *flags]
    assert cli.run(cli.prepare, arguments) == 2
    output, error = capsys.readouterr()
    assert (output, error.count("\n")) == ("", 1)
    for part in ["error: data.sources: ", *parts]:
        assert part in error
    assert not store.parent.exists()
    for path in folder.iterdir():
        path.unlink()
    (folder / "good.txt").write_text("good")
    assert cli.run(cli.prepare, arguments) == 0
    assert open_store(store).manifest["tokens"] == 5


def test_a_line_of_20_megabytes(tmp_path):
    """As a row and as a file."""
    text = "a😀 bc" * 2_500_000
    (tmp_path / "row.jsonl").write_text(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    (tmp_path / "text.txt").write_text(text)
    inputs = list_inputs(str(tmp_path))
    store = Preparation(inputs, Reading(), BytesTokenizer()).into(tmp_path / "store")
    assert store.lengths.tolist() == [20_000_001] * 2
    assert store.hashes[0] == store.hashes[1]
    ids = np.concatenate([shard.ids for shard in store.shards])
    assert bytes(ids[:20_000_000].astype(np.uint8)) == text.encode()
    assert np.array_equal(ids[:20_000_001], ids[20_000_001:])


def test_two_at_once(folder, tmp_path):
    """The second is refused, or waits in the cache, says for whom, and can be told to stop."""
    path = tmp_path / preparation(folder).key
    path.mkdir()
    shown = []

    @contextlib.contextmanager
    def shows(what, total):
        shown.append(what)
        yield lambda size, tokens: None
        shown.append("done")

    held = lock(path / ".lock")
    with pytest.raises(DataError, match=rf"process {os.getpid()} on .* is preparing {path}"):
        preparation(folder).into(path)
    hashing = preparation(folder, display=shows)
    assert hashing.key == path.name
    assert shown == ["hashing the text", "done"]
    asked = iter([False, False, True])
    hashing.stopped = lambda: next(asked)
    with pytest.raises(Interrupted):
        hashing.cached(tmp_path)
    waits = f"waiting for process {os.getpid()} on {socket.gethostname()}, which is preparing"
    assert shown[2:] == [f"{waits} {path}"]
    del shown[2:]
    timer = threading.Timer(0.3, os.close, [held])
    timer.start()
    hashing.stopped = lambda: False
    assert hashing.cached(tmp_path).manifest["documents"] == 40
    assert shown[2:] == [f"{waits} {path}", "done", "tokenizing", "done"]
    timer.join()


def test_hashing_and_tokenizing_are_shown_by_themselves(folder, tmp_path):
    """Each with the bytes of all files."""
    size = sum(path.stat().st_size for path in folder.iterdir())
    shown = []

    @contextlib.contextmanager
    def shows(what, total):
        done = []
        yield lambda size, tokens: done.append(size)
        shown.append((what, total, sum(done)))

    preparation(folder, display=shows, what="tokenizing it").cached(tmp_path)
    assert shown == [("hashing the text", size, size), ("tokenizing it", size, size)]
    preparation(folder, display=shows).cached(tmp_path)
    assert shown[2:] == [("hashing the text", size, size)]


def test_text_that_is_refused_leaves_nothing_in_the_way(folder, tmp_path, monkeypatch):
    """Also if the process ends while it is cleared away; what was made with effort stays."""
    (folder / "a.txt").write_bytes(b"\xff")
    unlink, path = Path.unlink, tmp_path / "store"
    for allowed in range(3):
        left = iter([True] * allowed)

        def ending(self, missing_ok=False, left=left):
            if not next(left, False):
                raise OSError(errno.EIO, "gone", str(self))
            unlink(self, missing_ok)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", ending)
            for _ in range(2):
                with pytest.raises(DataError, match="not UTF-8"):
                    preparation(folder).into(path)
    trained = tmp_path / "trained"
    with pytest.raises(DataError, match="not UTF-8"):
        preparation(folder, made_from="digest").into(trained)
    assert tokenizer_left(trained, "digest") == BytesTokenizer()
    with pytest.raises(DataError, match="not UTF-8"):
        preparation(folder).into(path)
    assert not list(path.iterdir())


def test_a_place_that_cannot_be_written_to(folder, tmp_path, capsys):
    """A file in its place or above it, or a file system that takes nothing."""
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "store", "/proc/store"):
        assert cli.run(cli.prepare, [str(path), "--data.sources", str(folder)]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: STORE is {path}: ")
        assert error.endswith("; name a directory that can be written to\n")


@pytest.mark.parametrize(
    "files", [("thesis.tex",), ("tokenizer.json",), ("progress.json", "x.txt")]
)
def test_a_folder_of_something_else_is_refused_and_stays_as_it_is(files, folder, tmp_path):
    """Also one with names that a store has too."""
    path = tmp_path / "mine"
    path.mkdir()
    for name in files:
        (path / name).write_text('{"mine": 1}')
    before = {p.name: p.read_bytes() for p in path.iterdir()}
    with pytest.raises(DataError, match=r"name another directory") as error:
        preparation(folder).into(path)
    assert str(path) in str(error.value)
    assert {p.name: p.read_bytes() for p in path.iterdir() if p.name != ".lock"} == before


def test_empty_documents_of_arrays_are_counted(tmp_path):
    """With and without the end of a document, which is id 256."""
    np.save(tmp_path / "stream.npy", np.array([5, 256, 256, 6, 256], np.uint16))
    np.save(tmp_path / "rows.npy", np.array([[256], [65]], np.uint16))
    store = preparation(tmp_path).into(tmp_path / "store")
    assert store.lengths.tolist() == [2, 2, 2]
    assert store.manifest["empty"] == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.pop("shards"),
        lambda m: m.pop("fingerprint"),
        lambda m: m.pop("empty"),
        lambda m: m.update(empty="a"),
        lambda m: m.update(fingerprint="0" * 32),
        lambda m: m.update(vocab_size=300),
        lambda m: m.update(shards=[]),
        lambda m: m["shards"][0].update(tokens="x"),
        lambda m: m["shards"][0].update(name="../store/00000"),
        lambda m: m["shards"][0].pop("index"),
    ],
    ids=range(10),
)
def test_an_altered_manifest_is_refused(change, folder, tmp_path):
    """By which a resumed run knows that its text is the same."""
    path = tmp_path / "store"
    preparation(folder).into(path)
    manifest = json.loads((path / "store.json").read_text())
    change(manifest)
    (path / "store.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match=r"store.json was altered after it was written \(.+\)"):
        open_store(path)


def test_an_unfinished_store_is_no_folder_of_text(folder, tmp_path):
    path = tmp_path / "store"
    with pytest.raises(Interrupted):
        preparation(folder, stopped=lambda: (path / "progress.json").exists()).into(path)
    with pytest.raises(DataError, match="is a store that is not finished: give the same"):
        list_inputs(str(path))
