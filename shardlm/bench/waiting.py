"""How long a training run waits for its data."""

import subprocess
import sys
from pathlib import Path
from typing import Any

from shardlm.bench.report import Say, Table
from shardlm.observe import read_metrics

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "scripts/train.py", "--config", "configs/quickstart.yaml")


def waiting(directory: Path, updates: int, say: Say) -> dict[str, Any]:
    """The share of the time in which the quickstart waits for batches, over the updates after the
    first, with which it compiles.

    Raises:
      RuntimeError: the run failed; with what it said.
    """
    flags = {
        "run.dir": directory / "run",
        "data.cache": directory / "cache",
        "train.steps": updates,
        "optim.warmup_steps": 1,
    }
    command = [*COMMAND, *(str(word) for key, v in flags.items() for word in (f"--{key}", v))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr}")
    figures = share_of(directory / "run" / "metrics.jsonl")
    table = Table(("updates", "seconds", "of them waiting", "share"))
    table.add(
        f"{figures['updates']:,}",
        f"{figures['seconds']:.2f}",
        f"{figures['data_seconds']:.4f}",
        f"{figures['share']:.3%}",
    )
    say(str(table))
    return figures


def share_of(metrics: Path) -> dict[str, Any]:
    """Seconds of a run's updates after the first, and those of them that were spent waiting."""
    updates = [r for r in read_metrics(metrics) if r["step"] > 1 and "data_seconds" in r]
    seconds = sum(line["seconds"] for line in updates)
    waited = sum(line["data_seconds"] for line in updates)
    return {
        "updates": len(updates),
        "seconds": seconds,
        "data_seconds": waited,
        "share": waited / seconds,
    }
