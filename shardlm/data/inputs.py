"""From a source to its inputs: what is read, in which order, under which name.

A source is, in this order of precedence,

- `stdlib`: the `.py` files of the running Python's standard library (about 11 MB), without
  installed packages, tests and files that the build generated for its machine;
- `hf:NAME` or `hf:NAME:CONFIG:SPLIT`: a dataset by name, streamed by the package datasets (an empty
  CONFIG is the default one; the default SPLIT is train);
- `SCHEME://...`: a file, a directory or a pattern that fsspec reaches;
- a directory of `datasets.Dataset.save_to_disk`;
- a file, whatever its suffix;
- a directory: every file below it with a known suffix, following links, without hidden names and
  `__pycache__`;
- a pattern with `*`, `?`, `[` or `**`: every file that matches, whatever its suffix, without hidden
  names unless the pattern has one; `**` does not follow links.

The suffix says what a file is: structured rows, parquet, token ids, and text where it says nothing;
`.gz` and `.zst` after it are decompressed. The order is that of the names. A file that is reached
twice is read once.
"""

import functools
import hashlib
import json
import os
import re
import stat
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shardlm.data.errors import DataError
from shardlm.data.opening import (
    HUB,
    filesystem,
    from_hub,
    is_url,
    opened,
    reported,
    require,
    unreadable,
)

STDLIB = "stdlib"
BOM = b"\xef\xbb\xbf"

# fmt: off
TEXT_SUFFIXES = frozenset({
    ".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".org", ".html", ".css", ".toml", ".yaml",
    ".yml", ".ini", ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cs", ".rs", ".go",
    ".java", ".kt", ".scala", ".clj", ".js", ".jsx", ".ts", ".tsx", ".vue", ".dart", ".sh", ".sql",
    ".r", ".jl", ".lua", ".rb", ".php", ".pl", ".swift", ".hs", ".ml", ".el", ".ex", ".exs", ".erl",
})
# fmt: on
"""Files with these suffixes, in any case, are read from a directory as text."""

ROW_SUFFIXES = frozenset({".jsonl", ".ndjson"})
"""A JSON object a line."""

Kind = Literal["text", "rows", "parquet", "array", "dataset", "hub"]
Compression = Literal["", "gz", "zst"]

_COMPRESSIONS: dict[str, Compression] = {".gz": "gz", ".zst": "zst"}
_BINARY: dict[str, Kind] = {".parquet": "parquet", ".npy": "array"}
_NOT_STDLIB = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages"})
_BLOCK = 1 << 22


@dataclass(frozen=True)
class Input:
    """One file or dataset of a source.

    `name` is the path below the source with forward slashes (the file's own name where the source
    is that file), so that it is the same wherever the source lies. `path` is what opens it: a path,
    a URL, or `hf:NAME:CONFIG:SPLIT`. `size` is in bytes as stored, 0 if unknown.
    """

    name: str
    path: str
    kind: Kind
    compression: Compression = ""
    size: int = 0

    @property
    def remote(self) -> bool:
        """Whether fsspec opens it."""
        return is_url(self.path)

    @functools.cached_property
    def content(self) -> str:
        """Hexadecimal digest that changes with what is stored.

        Of a file, its bytes; of a remote one, what fsspec tells it apart by (the ETag of an object
        store; for some file systems only name and size); of a dataset, its fingerprint.

        Raises:
          DataError: it cannot be read.
        """
        digest = hashlib.blake2b(digest_size=16)
        if self.kind == "hub":
            builder = from_hub(self.path, "load_dataset_builder")
            digest.update(f"{self.path}\n{builder.hash}".encode())
        elif self.kind == "dataset":
            digest.update(str(_state(self.path)["_fingerprint"]).encode())
        elif self.remote:
            fs, path = filesystem(self.path)
            with reported(self.path):
                digest.update(str(fs.ukey(path)).encode())
        else:
            with opened(self.path) as file:
                while block := file.read(_BLOCK):
                    digest.update(block)
        return digest.hexdigest()


def list_inputs(source: str) -> list[Input]:
    """What is read of `source`, in order.

    Raises:
      DataError: a source that does not exist, has nothing to read, only empty files or files that
        are not regular; or a package that it needs is missing.
    """
    if source.startswith(HUB):
        return [_hub(source)]
    if is_url(source) and not source.startswith(("file://", "local://")):
        found = _remote(source)
        path, explicit = source, len(found) == 1 and found[0][1] == source
    else:
        path = re.sub(r"\A(file|local)://", "", os.path.expanduser(source))
        if _is_dataset(path):
            return [_dataset(path)]
        found = list(_once(_stdlib() if source == STDLIB else _files(path)))
        explicit = len(found) == 1 and found[0][1] == path
    if all(_is_empty(file, size) for _, file, size in found):
        if explicit:
            raise DataError(
                f"data.sources: {path} is empty: put text in it, or leave it out of the sources"
            )
        names = ", ".join(name for name, _, _ in found[:3]) + ", ..." * (len(found) > 3)
        raise DataError(
            f"data.sources: every file of {source} is empty ({names}): put text in one, or leave "
            "it out of the sources"
        )
    return [_input(name, file, size or 0) for name, file, size in found]


_Found = tuple[str, str, int | None]
"""Name, path, and size where it is known."""


def _input(name: str, path: str, size: int) -> Input:
    stem, suffix = os.path.splitext(name.lower())
    compression: Compression = _COMPRESSIONS.get(suffix, "")
    if compression:
        suffix = os.path.splitext(stem)[1]
        if suffix in _BINARY:
            raise DataError(
                f"data.sources: {path} is a compressed {suffix} file, which is not read: "
                "decompress it"
            )
    kind: Kind = "rows" if suffix in ROW_SUFFIXES else _BINARY.get(suffix, "text")
    if kind == "parquet":
        require("pyarrow", "parquet", f"data.sources: {path}")
    if compression == "zst":
        require("zstandard", "zstd", f"data.sources: {path}")
    return Input(name, path, kind, compression, size)


def _is_wanted(name: str) -> bool:
    stem, suffix = os.path.splitext(name.lower())
    if suffix in _COMPRESSIONS:
        return os.path.splitext(stem)[1] in TEXT_SUFFIXES | ROW_SUFFIXES
    return suffix in TEXT_SUFFIXES | ROW_SUFFIXES or suffix in _BINARY


def _is_empty(path: str, size: int | None) -> bool:
    if size == len(BOM) and not is_url(path):
        with opened(path) as file:
            return file.read() == BOM
    return size == 0


def _once(found: Iterator[tuple[str, str]]) -> Iterator[_Found]:
    """With sizes, and each file under its first name only."""
    seen: set[str] = set()
    for name, path in found:
        real = os.path.realpath(path)
        if real in seen:
            continue
        seen.add(real)
        try:
            status = os.stat(path)
        except OSError as error:
            unreadable(error, path)
        if not stat.S_ISREG(status.st_mode):
            raise DataError(
                f"data.sources: {path} is not a regular file: save its content to a file first"
            )
        yield name, path, status.st_size


def _files(path: str) -> Iterator[tuple[str, str]]:
    """(name, path) of the files of a path or pattern, in order."""
    if os.path.isdir(path):
        found = sorted(_walk(path, _is_wanted, _visible))
        if not found and os.path.exists(os.path.join(path, "progress.json")):
            raise DataError(
                f"data.sources: {path} is a store that is not finished: give the same shardlm "
                "prepare command again"
            )
        if not found:
            raise _no_text(path, os.path.join(path, "**", "*.log"))
        yield from ((name, os.path.join(path, name)) for name in found)
    elif os.path.lexists(path):
        yield os.path.basename(path), path
    elif _is_pattern(path):
        yield from _pattern(path)
    else:
        raise DataError(
            f"data.sources: {path!r} does not exist or cannot be reached (working directory "
            f"{os.getcwd()}): name a file, a directory, a pattern or {STDLIB!r}"
        )


def _no_text(directory: str, example: str) -> DataError:
    suffixes = " ".join(sorted(TEXT_SUFFIXES | ROW_SUFFIXES))
    return DataError(
        f"data.sources: the directory {directory} has no text file: files with other suffixes "
        f"than {suffixes} (also with {' or '.join(_COMPRESSIONS)} after them) "
        f"{' '.join(_BINARY)} are read when a pattern names them ({example})"
    )


def _stdlib() -> Iterator[tuple[str, str]]:
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
    yield from ((name, os.path.join(root, name)) for name in found)


def _pattern(pattern: str) -> Iterator[tuple[str, str]]:
    parts = Path(pattern).parts
    fixed = next(i for i, part in enumerate(parts) if _is_pattern(part))
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
        raise _no_match(pattern, f" (working directory {os.getcwd()})")
    yield from ((name, str(root / name)) for name in names)


def _no_match(pattern: str, where: str = "") -> DataError:
    return DataError(
        f"data.sources: no file matches {pattern}{where}: "
        "correct the pattern (directories match only if they are named themselves)"
    )


def _walk(
    root: str, want_file: Callable[[str], bool], want_directory: Callable[[str], bool]
) -> Iterator[str]:
    """Names of files below `root`, relative and with forward slashes, links followed once."""
    visited: set[str] = set()
    for directory, below, files in os.walk(root, followlinks=True, onerror=unreadable):
        real = os.path.realpath(directory)
        if real in visited:
            below.clear()
            continue
        visited.add(real)
        below[:] = sorted(name for name in below if want_directory(name))
        for name in files:
            if want_file(name) and _visible(name):
                yield os.path.relpath(os.path.join(directory, name), root).replace(os.sep, "/")


def _is_pattern(path: str) -> bool:
    return any(character in path for character in "*?[")


def _visible(name: str) -> bool:
    return not name.startswith(".") and name != "__pycache__"


def _hub(source: str) -> Input:
    match source.removeprefix(HUB).split(":"):
        case [name]:
            config, split = "", "train"
        case [name, config, split]:
            split = split or "train"
        case _:
            name = ""
    if not name or name.startswith("//"):
        raise DataError(
            f"data.sources: {source} names no dataset: write hf:NAME or hf:NAME:CONFIG:SPLIT, for "
            "example hf:roneneldan/TinyStories"
        )
    require("datasets", "hf", f"data.sources: {source}")
    return Input(name, f"{HUB}{name}:{config}:{split}", "hub")


def _is_dataset(path: str) -> bool:
    if os.path.isfile(os.path.join(path, "dataset_dict.json")):
        splits = sorted(name for name in os.listdir(path) if _is_dataset(os.path.join(path, name)))
        raise DataError(
            f"data.sources: {path} holds a dataset for each split, {' '.join(splits) or 'none'}: "
            f"name the directory of one ({os.path.join(path, *splits[:1])})"
        )
    files = ("state.json", "dataset_info.json")
    return all(os.path.isfile(os.path.join(path, name)) for name in files)


def _dataset(path: str) -> Input:
    require("datasets", "hf", f"data.sources: {path}")
    size = 0
    for file in _state(path)["_data_files"]:
        try:
            size += os.stat(os.path.join(path, file["filename"])).st_size
        except OSError as error:
            unreadable(error)
    return Input(os.path.basename(os.path.abspath(path)), path, "dataset", size=size)


def _state(path: str) -> dict[str, Any]:
    file = os.path.join(path, "state.json")
    with opened(file) as stored:
        try:
            state = json.load(stored)
            return {key: state[key] for key in ("_fingerprint", "_data_files")}
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"data.sources: {file} is not what datasets writes ({type(error).__name__}: "
                f"{error}): save the dataset again"
            ) from error


def _remote(url: str) -> list[_Found]:
    fs, path = filesystem(url)
    with reported(url):
        if fs.isfile(path):
            name = re.sub(r"[?#].*", "", path) if url.startswith("http") else path
            return [(name.rsplit("/", 1)[-1], url, fs.info(path).get("size"))]
        is_directory = fs.isdir(path)
        if is_directory:
            root, hidden, infos = path, False, fs.find(path, detail=True)
        elif _is_pattern(path):
            parts = path.split("/")
            fixed = next(i for i, part in enumerate(parts) if _is_pattern(part))
            root, hidden = "/".join(parts[:fixed]), any(p.startswith(".") for p in parts[fixed:])
            infos = fs.glob(path, detail=True)
        else:
            raise DataError(
                f"data.sources: {url} does not exist or cannot be reached: name a file, a "
                "directory or a pattern"
            )
    found = []
    for path, info in infos.items():
        name = path.removeprefix(root).lstrip("/")
        if info["type"] != "file" or not (hidden or all(map(_visible, name.split("/")))):
            continue
        if is_directory and name in ("state.json", "dataset_dict.json"):
            raise DataError(
                f"data.sources: {url} is a saved dataset, which is read from a local directory "
                "only: copy it to one"
            )
        if not is_directory or _is_wanted(name):
            found.append((name, fs.unstrip_protocol(path), info.get("size")))
    if not found:
        raise _no_text(url, url.rstrip("/") + "/**/*.log") if is_directory else _no_match(url)
    return sorted(found)
