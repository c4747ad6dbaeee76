"""Text that no machine has to download: documents with lengths as real corpora have them."""

import json
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
from jaxtyping import Int64

MEAN, LONGEST = 600, 16_384


def document_lengths(count: int, seed: int = 0) -> Int64[np.ndarray, "documents"]:
    """Lengths of documents: log-normal with a heavy tail (3% have twice the spread), of mean `MEAN`
    before the longest are clipped to `LONGEST`."""
    random = np.random.default_rng(seed)
    spread = np.where(random.random(count) < 0.03, 2.4, 1.2)
    lengths = np.exp(random.normal(size=count) * spread)
    lengths *= MEAN / lengths.mean()
    return np.clip(np.rint(lengths), 1, LONGEST).astype(np.int64)


def random_texts(lengths: Int64[np.ndarray, "documents"], seed: int = 0) -> Iterator[str]:
    """Documents of so many letters, and so many ids of the tokenizer `bytes` without the end."""
    letters = np.random.default_rng(seed).integers(97, 123, int(lengths.sum()), np.uint8)
    text, end = letters.tobytes().decode(), 0
    for length in lengths.tolist():
        yield text[end : end + length]
        end += length


def cut(text: str, lengths: Int64[np.ndarray, "documents"]) -> list[str]:
    """The text in pieces of so many characters, as far as it reaches."""
    ends = [end for end in np.cumsum(lengths).tolist() if end < len(text)]
    return [text[a:b] for a, b in pairwise([0, *ends, len(text)])]


def write_rows(path: Path, texts: Iterable[str]) -> Path:
    """A .jsonl with a row for each text."""
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    return path
