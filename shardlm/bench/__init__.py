"""Measurements: `scripts/bench.py NAME`."""

import argparse
from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Measure the engine; a table and, as the last line, one JSON object."""
    parser = argparse.ArgumentParser(prog="bench", description=main.__doc__)
    names = parser.add_subparsers(dest="name", required=True)
    step = names.add_parser("step", help="the update against a step written by hand, on one device")
    step.add_argument("--rounds", type=int, default=10, help="pairs timed (default: 10)")
    step.add_argument("--every", action="store_true", help="try all 16 forms of the reference")
    step.add_argument("--only", help="one workload by its name in the table")
    args = parser.parse_args(argv)
    from shardlm.bench.report import print_figures
    from shardlm.bench.step import bench_step

    print_figures(args.name, bench_step(args.rounds, args.every, args.only))
    return 0
