"""What becomes a document, and what is refused."""

import os
import sys

import pytest

from shardlm.data import DataError
from shardlm.data.inputs import TEXT_SUFFIXES, list_inputs
from shardlm.data.readers import Reading, parse, read_chunks

BOM = b"\xef\xbb\xbf"


def write(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return str(path)


def names(source):
    return [found.name for found in list_inputs(source)]


def texts(source):
    chunks = read_chunks(list_inputs(source), Reading())
    return [document.text for chunk in chunks for document in parse(chunk, Reading()).documents]


def test_a_directory_is_read_in_order_of_names_and_only_its_text(tmp_path):
    skipped = (".git/x.txt", "__pycache__/y.py", "image.png", ".h.c")
    for name in ("b.txt", "a/z.md", "a/c.PY", *skipped):
        write(tmp_path / name, name.encode())
    assert names(str(tmp_path)) == ["a/c.PY", "a/z.md", "b.txt"]
    assert texts(str(tmp_path)) == ["a/c.PY", "a/z.md", "b.txt"]


def test_names_do_not_depend_on_where_the_source_lies(tmp_path, monkeypatch):
    for top in ("one", "two"):
        write(tmp_path / top / "a" / "x.txt", b"x")
    monkeypatch.chdir(tmp_path / "one")
    expected = ["a/x.txt"]
    assert names(str(tmp_path / "two")) == names(".") == names("../one") == expected
    assert names("**/*.txt") == names(str(tmp_path / "two" / "*" / "*.txt")) == expected
    assert names("a/x.txt") == ["x.txt"]


def test_a_file_is_read_once(tmp_path):
    for name in ("a.txt", "b.txt", "c.log"):
        write(tmp_path / name, name.encode())
    (tmp_path / "d.txt").symlink_to("a.txt")
    assert names(str(tmp_path / "*")) == ["a.txt", "b.txt", "c.log"]


def test_patterns_skip_hidden_names_unless_asked(tmp_path):
    for name in ("a.txt", ".b.txt", "c/d.txt", "c/.e/f.txt"):
        write(tmp_path / name, b"x")
    assert names(str(tmp_path / "**" / "*.txt")) == ["a.txt", "c/d.txt"]
    assert names(str(tmp_path / "**")) == ["a.txt", "c/d.txt"]
    assert names(str(tmp_path / ".*.txt")) == [".b.txt"]


def test_a_file_whose_name_looks_like_a_pattern_is_that_file(tmp_path):
    write(tmp_path / "1.txt", b"wrong")
    path = write(tmp_path / "[1].txt", b"right")
    assert texts(path) == ["right"]


def test_a_byte_order_mark_changes_nothing(tmp_path):
    plain = write(tmp_path / "plain.txt", "\n\nä\r\n".encode())
    marked = write(tmp_path / "marked.txt", BOM + "\n\nä\r\n".encode())
    assert texts(plain) == texts(marked) == ["\n\nä\r\n"]
    assert texts(write(tmp_path / "inside.txt", b"a" + BOM)) == ["a\ufeff"]


def test_a_line_of_20_megabytes_and_characters_of_four_bytes(tmp_path):
    text = "a" + "\U0001f600" * 5_000_000
    path = write(tmp_path / "long.txt", text.encode())
    assert texts(path) == [text]


def test_empty_files_in_a_directory_add_nothing(tmp_path):
    write(tmp_path / "__init__.py", b"")
    write(tmp_path / "bom.txt", BOM)
    write(tmp_path / "a.py", b"x")
    assert texts(str(tmp_path)) == ["x"]


@pytest.mark.parametrize(
    "data, offset, byte",
    [(b"abc\xff", 3, "0xff"), (BOM + b"\xe4", 3, "0xe4"), ("x".encode("utf-16"), 0, "0xff")],
)
def test_text_that_is_not_utf8_is_refused_with_its_place(tmp_path, data, offset, byte):
    path = write(tmp_path / "bad.txt", data)
    for source in (path, str(tmp_path), str(tmp_path / "*.txt")):
        with pytest.raises(DataError) as error:
            texts(source)
        for part in (path, "UTF-8", byte, f"offset {offset} ", "convert"):
            assert part in str(error.value)


def test_missing_and_empty_sources_are_refused(tmp_path):
    empty = write(tmp_path / "empty" / "e.txt", b"")
    image = write(tmp_path / "images" / "i.png", b"x")
    (tmp_path / "bare").mkdir()
    for source, parts in {
        str(tmp_path / "absent"): ["absent", "does not exist"],
        "": ["does not exist"],
        empty: [empty, "is empty: put text in it, or leave it out of the sources"],
        os.path.dirname(empty): ["every file", "is empty (e.txt): put text in one, or leave it"],
        os.path.dirname(image): ["no text file", *TEXT_SUFFIXES],
        str(tmp_path / "bare"): ["no text file"],
        str(tmp_path / "bare" / "*.txt"): ["no file matches", "*.txt"],
        str(tmp_path / "*"): ["no file matches"],
    }.items():
        with pytest.raises(DataError) as error:
            texts(source)
        for part in ["data.sources", *parts]:
            assert part in str(error.value)
    if sys.version_info < (3, 13):
        with pytest.raises(DataError, match=r"data\.sources: .*a\*\*b is no pattern"):
            texts(str(tmp_path / "a**b"))


def test_unreadable_files_and_directories_are_refused(unprivileged):
    path = write(unprivileged / "closed" / "a.txt", b"x")
    os.chmod(path, 0)
    with pytest.raises(DataError, match=r"a\.txt cannot be read \(Permission denied\)"):
        texts(str(unprivileged))
    os.chmod(os.path.dirname(path), 0)
    with pytest.raises(DataError, match=r"closed cannot be read \(Permission denied\)"):
        texts(str(unprivileged))


def test_an_error_of_the_system_names_the_file(tmp_path):
    (tmp_path / "loop.txt").symlink_to("loop.txt")
    (tmp_path / "gone.txt").symlink_to("absent")
    for name in ("loop.txt", "gone.txt"):
        with pytest.raises(DataError, match=rf"{name} cannot be read \("):
            texts(str(tmp_path / name))


@pytest.mark.parametrize(
    "name, package, extra",
    [
        ("a.parquet", "pyarrow", "parquet"),
        ("a.txt.zst", "zstandard", "zstd"),
        ("hf:a", "datasets", "hf"),
    ],
)
def test_a_missing_package_and_how_to_install_it_are_named(
    name, package, extra, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, package, None)
    source = name if extra == "hf" else write(tmp_path / name, b"x")
    with pytest.raises(DataError) as error:
        list_inputs(source)
    assert str(error.value).startswith(f"data.sources: {source} needs the package {package} (")
    assert f"make setup EXTRAS={extra}, or" in str(error.value)
    assert str(error.value).endswith(f"pip install '.[{extra}]'")


def test_a_pipe_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    for source in (tmp_path, tmp_path / "pipe.txt", tmp_path / "*.txt"):
        with pytest.raises(DataError, match=r"pipe\.txt is not a regular file"):
            texts(str(source))


def test_loops_of_links_end_and_linked_directories_are_read_once(tmp_path):
    write(tmp_path / "corpus" / "a" / "x.txt", b"x")
    write(tmp_path / "elsewhere" / "y.txt", b"y")
    corpus = tmp_path / "corpus"
    for i in range(3):
        (corpus / "a" / f"up{i}").symlink_to(corpus)
        (corpus / f"self{i}").symlink_to(".")
    (corpus / "linked").symlink_to(tmp_path / "elsewhere")
    (corpus / "linked_again").symlink_to(tmp_path / "elsewhere")
    assert names(str(corpus)) == ["a/x.txt", "linked/y.txt"]
    assert names(str(corpus / "**" / "*.txt")) == ["a/x.txt"]


def test_the_standard_library_is_the_same_every_time_and_without_tests():
    found = names("stdlib")
    assert found == sorted(found) == names("stdlib")
    assert {"argparse.py", "json/decoder.py", "email/message.py"} <= set(found)
    directories = {part for name in found for part in name.split("/")[:-1]}
    assert not directories & {"test", "tests", "idle_test", "site-packages", "__pycache__"}
    assert all(name.endswith(".py") and "_sysconfigdata" not in name for name in found)
    assert 8e6 < sum(map(len, texts("stdlib"))) < 16e6
