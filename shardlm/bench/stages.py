"""Idle time of stages, by the time of updates with few and with many micro-batches."""

import statistics
from typing import Any

from shardlm.bench.report import Say, Table
from shardlm.bench.step import Runner, run_engine
from shardlm.config import Config, DataConfig, MeshConfig, ModelConfig, TrainConfig
from shardlm.mesh import make_mesh, simulate_devices
from shardlm.options import BenchOptions
from shardlm.parallel.pipeline import Schedule

FORMS = {
    "stage_4": Schedule(4),
    "stage_4_rounds_2": Schedule(4, 2),
    "stage_2": Schedule(2),
}
MICRO_BATCHES = (4, 8, 16)


def bench_stages(options: BenchOptions, say: Say = print) -> dict[str, Any]:
    """Measure the bubble of each schedule against its formula, on simulated devices.

    A device computes in idle ticks too, so that with the cores shared an update takes as long as
    its ticks: seconds = a · (micro-batches + idle). Both are read off the fewest and the most
    micro-batches, of which the medians over rounds are taken; the bubble of those in between is the
    measure. What an update does once, as the optimizer's work, counts as idle.
    """
    simulate_devices(4)
    table = Table(("schedule", "micro-batches", "seconds", "bubble", "formula"))
    figures: dict[str, Any] = {}
    for name, schedule in FORMS.items():
        if options.only not in ("all", name):
            continue
        runners = {k: stages_runner(schedule, k) for k in MICRO_BATCHES}
        for _ in range(options.rounds):
            for runner in runners.values():
                runner.step()
        seconds = {k: statistics.median(r.seconds) for k, r in runners.items()}
        few, most = min(seconds), max(seconds)
        each = (seconds[most] - seconds[few]) / (most - few)
        figures[name] = {
            str(k): {
                "seconds": t,
                "bubble": t / (k * each) - 1,
                "formula": schedule.bubble(k),
            }
            for k, t in seconds.items()
        }
        for k, f in figures[name].items():
            table.add(name, k, f"{f['seconds']:.3f}", f"{f['bubble']:.1%}", f"{f['formula']:.1%}")
    say(str(table))
    return figures


def stages_runner(schedule: Schedule, micro_batches: int, rows: int = 4) -> Runner:
    """The update of a small model over stages.

    Args:
      schedule: of the stages.
      micro_batches: of an update.
      rows: of a micro-batch.
    """
    config = Config(
        mesh=MeshConfig(stage=schedule.stages, stage_rounds=schedule.rounds, data=1),
        model=ModelConfig(
            layers=8, embed=256, heads=4, kv_heads=2, mlp=688, vocab=256, dtype="float32"
        ),
        data=DataConfig(length=256),
        train=TrainConfig(batch=rows * micro_batches, micro_batch=rows),
    )
    return run_engine(config, make_mesh(config.mesh))
