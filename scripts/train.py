"""Train a model, or resume a run: `python scripts/train.py --config configs/quickstart.yaml`."""

from shardlm.cli import leave, run, train

if __name__ == "__main__":
    leave(run(train))
