"""Tokenizers of other libraries: their ids and their text, and specials from us only."""

import functools
import io
import json
import re
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from shardlm.config import Config, ConfigError, ModelConfig
from shardlm.data import DataError, from_json
from shardlm.data.other_tokenizers import SentencePieceTokenizer, TiktokenTokenizer
from shardlm.data.subwords import SubwordTokenizer, train_bpe
from shardlm.data.tokenizer import decode_after, make_tokenizer
from shardlm.train.prompts import encode_prompts

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
SAMPLE = [
    "the cat sat on the mat, and the other cats sat there too.",
    "  def mat(cat):\n\treturn cat  # the § sat, naïvely",
    "un café, s'il vous plaît; 東京 is far. don't !",
]
ORDINARY = ["", "the cats sat", "  the\n mat ", "don't §東京!", *SAMPLE]
LETTERS = sorted(set("".join(SAMPLE)))
SMILE = "\U0001f600"


def of(library, **changes):
    """Ours, of one of the library's, whose JSON is changed so."""
    return SubwordTokenizer.of(json.loads(library.to_str()) | changes)


def template(library, start, end):
    names = [name for name in (start, end) if name]
    library.add_special_tokens(names)
    ids = [(name, library.token_to_id(name)) for name in names]
    single = " ".join(filter(None, [start, "$A", end]))
    return processors.TemplateProcessing(single=single, special_tokens=ids)


def llama():
    """Characters and bytes in the vocabulary, with BOS and EOS there also."""
    letters = sorted({"▁", *LETTERS} - {" ", "\n", "東"})
    names = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *letters, "▁c", "at"]
    vocab = {name: i for i, name in enumerate([*names, "▁cat"])}
    merges = [("▁", "c"), ("a", "t"), ("▁c", "at")]
    library = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    library.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    library.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    library.add_special_tokens(["<unk>"])
    library.post_processor = template(library, "<s>", "</s>")
    return library


def bert():
    library = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    library.normalizer = normalizers.BertNormalizer()
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece()
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    library.train_from_iterator(
        SAMPLE,
        trainers.WordPieceTrainer(vocab_size=120, special_tokens=specials, show_progress=False),
    )
    library.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return library


def unigram():
    """Like T5: a unigram model that has the end of a document among its pieces."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁the", -2.0), ("at", -2.5)]
    pieces += [(letter, -4.0) for letter in sorted({"▁", *"</>", *LETTERS} - {" "})]
    library = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=2))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    library.add_special_tokens(["<pad>", "<unk>"])
    library.post_processor = template(library, None, "</s>")
    return library


def words():
    """Whole words, an added token after them, and an end that no template adds."""
    names = ["[UNK]", "<eos>", "the", "cat", "sat", "on"]
    library = tokenizers.Tokenizer(
        models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="[UNK]")
    )
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(["[UNK]", "<eos>"])
    library.add_tokens(["mat"])
    return library


def gpt():
    """Byte-level BPE in which a merge makes the end, and which takes whole words from the
    vocabulary."""
    library = tokenizers.Tokenizer(models.BPE(ignore_merges=True))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    end = ["<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=end, initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(end * 9 + SAMPLE, trainer)
    assert library.encode(*end).ids == [0]
    return library


LIBRARIES = {f.__name__: functools.cache(f) for f in (llama, bert, unigram, words, gpt)}
"""Tokenizers of the library, each made once."""


@functools.cache
def sentencepiece():
    package = pytest.importorskip("sentencepiece", reason="needs the extra sentencepiece")
    model = io.BytesIO()
    package.SentencePieceTrainer.train(
        sentence_iterator=iter(SAMPLE * 9),
        model_writer=model,
        vocab_size=320,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return SentencePieceTokenizer.of(model.getvalue())


PLUGIN = """
def tiny():
    ranks = {bytes([i]): i for i in range(256)} | {b"at": 256, b" c": 257, b" cat": 258}
    return dict(name="tiny", pat_str=PATTERN, mergeable_ranks=ranks,
                special_tokens={"<|endoftext|>": 262, "<|end_of_text|>": 261})
ENCODING_CONSTRUCTORS = {"tiny": tiny}
"""
PATTERN = r" ?\w+|\s+|[^\w\s]+"


@pytest.fixture(scope="module")
def plugin(tmp_path_factory) -> Iterator[pytest.MonkeyPatch]:
    """tiktoken with an encoding `tiny`, and back."""
    package = pytest.importorskip("tiktoken", reason="needs the extra tiktoken")
    folder = tmp_path_factory.mktemp("plugin") / "tiktoken_ext"
    folder.mkdir()
    (folder / "tiny.py").write_text(f"PATTERN = {PATTERN!r}\n{PLUGIN}")
    registry = package.registry
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder.parent))
        patch.setattr(registry, "ENCODING_CONSTRUCTORS", None)
        patch.setattr(registry, "ENCODINGS", {})
        registry._available_plugin_modules.cache_clear()
        yield patch
    registry._available_plugin_modules.cache_clear()
    sys.modules.pop("tiktoken_ext.tiny", None)


KINDS = ["bytes", "characters", "bpe", *LIBRARIES, "sentencepiece", "tiktoken"]


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request):
    """One of each kind."""
    return made(request.param, request)


def made(kind, request):
    if kind in LIBRARIES:
        return of(LIBRARIES[kind]())
    if kind == "bpe":
        return trained()
    if kind == "sentencepiece":
        return sentencepiece()
    if kind == "tiktoken":
        request.getfixturevalue("plugin")
        return TiktokenTokenizer.of("tiny")
    return make_tokenizer(kind, [*SAMPLE, *NAMES, SMILE])


@functools.cache
def trained():
    return train_bpe(SAMPLE * 3, 300)


NAMES = ["<s>", "</s>", "<eos>", "<pad>", "[CLS]", "[SEP]", "[PAD]", "<|endoftext|>"]
NAMES += ["<|im_end|>", "<|end_of_text|>"]


def special_ids(tokenizer):
    return {i for i in (tokenizer.start_of_document, tokenizer.end_of_document) if i is not None}


@pytest.mark.parametrize(
    "kind, size, start, end",
    [
        ("bytes", 257, None, 256),
        ("bpe", 300, None, 0),
        ("llama", 296, 1, 2),
        ("bert", 95, 2, 3),
        ("unigram", None, None, 1),
        ("words", 7, None, 1),
        ("gpt", 300, None, 0),
        ("sentencepiece", None, 1, 2),
        ("tiktoken", 263, None, 262),
    ],
)
def test_specials_are_those_of_the_template_else_a_known_name(kind, size, start, end, request):
    tokenizer = made(kind, request)
    assert (tokenizer.start_of_document, tokenizer.end_of_document) == (start, end)
    assert size in (None, tokenizer.vocab_size)


@pytest.mark.parametrize("kind", LIBRARIES)
def test_ids_and_text_are_those_of_the_library(kind):
    library = LIBRARIES[kind]()
    tokenizer = of(library)
    assert tokenizer.vocab_size == max(library.get_vocab().values()) + 1
    for text in ORDINARY:
        expected = library.encode(text, add_special_tokens=False).ids
        ids = tokenizer.encode(text)
        assert ids.dtype == np.int32
        assert ids.tolist() == expected
        whole = library.encode(text).ids
        ends = [tokenizer.start_of_document], [tokenizer.end_of_document]
        if whole != expected:
            assert whole == [i for i in [*ends[0], *expected, *ends[1]] if i is not None]
        assert tokenizer.decode(whole) == library.decode(expected)


def test_a_batch_is_its_texts_alone(tokenizer):
    texts = ["the cat", "", *SAMPLE[:1], "at"] * 3
    found = tokenizer.encode_batch(texts)
    assert tokenizer.encode_batch([]) == []
    assert [ids.tolist() for ids in found] == [tokenizer.encode(t).tolist() for t in texts]
    assert all(np.issubdtype(ids.dtype, np.integer) for ids in found)
    assert not special_ids(tokenizer) & {i for ids in found for i in ids.tolist()}


def test_the_name_of_a_special_in_a_text_is_text(tokenizer):
    for name in NAMES:
        for text in (name, f"the {name} cat", f"{name}{name}", f" {name}\n", f"at{name}at"):
            for ids in (tokenizer.encode(text), tokenizer.encode_batch([text, text])[1]):
                assert not special_ids(tokenizer) & set(ids.tolist()), text


def test_an_ordinary_added_token_of_the_template_is_reserved_too():
    library = words()
    library.add_tokens(["<doc>"])
    library.post_processor = processors.TemplateProcessing(
        single="<doc> $A", special_tokens=[("<doc>", 7)]
    )
    tokenizer = of(library)
    assert (tokenizer.start_of_document, tokenizer.end_of_document) == (7, 1)
    assert tokenizer.encode("the <doc>cat mat <eos>").tolist() == [2, 0, 6, 0]
    assert tokenizer.decode([7, 2, 6, 1]) == "the mat"


def test_truncation_and_padding_are_switched_off():
    library = bert()
    plain = of(library)
    library.enable_truncation(3)
    library.enable_padding(length=40)
    tokenizer = of(library)
    assert json.loads(library.to_str())["padding"]
    for text in SAMPLE:
        expected = plain.encode(text).tolist()
        assert len(expected) > 8
        assert tokenizer.encode(text).tolist() == expected
        assert tokenizer.encode_batch([text, "the"])[0].tolist() == expected
    assert tokenizer.fingerprint() == plain.fingerprint()


def test_a_stored_tokenizer_is_an_equal_one(tokenizer, tmp_path):
    stored = tokenizer.to_json()
    path = tmp_path / "tokenizer.json"
    path.write_text(stored)
    for again in (from_json(stored), make_tokenizer(str(path), [])):
        assert again == tokenizer
        assert again.to_json() == stored
        assert again.fingerprint() == tokenizer.fingerprint()
        assert re.fullmatch("[0-9a-f]{32}", again.fingerprint())
        for text in SAMPLE:
            assert again.encode(text).tolist() == tokenizer.encode(text).tolist()


def test_every_kind_has_its_own_fingerprint(request):
    assert len({made(kind, request).fingerprint() for kind in KINDS}) == len(KINDS)


def test_the_layout_and_the_name_of_a_file_do_not_matter(tmp_path):
    library = bert()
    library.save(str(tmp_path / "a.json"), pretty=True)
    library.save(str(tmp_path / "b.json"), pretty=False)
    a, b = (make_tokenizer(str(tmp_path / name), []) for name in ("a.json", "b.json"))
    assert a == b
    assert a.to_json() == b.to_json()
    assert a.name == str(tmp_path / "a.json")


@given(st.data())
def test_text_after_text_is_the_rest_of_the_whole(tokenizer, data):
    """For ids of any kind and for those of a text, cut anywhere."""
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=12))
    text = data.draw(st.text(st.sampled_from([*LETTERS, SMILE]), max_size=12))
    at = data.draw(st.integers(0, 12))
    ids = ids if len(ids) > len(text) else tokenizer.encode(text).tolist()
    known, whole = tokenizer.decode(ids[:at]), tokenizer.decode(ids)
    added = decode_after(tokenizer, ids[:at], np.array(ids[at:], np.int32))
    assert whole.endswith(added)
    if not known.endswith("\ufffd"):
        assert known + added == whole


@pytest.mark.parametrize("kind", ["bytes", "bpe", "gpt", "llama", "sentencepiece", "tiktoken"])
def test_a_character_that_begins_before_comes_out_whole(kind, request):
    tokenizer = made(kind, request)
    ids = tokenizer.encode(f"é the {SMILE}").tolist()
    for cut in (1, 2, 3):
        before, new = ids[:-cut], ids[-cut:]
        assert decode_after(tokenizer, before, new) == SMILE
        rest = decode_after(tokenizer, ids[:-4], ids[-4:-cut])
        assert rest == "\ufffd" * len(rest) != ""
        assert tokenizer.decode(before) == "é the " + rest
        assert decode_after(tokenizer, before, tokenizer.encode("é")[-2:]).endswith("é")


@pytest.mark.parametrize("kind", ["llama", "unigram", "sentencepiece"])
def test_a_space_in_front_is_kept(kind, request):
    tokenizer = made(kind, request)
    ids = tokenizer.encode("the cat sat").tolist()
    at = next(i for i in range(len(ids)) if tokenizer.decode(ids[:i]) == "the")
    assert tokenizer.decode(ids[at:]) == "cat sat"
    assert decode_after(tokenizer, ids[:at], ids[at:]) == " cat sat"


def test_prompts_begin_a_document_and_do_not_end_it():
    config, tokenizer = Config(model=ModelConfig(vocab=305)), of(llama())
    ids = encode_prompts(config, tokenizer, ["the cat", "at"], 3)
    assert [i.tolist() for i in ids] == [[1, *tokenizer.encode(t)] for t in ("the cat", "at")]
    assert ids[0].dtype == np.int32
    with pytest.raises(ConfigError, match="prompt is ' ': the tokenizer has no token for any of"):
        encode_prompts(config, of(words()), [" "], 3)


def test_ids_without_a_token_and_specials_have_no_text(request):
    tokenizer = made("tiktoken", request)
    assert tokenizer.decode([262, 256, 259, 260, 261, 257]) == "at c"
    assert of(llama()).decode([3 + byte for byte in b"\xc3\xa9\xf0\x9f"]) == "é\ufffd"
    for kind in KINDS:
        tokenizer = made(kind, request)
        for bad in (-1, tokenizer.vocab_size):
            with pytest.raises(DataError, match=f"id {bad} is outside the vocabulary of"):
                tokenizer.decode([0, bad])


def test_what_has_no_utf8_form_is_refused(request):
    for kind in set(KINDS) - {"characters"}:
        tokenizer = made(kind, request)
        for encode in (tokenizer.encode, lambda text, t=tokenizer: t.encode_batch(["a", text])):
            with pytest.raises(DataError, match=r"character 3 of the text, .* is half of a pair"):
                encode("the\udc80")


def test_tokens_that_changed_since_a_tokenizer_was_stored_are_refused(plugin):
    stored = json.loads(make_tokenizer("tiktoken:tiny", []).to_json())
    for change in ({"digest": "0" * 32}, {"specials": {"<|endoftext|>": 261}}):
        with pytest.raises(DataError, match="tiktoken:tiny, and the encoding of that name has oth"):
            from_json(json.dumps(stored | change))
    with pytest.raises(DataError, match=r"no such encoding; use one of .*tiny, .*, or install "):
        make_tokenizer("tiktoken:none", [])


def test_ranks_that_cannot_be_had(plugin):
    def unreachable():
        raise ConnectionError("no network")

    import tiktoken

    tiktoken.list_encoding_names()
    plugin.setitem(tiktoken.registry.ENCODING_CONSTRUCTORS, "far", unreachable)
    with pytest.raises(DataError, match=r"downloaded \(ConnectionError: no network\): use it once"):
        make_tokenizer("tiktoken:far", [])
