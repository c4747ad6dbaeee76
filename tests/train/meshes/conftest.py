"""A small model of odd sizes, compiled once for each mesh that a test names."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from shardlm.config import Config, DataConfig, MeshConfig, ModelConfig, OptimConfig, TrainConfig
from shardlm.mesh import AXES, make_mesh
from shardlm.train.engine import Engine
from shardlm.train.setup import build_engine, new_state
from shardlm.train.state import State, shardings
from shardlm.train.step import batch_sharding, make_train_step

BATCH, LENGTH, VOCAB = 16, 19, 67

# Most of a compilation goes into machine code that a test runs a few times.
QUICK_COMPILE: dict[str, Any] = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 11):
    QUICK_COMPILE["xla_cpu_use_fusion_emitters"] = False


class Layout(NamedTuple):
    """What of a run may change how it is done and not what it computes."""

    replica: int = 1
    data: int = 1
    model: int = 1
    shard_params: str = "all"
    micro_batches: int = 1
    context: int = 1
    context_comm: str = "ring"
    expert: int = 1
    stage: int = 1
    stage_rounds: int = 1

    def __str__(self) -> str:
        sizes = [f"{axis}{getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1]
        comm = [self.context_comm] if self.context > 1 else []
        rounds = [f"rounds{self.stage_rounds}"] if self.stage_rounds > 1 else []
        return "-".join([*sizes, *comm, *rounds, self.shard_params, str(self.micro_batches)])


class Lab:
    """Engines, compiled steps and recorded runs, each made once in a process."""

    Layout = Layout
    quick_compile = QUICK_COMPILE

    @staticmethod
    def config(layout: Layout = Layout(), optim: str = "sgd", dtype: str = "float32") -> Config:
        """Odd sizes, fewer key/value heads, and a loss in chunks that do not divide the tokens."""
        return Config(
            mesh=MeshConfig(
                replica=layout.replica,
                data=layout.data,
                expert=layout.expert,
                model=layout.model,
                shard_params=layout.shard_params,
                context=layout.context,
                context_comm=layout.context_comm,
                stage=layout.stage,
                stage_rounds=layout.stage_rounds,
            ),
            model=ModelConfig(
                layers=4,
                embed=48,
                heads=16,
                kv_heads=8,
                head_dim=6,
                mlp=40,
                vocab=VOCAB,
                qk_norm=True,
                dtype=dtype,
                # A ring attends block by block: here to several.
                attention="xla" if layout.context == 1 else "blockwise",
                attention_block=128 if layout.context == 1 else 2,
            ),
            data=DataConfig(length=LENGTH),
            train=TrainConfig(
                batch=BATCH,
                micro_batch=BATCH // layout.micro_batches,
                z_loss=1e-3,
                loss_chunk=7,
            ),
            optim=OPTIM[optim],
        )

    @staticmethod
    def engine(config: Config) -> Engine:
        return build_engine(config, make_mesh(config.mesh))

    @staticmethod
    @functools.cache
    def compiled(config: Config) -> "Compiled":
        return Compiled(Lab.engine(config))

    @staticmethod
    def batch(seed: int, rows: int = BATCH) -> dict[str, np.ndarray]:
        """Packed rows with padding and a target to be learned; rows 3, 5 and 12 have no target, the
        others each their own share."""
        rng = np.random.default_rng(seed)
        shape = (rows, LENGTH)
        segments = np.sort(rng.integers(0, 4, shape), 1)[:, ::-1]
        first = np.stack([np.searchsorted(-row, -row, "left") for row in segments])
        has_target = rng.random(shape) < rng.uniform(0.05, 1, (rows, 1))
        has_target[[3, 5, 12]] = False
        tokens = rng.integers(0, VOCAB, shape)
        batch = {
            "tokens": tokens,
            "targets": np.where(has_target & (segments > 0), (5 * tokens + 2) % VOCAB, -1),
            "segments": segments,
            "positions": np.arange(LENGTH) - first,
            "rows": np.arange(rows),
        }
        return {k: np.ascontiguousarray(v, np.int32) for k, v in batch.items()}

    @staticmethod
    def put(engine: Engine, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        return jax.device_put(batch, batch_sharding(engine))

    @staticmethod
    def fetch(tree: Any) -> dict[str, np.ndarray]:
        """Leaves by dotted path, as host copies."""
        return {
            jax.tree_util.keystr(path, simple=True, separator="."): np.array(leaf)
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        }

    @staticmethod
    @functools.cache
    def run(
        layout: Layout = Layout(), optim: str = "sgd", dtype: str = "float32", steps: int = 20
    ) -> "Run":
        """Train from the start, a new batch each step."""
        compiled = Lab.compiled(Lab.config(layout, optim, dtype))
        engine, step, state = compiled.engine, compiled.step, compiled.start()
        initial = Lab.fetch(state)
        metrics, after_one = [], {}
        for i in range(steps):
            state, values = step(state, Lab.put(engine, Lab.batch(i)))
            metrics.append({k: v.item() for k, v in Lab.fetch(values).items()})
            if i == 0:
                after_one = Lab.fetch(state)
        return Run(initial, after_one, Lab.fetch(state), metrics)


OPTIM = {
    # The momentum buffer after one update is the gradient itself.
    "sgd": OptimConfig(
        name="sgd",
        learning_rate=0.1,
        b1=0.9,
        schedule="constant",
        warmup_steps=0,
        weight_decay=0.0,
        clip_norm=0.0,
    ),
    "adamw": OptimConfig(
        name="adamw",
        learning_rate=1e-3,
        eps=1e-3,
        schedule="constant",
        warmup_steps=0,
        weight_decay=0.1,
        clip_norm=0.1,
    ),
}


class Compiled:
    """An engine, its initial state and its update, each compiled when it is first asked for."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @functools.cached_property
    def step(self) -> Any:
        """The update; the state is donated."""
        batch = jax.eval_shape(lambda: Lab.batch(0, self.engine.config.train.batch))
        lowered = make_train_step(self.engine).lower(self.engine.abstract, batch)
        return lowered.compile(compiler_options=QUICK_COMPILE)

    @functools.cached_property
    def initial(self) -> State:
        return jax.device_get(new_state(self.engine))

    def start(self) -> State:
        """The initial state, once more."""
        return jax.device_put(self.initial, shardings(self.engine.abstract))


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run left behind, on the host."""

    initial: dict[str, np.ndarray]
    after_one: dict[str, np.ndarray]
    final: dict[str, np.ndarray]
    metrics: list[dict[str, float]]

    @property
    def losses(self) -> np.ndarray:
        return np.array([m["loss"] for m in self.metrics])

    def gradients(self) -> dict[str, np.ndarray]:
        """Those of the first update of an sgd run."""
        return {
            name.split("trace.")[1]: leaf
            for name, leaf in self.after_one.items()
            if "trace." in name
        }

    def params(self) -> dict[str, np.ndarray]:
        """The last parameters."""
        return {k: v for k, v in self.final.items() if k.startswith("params.")}


@pytest.fixture(scope="session")
def lab() -> type[Lab]:
    return Lab
