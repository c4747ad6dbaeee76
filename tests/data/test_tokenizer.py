"""Ids of text and back."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlm.config import ConfigError
from shardlm.data import DataError, from_json
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
