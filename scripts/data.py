"""Show what a model will see of its text: `python scripts/data.py describe configs/NAME.yaml`."""

from shardlm.cli import data, leave, run

if __name__ == "__main__":
    leave(run(data))
