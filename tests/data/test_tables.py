"""Columns of .parquet files and saved datasets, against what was written."""

import numpy as np
import pytest

from shardlm.data import DataError, opening
from shardlm.data.inputs import list_inputs
from shardlm.data.readers import Reading, parse, read_chunks

pyarrow = pytest.importorskip("pyarrow", reason="needs the extra parquet")
parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra parquet")
datasets = pytest.importorskip("datasets", reason="needs the extra hf")


def write(path, table, **options):
    if path.suffix == ".parquet":
        parquet.write_table(table, path, **options)
    else:
        datasets.Dataset(table).save_to_disk(path)
    return path


def chunks_of(path, field="text", errors="error", target=1 << 22):
    reading = Reading(field, errors)
    chunks = list(read_chunks(list_inputs(str(path)), reading, target_bytes=target))
    return chunks, [parse(chunk, reading) for chunk in chunks]


def texts(path, field="text", errors="error", target=1 << 22):
    return [d.text for part in chunks_of(path, field, errors, target)[1] for d in part.documents]


def strings(values):
    """A column of text whose bytes nobody checks."""
    return pyarrow.array(values, pyarrow.binary()).view(pyarrow.string())


KINDS = pytest.mark.parametrize("name", ["a.parquet", "saved"])


@KINDS
@pytest.mark.parametrize("target", [1, 100, 1 << 22])
def test_rows_are_numbered_and_their_shares_are_the_whole(name, target, tmp_path):
    written = [f"row {i} \U0001f600" for i in range(50)]
    table = pyarrow.table({"n": list(range(50)), "text": written})
    options = {"row_group_size": 7} if name == "a.parquet" else {}
    path = write(tmp_path / name, table, **options)
    chunks, parsed = chunks_of(path, target=target)
    documents = [d for part in parsed for d in part.documents]
    assert [(d.name, d.text) for d in documents] == [
        (f"{path}:{i}", text) for i, text in enumerate(written, start=1)
    ]
    assert sum(chunk.stored_bytes for chunk in chunks) == list_inputs(str(path))[0].size
    assert (len(chunks) == 1) == (target == 1 << 22)


@KINDS
def test_text_that_is_not_utf8(name, tmp_path):
    path = write(tmp_path / name, pyarrow.table({"text": strings([b"good", b"ab\xffcd"])}))
    with pytest.raises(DataError, match=rf"{name}:2 is not UTF-8: byte 0xff at offset 2"):
        texts(path)
    assert texts(path, errors="replace") == ["good", "ab\ufffdcd"]
    assert texts(path, errors="skip") == ["good"]
    _, parsed = chunks_of(path, errors="skip")
    assert (parsed[0].skipped, parsed[0].replaced) == (1, 0)


@KINDS
def test_nested_fields_and_names_with_dots(name, tmp_path):
    nested = pyarrow.array([{"b": "x", "c": 1}, {"b": "y", "c": 2}])
    path = write(tmp_path / name, pyarrow.table({"a": nested}))
    assert texts(path, "a.b") == ["x", "y"]
    both = write(tmp_path / f"2{name}", pyarrow.table({"a": nested, "a.b": ["literal", "too"]}))
    assert texts(both, "a.b") == ["literal", "too"]


@KINDS
@pytest.mark.parametrize(
    "table, field, message",
    [
        ({"body": ["x"], "n": [1]}, "text", r" has no column 'text' \(it has body, n\)"),
        ({"a": [{"b": "x"}]}, "a.c", r" has no column 'c' \(it has b\)"),
        ({"a": ["x"]}, "a.c", r" has no column 'c' \(it has none\)"),
        ({"text": [1]}, "text", r" has int64 in the column 'text', where text belongs"),
        ({"text": [["x"]]}, "text", r" has list<.*> in the column 'text'"),
        ({"text": ["x", None]}, "text", r":2 has null in the field 'text'"),
        ({"a": [{"b": "x"}, None]}, "a.b", r":2 has null in the field 'a\.b'"),
    ],
)
def test_what_has_no_text_is_named(name, table, field, message, tmp_path):
    path = write(tmp_path / name, pyarrow.table(table))
    with pytest.raises(DataError, match=rf"data\.sources: {path}{message}"):
        texts(path, field)


@pytest.mark.parametrize(
    "names, field", [(["text", "n", "text"], "text"), (["a.b", "x", "a.b"], "a.b"), ("in", "a.b")]
)
def test_two_columns_of_one_name_are_refused(names, field, tmp_path):
    """Whichever is meant; others may have one name."""
    path = tmp_path / "a.parquet"
    if names == "in":
        inside = [pyarrow.array(["x"])] * 2
        column = pyarrow.StructArray.from_arrays(inside, names=["b", "b"])
        table = pyarrow.table({"a": column})
    else:
        table = pyarrow.Table.from_arrays([pyarrow.array(["x"])] * 3, names=names)
    write(path, table)
    part = field.rpartition(".")[2] if names == "in" else field
    with pytest.raises(DataError, match=rf"{path} has 2 columns '{part}': leave one of them"):
        texts(path, field)
    if names != "in":
        assert texts(path, names[1]) == ["x"]


@pytest.mark.parametrize(
    "kind", ["string", "large_string", "string_view", "binary", "large_binary", "dictionary"]
)
def test_the_types_of_text(kind, tmp_path):
    column = pyarrow.array(["a", "", "ä"])
    if kind == "dictionary":
        column = column.dictionary_encode()
    else:
        column = column.cast(getattr(pyarrow, kind)())
    path = write(tmp_path / "a.parquet", pyarrow.table({"text": column}))
    assert texts(path) == ["a", "ä"]


def test_many_row_groups_are_one_chunk_and_the_file_is_opened_once(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    rows = pyarrow.table({"text": [f"row {i}" for i in range(2000)]})
    parquet.write_table(rows, path, row_group_size=1)
    opened = []
    monkeypatch.setattr(
        "shardlm.data.tables.opened", lambda path: opened.append(path) or opening.opened(path)
    )
    chunks, parsed = chunks_of(path)
    assert len(parsed[0].documents) == 2000
    assert (len(chunks), opened) == (1, [str(path)])


def test_a_large_row_group_is_several_chunks(tmp_path):
    """As pandas writes them: a million rows in one."""
    random = np.random.default_rng(0)
    written = [random.bytes(500).hex() for _ in range(400)]
    path = write(tmp_path / "a.parquet", pyarrow.table({"text": written}))
    chunks, parsed = chunks_of(path, target=20_000)
    assert [d.text for part in parsed for d in part.documents] == written
    assert max(sum(map(len, chunk.data)) for chunk in chunks) <= 30_000


def test_other_columns_are_not_read(tmp_path):
    """Here one whose pages are damaged."""
    path = tmp_path / "a.parquet"
    noise = np.random.default_rng(0).integers(0, 2**60, 3000)
    table = pyarrow.table({"noise": noise, "text": [f"row {i}" for i in range(3000)]})
    parquet.write_table(table, path, use_dictionary=False)
    place = parquet.ParquetFile(path).metadata.row_group(0).column(0).data_page_offset
    data = bytearray(path.read_bytes())
    data[place : place + 64] = b"\xff" * 64
    path.write_bytes(data)
    with pytest.raises(OSError, match="Deserializing page header"):
        parquet.read_table(path)
    assert len(texts(path)) == 3000


def test_a_damaged_file_is_named(tmp_path):
    path = write(tmp_path / "a.parquet", pyarrow.table({"text": ["x"] * 100}))
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match=rf"{path} cannot be read .*: write the file again"):
        texts(path)
