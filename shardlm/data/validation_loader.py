"""The validation split in batches."""

from collections.abc import Iterator, Sequence

import numpy as np

from shardlm.data.corpus import Corpus
from shardlm.data.rows import Batch, ConcatenatedRows, lay_out
from shardlm.data.summary import Summary, check_predictable, summarize


class ValidationLoader:
    """The whole validation split, in the order of the text."""

    def __init__(self, corpora: Sequence[Corpus], *, length: int) -> None:
        """
        Raises:
          DataError: no token to predict.
        """
        check_predictable(corpora, "validation")
        self.corpus, self.length = Corpus.join(corpora), length
        self._rows = ConcatenatedRows(self.corpus, length)

    def summary(self) -> Summary:
        """Documents, tokens and rows."""
        return summarize([self.corpus], self._rows.rows, self.length)

    def batches(self, batch: int) -> Iterator[Batch]:
        """Every row once, int32 [batch, T]; the last batch is filled up with rows of padding."""
        for start in range(0, self._rows.rows, batch):
            rows = np.arange(start, start + batch)
            segments = self._rows.segments(rows, np.zeros_like(rows))
            found = lay_out(self.corpus.tokens, segments, batch, self.length)
            yield {**found, "rows": np.arange(batch, dtype=np.int32)}
