"""The size of a split."""

from collections.abc import Sequence
from dataclasses import dataclass

from shardlm.data.corpus import Corpus
from shardlm.data.errors import DataError
from shardlm.words import many


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
            f"{many(self.documents, 'document')}, {many(self.tokens, 'token')}, "
            f"{many(self.rows, 'row')} of {self.length:,}"
        )


def summarize(corpora: Sequence[Corpus], rows: int, length: int) -> Summary:
    """The figures of a split of so many rows."""
    return Summary(
        documents=sum(c.documents for c in corpora),
        tokens=sum(c.size for c in corpora),
        loss_tokens=sum(c.loss_tokens for c in corpora),
        rows=rows,
        length=length,
    )


def check_predictable(corpora: Sequence[Corpus], side: str) -> None:
    """Refuse a split without a token to predict."""
    if sum(corpus.loss_tokens for corpus in corpora) < 1:
        raise DataError(
            f"the {side} text has {many(sum(c.size for c in corpora), 'token')} in "
            f"{many(sum(c.documents for c in corpora), 'document')}: at least one document of two "
            "tokens is needed, since the first of each is not predicted: give more text"
        )
