"""From `data.sources` to documents: what is read, in which order, under which name.

A source is, in this order of precedence,

- `stdlib`: the `.py` files of the running Python's standard library (about 11 MB), without
  installed packages, tests and files that the build generated for its machine;
- a file, whatever its suffix;
- a directory: every file below it with one of `TEXT_SUFFIXES`, following links, without hidden
  names and `__pycache__`;
- a pattern with `*`, `?`, `[` or `**`: every file that matches, whatever its suffix, without hidden
  names unless the pattern has one; `**` does not follow links.

Within a source the order is that of the names; sources keep the order in which they are given. A
file that is reached twice is read once. Empty files inside directories and patterns add nothing.
"""

import os
import stat
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from shardlm.data.errors import DataError

STDLIB = "stdlib"

# fmt: off
TEXT_SUFFIXES = frozenset({
    ".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".org", ".html", ".css", ".toml", ".yaml",
    ".yml", ".ini", ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java",
    ".kt", ".scala", ".js", ".jsx", ".ts", ".tsx", ".sh", ".sql", ".r", ".jl", ".lua", ".rb",
    ".php", ".pl", ".swift", ".hs", ".ml", ".el",
})
# fmt: on
"""Files with these suffixes, in any case, are read from a directory."""

_BOM = b"\xef\xbb\xbf"
_NOT_STDLIB = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages"})


@dataclass(frozen=True)
class Document:
    """One text.

    `name` is the path below its source with forward slashes (the file's own name where the source
    is that file), so that it is the same wherever the source lies. `data` is valid UTF-8 without
    byte-order mark.
    """

    name: str
    data: bytes

    @property
    def text(self) -> str:
        """The characters."""
        return self.data.decode()


def read_documents(sources: Iterable[str]) -> list[Document]:
    """All documents of `sources`.

    Raises:
      DataError: a source that does not exist, cannot be read, has no text or is not UTF-8 (with
        the offset in bytes), and no source at all.
    """
    documents: list[Document] = []
    seen: set[str] = set()
    for source in sources:
        documents_before, files_before = len(documents), len(seen)
        for name, path, explicit in _files(source):
            real = os.path.realpath(path)
            if real in seen:
                continue
            seen.add(real)
            data = _read(path)
            if data:
                documents.append(Document(name, data))
            elif explicit:
                raise DataError(
                    f"data.sources: {path} is empty: remove it from the sources, or put text in it"
                )
        if len(documents) == documents_before and len(seen) > files_before:
            raise DataError(f"data.sources: every file of {source} is empty: put text in one")
    if not documents:
        raise DataError("data.sources names no text: name at least one file, directory or pattern")
    return documents


def _files(source: str) -> Iterator[tuple[str, str, bool]]:
    """(name, path, whether it was named itself) of the files of one source, in order."""
    if source == STDLIB:
        yield from _stdlib()
        return
    path = os.path.expanduser(source)
    if os.path.isdir(path):
        found = sorted(_walk(path, _is_text, _visible))
        if not found:
            raise DataError(
                f"data.sources: the directory {path} has no text file: files with other suffixes "
                f"than {' '.join(sorted(TEXT_SUFFIXES))} are read when a pattern names them "
                f"({os.path.join(source, '**', '*.log')})"
            )
        yield from ((name, os.path.join(path, name), False) for name in found)
    elif os.path.lexists(path):
        yield os.path.basename(path), path, True
    elif any(character in path for character in "*?["):
        yield from _pattern(path)
    else:
        raise DataError(
            f"data.sources: {path!r} does not exist or cannot be reached (working directory "
            f"{os.getcwd()}): name a file, a directory, a pattern or {STDLIB!r}"
        )


def _stdlib() -> Iterator[tuple[str, str, bool]]:
    root = sysconfig.get_path("stdlib")
    found = sorted(
        _walk(
            root,
            lambda name: name.endswith(".py") and not name.startswith("_sysconfigdata"),
            lambda name: _visible(name) and name not in _NOT_STDLIB and name[:7] != "config-",
        )
    )
    if not found:
        raise DataError(
            f"data.sources: this Python has no sources of its library in {root}: name files or "
            "directories of text instead of stdlib"
        )
    yield from ((name, os.path.join(root, name), False) for name in found)


def _pattern(pattern: str) -> Iterator[tuple[str, str, bool]]:
    parts = Path(pattern).parts
    fixed = next(i for i, part in enumerate(parts) if any(c in part for c in "*?["))
    # A final `**` matches files from Python 3.13 on, before that directories only.
    wild = [*parts[fixed:], "*"] if parts[-1] == "**" else parts[fixed:]
    root, relative = Path(*parts[:fixed]), "/".join(wild)
    # pathlib never enters linked directories for `**`, so that a link to a parent cannot make the
    # search endless. Unlike a shell it lets wildcards match hidden names.
    hidden = any(part.startswith(".") for part in wild)
    try:
        names = sorted(
            match.relative_to(root).as_posix()
            for match in root.glob(relative)
            if not match.is_dir()
            and (hidden or all(_visible(part) for part in match.relative_to(root).parts))
        )
    except ValueError as error:
        raise DataError(f"data.sources: {pattern} is no pattern: {error}") from None
    if not names:
        raise DataError(
            f"data.sources: no file matches {pattern} (working directory {os.getcwd()}): "
            "correct the pattern (directories match only if they are named themselves)"
        )
    yield from ((name, str(root / name), False) for name in names)


def _walk(
    root: str, want_file: Callable[[str], bool], want_directory: Callable[[str], bool]
) -> Iterator[str]:
    """Names of files below `root`, relative and with forward slashes, links followed once."""
    visited: set[str] = set()
    for directory, below, files in os.walk(root, followlinks=True, onerror=_unreadable):
        real = os.path.realpath(directory)
        if real in visited:
            below.clear()
            continue
        visited.add(real)
        below[:] = sorted(name for name in below if want_directory(name))
        for name in files:
            if want_file(name) and _visible(name):
                yield os.path.relpath(os.path.join(directory, name), root).replace(os.sep, "/")


def _is_text(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in TEXT_SUFFIXES


def _visible(name: str) -> bool:
    return not name.startswith(".") and name != "__pycache__"


def _read(path: str) -> bytes:
    """The file's UTF-8 bytes without byte-order mark."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise DataError(
                f"data.sources: {path} is not a regular file: save its content to a file first"
            )
        with open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        _unreadable(error)
    try:
        data.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"data.sources: {path} is not UTF-8: byte 0x{data[error.start]:02x} at offset "
            f"{error.start} ({error.reason}): convert it (iconv -f ENCODING -t UTF-8), or leave it "
            "out of the sources"
        ) from None
    return data.removeprefix(_BOM)


def _unreadable(error: OSError) -> NoReturn:
    raise DataError(
        f"data.sources: {error.filename} cannot be read ({error.strerror}): make it readable, or "
        "leave it out of the sources"
    ) from error
