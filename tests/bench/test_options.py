"""The flags of `shardlm bench`: those of one bench are refused with the other."""

import pytest

from shardlm import cli


@pytest.mark.parametrize(
    "flags, message",
    [
        ("", "bench: "),
        ("stop", "bench: name is 'stop': it must be one of step, data, stages; did you mean step?"),
        ("step --rounds 1", "bench: rounds is 1: it must be at least 2, for quartiles"),
        ("step --only byte", "bench: only is 'byte': with step it must be one of"),
        ("step --only loader", "bench: only is 'loader': with step it must be one of all, bytes"),
        ("data --only bytes", "bench: only is 'bytes': with data it must be one of all, loader"),
        (
            "stages --only bytes",
            "bench: only is 'bytes': with stages it must be one of all, stage_4",
        ),
        ("data --every true", "bench: every is true: it is of step alone"),
    ],
)
def test_mistakes(flags, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.bench(flags.split())
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(message)
    assert error.count("\n") == 1
