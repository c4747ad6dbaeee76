"""The training run, read from top to bottom: directory, data, mesh, engine, state, updates, end."""

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from shardlm.checkpoint import CheckpointStore, SaveError, SavePolicy
from shardlm.config import Config, validate
from shardlm.data import Data, load_data
from shardlm.generate import Sampling, generate
from shardlm.mesh.axes import check_axes
from shardlm.model.flops import flops_per_token
from shardlm.observe import (
    Console,
    DelayedMetrics,
    Fetched,
    MetricsWriter,
    RunDirectory,
    mfu,
    peak_memory,
    plot_loss,
    update_record,
)
from shardlm.optim import learning_rate
from shardlm.train.arithmetic import Arithmetic
from shardlm.train.evaluate import make_evaluate
from shardlm.train.setup import build_engine, build_mesh, refuse_changes, resolve_vocab
from shardlm.train.signals import StopRequest
from shardlm.train.state import State, init_state, shardings
from shardlm.train.step import Engine, batch_sharding, make_train_step


class TrainingError(RuntimeError):
    """A run that cannot go on: what happened and what to do."""


TOKENIZER_FILE = "tokenizer.json"
PICTURE_FILE = "loss.png"


def train(config: Config, resume_command: str, started: float | None = None) -> int:
    """Train, or resume, the run in `config.run.dir`.

    Args:
      config: what to do.
      resume_command: what a user types to go on; printed at the end.
      started: `time.time()` of the start of the process, for the time to the first update.

    Returns:
      The exit status: 0 finished, 128+N stopped by signal N with everything saved.

    Raises:
      ConfigError: the configuration, data, directory or checkpoint cannot be used.
      TrainingError: gradients that stay NaN or infinite, or a last state that cannot be saved.
    """
    started = time.time() if started is None else started
    validate(config)
    check_axes(config.mesh)
    with StopRequest() as stop, RunDirectory.open(config.run.dir, config.run.fresh) as directory:
        before = directory.read_config()
        data = load_data(config)
        config = resolve_vocab(config, data)
        engine = build_engine(config, build_mesh(config))
        config = engine.config
        if before is not None:
            refuse_changes(before, config)
        with contextlib.closing(_store(directory, config)) as store:
            run = _Run(engine, data, directory, store, stop, resume_command, started)
            return run.go(new=before is None)


def _store(directory: RunDirectory, config: Config) -> CheckpointStore:
    keep = config.checkpoint
    return CheckpointStore(directory.checkpoints_path, keep.keep, keep.keep_every)


@dataclass
class _Run:
    """A run whose parts are all there."""

    engine: Engine
    data: Data
    directory: RunDirectory
    store: CheckpointStore
    stop: StopRequest
    resume_command: str
    started: float

    def go(self, new: bool) -> int:
        config = self.engine.config
        self.console = Console(config.train.steps, config.run.log_every_steps)
        self._describe()
        first, self.tokens = self._position()
        if new:
            (self.directory.path / TOKENIZER_FILE).write_text(self.data.tokenizer.to_json())
            self.directory.write_config(config)
        self.rate = learning_rate(config)
        self.skipped = 0
        self.per_token = flops_per_token(config.model, config.data.length)
        state, step = self._state_and_step(first)
        with contextlib.closing(MetricsWriter(self.directory.metrics_path)) as self.writer:
            if self.writer.truncate_after(first) < first:
                self.console.say(f"metrics.jsonl has no lines up to step {first}: some were lost")
            self.evaluate = (
                make_evaluate(self.engine, self.data.validation) if self.data.validation else None
            )
            return self._updates(state, step, first)

    def _describe(self) -> None:
        """Say what will be done."""
        engine, config = self.engine, self.engine.config
        arithmetic = Arithmetic.of(config, engine.mesh.shape, self.data.train.rows_per_epoch)
        axes = " x ".join(f"{a} {n}" for a, n in engine.mesh.shape.items() if n > 1)
        device = engine.mesh.devices.flat[0]
        self.console.say(
            f"{self.data.summary()}\n"
            f"model       {engine.transformer.count():,} parameters, {config.model.layers} layers, "
            f"width {config.model.embed}, computing in {engine.dtype}\n"
            f"mesh        {axes or 'one device'} ({engine.mesh.size} {device.device_kind})\n"
            f"{arithmetic}"
        )

    def _position(self) -> tuple[int, int]:
        """Updates done and tokens seen, by the newest complete checkpoint."""
        first = self.store.latest() or 0
        for step, why in self.store.broken().items():
            self.console.say(f"checkpoint {step} is passed over: {why}")
        if not first:
            return 0, 0
        saved = self.store.metadata(first)
        if saved["data"] != self.data.fingerprint:
            raise TrainingError(
                f"{self.directory.path} was trained on other text than data.sources holds now: "
                "restore the text to resume, or name another run.dir"
            )
        self.console.say(f"resuming after update {first:,}")
        return first, saved["tokens"]

    def _state_and_step(self, first: int) -> tuple[State, Any]:
        """The state to begin with and the compiled update. Both take seconds, so side by side."""
        engine = self.engine

        def state() -> State:
            if first:
                return self.store.restore(first, engine.abstract)
            start = jax.jit(
                partial(init_state, engine.transformer, engine.optimizer, engine.config.run.seed),
                out_shardings=shardings(engine.abstract),
            )
            return start()

        batch = jax.eval_shape(lambda: dict(self.data.train.batch_at(0)))
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(state)
            step = make_train_step(engine).lower(engine.abstract, batch).compile()
            return future.result(), step

    def _updates(self, state: State, step: Any, first: int) -> int:
        config = self.engine.config
        policy = SavePolicy(config.checkpoint.every_steps, config.checkpoint.every_minutes)
        sharding = batch_sharding(self.engine)
        self.delayed = DelayedMetrics()
        saved_step, saved_at = first, time.monotonic()
        done = first
        with contextlib.closing(self.data.train.iterate(first)) as batches:
            while done < config.train.steps and not self.stop.signal:
                state, metrics = step(state, jax.device_put(next(batches), sharding))
                done += 1
                self._record(self.delayed.push(done, metrics))
                if done == first + 1:
                    self._record(self.delayed.flush())
                    self.console.say(f"first update {time.time() - self.started:.1f} s after start")
                every = config.eval.every_steps
                if every and done % every == 0 and done < config.train.steps:
                    self._evaluate(done, state)
                if policy.due(done, time.monotonic(), saved_step, saved_at):
                    with self._kept_going(done):
                        self._save(done, state)
                    saved_step, saved_at = done, time.monotonic()
        self._record(self.delayed.flush())
        if done >= config.train.steps:
            self._evaluate(done, state)
        self._save_last(done, state)
        plot_loss(
            self.directory.metrics_path,
            self.directory.path / PICTURE_FILE,
            title=self.directory.path.name,
        )
        if self.stop.signal:
            self.console.say(f"stopped by signal {self.stop.signal} after update {done:,}, saved")
            self.console.say(f"resume with: {self.resume_command}")
            return 128 + self.stop.signal
        self._finish(state)
        return 0

    def _record(self, fetched: Fetched | None) -> None:
        """Write the line of an update, and stop if it is one skipped too many."""
        if fetched is None:
            return
        config, values = self.engine.config, fetched.values
        self.tokens += values["tokens"]
        per_second = values["tokens"] / fetched.seconds
        record = update_record(
            step=fetched.step,
            loss=values["loss"],
            grad_norm=values["grad_norm"],
            learning_rate=self.rate(fetched.step - values["skipped"]),
            tokens=self.tokens,
            seconds=fetched.seconds,
            tokens_per_second=per_second,
            mfu=mfu(per_second * self.per_token, list(self.engine.mesh.devices.flat)),
            skipped=values["consecutive"] > 0,
        )
        self.writer.write(record)
        self.console.update(record)
        if values["consecutive"] >= config.optim.max_skipped:
            raise TrainingError(
                f"the gradients of the last {values['consecutive']} updates, up to update "
                f"{fetched.step}, are not finite (loss {values['loss']}): lower "
                f"optim.learning_rate ({config.optim.learning_rate}) or look at the data of those "
                "updates; nothing was learned from them, and the checkpoints before are good"
            )

    def _evaluate(self, step: int, state: State) -> None:
        if self.evaluate is None:
            return
        self._record(self.delayed.flush())
        loss = self.evaluate(state["params"])
        self.writer.write({"step": step, "eval_loss": loss})
        self.console.evaluation(step, loss)

    def _save(self, step: int, state: State) -> None:
        """Save in the background. The lines up to this step are on the disk first."""
        self._record(self.delayed.flush())
        self.writer.sync()
        self.store.save(step, state, {"tokens": self.tokens, "data": self.data.fingerprint})

    @contextlib.contextmanager
    def _kept_going(self, step: int) -> Iterator[None]:
        """A save that fails is said, and tried again when the next is due."""
        try:
            yield
        except SaveError as error:
            self.console.say(f"checkpoint {step} was not saved: {error}")

    def _save_last(self, step: int, state: State) -> None:
        with self._kept_going(step):
            self.store.wait()
        try:
            if step:
                self._save(step, state)
                self.store.wait()
        except SaveError as error:
            raise TrainingError(
                f"the state after update {step} could not be saved: {error}; resuming starts from "
                f"checkpoint {self.store.latest()}"
            ) from error

    def _finish(self, state: State) -> None:
        """Sample, memory, picture, and how to go on."""
        config = self.engine.config
        if config.eval.sample_tokens:
            sampling = Sampling(tokens=config.eval.sample_tokens, seed=config.run.seed)
            prompt = config.eval.prompt
            (text,) = generate(
                self.engine, state["params"], self.data.tokenizer, [prompt], sampling
            )
            self.console.say(f"\nsample after {prompt!r}:\n{text}\n")
        memory = peak_memory(list(self.engine.mesh.devices.flat))
        self.console.say(f"peak memory {memory['host'] / 2**20:,.0f} MiB")
        path = self.directory.path
        self.console.say(
            f"{path / PICTURE_FILE} has the loss curve, {self.directory.metrics_path} the figures\n"
            f"generate with: python scripts/generate.py {path} --prompt 'def '\n"
            f"continue with: {self.resume_command} --train.steps {config.train.steps * 2}"
        )
