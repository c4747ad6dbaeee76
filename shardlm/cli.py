"""The commands behind `shardlm VERB` and `scripts/VERB.py`.

Exit status: 0 finished; 2 unusable configuration or arguments; 128+N after signal N; 1 any other
failure.
"""

import shlex
import sys
import time
from collections.abc import Callable, Sequence

from shardlm.arguments import parse_config
from shardlm.config import ConfigError


def train(argv: Sequence[str] | None = None) -> int:
    """Train a model, or resume a run."""
    started = _process_start()
    argv = sys.argv[1:] if argv is None else list(argv)
    config = parse_config(argv, "train", train.__doc__ or "")
    from shardlm.train import loop

    command = f"python scripts/train.py {shlex.join(argv)}"
    return loop.train(config, command, started)


def _process_start() -> float:
    """`time.time()` at which this process began."""
    return time.time() - time.process_time()


VERBS: dict[str, Callable[[Sequence[str] | None], int]] = {"train": train}


def run(verb: Callable[[Sequence[str] | None], int], argv: Sequence[str] | None = None) -> int:
    """Run a command; mistakes of the user's end in one message on standard error."""
    try:
        return verb(argv)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: what was saved before is kept", file=sys.stderr)
        return 130


def main(argv: Sequence[str] | None = None) -> int:
    """`shardlm VERB ...`."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv and argv[0] in VERBS:
        return run(VERBS[argv[0]], argv[1:])
    lines = [f"  {name:10} {(verb.__doc__ or '').splitlines()[0]}" for name, verb in VERBS.items()]
    print("usage: shardlm VERB [--help] ...\n" + "\n".join(lines))
    return 0 if argv in (["-h"], ["--help"]) else 2
