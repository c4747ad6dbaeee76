"""Ids of text and back: bytes, characters and byte pairs; and what is no tokenizer."""

import dataclasses
import functools
import json
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from shardlm.config import ConfigError
from shardlm.data import DataError, from_json, subwords
from shardlm.data.subwords import SubwordTokenizer, train_bpe
from shardlm.data.tokenizer import BytesTokenizer, CharactersTokenizer, make_tokenizer

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


@given(TEXTS)
def test_bytes_round_trip(text):
    tokenizer = BytesTokenizer()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(np.append(ids, tokenizer.end_of_document)) == text


@given(st.lists(TEXTS, min_size=1).filter(any))
def test_characters_are_those_of_the_text_in_order(texts):
    tokenizer = make_tokenizer("characters", texts)
    expected = sorted(set("".join(texts)))
    assert tokenizer.vocab_size == len(expected)
    assert tokenizer.decode(range(len(expected))) == "".join(expected)
    for text in texts:
        ids = tokenizer.encode(text)
        assert ids.dtype == np.int32
        assert ids.tolist() == [expected.index(character) for character in text]
        assert tokenizer.decode(ids) == text


def test_the_vocabularies():
    assert BytesTokenizer.vocab_size == 257
    assert BytesTokenizer.end_of_document == 256
    assert CharactersTokenizer("ab").end_of_document is None


def test_bytes_that_are_no_character_are_replaced():
    smile = "\U0001f600".encode()
    assert BytesTokenizer().decode([97, *smile[:3], 98]) == "a\ufffdb"
    assert BytesTokenizer().decode([*smile[:2], 256, *smile[2:]]) == "\U0001f600"


@given(TEXTS.filter(bool))
def test_a_stored_tokenizer_is_an_equal_one(text):
    for name in ("bytes", "characters"):
        tokenizer = make_tokenizer(name, [text])
        assert from_json(tokenizer.to_json()) == tokenizer


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"tokenizer": "bpe"}',
        '{"tokenizer": "bytes", "merges": []}',
        '{"tokenizer": "characters"}',
        '{"tokenizer": "characters", "characters": ["a"]}',
        '{"tokenizer": "characters", "characters": "ba"}',
        '{"tokenizer": "characters", "characters": ""}',
        '{"tokenizer": "characters", "characters": "ab", "more": 1}',
    ],
)
def test_a_damaged_stored_tokenizer_is_refused(text):
    with pytest.raises(DataError, match="tokenizer"):
        from_json(text)


def test_what_has_no_id_is_refused_with_its_place():
    tokenizer = CharactersTokenizer("abc")
    with pytest.raises(ConfigError, match=r"character 2 of the text, '\\xe9', is none of the 3 "):
        tokenizer.encode("abéd")
    with pytest.raises(DataError, match="character 0 of the text, 'B'"):
        tokenizer.encode("B")
    with pytest.raises(DataError, match="character 1 of the text"):
        BytesTokenizer().encode("a\udc80")
    for bad in (-1, 3):
        with pytest.raises(DataError, match=f"id {bad} is outside the vocabulary of 3 ids"):
            tokenizer.decode([0, bad])
    with pytest.raises(DataError, match="id 257 is outside"):
        BytesTokenizer().decode([257])


SAMPLE = [
    "the cat sat on the mat, and the other cats sat there too.",
    "  def mat(cat):\n\treturn cat  # the § sat, naïvely",
    "aaa aaaa aaaaa",
]


@functools.cache
def trained():
    return train_bpe(SAMPLE * 3, 300)


@given(TEXTS)
def test_trained_bpe_round_trips_any_text(text):
    assert trained().decode(trained().encode(text)) == text


def test_trained_bpe_merges_as_a_plain_loop_does():
    """The merges applied in their order, one at a time, to the words of the text."""
    tokenizer = trained()
    model = json.loads(tokenizer.content)["model"]
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for text in ["", *SAMPLE, "aaaa 東京\n\t  don't"]:
        expected = []
        for word, _ in split.pre_tokenize_str(text):
            parts = list(word)
            for left, right in model["merges"]:
                for i in range(len(parts) - 1, -1, -1):
                    if parts[i : i + 2] == [left, right] and not odd(parts, i, left, right):
                        parts[i : i + 2] = [left + right]
            expected += [model["vocab"][part] for part in parts]
        assert tokenizer.encode(text).tolist() == expected
    sizes = [len(tokenizer.encode(t)) / len(t.encode()) for t in SAMPLE]
    assert sizes[0] < 0.6


def odd(parts, i, left, right):
    """Whether a pair of equal halves begins within an earlier one: "aaa" is "aa", "a"."""
    run = i
    while left == right and run and parts[run - 1] == left:
        run -= 1
    return (i - run) % 2 == 1


def test_training_gives_the_same_in_every_process():
    script = (
        "import sys; from shardlm.data.subwords import train_bpe\n"
        f"print(train_bpe(iter({SAMPLE * 3!r}), 300).to_json())"
    )
    for seed in ("1", "2"):
        env = os.environ | {"PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == trained().to_json()
        assert done.stderr == ""


def test_training_is_checked():
    assert train_bpe([], 1000).vocab_size == 257
    assert train_bpe(["abab"], 1000).vocab_size == 259
    assert train_bpe(["abab"], 257).encode("ab").tolist() != [257]
    with pytest.raises(DataError, match=r"tokenizer\.vocab is 256: it must be at least 257"):
        train_bpe(["abab"], 256)
    with pytest.raises(DataError, match="character 1 of the text"):
        train_bpe(["a\udc80"], 300)

    def broken():
        yield "a"
        raise DataError("the second text")

    with pytest.raises(DataError, match="the second text"):
        train_bpe(broken(), 300)


SPLIT = json.loads(trained().content)["pre_tokenizer"]
SPACES = st.sampled_from(" \n\t\r\x0b\x1c\x85\xa0\u2003\u3000\ufeff\u200b")
MIXED = st.text(SPACES | st.sampled_from("aat'sll12.,-_é東") | st.characters(codec="utf-8"))


@functools.cache
def of_spaces():
    """With tokens of several spaces, and of what may stand before and after them."""
    return train_bpe([*SAMPLE, "a  b   c    d\n\n e \n\t f's 'll é東 \r\n" * 9], 340)


@settings(max_examples=200)
@example(texts=["a    b"], piece=2, together=1, threads=2)
@given(
    texts=st.lists(MIXED),
    piece=st.integers(1, 12),
    together=st.integers(0, 30),
    threads=st.integers(1, 3),
)
def test_a_long_text_has_the_same_ids_in_pieces(texts, piece, together, threads):
    """As the library gives it at once."""
    tokenizer = dataclasses.replace(of_spaces(), threads=threads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subwords, "PIECE", piece)
        patch.setattr(subwords, "TOGETHER", together)
        found = tokenizer.encode_batch(texts)
        assert ["".join(subwords._pieces(text)) for text in texts] == texts
    assert [ids.tolist() for ids in found] == [of_spaces().encode(t).tolist() for t in texts]


def test_parts_of_a_large_batch_are_tokenized_at_the_same_time(monkeypatch):
    monkeypatch.setattr(subwords, "TOGETHER", 1)
    meeting, encode = threading.Barrier(2), SubwordTokenizer._encode_together

    def both(self, texts):
        meeting.wait(60)
        return encode(self, texts)

    monkeypatch.setattr(SubwordTokenizer, "_encode_together", both)
    found = dataclasses.replace(trained(), threads=2).encode_batch(SAMPLE[:2])
    assert [ids.tolist() for ids in found] == [trained().encode(t).tolist() for t in SAMPLE[:2]]


@pytest.mark.parametrize("before", [None, "true"])
def test_what_is_set_for_the_library_is_set_back(before, monkeypatch):
    if before is None:
        monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    else:
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", before)
    with subwords.library_in_one_thread():
        assert os.environ["TOKENIZERS_PARALLELISM"] == "false"
    assert os.environ.get("TOKENIZERS_PARALLELISM") == before


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": None},
        {"pre_tokenizer": SPLIT | {"add_prefix_space": True}},
        {"pre_tokenizer": SPLIT | {"use_regex": False}},
        {"pre_tokenizer": {"type": "WhitespaceSplit"}},
    ],
)
def test_tokenizers_with_other_words_are_given_whole_texts(change, monkeypatch):
    """Here and there a cut would change the ids: where the library would see a beginning."""
    monkeypatch.setattr(subwords, "PIECE", 1)
    tokenizer = SubwordTokenizer.of(json.loads(trained().content) | change)
    text = "the cat\nsat on A mat"
    given = []

    def encode(self, texts):
        given.append(texts)
        return [np.zeros(0, np.uint32)] * len(texts)

    monkeypatch.setattr(SubwordTokenizer, "_encode_together", encode)
    tokenizer.encode_batch([text])
    assert given[0] == [text]


def test_a_tokenizer_made_from_texts_in_pieces_is_the_same(monkeypatch):
    monkeypatch.setattr(subwords, "PIECE", 3)
    assert len(list(subwords._pieces(SAMPLE[0]))) > 5
    assert train_bpe(SAMPLE * 3, 300) == trained()


def test_only_characters_reads_the_texts():
    def unread():
        raise AssertionError
        yield

    assert make_tokenizer("bytes", unread()) == BytesTokenizer()


@pytest.mark.parametrize(
    "name, content, part",
    [
        ("gpt2", None, "data.tokenizer is 'gpt2': it must be bytes, characters, the path of a"),
        ("tiktoken:", None, "data.tokenizer is 'tiktoken:': it must be bytes"),
        ("a.json", None, "which cannot be read (No such file or directory): it must be bytes"),
        ("a.model", None, "which cannot be read (No such file or directory): it must be bytes"),
        (".json", None, "which cannot be read (Is a directory): it must be bytes"),
        ("a.json", b"\xff", "the file is not JSON ("),
        ("a.json", b"{", "the file is not JSON ("),
        ("a.json", b"[]", "this is no tokenizer.json of the library tokenizers, which has a model"),
        ("a.json", b'{"model": {}}', "cannot use this tokenizer.json ("),
        ("a.json", b'{"model": {"type": "BPE", "vocab": {}, "merges": []}}', "no text has a token"),
        ("a.json", b'{"tokenizer": "bpe"}', "a.json': the stored tokenizer is of kind 'bpe': this"),
    ],
)
def test_what_is_no_tokenizer_is_refused(name, content, part, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".json").mkdir()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as raised:
        make_tokenizer(name, [])
    assert part in str(raised.value)
    assert str(raised.value).startswith(f"data.tokenizer is {name!r}")


@pytest.mark.parametrize("content", [b"", b"xx", b"\0" * 99])
def test_what_is_no_sentencepiece_model_is_refused(content, tmp_path):
    pytest.importorskip("sentencepiece", reason="needs the extra sentencepiece")
    (tmp_path / "a.model").write_bytes(content)
    with pytest.raises(DataError, match=r"a\.model': this is no sentencepiece model \("):
        make_tokenizer(str(tmp_path / "a.model"), [])


@pytest.mark.parametrize("name", ["sentencepiece", "tiktoken"])
def test_a_missing_package_is_named(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "a.model").write_bytes(b"x")
    value = {"sentencepiece": str(tmp_path / "a.model"), "tiktoken": "tiktoken:gpt2"}[name]
    with pytest.raises(DataError) as raised:
        make_tokenizer(value, [])
    assert repr(value) in str(raised.value)
    assert f"the tokenizer needs the package {name} (" in str(raised.value)
    assert f"give make setup EXTRAS={name}, or, for an env" in str(raised.value)
    assert str(raised.value).endswith(f"pip install '.[{name}]'")


@pytest.mark.parametrize("single", ["<s> <s> $A", "$A <s> <s>", "$A <s> $A"])
def test_a_template_of_more_than_a_token_each_side_is_refused(single, tmp_path):
    library = Tokenizer(models.WordLevel({"<s>": 0, "a": 1}))
    library.add_special_tokens(["<s>"])
    library.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[("<s>", 0)]
    )
    library.save(str(tmp_path / "a.json"))
    with pytest.raises(DataError, match=r"post_processor makes \[.*\] of a text of the ids"):
        make_tokenizer(str(tmp_path / "a.json"), [])


def test_a_text_that_the_library_cannot_encode_is_refused(tmp_path):
    library = Tokenizer(models.WordLevel({"b": 0, "c": 4}))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.save(str(tmp_path / "a.json"))
    tokenizer = make_tokenizer(str(tmp_path / "a.json"), [])
    assert tokenizer.vocab_size == 5
    assert tokenizer.encode("c b c").tolist() == [4, 0, 4]
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_batch([text])):
        with pytest.raises(DataError, match=r"a\.json cannot encode the text \(.*UNK"):
            encode("b x")


def test_importing_loads_no_tokenizer_and_reading_prompts_lets_fork(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(json.loads(trained().to_json())["content"]))
    script = """
import os, sys
before = dict(os.environ)
import shardlm.data
assert not {"tokenizers", "sentencepiece", "tiktoken"} & set(sys.modules)
from shardlm.data.tokenizer import make_tokenizer
tokenizer = make_tokenizer(sys.argv[1], [])
ids = tokenizer.encode("the cat")
child = os.fork()
assert (tokenizer.encode_batch(["the cat"])[0] == ids).all()
if child:
    assert os.waitpid(child, 0)[1] == 0
assert before == dict(os.environ)
"""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", script]
    env = {k: v for k, v in os.environ.items() if k != "TOKENIZERS_PARALLELISM"}
    done = subprocess.run(
        [*command, str(tmp_path / "a.json")], env=env, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
