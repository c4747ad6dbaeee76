"""The commands that a run prints for its user to go on with, spelt as the run was started."""

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from shardlm.config import Config


@dataclass(frozen=True)
class Commands:
    """Lines for a shell, to be typed in the directory that the run was started in."""

    resume: str
    """Go on with this run."""
    longer: str
    """Go on to twice the updates."""
    generate: str
    """Text from the model."""

    @classmethod
    def of(cls, config: Config, argv: Sequence[str]) -> Self:
        """The commands of a run that was started with these arguments."""
        # run.fresh would refuse the directory that the run has filled.
        again = ["--run.fresh", "false"] if config.run.fresh else []
        argv = [*invocation("train"), *_without(argv, "--run.fresh"), *again]
        prompt = config.eval.prompt
        given = [f"--prompt={prompt}"] if prompt.startswith("-") else ["--prompt", prompt]
        return cls(
            resume=shlex.join(argv),
            longer=shlex.join(
                [*_without(argv, "--train.steps"), "--train.steps", str(2 * config.train.steps)]
            ),
            generate=shlex.join(
                [
                    *invocation("generate"),
                    config.run.dir,
                    # Without the flag it is this prompt too.
                    *(given if prompt.isprintable() else []),
                ]
            ),
        )


def invocation(verb: str) -> list[str]:
    """The words that start a command, as this process was started: by a script, or `shardlm`."""
    program = Path(sys.argv[0])
    script = program.with_name(f"{verb}.py")
    if program.suffix == ".py" and script.is_file():
        return [_shortest(sys.executable), str(script)]
    return [_shortest(str(program)) if program.name == "shardlm" else "shardlm", verb]


def _shortest(program: str) -> str:
    """A program's name where the shell finds this very one by it, else its path."""
    name = os.path.basename(program)
    found = shutil.which(name)
    if found and os.path.abspath(found) == os.path.abspath(program):
        return name
    relative = os.path.relpath(program)
    if relative.startswith(".."):
        return program
    return relative if os.sep in relative else os.path.join(".", relative)


def _without(argv: Sequence[str], flag: str) -> list[str]:
    """The arguments without a flag that takes one value."""
    kept: list[str] = []
    words = iter(argv)
    for word in words:
        if word == flag:
            next(words, None)
        elif not word.startswith(f"{flag}="):
            kept.append(word)
    return kept
