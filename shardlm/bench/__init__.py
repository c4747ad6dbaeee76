"""Measurements: `scripts/bench.py NAME`."""

import argparse
from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Measure the engine; a table and, as the last line, one JSON object."""
    from shardlm.bench.report import print_figures
    from shardlm.bench.step import WORKLOADS, bench_step

    parser = argparse.ArgumentParser(prog="bench", description=main.__doc__)
    names = parser.add_subparsers(dest="name", required=True)
    step = names.add_parser("step", help="the update against a step written by hand, on one device")
    step.add_argument(
        "--rounds", type=rounds, default=10, help="pairs timed, at least 2 (default: 10)"
    )
    step.add_argument("--every", action="store_true", help="try all 16 forms of the reference")
    step.add_argument("--only", choices=WORKLOADS, help="one workload of the table")
    args = parser.parse_args(argv)
    print_figures(args.name, bench_step(args.rounds, args.every, args.only))
    return 0


def rounds(text: str) -> int:
    """A number of pairs; argparse names this function where the text is no number."""
    if (number := int(text)) < 2:
        raise argparse.ArgumentTypeError(f"{number} pairs have no quartiles: at least 2")
    return number
