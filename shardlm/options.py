"""The flags of the commands other than train. Imports no jax."""

from dataclasses import dataclass
from typing import Literal

from shardlm.config import ConfigError

MESH_KEYS = ("mesh.", "run.simulate_devices")
"""Configuration keys that these commands have as flags too: by default a model is spread over the
devices that are there, whatever it was trained on."""

TEXT_KEYS = ("data.sources", "data.cache")
"""Where the text of a run lies, for commands that read it again: it may have moved since. Its
tokenizer is in the run's own directory."""


def _check_path(name: str, path: str, what: str) -> None:
    """Refuse no path at all, which the system takes for the directory that one is in."""
    if not path:
        raise ConfigError(f"{name.upper()} is empty: name {what}")


@dataclass(frozen=True)
class EvaluateOptions:
    """Which model to evaluate."""

    run_dir: str
    """Directory of a run."""
    step: int | None = None
    """Checkpoint to use; default: the newest."""

    def __post_init__(self) -> None:
        _check_path("run_dir", self.run_dir, "the directory of a run")


MOST_IDS = 2**24
"""Of a tokenizer: more than any that is used, and some gigabytes while it is trained."""


@dataclass(frozen=True)
class TokenizerOptions:
    """A tokenizer made from the text."""

    train: Literal["none", "bpe"] = "none"
    """bpe: byte-level pairs, learnt from all of the text; none: data.tokenizer is used."""
    vocab: int = 8192
    """Ids of the tokenizer that is trained, at most."""

    def __post_init__(self) -> None:
        if not 1 <= self.vocab <= MOST_IDS:
            raise ConfigError(f"tokenizer.vocab is {self.vocab}: it must be from 1 to {MOST_IDS}")


@dataclass(frozen=True)
class PrepareOptions:
    """Where tokens go, and who makes them."""

    store: str
    """Directory of the store; the same command goes on where it was interrupted."""
    workers: int = 0
    """Processes that tokenize; 0: as many as are fastest (one for bytes and characters, and for the
    library tokenizers on few cores, where threads do it; else one for each core)."""
    tokenizer: TokenizerOptions = TokenizerOptions()
    """A tokenizer made from the text."""

    def __post_init__(self) -> None:
        _check_path("store", self.store, "a directory for the store")
        if not 0 <= self.workers <= 1024:
            raise ConfigError(f"workers is {self.workers}: it must be from 0 to 1024")


BENCHES = {
    "step": ("bytes", "micro_batches", "vocabulary_32k"),
    "data": ("loader", "prepare", "balance", "waiting", "opening"),
    "stages": ("stage_4", "stage_4_rounds_2", "stage_2"),
}
"""The parts of each benchmark."""


@dataclass(frozen=True)
class DescribeOptions:
    """Whose data to describe, and where to."""

    configuration: str
    """YAML file of a run; flags win over it."""
    html: str | None = None
    """File for the same page as HTML, with whole rows."""


@dataclass(frozen=True)
class BenchOptions:
    """What to measure."""

    name: Literal["step", "data", "stages"]
    """step: the update against one written by hand, on one device; data: what feeds it; stages: how
    long they are idle, against the formula."""
    rounds: int = 10
    """How often what is timed is repeated; what takes long, a third as often."""
    every: bool = False
    """Of step: choose among all 16 forms of the hand-written step, else among 5 (a quarter of the
    time)."""
    only: str = "all"
    """One part. Of step: bytes, micro_batches, vocabulary_32k; of data: loader, prepare, balance,
    waiting, opening; of stages: stage_4, stage_4_rounds_2, stage_2."""

    def __post_init__(self) -> None:
        if not 2 <= self.rounds < 2**31:
            raise ConfigError(f"rounds is {self.rounds}: it must be at least 2, for quartiles")
        parts = ("all", *BENCHES[self.name])
        if self.only not in parts:
            raise ConfigError(
                f"only is {self.only!r}: with {self.name} it must be one of {', '.join(parts)}"
            )
        if self.every and self.name != "step":
            raise ConfigError(f"every is true: it is of step alone; leave it out with {self.name}")


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn."""

    tokens: int = 200
    """Tokens to add at most; a document's end stops earlier."""
    temperature: float = 0.8
    """Divides the logits; 0 takes the likeliest."""
    top_k: int = 0
    """Keep this many likeliest tokens; 0: all."""
    top_p: float = 1.0
    """Keep the likeliest tokens that together have this probability (arXiv 1904.09751)."""
    seed: int = 0
    """A prompt's text depends on the seed, its place among the prompts, and nothing else."""

    def __post_init__(self) -> None:
        for name, value, good, need in (
            ("tokens", self.tokens, 1 <= self.tokens <= 2**20, f"from 1 to {2**20}"),
            (
                "temperature",
                self.temperature,
                self.temperature == 0 or self.temperature >= 1e-3,
                "0, or at least 0.001",
            ),
            ("top_k", self.top_k, 0 <= self.top_k < 2**31, f"from 0 to {2**31 - 1}"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("seed", self.seed, 0 <= self.seed < 2**32, f"from 0 to {2**32 - 1}"),
        ):
            if not good:
                raise ConfigError(f"{name} is {value}: it must be {need}")


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(Sampling):
    """What to generate, and from which model."""

    run_dir: str
    """Directory of a run; it may still be training."""
    prompt: tuple[str, ...] = ()
    """Text to continue; several flags, several texts. Default: eval.prompt of the run."""
    step: int | None = None
    """Checkpoint to use; default: the newest."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_path("run_dir", self.run_dir, "the directory of a run")
