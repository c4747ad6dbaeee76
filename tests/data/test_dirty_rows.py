"""Rows of JSON as people have them: a mark in front, empty lines, a line of 20 MB, a bad one."""

import json

import pytest

from shardlm.data import DataError
from shardlm.data.inputs import list_inputs
from shardlm.data.readers import Reading, parse, read_chunks

SMILE = "\U0001f600"


def texts(path):
    chunks = read_chunks(list_inputs(str(path)), Reading())
    return [d.text for chunk in chunks for d in parse(chunk, Reading()).documents]


def test_a_mark_and_empty_lines_add_nothing(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [json.dumps({"text": t}, ensure_ascii=False) for t in ("a", SMILE, "\ufeffb")]
    path.write_bytes(b"\xef\xbb\xbf" + "\n\r\n\n  \n".join(["", *rows, ""]).encode())
    assert texts(path) == ["a", SMILE, "\ufeffb"]


@pytest.mark.parametrize("ascii_only", [True, False])
def test_a_row_of_20_megabytes_between_others(tmp_path, ascii_only):
    """Its characters are of four bytes, or escapes of twelve, so that some lie across any edge."""
    long = "x" + SMILE * (1_700_000 if ascii_only else 5_000_000)
    path = tmp_path / "rows.jsonl"
    rows = [json.dumps({"text": t}, ensure_ascii=ascii_only) for t in ("a", long, "b")]
    path.write_text("\n".join(rows), encoding="utf-8")
    assert path.stat().st_size > 20e6
    found = texts(path)
    assert [len(t) for t in found] == [1, len(long), 1]
    assert found == ["a", long, "b"]
    with path.open("a") as file:
        file.write("\n\n{")
    with pytest.raises(DataError, match=r"rows\.jsonl:5"):
        texts(path)
