"""Speed of the engine's update against a step written by hand, in one run and in alternation."""

import gc
import statistics
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from shardlm.bench.reference import Form, Shape, forms, make_step, nearest_forms
from shardlm.bench.report import Say, Table
from shardlm.config import Config, DataConfig, MeshConfig, ModelConfig, OptimConfig, TrainConfig
from shardlm.mesh import make_mesh
from shardlm.options import BenchOptions
from shardlm.train.setup import build_engine, new_state
from shardlm.train.step import batch_sharding, make_train_step

WORKLOADS = {
    "bytes": Shape(),
    "micro_batches": Shape(micro_batches=4),
    "vocabulary_32k": Shape(vocab=32768),
}


class Runner:
    """A compiled update with its state, timed one call at a time."""

    def __init__(
        self, name: str, compiled: Any, state: Any, batch: tuple[Any, ...], started: float
    ):
        self.name = name
        self.compiled = compiled
        self.state = state
        self.batch = batch
        self.seconds: list[float] = []
        self.step()
        self.first = time.perf_counter() - started
        """Seconds from tracing to the end of the first update."""
        self.seconds.clear()

    def step(self) -> float:
        """One update; returns its seconds."""
        begin = time.perf_counter()
        self.state, loss = self.compiled(self.state, *self.batch)
        jax.block_until_ready((self.state, loss))
        self.seconds.append(time.perf_counter() - begin)
        return self.seconds[-1]

    @property
    def peak_bytes(self) -> int:
        """Arguments and temporaries of the compiled program."""
        memory = self.compiled.memory_analysis()
        return memory.argument_size_in_bytes + memory.temp_size_in_bytes


def hand_written(shape: Shape, form: Form) -> Runner:
    """The reference in one form."""
    started = time.perf_counter()
    step, state = make_step(shape, form)
    tokens = random_tokens(shape.batch, shape.length)
    batch = tokens[:, :-1], tokens[:, 1:]
    return Runner(str(form), step.lower(state, *batch).compile(), state, batch, started)


def engine(shape: Shape, dtype: str) -> Runner:
    """The engine on one device, with everything it does beside the reference's work: packed
    documents, clipping, the guard, exact token counts."""
    config = engine_config(shape, dtype)
    return run_engine(config, make_mesh(config.mesh, jax.devices()[:1]))


def run_engine(config: Config, mesh: Mesh) -> Runner:
    """The engine on a mesh, with random tokens."""
    started = time.perf_counter()
    parts = build_engine(config, mesh)
    tokens = random_tokens(config.batch, config.data.length)
    ones = jnp.ones_like(tokens[:, :-1])
    batch = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segments": ones,
        "positions": jnp.cumsum(ones, 1) - 1,
        "rows": jnp.arange(config.batch),
    }
    batch = jax.device_put(batch, batch_sharding(parts))
    compiled = make_train_step(parts).lower(parts.abstract, batch).compile()
    return Runner(f"engine {parts.dtype}", compiled, new_state(parts), (batch,), started)


def engine_config(shape: Shape, dtype: str) -> Config:
    """The engine's configuration of the reference's workload."""
    return Config(
        mesh=MeshConfig(data=1),
        model=ModelConfig(
            layers=shape.layers,
            embed=shape.embed,
            heads=shape.heads,
            head_dim=shape.head_dim,
            mlp=shape.mlp,
            vocab=shape.vocab,
            dtype=dtype,  # type: ignore[arg-type]
            scan_unroll=0,
            attention_block=64,  # As the reference.
        ),
        data=DataConfig(length=shape.length),
        train=TrainConfig(batch=shape.batch, micro_batch=shape.batch // shape.micro_batches),
        optim=OptimConfig(schedule="constant", warmup_steps=0),
    )


def random_tokens(rows: int, length: int) -> jax.Array:
    """Bytes, int32 [rows, length + 1]."""
    values = np.random.default_rng(0).integers(0, 256, (rows, length + 1))
    return jnp.asarray(values, jnp.int32)


def best_form(shape: Shape, rounds: int, every: bool, say: Say) -> Form:
    """The fastest form of the reference by its best time in a few updates.

    Args:
      every: try all combinations; else those one switch away from a good start, which is a quarter
        of the compile time.
    """
    candidates = list(forms()) if every else [Form(), *nearest_forms(Form())]
    times: dict[Form, float] = {}
    for form in candidates:
        runner = hand_written(shape, form)
        times[form] = min(runner.step() for _ in range(rounds))
        say(f"  {form!s:38} {shape.batch * shape.length / times[form]:8,.0f} tokens/s")
        del runner
        gc.collect()
    return min(times, key=lambda form: times[form])


def bench_step(options: BenchOptions, say: Say = print) -> dict[str, Any]:
    """Compare engine and reference on each workload.

    The ratio is the median over rounds of reference seconds over engine seconds, each pair timed
    one after the other, so that what else the machine does weighs on both.
    """
    table = Table(
        ("workload", "engine tokens/s", "reference tokens/s", "ratio", "first step s", "peak MiB")
    )
    figures: dict[str, Any] = {}
    for name, shape in WORKLOADS.items():
        if options.only not in ("all", name):
            continue
        say(f"{name}: forms of the hand-written step")
        form = best_form(shape, max(options.rounds // 3, 3), options.every, say)
        reference, ours = hand_written(shape, form), engine(shape, "auto")
        ratios = []
        for i in range(options.rounds):
            pair = (reference, ours) if i % 2 else (ours, reference)
            for runner in pair:
                runner.step()
            ratios.append(reference.seconds[-1] / ours.seconds[-1])
        rate = partial(_rate, shape)
        figures[name] = {
            "ratio": statistics.median(ratios),
            "ratio_quartiles": statistics.quantiles(ratios, n=4)[::2],
            "engine_tokens_per_second": rate(ours),
            "reference_tokens_per_second": rate(reference),
            "reference_form": str(form),
            "engine_dtype": ours.name.removeprefix("engine "),
            "first_step_seconds": ours.first,
            "reference_first_step_seconds": reference.first,
            "peak_bytes": ours.peak_bytes,
            "reference_peak_bytes": reference.peak_bytes,
        }
        f = figures[name]
        table.add(
            name,
            f"{f['engine_tokens_per_second']:,.0f}",
            f"{f['reference_tokens_per_second']:,.0f} ({form})",
            f"{f['ratio']:.3f}",
            f"{ours.first:.1f} / {reference.first:.1f}",
            f"{ours.peak_bytes / 2**20:,.0f} / {reference.peak_bytes / 2**20:,.0f}",
        )
        del reference, ours
        gc.collect()
    say(str(table))
    return figures


def _rate(shape: Shape, runner: Runner) -> float:
    """Tokens a second by the best update: what the program can do when it is left alone."""
    return shape.batch * shape.length / min(runner.seconds)
