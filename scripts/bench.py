"""Measure: `python scripts/bench.py step`. Prints a table and, last, one line of JSON."""

import sys

from shardlm.bench import main
from shardlm.cli import leave, run

if __name__ == "__main__":
    leave(run(main, sys.argv[1:]))
