"""Tokenize text into a store: `python scripts/prepare.py stores/mine --data.sources texts`."""

from shardlm.cli import leave, prepare, run

if __name__ == "__main__":
    leave(run(prepare))
