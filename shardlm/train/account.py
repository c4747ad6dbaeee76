"""What a run has read so far: part of its checkpoints, so that a resumed run counts on."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shardlm.data import Loader, Update
from shardlm.words import many


@dataclass(frozen=True)
class Account:
    """Sums over updates."""

    tokens: tuple[int, ...]
    """Predicted tokens of each source."""
    busiest: float = 0.0
    """Estimated time of the device that is done last in an update; see `Update`."""
    mean: float = 0.0
    """Estimated time of a device on average."""

    @classmethod
    def empty(cls, loader: Loader) -> "Account":
        """Before the first update."""
        return cls((0,) * len(loader.corpora))

    def add(self, update: Update) -> "Account":
        """With one more update."""
        return Account(
            tuple(n + int(more) for n, more in zip(self.tokens, update.tokens, strict=True)),
            self.busiest + float(update.time.max()),
            self.mean + float(update.time.mean()),
        )

    @property
    def balance(self) -> float:
        """Time of the busiest devices over the mean, of the whole run: 1 where all are done at
        once, which is how long the run takes over how long it need take."""
        return self.busiest / self.mean if self.mean else 1.0

    def epochs(self, loader: Loader) -> list[float]:
        """How often each source has been read: its predicted tokens over those of an epoch."""
        sizes = [corpus.loss_tokens for corpus in loader.corpora]
        return [n / size if size else 0.0 for n, size in zip(self.tokens, sizes, strict=True)]

    def describe(self, loader: Loader) -> str:
        """A line for each source."""
        total = sum(self.tokens) or 1
        return "\n".join(
            f"read        {corpus.name}: {many(n, 'token')} ({n / total:.1%}), {epochs:.2f} epochs"
            for corpus, n, epochs in zip(
                loader.corpora, self.tokens, self.epochs(loader), strict=True
            )
        )

    def to_json(self) -> dict[str, Any]:
        """What `from_json` makes an equal account of."""
        return asdict(self)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "Account":
        """The account that `to_json` wrote."""
        return cls(tuple(stored["tokens"]), stored["busiest"], stored["mean"])
