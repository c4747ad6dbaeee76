"""Tiny runs, in this process by the command line's own functions, or in one that can be killed."""

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from shardlm import cli
from shardlm.arguments import override
from shardlm.checkpoint import CheckpointStore
from shardlm.observe import RunDirectory, read_metrics
from shardlm.train.setup import build_engine, build_mesh

ROOT = Path(__file__).parents[2]
TIMINGS = ("seconds", "data_seconds", "tokens_per_second", "mfu", "device_seconds")


@pytest.fixture(scope="module")
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Here, and in processes with the returned environment, a program is compiled once."""
    base = tmp_path_factory.getbasetemp()
    values = {
        "jax_compilation_cache_dir": str(
            (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compiled"
        ),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in values}
    for name, value in values.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield {name.upper(): str(value) for name, value in values.items()}
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of some 700 characters."""
    draw = random.Random(0)
    words = [draw.choice(["the", "cat", "sat", "on", "a", "mat"]) for _ in range(200)]
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(words))
    return path


class Runs:
    """Runs of one small model: kv_heads != heads, odd sizes, a constant rate, so that the length of
    a run, its evaluations and its saves do not change what is compiled."""

    def __init__(self, text: Path, environment: dict[str, str]) -> None:
        self.environment = os.environ | environment | {"PYTHONPATH": str(ROOT)}
        self.base = (
            f"--run.simulate_devices 8 --mesh.data 2 --data.sources {text} --data.split tail "
            "--data.length 11 --data.tokenizer characters --data.prefetch 4 "
            "--model.layers 1 --model.embed 24 --model.heads 4 --model.kv_heads 2 --model.mlp 20 "
            "--model.dtype float32 --train.batch 12 --train.steps 6 "
            "--optim.schedule constant --optim.warmup_steps 2 --optim.learning_rate 0.01 "
            "--eval.sample_tokens 0 --checkpoint.every_minutes 0"
        ).split()

    def arguments(self, directory: Path, flags: str = "") -> list[str]:
        """Command line of a run."""
        return [*self.base, "--run.dir", str(directory), *flags.split()]

    def train(self, directory: Path, flags: str = "") -> int:
        """Run here; returns the exit status."""
        return cli.run(cli.train, self.arguments(directory, flags))

    def process(self, directory: Path, flags: str = "", before: str = "") -> subprocess.Popen[str]:
        """Start a process that runs some Python before it trains."""
        code = f"import os, signal\n{before}\nfrom shardlm.cli import *\nleave(run(train))"
        return subprocess.Popen(
            [sys.executable, "-W", "error", "-c", code, *self.arguments(directory, flags)],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    @staticmethod
    def figures(directory: Path) -> list[dict[str, object]]:
        """metrics.jsonl without the timings."""
        records = read_metrics(directory / "metrics.jsonl")
        return [{k: v for k, v in r.items() if k not in TIMINGS} for r in records]

    @staticmethod
    def state(directory: Path, step: int, mesh: str = "") -> dict[str, np.ndarray]:
        """Every array of a checkpoint by name, restored as the run would restore it, perhaps on
        another mesh "data,model"."""
        config = RunDirectory(directory).read_config()
        assert config is not None
        if mesh:
            data, model = map(int, mesh.split(","))
            config = override(config, {"mesh.data": data, "mesh.model": model})
        engine = build_engine(config, build_mesh(config))
        state = CheckpointStore(directory / "checkpoints").restore(step, engine.abstract)
        leaves = jax.tree_util.tree_leaves_with_path(state)
        return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


@pytest.fixture(scope="module")
def runs(text: Path, compiled_once: dict[str, str]) -> Runs:
    return Runs(text, compiled_once)


@pytest.fixture(scope="module")
def finished(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """Makes copies of a run of 6 updates, evaluated and saved after every third."""
    master = tmp_path_factory.mktemp("finished") / "run"
    assert runs.train(master, "--eval.every_steps 3 --checkpoint.every_steps 3") == 0

    def copy(target: Path) -> Path:
        shutil.copytree(master, target)
        return target

    return copy
