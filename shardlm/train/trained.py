"""A trained model, opened from the directory of its run on any mesh."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from shardlm.arguments import override
from shardlm.checkpoint import CheckpointError, CheckpointStore
from shardlm.config import Config, ConfigError
from shardlm.data import Tokenizer, from_json
from shardlm.mesh import make_mesh, simulate_devices
from shardlm.mesh.axes import check_axes, check_model
from shardlm.model.transformer import Params
from shardlm.observe import RunDirectory
from shardlm.train.engine import Engine
from shardlm.train.setup import build_engine
from shardlm.train.state import in_stage_order
from shardlm.validation import validate


class Trained(NamedTuple):
    """A model and where it comes from."""

    engine: Engine
    params: Params
    tokenizer: Tokenizer
    step: int
    """Updates it was trained for."""
    metadata: dict[str, Any]
    """Of its checkpoint."""


def open_trained(run_dir: str, changes: Mapping[str, Any], step: int | None = None) -> Trained:
    """Read a run that may still be training: its lock is not needed, since its files are whole at
    any moment. Only the parameters are read.

    Args:
      run_dir: directory of the run.
      changes: of the configuration, by dotted name: the mesh and the devices.
      step: checkpoint to take; default: the newest complete one.

    Raises:
      ConfigError: not a run, no checkpoint yet, or a mesh that the devices or the model do not
        allow.
      CheckpointError: a checkpoint that is damaged or of another model.
    """
    directory = RunDirectory(run_dir)
    config = directory.read_config() if directory.path.is_dir() else None
    if config is None:
        raise ConfigError(
            f"{run_dir} is no run, which is a directory with a config.yaml: name that of a run"
        )
    # The implementation of attention is a matter of the devices.
    config = override(config, {**changes, "model.attention": "auto"})
    validate(config)
    check_axes(config.mesh)
    try:
        tokenizer = from_json(directory.tokenizer_path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{directory.tokenizer_path} cannot be read: {error}") from None
    store = CheckpointStore(directory.checkpoints_path)
    _choose(store, step)
    engine = _engine(config)
    while True:
        chosen = _choose(store, step)
        try:
            params = store.restore(chosen, {"params": engine.abstract["params"]}, partial=True)[
                "params"
            ]
            params = in_stage_order(params, engine.transformer)
            return Trained(engine, params, tokenizer, chosen, store.metadata(chosen))
        except CheckpointError:
            # A run that is training removes old checkpoints.
            if _choose(store, step) == chosen:
                raise


def _choose(store: CheckpointStore, step: int | None) -> int:
    steps = store.steps()
    if not steps:
        raise ConfigError(f"{store.directory} has no complete checkpoint yet: let the run save one")
    if step is not None and step not in steps:
        raise ConfigError(
            f"step is {step}, and the complete checkpoints in {store.directory} are of steps "
            f"{', '.join(map(str, steps))}"
        )
    return steps[-1] if step is None else step


def _engine(config: Config) -> Engine:
    if config.run.simulate_devices:
        simulate_devices(config.run.simulate_devices)
    mesh = make_mesh(config.mesh)
    # The batch of the training does not matter here.
    check_model(config.model, mesh.shape, config.mesh)
    return build_engine(config, mesh)
