"""Train a model, or resume a run: `python scripts/train.py --config configs/quickstart.yaml`."""

import sys

from shardlm.cli import run, train

if __name__ == "__main__":
    sys.exit(run(train))
