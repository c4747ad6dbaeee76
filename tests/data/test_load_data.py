"""From a configuration to training and validation."""

import os
import subprocess
import sys

import numpy as np
import pytest

from shardlm.config import Config, DataConfig, ModelConfig, RunConfig, TrainConfig
from shardlm.data import DataError, Loader, load_data


def make(sources, batch=2, length=5, seed=0, vocab=None, **data):
    return Config(
        run=RunConfig(seed=seed),
        model=ModelConfig(vocab=vocab),
        data=DataConfig(sources=tuple(map(str, sources)), length=length, **data),
        train=TrainConfig(batch=batch),
    )


@pytest.fixture
def folder(tmp_path):
    random = np.random.default_rng(0)
    for i in range(40):
        size = int(random.integers(1, 90))
        text = "".join(chr(c) for c in random.integers(97, 230, size))
        (tmp_path / f"{i}.txt").write_text(text, encoding="utf-8")
    return tmp_path


def texts_of(loader, tokenizer):
    corpora = loader.corpora if isinstance(loader, Loader) else [loader.corpus]
    return [tokenizer.decode(c.document(i)) for c in corpora for i in range(c.documents)]


def ids_of(loader):
    """All ids of a split of one source."""
    corpus = loader.corpora[0] if isinstance(loader, Loader) else loader.corpus
    return np.concatenate([corpus.document(i) for i in range(corpus.documents)])


@pytest.mark.parametrize("tokenizer", ["bytes", "characters"])
def test_documents_are_on_one_side_each(folder, tokenizer):
    data = load_data(make([folder], tokenizer=tokenizer, validation=0.25))
    train = texts_of(data.train, data.tokenizer)
    validation = texts_of(data.validation, data.tokenizer)
    whole = [path.read_text(encoding="utf-8") for path in folder.iterdir()]
    assert sorted(train + validation) == sorted(whole)
    assert not set(train) & set(validation)
    assert 4 <= len(validation) <= 16
    sizes = {"bytes": lambda t: len(t.encode()), "characters": lambda t: len(t) - 1}
    count = sizes[tokenizer]  # every byte is predicted but for the first, and the end is
    assert data.train.summary().loss_tokens == sum(map(count, train))
    assert data.validation.summary().loss_tokens == sum(map(count, validation))


def test_a_new_document_moves_none(folder):
    before = load_data(make([folder], validation=0.25))
    (folder / "new.txt").write_text("new", encoding="utf-8")
    after = load_data(make([folder], validation=0.25))
    for side in ("train", "validation"):
        old, new = (texts_of(getattr(d, side), d.tokenizer) for d in (before, after))
        assert set(old) <= set(new) <= {*old, "new"}
    assert before.fingerprint != after.fingerprint


def test_the_end_of_a_document_is_predicted_and_predicts_nothing(folder):
    data = load_data(make([folder]))
    ends = np.zeros(2, int)
    for batch in data.validation.batches(3):
        assert (batch["targets"][batch["tokens"] == 256] == -1).all()
        ends += (batch["tokens"] == 256).sum(), (batch["targets"] == 256).sum()
    assert ends.tolist() == [data.validation.corpus.documents] * 2


@pytest.mark.parametrize("share", [0.1, 0.25, 0.3])
def test_the_tail_is_the_rest_after_the_first_share(tmp_path, share):
    text = "".join(chr(97 + i * i % 23) for i in range(1003))
    (tmp_path / "t.txt").write_text(text, encoding="utf-8")
    source = [tmp_path / "t.txt"]
    data = load_data(make(source, tokenizer="characters", split="tail", validation=share))
    cut = int((1 - share) * 1003)
    assert texts_of(data.train, data.tokenizer) == [text[:cut]]
    assert texts_of(data.validation, data.tokenizer) == [text[cut:]]
    assert data.tokenizer.vocab_size == len(set(text))


def test_shakespeare_by_characters_is_split_as_published(tinyshakespeare):
    text = tinyshakespeare.read_text(encoding="utf-8")
    data = load_data(make([tinyshakespeare], tokenizer="characters", split="tail"))
    ids = {character: i for i, character in enumerate(sorted(set(text)))}
    expected = np.array([ids[character] for character in text])
    cut = int(0.9 * len(text))
    assert data.tokenizer.vocab_size == 65
    assert np.array_equal(ids_of(data.train), expected[:cut])
    assert np.array_equal(ids_of(data.validation), expected[cut:])


@pytest.mark.parametrize("share", [0.1, 0.5, 0.6])
def test_the_tail_of_several_documents(tmp_path, share):
    documents = ["abcdefghij", "klmnopqrst", "uvwxyzABCD"]
    for i, text in enumerate(documents):
        (tmp_path / f"{i}.txt").write_text(text, encoding="utf-8")
    config = make([tmp_path], tokenizer="characters", split="tail", validation=share)
    data = load_data(config)
    train = texts_of(data.train, data.tokenizer)
    validation = texts_of(data.validation, data.tokenizer)
    cut = int((1 - share) * 30)
    assert "".join(train) == "".join(documents)[:cut]
    assert "".join(validation) == "".join(documents)[cut:]
    assert all(any(piece in text for text in documents) for piece in train + validation)
    assert len(train) + len(validation) == 3 + (cut % 10 > 0)


def test_without_validation(folder):
    data = load_data(make([folder], validation=0.0))
    assert data.validation is None
    assert data.train.summary().documents == 40
    assert "none" in data.summary()
    tail = load_data(make([folder], validation=0.0, split="tail"))
    assert texts_of(tail.train, tail.tokenizer) == texts_of(data.train, data.tokenizer)


def test_the_fingerprint_knows_the_text_and_not_its_place(folder, tmp_path_factory):
    first = load_data(make([folder]))
    assert load_data(make([folder], seed=5, batch=3)).fingerprint == first.fingerprint
    copy = tmp_path_factory.mktemp("copy")
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    assert load_data(make([copy])).fingerprint == first.fingerprint
    other = load_data(make([folder], tokenizer="characters"))
    (copy / "7.txt").write_bytes((copy / "7.txt").read_bytes() + b"x")
    prints = {data.fingerprint for data in (first, other, load_data(make([copy])))}
    assert len(prints) == 3


def test_a_vocabulary_below_the_tokenizers_is_refused(folder):
    with pytest.raises(DataError, match=r"model\.vocab is 256 and .* bytes has 257 ids"):
        load_data(make([folder], vocab=256))
    load_data(make([folder], vocab=257))
    load_data(make([folder], vocab=50_304))


def test_one_character_alone_is_refused(tmp_path):
    """Its loss would be 0 from the first update on."""
    (tmp_path / "a.txt").write_text("a" * 1000)
    data = DataConfig(sources=(str(tmp_path),), tokenizer="characters", split="tail", length=8)
    with pytest.raises(DataError, match="characters and the text has one distinct character"):
        load_data(Config(data=data))


def test_too_little_text_is_refused(tmp_path):
    one = tmp_path / "one.txt"
    one.write_text("some text", encoding="utf-8")
    for config, parts in (
        (make([one]), ["data.split", "none of 1 document is left", "tail"]),
        (make([one], split="tail", batch=3), ["train.batch is 3", "only 2 rows"]),
        (make([one], split="tail", validation=0.95), ["data.validation 0.95", "10 tokens"]),
        (make([one], validation=0.0, batch=3), ["train.batch is 3", "only 2 rows"]),
        (make([one], split="tail", validation=0.1), ["validation text has 1 token in 1 document:"]),
    ):
        with pytest.raises(DataError) as error:
            load_data(config)
        for part in parts:
            assert part in str(error.value)


def test_a_weight_of_nothing_is_refused(folder, tmp_path_factory):
    """By the source's name, since its one document is for validation."""
    one = tmp_path_factory.mktemp("one") / "one.txt"
    one.write_text("all of it is for validation")
    with pytest.raises(DataError, match=r"one.txt has a weight and no document for training"):
        load_data(make([folder, one], weights=(1.0, 1.0), validation=0.9))


def test_a_cache_that_cannot_be_written_to_is_named(folder, tmp_path_factory, monkeypatch):
    """Whether it is given or the default, a file or below one, or where nothing can be made."""
    other = tmp_path_factory.mktemp("other")
    (other / "file").touch()
    for cache in (other / "file", other / "file" / "cache", "/proc/cache"):
        message = rf"^data\.cache is {cache}: .*; name a directory that can be written to$"
        with pytest.raises(DataError, match=message):
            load_data(make([folder], cache=str(cache)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(other / "file"))
    with pytest.raises(DataError, match=rf"^data\.cache is {other}/file/shardlm: Not a directory"):
        load_data(make([folder]))
    with pytest.raises(DataError, match=r"^data\.cache is ~nobody here/cache: .*; name a"):
        load_data(make([folder], cache="~nobody here/cache"))
    (folder / "bad.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"bad\.txt is not UTF-8"):
        load_data(make([folder], cache=str(other / "new" / "cache")))
    assert [path.name for path in other.iterdir()] == ["file"]


def test_a_cache_that_is_complete_need_not_be_writable(unprivileged):
    text, cache = unprivileged / "text.txt", unprivileged / "cache"
    text.write_text("some text")
    config = make([text], cache=str(cache), validation=0.0, batch=1)
    first = load_data(config).fingerprint
    cache.chmod(0o555)
    assert load_data(config).fingerprint == first
    text.write_text("other text")
    with pytest.raises(DataError, match=rf"^data\.cache is {cache}: Permission denied \(.*name a "):
        load_data(config)


def test_the_summary_states_both_sides(folder):
    data = load_data(make([folder]))
    train, validation = data.train.summary(), data.validation.summary()
    for summary in (train, validation):
        assert f"{summary.documents:,} documents, {summary.tokens:,} tokens" in data.summary()
        assert summary.rows == -(-summary.tokens // 5)
    assert "bytes, 257 ids" in data.summary()


def test_the_package_is_imported_without_jax_or_grain():
    code = "import sys, shardlm.data; print({'jax', 'grain'} & set(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert result.stdout == "set()\n"
