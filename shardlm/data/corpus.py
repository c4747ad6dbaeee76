"""Documents: where the ids of each lie, and which are for training and which for validation."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from pathlib import Path

import numpy as np
from jaxtyping import Int32, Int64, UInt64

from shardlm.data.errors import DataError
from shardlm.data.store import BLOCK, Shard, Store, id_dtype
from shardlm.words import many

_NONE = np.zeros(0, np.int32)


class Tokens:
    """The ids of shards one after the other, as if they were one array; a *place* is an index."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = list(shards)
        self._ids = [shard.ids for shard in shards]
        self._bases = np.cumsum([0, *(len(shard.ids) for shard in shards)], dtype=np.int64)
        # Of all shards in one array, so that looking costs the same for any number of them.
        self._blocks = np.cumsum([0, *(-(-s.ids.nbytes // BLOCK) for s in shards)], dtype=np.int64)
        self._good = np.zeros(self._blocks[-1], bool)
        self._per_block = BLOCK // shards[0].ids.itemsize if shards else BLOCK

    def __len__(self) -> int:
        return int(self._bases[-1])

    def gather(
        self, starts: Int64[np.ndarray, "runs"], sizes: Int64[np.ndarray, "runs"]
    ) -> Int32[np.ndarray, "tokens"]:
        """The ids of runs, one after the other.

        Args:
          starts: the place of each run's first id.
          sizes: ids of each run, at least 1; a run lies in one shard.

        Raises:
          DataError: the ids were altered on the disk.
        """
        of = np.searchsorted(self._bases, starts, "right") - 1
        first = starts - self._bases[of]
        stop = first + sizes
        self._check(of, first, stop - 1)
        # Copying runs is several times faster than taking ids by their places, and as fast where
        # runs are some 100 ids.
        runs = zip(of.tolist(), first.tolist(), stop.tolist(), strict=True)
        return np.concatenate([_NONE, *(self._ids[n][a:b] for n, a, b in runs)], dtype=np.int32)

    def _check(self, of: np.ndarray, first: np.ndarray, last: np.ndarray) -> None:
        """Check the ids from each of `first` to each of `last`, inclusive, of the shards `of`."""
        low = self._blocks[of] + first // self._per_block
        high = self._blocks[of] + last // self._per_block
        if self._good[low].all() and self._good[high].all() and (high - low <= 1).all():
            return
        for number in np.unique(of).tolist():
            mine = of == number
            self._shards[number].check(first[mine], last[mine])
        self._good[low] = self._good[high] = True


@dataclass(frozen=True, eq=False)
class Corpus:
    """Documents in an order.

    `firsts` are the places of their first ids in `tokens`, `lengths` how many ids each has (at
    least one). `hashes` are of their texts. `fingerprint` is a digest of all that and of the ids.
    """

    tokens: Tokens
    firsts: Int64[np.ndarray, "documents"]
    lengths: Int64[np.ndarray, "documents"]
    hashes: UInt64[np.ndarray, "documents"]
    fingerprint: str
    name: str = ""
    """The source that they come from."""
    base: int = 0
    """Where the ids of the source begin in `tokens`."""

    @classmethod
    def of(cls, documents: Iterable[np.ndarray], vocab_size: int) -> "Corpus":
        """Documents from memory; those without ids add nothing."""
        pieces = [np.asarray(ids).astype(id_dtype(vocab_size)) for ids in documents if len(ids)]
        ids = np.concatenate(pieces) if pieces else np.zeros(0, id_dtype(vocab_size))
        lengths = np.array([len(piece) for piece in pieces], np.int64)
        digests = [blake2b(p.astype("<u4").tobytes(), digest_size=8).digest() for p in pieces]
        whole = blake2b(b"".join(digests), digest_size=16).hexdigest()
        shard = Shard(Path("memory"), ids, np.zeros(-(-ids.nbytes // BLOCK), np.uint32))
        shard.trust()
        hashes = np.array([int.from_bytes(d, "big") for d in digests], np.uint64)
        return cls(Tokens([shard]), np.cumsum(lengths) - lengths, lengths, hashes, whole)

    @classmethod
    def of_stores(cls, stores: Sequence[Store], names: Sequence[str]) -> "list[Corpus]":
        """All documents of each store, with all their ids as one array of `tokens`."""
        tokens = Tokens([shard for store in stores for shard in store.shards])
        found, base = [], 0
        for store, name in zip(stores, names, strict=True):
            firsts = base + np.cumsum(store.lengths) - store.lengths
            found.append(
                cls(tokens, firsts, store.lengths, store.hashes, store.fingerprint, name, base)
            )
            base += int(store.lengths.sum())
        return found

    @classmethod
    def join(cls, corpora: "Sequence[Corpus]") -> "Corpus":
        """The documents of several, which share their `tokens`, one after the other."""
        if len(corpora) == 1:
            return corpora[0]
        return cls(
            corpora[0].tokens,
            np.concatenate([c.firsts for c in corpora]),
            np.concatenate([c.lengths for c in corpora]),
            np.concatenate([c.hashes for c in corpora]),
            " ".join(c.fingerprint for c in corpora),
        )

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self.lengths)

    @cached_property
    def starts(self) -> Int64[np.ndarray, "boundaries"]:
        """Where each document begins when they are laid end to end, and the end: documents + 1."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths)])

    @property
    def size(self) -> int:
        """Number of ids."""
        return int(self.starts[-1])

    @property
    def loss_tokens(self) -> int:
        """Tokens that are predicted in an epoch: all but the first of each document."""
        return self.size - self.documents

    def document(self, number: int) -> Int32[np.ndarray, "tokens"]:
        """The ids of one document."""
        return self.tokens.gather(
            self.firsts[number : number + 1], self.lengths[number : number + 1]
        )

    def select(self, chosen: np.ndarray | slice) -> "Corpus":
        """Some of the documents, in their order."""
        return replace(
            self,
            firsts=self.firsts[chosen],
            lengths=self.lengths[chosen],
            hashes=self.hashes[chosen],
        )


def split_documents(corpus: Corpus, share: float) -> tuple[Corpus, Corpus]:
    """Training and validation of whole documents.

    A document is on the side that the hash of its text says, whatever the other documents are: so
    adding some moves none, equal texts are on one side, and every process agrees. `share` of the
    documents are expected in validation.
    """
    # 53 bits: what a float64 holds.
    validation = (corpus.hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53 < share
    return corpus.select(~validation), corpus.select(validation)


def split_tail(corpus: Corpus, share: float) -> tuple[Corpus, Corpus]:
    """Training on the first `int((1 - share) * size)` ids, validation on the others.

    The document in which the cut falls becomes one document on each side.
    """
    cut = int((1 - share) * corpus.size)
    starts = corpus.starts
    of = int(np.searchsorted(starts, cut, "right")) - 1 if cut < corpus.size else corpus.documents
    before, after = corpus.select(np.s_[:of]), corpus.select(np.s_[of:])
    if of < corpus.documents and (inside := cut - int(starts[of])):
        firsts, lengths = after.firsts.copy(), after.lengths.copy()
        firsts[0] += inside
        lengths[0] -= inside
        after = replace(after, firsts=firsts, lengths=lengths)
        before = replace(
            before,
            firsts=np.append(before.firsts, corpus.firsts[of]),
            lengths=np.append(before.lengths, inside),
            hashes=np.append(before.hashes, corpus.hashes[of]),
        )
    return before, after


SPLITS = {"documents": split_documents, "tail": split_tail}


def split(corpora: Sequence[Corpus], how: str, share: float) -> tuple[list[Corpus], list[Corpus]]:
    """Training and validation of each source.

    Raises:
      DataError: one of the sides has nothing, though validation is asked for.
    """
    sides = [SPLITS[how](corpus, share) for corpus in corpora]
    train, validation = [a for a, _ in sides], [b for _, b in sides]
    sizes = [sum(c.size for c in side) for side in (train, validation)]
    if share and not all(sizes):
        documents, tokens = sum(c.documents for c in corpora), sum(sizes)
        if how == "tail":
            raise DataError(
                f"data.split is tail and data.validation {share:g}: of {many(tokens, 'token')} "
                f"{sizes[0]} would be for training and {sizes[1]} for validation: give "
                "more text or change data.validation"
            )
        side = "validation" if sizes[0] else "training"
        raise DataError(
            f"data.split is documents and data.validation {share:g}: by the hash of their texts "
            f"none of {many(documents, 'document')} is left for {side}: set data.split tail, "
            "change data.validation, or give the text in more documents"
        )
    return train, validation
