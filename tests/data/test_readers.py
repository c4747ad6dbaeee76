"""Documents of every kind of input, against what was written, however chunks are cut."""

import gzip
import json

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardlm.data import DataError
from shardlm.data.inputs import list_inputs
from shardlm.data.readers import Reading, parse, read_chunks
from shardlm.data.tokenizer import BytesTokenizer
from shardlm.data.tokenizing import tokenize

TEXTS = st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1)


def read(path, target_bytes=1 << 22, end=None, **reading):
    how = Reading(**reading)
    chunks = list(read_chunks(list_inputs(str(path)), how, end, target_bytes))
    parsed = [parse(chunk, how) for chunk in chunks]
    return [d for part in parsed for d in part.documents], parsed


def texts(path, target_bytes=1 << 22, **reading):
    return [document.text for document in read(path, target_bytes, **reading)[0]]


def compress(suffix, data):
    if suffix == ".gz":
        return gzip.compress(data)
    if suffix == ".zst":
        zstandard = pytest.importorskip("zstandard", reason="needs the extra zstd")
        return zstandard.compress(data)
    return data


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@settings(max_examples=40)
@given(written=TEXTS, target=st.integers(1, 40), ascii_only=st.booleans())
def test_rows_do_not_depend_on_where_chunks_are_cut(
    tmp_path_factory, suffix, written, target, ascii_only
):
    lines = [
        json.dumps({"text": t, "n": i}, ensure_ascii=ascii_only) for i, t in enumerate(written)
    ]
    path = tmp_path_factory.mktemp("rows") / f"rows.jsonl{suffix}"
    path.write_bytes(compress(suffix, "\r\n\n".join(lines).encode()))
    assert texts(path, target) == texts(path) == written


@example(text="\ufeff")
@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_a_file_is_its_text(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_bytes(text.encode())
    (path.parent / "b.txt").write_text("b")
    assert texts(path.parent) == [text.removeprefix("\ufeff")] * (text != "\ufeff") + ["b"]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("kind", [".txt", ".jsonl"])
def test_a_compressed_file_that_is_cut_off_is_refused(tmp_path, kind, suffix):
    line = json.dumps({"text": "".join(map(chr, np.random.default_rng(0).integers(97, 200, 9000)))})
    whole = compress(suffix, (line + "\n").encode())
    path = tmp_path / f"a{kind}{suffix}"
    for size in (len(whole) - 1, len(whole) // 2, 9):
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match="is damaged or cut off"):
            texts(path)
    # Two members one after the other are the two texts.
    path.write_bytes(whole + whole)
    assert "".join(texts(path)).count("text") in (0, 2)


@pytest.mark.parametrize(
    "line, parts",
    [
        ('{"text": ', ["rows.jsonl:2 is not JSON"]),
        ("[1]", ["rows.jsonl:2 has list where a JSON object"]),
        ('{"body": "x", "id": 1}', ["rows.jsonl:2 has no field 'text' (it has body, id)"]),
        ('{"text": 3}', ["rows.jsonl:2 has int in the field 'text'"]),
        ('{"text": null}', ["rows.jsonl:2 has null in the field 'text'", "remove the row"]),
        ("[" * 100_000, ["rows.jsonl:2 is not JSON"]),
    ],
)
def test_a_bad_row_is_named(tmp_path, line, parts):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "good"}\n' + line + "\n")
    for target in (4, 1 << 22):
        with pytest.raises(DataError) as error:
            texts(path, target)
        for part in ["data.sources", *parts]:
            assert part in str(error.value)


def test_the_field_may_be_nested(tmp_path):
    """But one that has the dotted name itself is taken first."""
    path = tmp_path / "rows.jsonl"
    nested = {"message": {"content": "x"}}
    path.write_text(f"{json.dumps(nested)}\n{json.dumps(nested | {'message.content': 'y'})}\n")
    assert texts(path, field="message.content") == ["x", "y"]
    path.write_text('{"message": null}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl:1 has null in the field 'message\.content'"):
        texts(path, field="message.content")


@pytest.mark.parametrize("target", [1, 30, 1 << 22])
def test_empty_lines_and_byte_order_marks_are_no_rows(tmp_path, target):
    """A mark at the start, and where files were put one after the other; lines are counted."""
    mark, path = b"\xef\xbb\xbf", tmp_path / "rows.jsonl"
    row = mark + b'{"text": "x"}\n'
    path.write_bytes(row + b"\n \t\r\n" + mark + b"\n" + row + row)
    found, _ = read(path, target)
    assert [(d.text, d.name) for d in found] == [("x", f"{path}:{n}") for n in (1, 5, 6)]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_what_is_not_utf8_is_refused_replaced_or_left_out_and_counted(tmp_path, name):
    path = tmp_path / name
    bad = b"ab\xffcd" if name == "a.txt" else b'{"text": "good"}\n{"text": "ab\xffcd"}\n'
    path.write_bytes(bad)
    good = ["good"] if name == "a.jsonl" else []
    with pytest.raises(DataError, match="is not UTF-8: byte 0xff"):
        texts(path)
    found, parsed = read(path, errors="replace")
    assert [d.text for d in found] == [*good, "ab\ufffdcd"]
    assert (parsed[0].replaced, parsed[0].skipped) == (1, 0)
    found, parsed = read(path, errors="skip")
    assert [d.text for d in found] == good
    assert (parsed[0].replaced, parsed[0].skipped) == (0, 1)


def test_half_a_pair_of_surrogates_is_not_utf8(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a\\ud800"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:1 is not UTF-8"):
        texts(path)
    assert texts(path, errors="replace") == ["a\ufffd"]


def test_arrays_are_ids(tmp_path):
    stream, rows = np.arange(10, dtype=np.uint16), np.arange(12).reshape(4, 3)
    np.save(tmp_path / "stream.npy", stream)
    np.save(tmp_path / "rows.npy", rows)
    (found,), _ = read(tmp_path / "stream.npy")
    assert found.stream
    assert found.ids.tolist() == stream.tolist()
    found, _ = read(tmp_path / "rows.npy", 25)
    assert [d.ids.tolist() for d in found] == rows.tolist()
    assert not any(d.stream for d in found)
    np.save(tmp_path / "bad.npy", np.zeros((2, 2, 2)))
    with pytest.raises(DataError, match=r"bad\.npy is an array of float64 with 3 dims"):
        read(tmp_path / "bad.npy")


@given(
    ids=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    target=st.integers(1, 200),
    width=st.sampled_from(["u1", "<u2", ">i8"]),
)
def test_a_stream_is_cut_behind_ends_only(tmp_path_factory, ids, target, width):
    """Into as many pieces as the amount asks for; without an end that is known, into one."""
    path = tmp_path_factory.mktemp("stream") / "stream.npy"
    array = np.array(ids, width)
    np.save(path, array)
    found, _ = read(path, target, end=0)
    assert np.concatenate([d.ids for d in found]).tolist() == ids
    assert [d.first for d in found] == np.cumsum([0, *(len(d.ids) for d in found)])[:-1].tolist()
    each = max(1, target // array.itemsize)
    for piece in found[:-1]:
        assert piece.ids[-1] == 0
        assert not (piece.ids[each - 1 : -1] == 0).any()
    (whole,), _ = read(path, target)
    assert whole.ids.tolist() == ids


def test_the_place_of_an_id_outside_the_vocabulary(tmp_path):
    """In a stream its place in the file, in rows the row and the place in it."""
    stream = np.zeros(1000, np.int32)
    stream[::10] = 256  # The end of a document.
    stream[777] = 257
    np.save(tmp_path / "stream.npy", stream)
    rows = np.zeros((20, 7), np.int16)
    rows[13, 4] = -1
    np.save(tmp_path / "rows.npy", rows)
    places = {"stream.npy": ": id 257 at place 777 ", "rows.npy": ":14: id -1 at place 4 "}
    for name, place in places.items():
        for target in (1, 100, 1 << 22):
            chunks = read_chunks(list_inputs(str(tmp_path / name)), Reading(), 256, target)
            made = (tokenize(chunk, Reading(), BytesTokenizer()) for chunk in chunks)
            with pytest.raises(DataError) as error:
                list(made)
            said = f"{name}{place}is outside the vocabulary of 257 ids: set data.tokenizer to"
            assert said in str(error.value)
