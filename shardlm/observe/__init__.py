"""What a run leaves behind and shows: its directory, its metrics, its progress, its loss curve.

Imports no jax: a directory that cannot be used is refused at once.
"""

from shardlm.observe.console import Console
from shardlm.observe.device import memory_limit, mfu, peak_flops, peak_memory
from shardlm.observe.metrics import (
    MIXTURE_METRICS,
    DelayedMetrics,
    Fetched,
    MetricsError,
    MetricsWriter,
    read_metrics,
    update_record,
)
from shardlm.observe.plot import plot_loss
from shardlm.observe.progress import Progress
from shardlm.observe.rundir import RunDirectory, RunDirectoryError

__all__ = [
    "MIXTURE_METRICS",
    "Console",
    "DelayedMetrics",
    "Fetched",
    "MetricsError",
    "MetricsWriter",
    "Progress",
    "RunDirectory",
    "RunDirectoryError",
    "memory_limit",
    "mfu",
    "peak_flops",
    "peak_memory",
    "plot_loss",
    "read_metrics",
    "update_record",
]
