"""The files of configs/: each loads and says how to run it; published models have their size."""

import math
from pathlib import Path

import jax
import pytest
from jax.sharding import AbstractMesh

from shardlm.arguments import from_yaml, override
from shardlm.config import Config
from shardlm.mesh import AxisRules
from shardlm.mesh.axes import AXES, check_sizes
from shardlm.mesh.shardings import bytes_per_device
from shardlm.model.transformer import Transformer
from shardlm.optim import make_optimizer
from shardlm.train.state import abstract_state
from shardlm.validation import validate

FILES = sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))

# Model cards and papers; GPT-2's is the count of its published weights.
PARAMETERS = {
    "gpt2_124m": 124_439_808,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "qwen3_8b": 8_190_735_360,
    "mixtral_8x7b": 46_702_792_704,
}


def recipe(name: str) -> Config:
    return from_yaml(next(f for f in FILES if f.stem == name).read_text())


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_file(file):
    config = from_yaml(file.read_text(), file.name)
    validate(config)
    # A short run of any recipe needs one flag.
    validate(override(config, {"train.steps": max(config.optim.warmup_steps, 1)}))
    assert config.run.dir == f"runs/{file.stem}"
    first = file.read_text().splitlines()[0]
    assert first.startswith(f"# python scripts/train.py --config configs/{file.name}")


@pytest.mark.parametrize("name", PARAMETERS)
def test_published_models(name):
    """Counts as published; on 64 devices of `data`, nothing is whole on a device but counters, and
    masters and both moments take 12 bytes a parameter over 64."""
    config = recipe(name)
    sizes = dict.fromkeys(AXES, 1) | {"data": 64}
    transformer = Transformer(config.model, config.data.length)
    assert transformer.count() == PARAMETERS[name]
    rules = AxisRules.for_model(sizes, config.model, "all")
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    state = abstract_state(transformer, make_optimizer(config), mesh, rules)
    used = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        whole = math.prod(leaf.shape) * leaf.dtype.itemsize
        used += bytes_per_device(leaf)
        if whole > 4:
            assert bytes_per_device(leaf) * 64 == whole, jax.tree_util.keystr(path)
    assert used == pytest.approx(12 * PARAMETERS[name] / 64, rel=0.01)


@pytest.mark.parametrize(
    "name, data, expert, model",
    [
        ("llama3_8b", 64, 1, 1),
        ("llama3_8b", 16, 1, 4),
        ("llama3_70b", 32, 1, 8),
        ("mixtral_8x7b", 16, 8, 2),
    ],
)
def test_meshes_for_large_models(name, data, expert, model):
    sizes = dict.fromkeys(AXES, 1) | {"data": data, "expert": expert, "model": model}
    check_sizes(recipe(name), sizes)
