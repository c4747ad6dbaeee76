"""What feeds the trainer: speed, evenness, waiting. `python scripts/bench.py data`."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardlm.bench.loading import balancing, loading
from shardlm.bench.opening import opening
from shardlm.bench.preparing import preparing
from shardlm.bench.report import Say
from shardlm.bench.waiting import waiting
from shardlm.options import BenchOptions

PARTS: dict[str, Callable[[Path, BenchOptions, Say], dict[str, Any]]] = {
    "loader": lambda path, options, say: loading(path, options.rounds, say),
    "prepare": lambda path, options, say: preparing(path, max(options.rounds // 3, 2), say),
    "balance": lambda path, options, say: balancing(say),
    "waiting": lambda path, options, say: waiting(path, 60, say),
    "opening": lambda path, options, say: opening(path, 10 * 10**9, say),
}


def bench_data(options: BenchOptions, say: Say = print) -> dict[str, Any]:
    """Measure each part, or the one that `options.only` names, in a temporary directory."""
    figures = {}
    for name, part in PARTS.items():
        if options.only in ("all", name):
            say(f"{name}:")
            with tempfile.TemporaryDirectory() as directory:
                figures[name] = part(Path(directory), options, say)
    return figures
