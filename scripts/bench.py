"""Measure the engine: `python scripts/bench.py step`, `data` or `stages`."""

from shardlm.cli import bench, leave, run

if __name__ == "__main__":
    leave(run(bench))
