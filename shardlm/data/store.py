"""Tokens on disk: the format, and reading it.

A store is a directory:

    store.json       what it holds; written last, so a directory without it is unfinished
    tokenizer.json   the tokenizer of its ids
    00000.tokens     ids of a shard, little-endian, one after the other
    00000.index      of the same shard: length of each document (uint32), hash of each (uint64),
                     CRC-32 of each block of 64 KiB of the ids (uint32)

Files are mapped into memory, so that opening a store reads the indices and none of the ids. A block
of ids is checked against its CRC when it is first read, and a small store at once: ids that were
altered on the disk are never trained on.
"""

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64, UInt32, UInt64

from shardlm.data.errors import DataError
from shardlm.data.tokenizer import Tokenizer, from_json
from shardlm.files import replace_bytes
from shardlm.words import many

FORMAT = "shardlm-store-1"
MANIFEST = "store.json"
TOKENIZER = "tokenizer.json"
COUNTS = {
    "empty": "empty and left out",
    "skipped": "not UTF-8 and left out",
    "replaced": "with U+FFFD for what was not UTF-8",
}
"""Of documents that are not in a store as they were: names of the counts, and what people read."""
BLOCK = 1 << 16
"""Bytes of ids that share a checksum."""
CHECKED_AT_ONCE = 1 << 28
"""Bytes up to which a store is checked whole when it is opened: some 0.2 s."""


def id_dtype(vocab_size: int) -> np.dtype:
    """The smallest little-endian unsigned dtype that holds every id."""
    return np.min_scalar_type(max(vocab_size - 1, 1)).newbyteorder("<")


@dataclass(frozen=True)
class ShardInfo:
    """What the manifest says of a shard."""

    name: str
    tokens: int
    documents: int
    index: str
    """Hexadecimal digest of the index file, and so, by the CRCs in it, of the ids."""


class Shard:
    """The ids of a shard, checked block by block as they are first read."""

    def __init__(self, path: Path, ids: np.ndarray, crcs: UInt32[np.ndarray, "blocks"]) -> None:
        self.path, self.ids, self._crcs = path, ids, crcs
        self._per_block = BLOCK // ids.dtype.itemsize
        self._good = np.zeros(len(crcs), bool)

    def trust(self) -> None:
        """Check nothing: the ids were never on a disk."""
        self._good[:] = True

    def check(self, first: np.ndarray | int, last: np.ndarray | int) -> None:
        """Check the blocks of the ids from each of `first` to each of `last`, inclusive.

        Raises:
          DataError: a block is not what was written.
        """
        low, high = np.divmod(first, self._per_block)[0], np.divmod(last, self._per_block)[0]
        if self._good[low].all() and self._good[high].all() and np.all(high - low <= 1):
            return
        touched = np.zeros(len(self._crcs) + 1, np.int32)
        np.add.at(touched, np.asarray(low), 1)
        np.subtract.at(touched, np.asarray(high) + 1, 1)
        for block in np.flatnonzero((np.cumsum(touched[:-1]) > 0) & ~self._good).tolist():
            part = self.ids[block * self._per_block : (block + 1) * self._per_block]
            if zlib.crc32(part.data) != self._crcs[block]:
                raise DataError(
                    f"{self.path} was altered after it was written: its bytes from {block * BLOCK} "
                    "on do not have their checksum: restore the file, or prepare the store again"
                )
            self._good[block] = True


@dataclass(frozen=True, eq=False)
class Store:
    """An open store."""

    path: Path
    manifest: Mapping[str, Any]
    tokenizer: Tokenizer
    shards: tuple[Shard, ...]
    lengths: Int64[np.ndarray, "documents"]
    """Tokens of each document, in the order of the store."""
    hashes: UInt64[np.ndarray, "documents"]
    """Of each document's text: equal texts are equal."""

    @property
    def fingerprint(self) -> str:
        """Hexadecimal digest of ids, boundaries and tokenizer, wherever the store lies."""
        return str(self.manifest["fingerprint"])


def odd_documents(counts: Mapping[str, Any]) -> list[str]:
    """What people read of the `COUNTS` that are not 0: "1 document empty and left out"."""
    return [
        f"{many(counts[name], 'document')} {what}" for name, what in COUNTS.items() if counts[name]
    ]


def is_store(path: str | Path) -> bool:
    """Whether a directory is a finished store."""
    # Not pathlib's, which raises where the directory may not be looked into.
    return os.path.isfile(Path(path) / MANIFEST)


def manifest_of(
    shards: list[ShardInfo], tokenizer: Tokenizer, counts: Mapping[str, int], key: str
) -> dict[str, Any]:
    """The content of `store.json`.

    Args:
      counts: documents and rows that were read and are not as they were: `empty`, `skipped` (left
        out) and `replaced` (their bytes that are not UTF-8).
      key: digest of what the store was made from, and how.
    """
    parts = [FORMAT, tokenizer.fingerprint(), *(s.index for s in shards)]
    return {
        "format": FORMAT,
        "dtype": id_dtype(tokenizer.vocab_size).name,
        "tokenizer": tokenizer.fingerprint(),
        "vocab_size": tokenizer.vocab_size,
        "tokens": sum(s.tokens for s in shards),
        "documents": sum(s.documents for s in shards),
        **counts,
        "shards": [asdict(s) for s in shards],
        "key": key,
        "fingerprint": blake2b("\n".join(parts).encode(), digest_size=16).hexdigest(),
    }


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a finished store.

    Raises:
      DataError: there is none, or it cannot be read.
    """
    file = path / MANIFEST
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if found["format"] != FORMAT:
            raise DataError(
                f"{file} has the format {found['format']!r} and this version reads {FORMAT}: "
                "prepare the store again"
            )
        return dict(found)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DataError(
            f"{path} is no finished store ({error.strerror}: {file.name}): finish it with "
            "shardlm prepare"
        ) from None
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror}): make it readable") from None
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{file} is damaged ({error}): prepare the store again") from None


def open_store(path: str | Path) -> Store:
    """Open a finished store for reading.

    Memory: 16 bytes a document. Ids stay on the disk.

    Raises:
      DataError: not a finished store, or one whose files are damaged, truncated or of another
        dtype or tokenizer than they were written with.
    """
    path = Path(path)
    manifest = read_manifest(path)
    file = path / TOKENIZER
    try:
        tokenizer = from_json(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read ({error}): prepare the store again") from None
    if tokenizer.fingerprint() != manifest["tokenizer"]:
        raise DataError(
            f"{file} is another tokenizer than the ids of {path} were made with: restore it, or "
            "prepare the store again"
        )
    dtype = id_dtype(tokenizer.vocab_size)
    if manifest["dtype"] != dtype.name:
        raise DataError(
            f"{path / MANIFEST} says that ids are {manifest['dtype']}, and {tokenizer.vocab_size} "
            f"ids are stored as {dtype.name}: restore the file, or prepare the store again"
        )
    shards, lengths, hashes = [], [], []
    for info in _described(path, manifest, tokenizer):
        shard, sizes, of_text = _open_shard(path, info, dtype)
        shards.append(shard)
        lengths.append(sizes)
        hashes.append(of_text)
    store = Store(
        path,
        manifest,
        tokenizer,
        tuple(shards),
        np.concatenate([*lengths, np.zeros(0, np.uint32)]).astype(np.int64),
        np.concatenate([*hashes, np.zeros(0, np.uint64)]),
    )
    if sum(shard.ids.nbytes for shard in shards) <= CHECKED_AT_ONCE:
        for shard in shards:
            if len(shard.ids):
                shard.check(0, len(shard.ids) - 1)
    return store


def _described(path: Path, manifest: Mapping[str, Any], tokenizer: Tokenizer) -> list[ShardInfo]:
    """The shards of a manifest in which all agrees."""
    try:
        shards = [ShardInfo(**said) for said in manifest["shards"]]
        counts = {name: int(manifest[name]) for name in COUNTS}
        named = [f"{i:05}" for i in range(len(shards))]
        expected = manifest_of(shards, tokenizer, counts, manifest["key"])
        odd = [name for name, value in expected.items() if manifest[name] != value]
        if [shard.name for shard in shards] != named or not shards:
            odd.append("shards")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        odd = [f"{type(error).__name__}: {error}".partition("\n")[0]]
    if odd:
        raise DataError(
            f"{path / MANIFEST} was altered after it was written ({', '.join(odd)}): restore it, "
            "or prepare the store again"
        )
    return shards


def _open_shard(path: Path, info: ShardInfo, dtype: np.dtype) -> tuple[Shard, Any, Any]:
    tokens, index = path / f"{info.name}.tokens", path / f"{info.name}.index"
    blocks = -(-info.tokens * dtype.itemsize // BLOCK)
    for file, size in (
        (tokens, info.tokens * dtype.itemsize),
        (index, 12 * info.documents + 4 * blocks),
    ):
        try:
            found = file.stat().st_size
        except OSError as error:
            raise DataError(
                f"{file} cannot be read ({error.strerror}): restore it, or prepare the store again"
            ) from None
        if found != size:
            raise DataError(
                f"{file} has {found} bytes and was written with {size}: restore it, or prepare the "
                "store again"
            )
    try:
        data = index.read_bytes()
        # A plain array over the map: slices of numpy's own memmap cost ten times as much.
        ids = np.asarray(np.memmap(tokens, dtype, "r") if info.tokens else np.zeros(0, dtype))
    except OSError as error:
        raise DataError(
            f"{error.filename} cannot be read ({error.strerror}): make it readable"
        ) from None
    if blake2b(data, digest_size=16).hexdigest() != info.index:
        raise DataError(
            f"{index} was altered after it was written: restore it, or prepare the store again"
        )
    lengths = np.frombuffer(data, "<u4", info.documents)
    hashes = np.frombuffer(data, "<u8", info.documents, 4 * info.documents)
    # Copied, or they would keep all of the index in memory.
    crcs = np.frombuffer(data, "<u4", blocks, 12 * info.documents).copy()
    return Shard(tokens, ids, crcs), lengths, hashes


def write_shard(
    path: Path, name: str, ids: np.ndarray, lengths: np.ndarray, hashes: np.ndarray
) -> ShardInfo:
    """Write the two files of a shard; they have their names only when they are whole.

    Raises:
      OSError: the disk is full or cannot be written to; nothing half-written is left.
    """
    data = np.ascontiguousarray(ids).data.cast("B")
    crcs = [zlib.crc32(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)]
    index = b"".join(
        (
            lengths.astype("<u4").tobytes(),
            hashes.astype("<u8").tobytes(),
            np.array(crcs, "<u4").tobytes(),
        )
    )
    replace_bytes(path / f"{name}.tokens", data)
    replace_bytes(path / f"{name}.index", index)
    digest = blake2b(index, digest_size=16).hexdigest()
    return ShardInfo(name, len(ids), len(lengths), digest)
