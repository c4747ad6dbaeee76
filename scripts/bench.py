"""Measure the engine against a step written by hand: `python scripts/bench.py step`."""

from shardlm.cli import bench, leave, run

if __name__ == "__main__":
    leave(run(bench))
