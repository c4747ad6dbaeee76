"""Loss over the validation split of a run: `python scripts/evaluate.py runs/quickstart`."""

from shardlm.cli import evaluate, leave, run

if __name__ == "__main__":
    leave(run(evaluate))
