"""Where a run stands: what its directory already holds, and what changes now."""

from collections.abc import Callable
from typing import NamedTuple

from shardlm.checkpoint import CheckpointStore
from shardlm.config import Config, ConfigError
from shardlm.data.balance import Speeds
from shardlm.files import replace_text
from shardlm.observe import RunDirectory, read_metrics
from shardlm.optim import learning_rate
from shardlm.train.account import Account
from shardlm.train.setup import refuse_changes
from shardlm.train.start import Start
from shardlm.words import many

Say = Callable[[str], None]


class Position(NamedTuple):
    """How far a run is."""

    step: int
    """Updates made."""
    tokens: int
    """Loss tokens seen."""
    account: Account
    """What was read for them."""
    speeds: Speeds | None
    """Of the devices that it ran on last, if they were measured."""


def find_position(start: Start, config: Config, store: CheckpointStore, say: Say) -> Position:
    """The position of the newest complete checkpoint.

    A directory without one has nothing that another configuration could spoil.

    Args:
      start: directory and data.
      config: resolved.
      store: the run's checkpoints.
      say: takes a line for the user.

    Raises:
      ConfigError: another configuration, other text, or fewer updates than are made.
      CheckpointError: the directory of checkpoints cannot be used.
    """
    first, where = store.latest() or 0, start.directory.path
    for step, why in store.broken().items():
        say(f"checkpoint {step} is passed over: {why}")
    if not first:
        return Position(0, 0, Account.empty(start.data.train), None)
    saved = store.metadata(first)
    same_text = saved.get("data") == start.data.fingerprint
    if start.before is not None:
        refuse_changes(start.before, config, same_text)
    if first > config.train.steps:
        raise ConfigError(
            f"train.steps is {config.train.steps} and the run in {where} has made "
            f"{many(first, 'update')}: ask for at least as many, or name another run.dir"
        )
    if not same_text:
        raise ConfigError(
            f"the run in {where} was trained on other text than data.sources "
            f"{' '.join(config.data.sources)} hold now: restore the text to resume, name where it "
            "is, or name another run.dir"
        )
    say(f"resuming after update {first:,}")
    speeds = saved["speeds"] and Speeds.from_json(saved["speeds"])
    return Position(first, saved["tokens"], Account.from_json(saved["account"]), speeds)


def write_config(start: Start, config: Config, first: int, skipped: int, say: Say) -> None:
    """Write what the run is from here, now that it can go on, and state a changed `train.steps`:
    the schedule is laid out over all updates.

    Args:
      start, config, say: as for `find_position`.
      first: updates made.
      skipped: of them, those that the schedule did not count.
    """
    before = start.before
    if first and before is not None and before.train.steps != config.train.steps:
        effect = "no update is left"
        if first < config.train.steps:
            n = first + 1 - skipped
            rate, instead = (float(learning_rate(c)(n)) for c in (config, before))
            changed = (
                f"stays {rate:.4g}" if rate == instead else f"is {rate:.4g}, not {instead:.4g}"
            )
            effect = f"the learning rate of update {first + 1} {changed}"
        say(f"train.steps {before.train.steps} -> {config.train.steps}: {effect}")
    if before != config:
        start.directory.write_config(config)
    replace_text(start.directory.tokenizer_path, start.data.tokenizer.to_json())


def has_evaluation(directory: RunDirectory, step: int) -> bool:
    """Whether the metrics have an evaluation after this update."""
    path = directory.metrics_path
    records = read_metrics(path) if path.exists() else []
    return any(r["step"] == step and "eval_loss" in r for r in records)
