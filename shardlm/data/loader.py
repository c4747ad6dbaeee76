"""Batches as a function of (seed, step).

Update `step` (from 0) takes the rows `step * batch` up to `(step + 1) * batch` of the epochs one
after the other; a batch may end one epoch and begin the next. Each epoch has an order of its own,
and cuts the text into rows at places of its own. There is no state: resuming is asking for another
step. Grain prepares batches ahead of the step.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from shardlm.data.corpus import Corpus
from shardlm.data.errors import DataError
from shardlm.data.rows import Batch, cut_rows, rows_per_epoch
from shardlm.data.shuffle import ROUNDS, shuffled

ALL_ROWS = slice(None)


@dataclass(frozen=True)
class Summary:
    """The size of a split: documents, tokens, and in an epoch the predicted tokens and rows."""

    documents: int
    tokens: int
    loss_tokens: int
    rows: int
    length: int

    def __str__(self) -> str:
        return (
            f"{self.documents:,} documents, {self.tokens:,} tokens, "
            f"{self.rows:,} rows of {self.length}"
        )


def summarize(corpus: Corpus, length: int) -> Summary:
    """The figures of `corpus` in rows of `length`."""
    return Summary(
        documents=corpus.documents,
        tokens=len(corpus.tokens),
        loss_tokens=corpus.loss_tokens,
        rows=rows_per_epoch(corpus, length),
        length=length,
    )


class Loader:
    """Training batches: every token once an epoch, in an order given by (seed, epoch)."""

    def __init__(
        self, corpus: Corpus, *, seed: int, batch: int, length: int, prefetch: int = 2
    ) -> None:
        """
        Args:
          corpus: the training text.
          seed: at least 0; decides the order of the rows and where the text is cut.
          batch: B, rows of an update.
          length: T, tokens of a row.
          prefetch: batches that `iterate` prepares ahead, at least 1.

        Raises:
          DataError: fewer rows than a batch, or no token to predict.
        """
        _check_predictable(corpus, "training")
        self.corpus, self.batch, self.length = corpus, batch, length
        self.rows_per_epoch = rows_per_epoch(corpus, length)
        if self.rows_per_epoch < batch:
            raise DataError(_too_few_rows(len(corpus.tokens), self.rows_per_epoch, batch, length))
        self._seed, self._prefetch = seed, prefetch

    def summary(self) -> Summary:
        """Documents, tokens and rows of an epoch."""
        return summarize(self.corpus, self.length)

    def rows_of_step(self, step: int) -> Int64[np.ndarray, "B"]:
        """Global numbers of the rows of update `step`: the epoch times
        `rows_per_epoch` plus the row within the epoch. In the course of a run none comes twice."""
        epoch, row, _ = self._draw(step, ALL_ROWS)
        return epoch * self.rows_per_epoch + row

    def batch_at(self, step: int, rows: slice = ALL_ROWS) -> Batch:
        """The batch of update `step`, from 0, or only the given rows of it.

        Returns:
          tokens, targets, segments and positions; see `rows.cut_rows`.
        """
        _, row, phase = self._draw(step, rows)
        return cut_rows(self.corpus, self.length, row, phase)

    def iterate(self, start_step: int = 0, rows: slice = ALL_ROWS) -> Iterator[Batch]:
        """The batches of the updates from `start_step` on, without end, prepared ahead in a
        thread. Closing the generator (or dropping it) ends the thread."""
        # Imported only for those who train, and not when the first batch is drawn in a thread:
        # importing it changes `__import__` for a while, for every thread (etils.epy.lazy_imports).
        import grain

        batches = iter(
            grain.MapDataset.range(start_step, sys.maxsize)
            .map(lambda step: self.batch_at(step, rows))
            .to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=self._prefetch))
        )

        def iterate() -> Iterator[Batch]:
            try:
                yield from batches
            finally:
                batches.close()

        return iterate()

    def _draw(self, step: int, rows: slice) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Epoch, row within the epoch and phase of the rows of update `step`, int64 each."""
        index = np.arange(step * self.batch, (step + 1) * self.batch)[rows]
        epoch, place = np.divmod(index, self.rows_per_epoch)
        row, phase = np.empty_like(place), np.empty_like(place)
        for e in np.unique(epoch).tolist():
            state = np.random.SeedSequence([self._seed, e]).generate_state(1 + ROUNDS, np.uint64)
            of_epoch = epoch == e
            row[of_epoch] = shuffled(place[of_epoch], self.rows_per_epoch, state[1:])
            phase[of_epoch] = int(state[0]) % len(self.corpus.tokens)
        return epoch, row, phase


class ValidationLoader:
    """The whole validation split, in the order of the text."""

    def __init__(self, corpus: Corpus, *, length: int) -> None:
        """
        Raises:
          DataError: no token to predict.
        """
        _check_predictable(corpus, "validation")
        self.corpus, self.length = corpus, length

    def summary(self) -> Summary:
        """Documents, tokens and rows."""
        return summarize(self.corpus, self.length)

    def batches(self, batch: int) -> Iterator[Batch]:
        """Every row once, int32 [batch, T]; the last batch is filled up with rows of padding."""
        for start in range(0, rows_per_epoch(self.corpus, self.length), batch):
            rows = np.arange(start, start + batch)
            yield cut_rows(self.corpus, self.length, rows, np.zeros_like(rows))


def _check_predictable(corpus: Corpus, side: str) -> None:
    if corpus.loss_tokens < 1:
        raise DataError(
            f"the {side} text has {len(corpus.tokens)} tokens in {corpus.documents} documents: "
            "at least one document of two tokens is needed, since the first of each is not "
            "predicted: give more text"
        )


def _too_few_rows(tokens: int, rows: int, batch: int, length: int) -> str:
    message = (
        f"train.batch is {batch} and the training text has only {rows} rows of data.length "
        f"{length} ({tokens} tokens): give more text, set train.batch to {rows} or less"
    )
    # The longest rows of which there are `batch`.
    if (shorter := (tokens - 1) // (batch - 1)) >= 2:
        message += f", or data.length to {shorter} or less"
    return message
