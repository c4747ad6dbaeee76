"""The training run, read from top to bottom: mesh, engine, place to resume, state, updates, end.

Its directory and data come from `shardlm.train.start`.
"""

import contextlib
import itertools
import math
import signal
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np
from jax.errors import JaxRuntimeError

from shardlm.checkpoint import CheckpointStore, SaveError, SavePolicy
from shardlm.config import Config
from shardlm.data import Update
from shardlm.data.balance import imbalance
from shardlm.mesh.axes import batch_ways
from shardlm.model.flops import flops_per_token
from shardlm.observe import (
    MIXTURE_METRICS,
    Console,
    DelayedMetrics,
    Fetched,
    MetricsWriter,
    mfu,
    plot_loss,
    update_record,
)
from shardlm.options import Sampling
from shardlm.train.commands import Commands
from shardlm.train.decode import generate
from shardlm.train.engine import Engine
from shardlm.train.errors import TrainingError
from shardlm.train.evaluate import bits_per_byte, make_evaluate
from shardlm.train.prompts import prompt_ids, room_after
from shardlm.train.report import describe, how_to_go_on
from shardlm.train.resume import find_position, has_evaluation, write_config
from shardlm.train.setup import build_engine, build_mesh, check_memory, new_state, resolve_vocab
from shardlm.train.signals import StopRequest
from shardlm.train.start import Start
from shardlm.train.state import State, in_layer_order, in_stage_order
from shardlm.train.step import batch_sharding, make_train_step
from shardlm.words import many


def train(start: Start, commands: Commands, stop: StopRequest, started: float) -> int:
    """Train, or resume, a run.

    Args:
      start: its directory, configuration and data.
      commands: what a user types to go on; printed at the end.
      stop: a signal that it notes ends the run after the update that is being made.
      started: `time.time()` of the start of the process, for the time to the first update.

    Returns:
      The exit status: 0 finished, 128+N stopped by signal N with everything saved.

    Raises:
      ConfigError: the mesh is not possible, or the directory holds another run.
      CheckpointError, MetricsError: what the directory holds cannot be used.
      TrainingError: losses or gradients that stay NaN or infinite, or a last state that cannot be
        saved.
    """
    config = resolve_vocab(start.config, start.data)
    engine = build_engine(config, build_mesh(config))
    check_memory(engine)
    keep = config.checkpoint
    path = start.directory.checkpoints_path
    with contextlib.closing(CheckpointStore(path, keep.keep, keep.keep_every)) as store:
        run = _Run(engine, start, store, commands, stop, started)
        try:
            return run.go()
        except BaseException as ended:
            # A save that fails beside what ended the run must not hide it.
            try:
                store.wait()
            except SaveError as error:
                run.console.say(str(error))
            if isinstance(ended, JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(ended):
                raise TrainingError(_out_of_memory(config, ended)) from ended
            raise
        finally:
            run.pool.shutdown(wait=False)


def _out_of_memory(config: Config, error: JaxRuntimeError) -> str:
    """What to do where the compiler or a device says that memory has run out."""
    said = str(error).partition("RESOURCE_EXHAUSTED: ")[2].partition("\n")[0]
    remat = "" if config.train.remat == "full" else "train.remat full, "
    return (
        f"{said.rstrip('.')}: lower train.micro_batch ({config.micro_batch} of train.batch "
        f"{config.batch}; the result stays the same), or use {remat}mesh.shard_params all or "
        "more devices"
    )


class Fed(NamedTuple):
    """How an update got its batch."""

    seconds: float
    """That the host waited for it."""
    update: Update
    """Without its arrays."""


class _Run:
    """A run whose fixed parts are all there."""

    def __init__(
        self,
        engine: Engine,
        start: Start,
        store: CheckpointStore,
        commands: Commands,
        stop: StopRequest,
        started: float,
    ) -> None:
        self.engine, self.config = engine, engine.config
        self.start, self.data, self.store = start, start.data, store
        self.commands, self.stop, self.started = commands, stop, started
        self.console = Console(
            self.config.train.steps,
            self.config.run.log_every_steps,
            closed=lambda: stop.request(signal.SIGPIPE),
        )
        self.per_token = flops_per_token(self.config.model, self.config.data.length)
        validation = self.data.validation
        self.evaluate = make_evaluate(engine, validation) if validation else None
        self.eval_loss: float | None = None
        self.consecutive = 0
        """Updates skipped since the last good one."""
        self.nothing_to_predict = False
        """In the last update."""
        self.delayed = DelayedMetrics()
        self.fed: dict[int, Fed] = {}
        """Of the updates whose metrics are not fetched yet."""
        self.pool = ThreadPoolExecutor(3)

    def go(self) -> int:
        start, config, say, pool = self.start, self.config, self.console.say, self.pool
        say(describe(self.engine, start.data))
        first, self.tokens, self.account, speeds = find_position(start, config, self.store, say)
        ways = batch_ways(self.engine.mesh.shape)
        if speeds is not None and len(speeds.measured) != ways:
            learnt = many(len(speeds.measured), "device")
            say(f"the speeds of {learnt} are forgotten: there are {ways} now")
            speeds = None
        self.data.train.deal_to(ways, speeds)
        if first == config.train.steps and not self._evaluation_missing(first):
            write_config(start, config, first, 0, say)
            say(f"this run has finished after {many(first, 'update')}")
            say(self.account.describe(self.data.train))
            say(how_to_go_on(self.engine, start.directory, self.commands))
            return 0
        updates = self.data.train.iterate(first)
        with contextlib.closing(updates):
            # Each takes seconds. XLA cannot be interrupted, so this thread only waits.
            drawn = pool.submit(next, updates)
            try:
                ready = self._wait(
                    pool.submit(self._state, first), pool.submit(self._compile, first), drawn
                )
            finally:
                # A generator cannot be closed while it runs.
                wait([drawn])
            if ready is None:
                return self._stopped(first)
            state, step, update = ready
            write_config(start, config, first, int(state["opt"].skipped), say)
            with contextlib.closing(MetricsWriter(start.directory.metrics_path)) as self.writer:
                if self.writer.truncate_after(first) < first:
                    say(f"metrics.jsonl has lost lines before update {first + 1:,}")
                return self._updates(first, state, step, itertools.chain([update], updates))

    def _state(self, first: int) -> State:
        if first:
            state = self.store.restore(first, self.engine.abstract)
            return in_stage_order(state, self.engine.transformer)
        return new_state(self.engine)

    def _compile(self, first: int) -> Any:
        """The update, compiled."""
        # Of the next one: by which speeds earlier ones were dealt is forgotten.
        batch = jax.eval_shape(lambda: self.data.train.at(first).batch)
        step = make_train_step(self.engine, buckets=self.data.train.buckets)
        return step.lower(self.engine.abstract, batch).compile()

    def _wait(self, *futures: Future[Any]) -> list[Any] | None:
        """Results of work in threads, or None as soon as the run is to stop."""
        while not self.stop.signal:
            done, waiting = wait(futures, timeout=0.1, return_when=FIRST_EXCEPTION)
            failed = [future for future in done if future.exception()]
            if failed or not waiting:
                return [future.result() for future in failed or futures]
        return None

    def _updates(self, first: int, state: State, step: Any, updates: Iterator[Update]) -> int:
        steps, keep = self.config.train.steps, self.config.checkpoint
        policy = SavePolicy(keep.every_steps, keep.every_minutes)
        sharding = batch_sharding(self.engine, buckets=self.data.train.buckets)
        done, saved_step, saved_at = first, first, time.monotonic()
        self.consecutive = int(state["opt"].consecutive)
        if self._evaluation_missing(first):
            # A signal cut it off.
            self._evaluate(first, state)
        self.delayed.start()
        while done < steps and not self.stop.signal:
            waited = time.perf_counter()
            update = next(updates)
            batch = jax.device_put(update.batch, sharding)
            self.fed[done + 1] = Fed(time.perf_counter() - waited, update._replace(batch={}))
            state, metrics = step(state, batch)
            done += 1
            self._record(self.delayed.push(done, metrics))
            if done == first + 1:
                self._record(self.delayed.flush())
                self.console.say(f"first update {time.time() - self.started:.1f} s after start")
            if self._evaluation_due(done):
                self._evaluate(done, state)
            if done < steps and policy.due(done, time.monotonic(), saved_step, saved_at):
                self._record(self.delayed.flush())
                # A state whose gradients are not finite is not kept as a good one.
                if not self.consecutive:
                    self._save(done, state)
                    saved_step, saved_at = done, time.monotonic()
        self._record(self.delayed.flush())
        self._end(done, state)
        self.console.say(self.account.describe(self.data.train))
        if self.data.train.dynamic:
            speeds = self.data.train.speeds.at(done)
            self.console.say(f"speeds      {' '.join(f'{speed:.2f}' for speed in speeds)}")
        if self.stop.signal:
            return self._stopped(done)
        self.console.say(how_to_go_on(self.engine, self.start.directory, self.commands))
        return 0

    def _record(self, fetched: Fetched | None) -> None:
        """Write the line of an update, and stop if it is one skipped too many."""
        if fetched is None:
            return
        values = fetched.values
        self.tokens += values["tokens"]
        self.consecutive = values["consecutive"]
        skipped = self.consecutive > 0
        self.nothing_to_predict = values["tokens"] == 0
        per_second = values["tokens"] / fetched.seconds
        fed = self.fed.pop(fetched.step)
        self.account = self.account.add(fed.update)
        device_seconds = values.get("device_seconds")
        if device_seconds is not None:
            self._learn_speeds(fetched.step, device_seconds, fed.update.work)
        record = update_record(
            step=fetched.step,
            loss=values["loss"],
            grad_norm=values["grad_norm"],
            learning_rate=values["learning_rate"],
            tokens=self.tokens,
            seconds=fetched.seconds,
            data_seconds=fed.seconds,
            tokens_per_second=per_second,
            mfu=mfu(per_second * self.per_token, list(self.engine.mesh.devices.flat)),
            balance=imbalance(fed.update.time),
            balance_run=self.account.balance,
            source_tokens=self.account.tokens,
            epochs=self.account.epochs(self.data.train),
            device_seconds=device_seconds,
            device_speeds=fed.update.speeds,
            skipped=skipped,
            mixture={key: values[key] for key in MIXTURE_METRICS if key in values},
        )
        self.writer.write(record)
        self.console.update(record)
        if self.consecutive >= self.config.optim.max_skipped:
            self._fail(fetched.step)

    def _learn_speeds(self, step: int, seconds: list[float], work: np.ndarray) -> None:
        """Deal later updates by how long each device took for update `step`. Which ones depends on
        the step only, and all processes have the same figures, so that they deal alike."""
        train = self.data.train
        if not all(0 < value < math.inf for value in seconds):
            return  # Nothing to do, or a device failed.
        # Updates are counted from 0 by the loader: `step` is the next one.
        start = step + 1 + train.ahead
        train.speeds = train.speeds.update(seconds, work.tolist(), now=step, start=start)

    def _fail(self, step: int) -> NoReturn:
        """End a run whose updates are skipped again and again."""
        if self.nothing_to_predict:
            raise TrainingError(
                f"update {step} had no token to predict, and {self.consecutive - 1} before it were "
                "skipped too: the first token of a document is not predicted, and most documents "
                "have no other. Give longer ones, a larger batch, or use data.packing best_fit"
            )
        optim = self.config.optim
        cause = f"lower optim.learning_rate ({optim.learning_rate:g})"
        if self.consecutive == step:
            cause = f"not even the first was: lower model.init_std ({self.config.model.init_std:g})"
        raise TrainingError(
            f"the gradients of the last {self.consecutive} updates, up to {step}, are not finite: "
            f"{cause}, or look at the data of those updates. They changed nothing; the checkpoints "
            "are of states before them"
        )

    def _evaluation_due(self, step: int) -> bool:
        every = self.config.eval.every_steps
        due = step == self.config.train.steps or (every > 0 and step % every == 0)
        return self.evaluate is not None and step > 0 and due

    def _evaluation_missing(self, step: int) -> bool:
        return self._evaluation_due(step) and not has_evaluation(self.start.directory, step)

    def _evaluate(self, step: int, state: State) -> None:
        """Write the line of an evaluation. Its time is its own and no part of an update's."""
        assert self.evaluate is not None
        self._record(self.delayed.flush())
        begun = time.perf_counter()
        loss = self._wait(self.pool.submit(self.evaluate, state["params"], self._stopping))
        if loss is None or loss[0] is None:
            return
        (self.eval_loss,) = loss
        seconds = time.perf_counter() - begun
        self.writer.write({"step": step, "eval_loss": self.eval_loss, "seconds": seconds})
        bits = bits_per_byte(self.eval_loss, self.data.tokenizer)
        self.console.evaluation(step, self.eval_loss, bits)
        self.delayed.start()

    def _save(self, step: int, state: State, last: bool = False) -> None:
        """Save, in the background unless it is the last. The lines up to this step are on the disk
        first. A failure is said, and the next save that is due tries again."""
        self.writer.sync()
        try:
            self.store.wait()
        except SaveError as error:
            self.console.say(f"{error}; saving update {step} now")
        try:
            train = self.data.train
            metadata = {
                "tokens": self.tokens,
                "data": self.data.fingerprint,
                "account": self.account.to_json(),
                "speeds": train.speeds.to_json() if train.dynamic else None,
            }
            state = in_layer_order(state, self.engine.transformer)
            self.store.save(step, state, metadata, wait=last)
        except SaveError as error:
            if last:
                latest = self.store.latest()
                whence = "its beginning" if latest is None else f"checkpoint {latest}"
                raise TrainingError(f"{error}. The run can go on from {whence}") from error
            self.console.say(str(error))

    def _end(self, step: int, state: State) -> None:
        """Save the last state; after the last update, check it, draw the curve and sample."""
        if step and not self.stop.signal:
            # Skipped updates changed nothing: what they left is as good as its validation loss,
            # unless no other was ever made.
            if self.consecutive and (self.eval_loss is None or self.consecutive == step):
                self._fail(step)
            if self.eval_loss is not None and not math.isfinite(self.eval_loss):
                raise TrainingError(
                    f"the validation loss after update {step} is {self.eval_loss}: lower "
                    f"optim.learning_rate ({self.config.optim.learning_rate:g}). This state is not "
                    "saved"
                )
        if step:
            self._save(step, state, last=True)
        if self.stop.signal:
            return
        directory, config = self.start.directory, self.config
        title = directory.path.resolve().name
        plot_loss(directory.metrics_path, directory.picture_path, title=title)
        prompt, tokens = config.eval.prompt, config.eval.sample_tokens
        room = room_after(config, len(prompt_ids(self.data.tokenizer, prompt))) if tokens else None
        tokens = tokens if room is None else min(tokens, room)
        if tokens:
            sampling = Sampling(tokens=tokens, seed=config.run.seed)
            arguments = (self.engine, state["params"], self.data.tokenizer, [prompt], sampling)
            if text := self._wait(self.pool.submit(generate, *arguments)):
                self.console.say(f"\nsample after {prompt!r}:\n{text[0][0]}\n")

    def _stopping(self) -> bool:
        return self.stop.signal > 0

    def _stopped(self, step: int) -> int:
        after = f"after update {step:,}" if step else "before the first update"
        self.console.say(f"stopped by signal {self.stop.signal} {after}; everything is saved")
        self.console.say(f"resume with: {self.commands.resume}")
        return 128 + self.stop.signal
