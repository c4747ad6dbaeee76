"""Text from a trained model: `python scripts/generate.py runs/quickstart --prompt "def "`."""

from shardlm.cli import generate, leave, run

if __name__ == "__main__":
    leave(run(generate))
