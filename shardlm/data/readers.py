"""From inputs to documents, in two stages: `read_chunks` finds bounded amounts of raw input, in an
order that depends on the inputs only, and `parse` makes documents of one, in any process.

A text file is one document, however large. Structured rows (.jsonl, .parquet, datasets) are a
document each, the text in one field: the one of that very name, or, where there is none and the
name has dots, a nested one. Arrays (.npy) are ids already: of two dims a document a row, of one dim
a stream, in which an id ends each document.
"""

import contextlib
import gzip
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, Literal

import numpy as np

from shardlm.data.errors import DataError
from shardlm.data.inputs import BOM, Input
from shardlm.data.opening import from_hub, is_url, opened, reported, require
from shardlm.data.tables import columns

TARGET_BYTES = 1 << 19
"""Of a chunk; one line or file may be larger."""
_LOOK_AHEAD = 1 << 20
"""Ids of a stream that are searched at once for an end."""


@dataclass(frozen=True)
class Reading:
    """How text is found and decoded: `data.field` and `data.errors`."""

    field: str = "text"
    errors: Literal["error", "replace", "skip"] = "error"


@dataclass(frozen=True)
class Document:
    """One text, or its ids where it is tokenized already.

    `name` is what opens the file; of rows, with the number of the line or row from 1. `stream`: the
    ids are of several documents, each with its end; they begin at place `first` of the file.
    """

    name: str
    text: str | None = None
    ids: np.ndarray | None = None
    stream: bool = False
    first: int = 0


@dataclass(frozen=True)
class Chunk:
    """A bounded amount of raw input."""

    inputs: tuple[Input, ...]
    """Whole files; of the other kinds one input."""
    stored_bytes: int
    """Its share of the inputs' sizes."""
    first: int = 0
    """Number, from 1, of its first line or row; of arrays, from 0, of its first row or id."""
    data: Any = None
    """Lines (bytes), or what a list of rows has in the field."""
    stop: int = 0
    """Of arrays: number of the row or id after its last one."""


@dataclass
class Parsed:
    """Documents of a chunk, and how many were not as they should be."""

    documents: list[Document]
    empty: int = 0
    """Without text."""
    skipped: int = 0
    """Left out, not being UTF-8."""
    replaced: int = 0
    """With U+FFFD for what was not UTF-8."""


def read_chunks(
    inputs: Sequence[Input],
    reading: Reading,
    end: int | None = None,
    target_bytes: int = TARGET_BYTES,
) -> Iterator[Chunk]:
    """The inputs, cut into chunks.

    Args:
      end: the id that ends a document in a stream of ids.

    Raises:
      DataError: one cannot be opened or decompressed, or is a table without the field or with
        something else than text in it.
    """
    files: list[Input] = []
    size = 0
    for found in inputs:
        if found.kind == "text":
            files.append(found)
            size += found.size
            if size >= target_bytes or len(files) >= 1024:
                yield _whole(files)
                files, size = [], 0
            continue
        if files:
            yield _whole(files)
            files, size = [], 0
        if found.kind == "rows":
            yield from _cut_lines(found, target_bytes)
        elif found.kind == "array":
            yield from _cut_array(found, end, target_bytes)
        elif found.kind == "hub":
            yield from _cut_hub(found, reading)
        else:
            for first, share, values in columns(found, reading.field, target_bytes):
                yield Chunk((found,), share, first, values)
    if files:
        yield _whole(files)


def _whole(files: list[Input]) -> Chunk:
    return Chunk(tuple(files), sum(f.size for f in files))


def _cut_lines(found: Input, target_bytes: int) -> Iterator[Chunk]:
    first, at = 1, 0
    rest: list[bytes] = []
    with _decompressed(found) as (file, position):
        while True:
            data = file.read(target_bytes)
            if not data:
                break
            end = data.rfind(b"\n") + 1
            if not end:
                rest.append(data)
                continue
            lines = b"".join((*rest, data[:end]))
            rest = [data[end:]]
            yield Chunk((found,), position() - at, first, lines)
            first, at = first + lines.count(b"\n"), position()
        if last := b"".join(rest):
            yield Chunk((found,), position() - at, first, last)


def _cut_array(found: Input, end: int | None, target_bytes: int) -> Iterator[Chunk]:
    array = _array(found)
    start, size = 0, len(array)
    each = max(1, target_bytes * size // max(array.nbytes, 1))
    while start < size:
        stop = min(start + each, size)
        if array.ndim == 1:
            stop = _after_end(array, end, stop)
        share = found.size * stop // size - found.size * start // size
        yield Chunk((found,), share, start, stop=stop)
        start = stop


def _after_end(array: np.ndarray, end: int | None, place: int) -> int:
    """The first place from `place` on in front of which a document ends."""
    if end is None:
        return len(array)
    for at in range(place - 1, len(array), _LOOK_AHEAD):
        ends = np.flatnonzero(array[at : at + _LOOK_AHEAD] == end)
        if ends.size:
            return at + int(ends[0]) + 1
    return len(array)


def _cut_hub(found: Input, reading: Reading) -> Iterator[Chunk]:
    split = found.path.rpartition(":")[2]
    stream = from_hub(found.path, "load_dataset", split=split, streaming=True)
    first, values = 1, []
    with reported(found.path, "try again when the network is there"):
        for number, row in enumerate(stream, start=1):
            values.append(_field(row, reading.field, f"{found.path}:{number}"))
            if len(values) == 1024:
                yield Chunk((found,), 0, first, values)
                first, values = number + 1, []
    if values:
        yield Chunk((found,), 0, first, values)


def parse(chunk: Chunk, reading: Reading) -> Parsed:
    """The documents of a chunk.

    Raises:
      DataError: text that is not UTF-8 (by `reading.errors`), a line that is no JSON object, a row
        without the field or with something else than text in it, an array that is no ids; with the
        file and the place.
    """
    parsed = Parsed([])
    for name, found in _raw(chunk, reading, parsed):
        if isinstance(found, np.ndarray):
            stream = found.ndim == 1
            first = chunk.first if stream else 0
            parsed.documents.append(Document(name, None, found.reshape(-1), stream, first))
            continue
        text = _decode(found, name, reading, parsed)
        if text:
            parsed.documents.append(Document(name, text))
        elif text == "":
            parsed.empty += 1
    return parsed


def _raw(
    chunk: Chunk, reading: Reading, parsed: Parsed
) -> Iterator[tuple[str, bytes | str | np.ndarray]]:
    """Names, and texts before they are decoded (bytes), perhaps with lone surrogates (str), or
    ids."""
    found = chunk.inputs[0]
    if found.kind == "text":
        for file in chunk.inputs:
            with _decompressed(file) as (opened_file, _):
                yield file.path, opened_file.read()
    elif found.kind == "rows":
        yield from _json_lines(chunk, found, reading, parsed)
    elif found.kind == "array":
        array = _array(found)
        if array.ndim == 1:
            yield found.path, np.asarray(array[chunk.first : chunk.stop])
        else:
            for row in range(chunk.first, chunk.stop):
                yield f"{found.path}:{row + 1}", np.asarray(array[row : row + 1])
    else:
        for number, value in enumerate(chunk.data, start=chunk.first):
            name = f"{found.path}:{number}"
            yield name, _text(value, reading.field, name)


def _json_lines(
    chunk: Chunk, found: Input, reading: Reading, parsed: Parsed
) -> Iterator[tuple[str, bytes | str]]:
    for number, line in enumerate(chunk.data.split(b"\n"), start=chunk.first):
        # Also where files that begin with the mark were put one after the other.
        line = line.removeprefix(BOM)
        if not line.strip():
            continue
        name = f"{found.path}:{number}"
        try:
            row = json.loads(line.decode())
        except UnicodeDecodeError:
            if reading.errors == "error":
                yield name, line  # `_decode` says what is wrong.
                continue
            if reading.errors == "skip":
                parsed.skipped += 1
                continue
            parsed.replaced += 1
            row = _replaced_row(line, name)
        except ValueError as error:
            raise _bad_line(name, error) from None
        except RecursionError:
            raise _bad_line(name, "it is nested too deeply") from None
        yield name, _text(_field(row, reading.field, name), reading.field, name)


def _replaced_row(line: bytes, name: str) -> Any:
    try:
        return json.loads(line.decode(errors="replace"))
    except (ValueError, RecursionError) as error:
        raise _bad_line(name, error) from None


def _bad_line(name: str, why: object) -> DataError:
    return DataError(f"data.sources: {name} is not JSON ({why}): correct the line, or remove it")


def _field(row: Any, field: str, name: str) -> Any:
    """What a row has in the field."""
    value = row
    for part in [field] if isinstance(row, dict) and field in row else field.split("."):
        if value is None:
            return None
        if not isinstance(value, dict):
            raise DataError(
                f"data.sources: {name} has {type(value).__name__} where a JSON object with the "
                f"field {part!r} belongs: set data.field to the field with the text"
            )
        if part not in value:
            there = ", ".join(map(str, value)) or "none"
            raise DataError(
                f"data.sources: {name} has no field {part!r} (it has {there}): set data.field to "
                "the field with the text"
            )
        value = value[part]
    return value


def _text(value: Any, field: str, name: str) -> bytes | str:
    if value is None:
        raise DataError(
            f"data.sources: {name} has null in the field {field!r}, where text belongs: remove the "
            "row, or give it an empty text"
        )
    if not isinstance(value, bytes | str):
        raise DataError(
            f"data.sources: {name} has {type(value).__name__} in the field {field!r}, where text "
            "belongs: set data.field to the field with the text"
        )
    return value


def _array(found: Input) -> np.ndarray:
    if is_url(found.path):
        raise DataError(
            f"data.sources: {found.path} is an array, which is read from a local file only: copy "
            "it to one"
        )
    with reported(found.path, "write it with numpy.save"):
        array = np.load(found.path, mmap_mode="r")
    if array.dtype.kind not in "ui" or array.ndim not in (1, 2):
        raise DataError(
            f"data.sources: {found.path} is an array of {array.dtype} with {array.ndim} dims: ids "
            "are whole numbers, one dim for a stream or two for a document a row"
        )
    return array


def _decode(found: bytes | str, name: str, reading: Reading, parsed: Parsed) -> str | None:
    """The text; None where it is left out, which is counted."""
    try:
        if isinstance(found, bytes):
            return found.decode().removeprefix("\ufeff")
        found.encode()
        return found
    except UnicodeError as error:
        if reading.errors == "skip":
            parsed.skipped += 1
            return None
        if reading.errors == "replace":
            parsed.replaced += 1
            if isinstance(found, bytes):
                return found.decode(errors="replace").removeprefix("\ufeff")
            return found.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        what, reason = "a character", "half of a pair of surrogates"
        if isinstance(error, UnicodeDecodeError):
            what = f"byte 0x{error.object[error.start]:02x} at offset {error.start}"
            reason = error.reason
        raise DataError(
            f"data.sources: {name} is not UTF-8: {what} ({reason}): convert it (iconv -f ENCODING "
            "-t UTF-8), leave it out of the sources, or set data.errors to replace or skip"
        ) from None


@contextlib.contextmanager
def _decompressed(found: Input) -> Iterator[tuple[IO[bytes], Any]]:
    """The bytes of a file, and a function that says how many stored ones have been read."""
    with opened(found.path) as stored:
        stack = contextlib.ExitStack()
        file: Any = stored
        errors: tuple[type[Exception], ...] = ()
        if found.compression == "gz":
            file = stack.enter_context(gzip.GzipFile(fileobj=stored))
            errors = EOFError, OSError, zlib.error
        elif found.compression == "zst":
            zstandard = require("zstandard", "zstd", f"data.sources: {found.path}")
            file = stack.enter_context(io.BufferedReader(_Zstandard(stored, zstandard)))
            errors = EOFError, zstandard.ZstdError
        with stack:
            try:
                yield file, stored.tell
            except errors as error:
                raise DataError(
                    f"data.sources: {found.path} is damaged or cut off ({error}): restore the file"
                ) from error


class _Zstandard(io.RawIOBase):
    """Decompressed bytes of a .zst. The package's own reader takes a file that is cut off for one
    that ends there."""

    def __init__(self, stored: IO[bytes], zstandard: Any) -> None:
        self._stored = stored
        # The largest window that the format's tool writes, with --long=31.
        self._frames = zstandard.ZstdDecompressor(max_window_size=1 << 31)
        self._frame: Any = None
        self._left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left:
            unused = self._frame.unused_data if self._frame and self._frame.eof else b""
            data = unused or self._stored.read(1 << 16)
            if not data:
                if self._frame and not self._frame.eof:
                    raise EOFError("the last frame has no end")
                return 0
            if not self._frame or self._frame.eof:
                self._frame = self._frames.decompressobj()
            self._left = memoryview(self._frame.decompress(data))
        size = min(len(buffer), len(self._left))
        buffer[:size], self._left = self._left[:size], self._left[size:]
        return size
