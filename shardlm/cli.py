"""The commands behind `shardlm VERB` and `scripts/VERB.py`.

Exit status: 0 finished; 2 unusable configuration or arguments; 128+N after signal N; 1 any other
failure. jax, which takes seconds to load, is imported after the checks that do not need it.
"""

import contextlib
import io
import json
import math
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from errno import EDQUOT, EFBIG, EIO, ENOSPC
from pathlib import Path
from typing import Any, NoReturn

from shardlm.arguments import override, parse_config, parse_options
from shardlm.config import Config, ConfigError
from shardlm.options import (
    MESH_KEYS,
    TEXT_KEYS,
    BenchOptions,
    DescribeOptions,
    EvaluateOptions,
    GenerateOptions,
    PrepareOptions,
)
from shardlm.validation import validate
from shardlm.words import many


def train(argv: Sequence[str]) -> int:
    """Train a model, or resume a run."""
    started = _process_start()
    config = parse_config(argv, "train", _about(train))
    from shardlm.data import Interrupted
    from shardlm.train.commands import Commands
    from shardlm.train.signals import StopRequest
    from shardlm.train.start import begin

    with StopRequest(at_once=_interrupted) as stop:
        try:
            with begin(config, lambda: stop.signal > 0) as start:
                from shardlm.train import loop

                return loop.train(start, Commands.of(config, argv), stop, started)
        except Interrupted:
            print(f"stopped by signal {stop.signal} before the first update", file=sys.stderr)
            print(f"resume with: {Commands.of(config, argv).resume}", file=sys.stderr)
            return 128 + stop.signal


def prepare(argv: Sequence[str]) -> int:
    """Tokenize text into a store, which is a source to train from."""
    keys = ("data.",)
    options, values = parse_options(
        PrepareOptions, keys, argv, "prepare", _about(prepare), files=True
    )
    config = override(Config(), values)
    validate(config)
    from shardlm import prepare as preparing
    from shardlm.data import Interrupted
    from shardlm.observe import Progress
    from shardlm.train.signals import StopRequest

    with StopRequest(at_once=_interrupted) as stop:
        try:
            store = preparing.prepare(options, config, lambda: stop.signal > 0, Progress)
        except Interrupted:
            print(
                f"stopped by signal {stop.signal}; the shards that are finished are kept: the same "
                "command goes on",
                file=sys.stderr,
            )
            return 128 + stop.signal
    print(preparing.describe(store))
    print(f"train from it with: --data.sources {shlex.quote(options.store)}")
    return 0


def data(argv: Sequence[str]) -> int:
    """Show what a model will see of its text: `data describe CONFIGURATION`."""
    usage = "usage: shardlm data describe CONFIGURATION [--html FILE] [--KEY VALUE]..."
    if list(argv) in (["-h"], ["--help"]):
        print(f"{usage}\n\n{_about(data)}")
        return 0
    if not argv or argv[0] != "describe":
        print(usage, file=sys.stderr)
        return 2
    keys = ("data.", "train.", "model.", "mesh.", "run.seed", "run.simulate_devices")

    def parse(argv: Sequence[str]) -> tuple[DescribeOptions, dict[str, Any]]:
        return parse_options(DescribeOptions, keys, argv, "data describe", _about(data), files=True)

    options, _ = parse(argv[1:])
    # Now that it is known, the file comes first, so that flags win wherever they stand.
    options, values = parse(["--config", options.configuration, *argv[1:]])
    config = override(Config(), values)
    validate(config)
    from shardlm.describe import describe_data

    describe_data(options, config)
    return 0


def generate(argv: Sequence[str]) -> int:
    """Continue texts with a trained model."""
    options, mesh = parse_options(GenerateOptions, MESH_KEYS, argv, "generate", _about(generate))
    from shardlm.generate import generate_text

    print("\n\n".join(prompt + text for prompt, text in generate_text(options, mesh)))
    return 0


def evaluate(argv: Sequence[str]) -> int:
    """Loss and perplexity of a trained model over the validation split."""
    options, changes = parse_options(
        EvaluateOptions, MESH_KEYS, argv, "evaluate", _about(evaluate), kept=TEXT_KEYS
    )
    from shardlm.evaluate import evaluate_run
    from shardlm.observe.console import loss_text

    found = evaluate_run(options, changes)
    loss, perplexity = found["eval_loss"], found["perplexity"]
    if not math.isfinite(perplexity):
        print(f"error: the validation loss after update {found['step']} is {loss}", file=sys.stderr)
        return 1
    print(
        f"update {found['step']:,}  validation loss {loss_text(loss, found['bits_per_byte'])}  "
        f"perplexity {perplexity:.4f}  "
        f"over {many(found['eval_tokens'], 'token')}"
    )
    print(json.dumps(found))
    return 0


def bench(argv: Sequence[str]) -> int:
    """Measure the engine; a table and, as the last line, one JSON object."""
    options, _ = parse_options(BenchOptions, (), argv, "bench", _about(bench))
    from shardlm.bench.report import print_figures

    if options.name == "step":
        from shardlm.bench.step import bench_step

        figures = bench_step(options)
    elif options.name == "stages":
        from shardlm.bench.stages import bench_stages

        figures = bench_stages(options)
    else:
        from shardlm.bench.data import bench_data

        figures = bench_data(options)
    print_figures(options.name, figures)
    return 0


VERBS = {
    "train": train,
    "prepare": prepare,
    "data": data,
    "generate": generate,
    "evaluate": evaluate,
    "bench": bench,
}


def run(verb: Callable[[Sequence[str]], int], argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status. What can be expected to go wrong ends in one
    message on standard error; anything else keeps its traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A text that the terminal cannot show is no reason to fail.
            stream.reconfigure(errors="replace")
    try:
        return verb(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 128 + signal.SIGPIPE
    except Exception as error:
        status = _status(error)
        if status is None:
            raise
        print(f"error: {error}", file=sys.stderr)
        return status


def leave(status: int) -> NoReturn:
    """End the process. After a failure at once: a compilation that still runs in a thread cannot be
    interrupted, and Python would wait for it."""
    if status:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(BrokenPipeError):
                stream.flush()
        os._exit(status)
    sys.exit(0)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """`shardlm VERB ...`."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv and argv[0] in VERBS:
        leave(run(VERBS[argv[0]], argv[1:]))
    lines = [f"  {name:10} {_about(verb)}" for name, verb in VERBS.items()]
    usage = "usage: shardlm VERB [--help] ...\n" + "\n".join(lines)
    if argv in (["-h"], ["--help"]):
        print(usage)
        leave(0)
    print(usage, file=sys.stderr)
    leave(2)


def _status(error: Exception) -> int | None:
    """Exit status of a failure that its message explains; None for others."""
    if isinstance(error, ConfigError):
        return 2
    # The disk: full, read-only, gone, or with a folder where a file belongs.
    if isinstance(error, OSError) and (
        error.filename or error.errno in (ENOSPC, EDQUOT, EFBIG, EIO)
    ):
        return 1
    from shardlm.data.workers import WorkerLost

    if isinstance(error, WorkerLost):
        return 1
    # Here, since they load jax: when it is not loaded yet, none of them has been raised.
    if "jax" not in sys.modules:
        return None
    from shardlm.checkpoint import CheckpointError, SaveError
    from shardlm.observe import MetricsError
    from shardlm.train.errors import TrainingError

    if isinstance(error, CheckpointError | MetricsError):
        return 2
    if isinstance(error, TrainingError | SaveError):
        return 1
    return None


def _interrupted() -> NoReturn:
    """A second Ctrl-C. Files are whole at any moment, so nothing needs to be awaited."""
    os.write(2, b"interrupted: what was saved before is kept\n")
    os._exit(130)


def _about(verb: Callable[[Sequence[str]], int]) -> str:
    return (verb.__doc__ or "").partition("\n")[0]


def _process_start() -> float:
    """`time.time()` at which this process began, where the system tells it; else now."""
    now = time.time()
    try:
        # The 22nd field, in clock ticks since the system started. The second is in parentheses and
        # may hold anything.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return now - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)
    except (OSError, AttributeError, ValueError, IndexError):
        return now
