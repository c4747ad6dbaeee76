"""Progress on standard error: a bar on a terminal, few lines in a log, nothing for short work."""

import io
import os
import pty
import re
import select

import pytest

from shardlm.observe import Progress


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def written(terminal, stream):
    """What is there to be seen."""
    stream.flush()
    parts = []
    while select.select([terminal], [], [], 0.1)[0]:
        parts.append(os.read(terminal, 1 << 16))
    return b"".join(parts).decode()


@pytest.fixture
def clock():
    return Clock()


def test_a_log_has_a_line_every_ten_seconds_and_none_for_short_work(clock):
    stream = io.StringIO()
    with Progress("tokenizing", 0, stream, clock) as progress:
        for _ in range(99):
            clock.now += 0.1
            progress(1000, 500)
    assert stream.getvalue() == ""
    with Progress("tokenizing", 100_000_000, stream, clock) as progress:
        for _ in range(50):
            clock.now += 0.5
            progress(500_000, 250_000)
    assert stream.getvalue().splitlines() == [
        "tokenizing: 10MB of 100MB, 500k tokens/s, 1m30s left",
        "tokenizing: 20MB of 100MB, 500k tokens/s, 1m20s left",
    ]


def test_what_is_skipped_says_nothing_of_the_rest(clock):
    """After half a minute the rate is that of the last half minute."""
    stream = io.StringIO()
    with Progress("tokenizing", 1_000_000, stream, clock) as progress:
        progress(500_000, 0)
        for _ in range(40):
            clock.now += 1.0
            progress(1000, 100)
    assert stream.getvalue().splitlines()[-1] == (
        "tokenizing: 540kB of 1MB, 100 tokens/s, 7m40s left"
    )


def test_work_that_goes_on_and_of_unknown_size(clock):
    stream = io.StringIO()
    with Progress("training the tokenizer", 1000, stream, clock) as progress:
        progress(1000, 0)
        clock.now += 61.0
        progress(0, 0)
    with Progress("tokenizing", 0, stream, clock) as progress:
        clock.now += 10.0
        progress(0, 2000)
    with Progress("waiting for process 7", 0, stream, clock) as progress:
        clock.now += 11.0
        progress(0, 0)
    assert stream.getvalue().splitlines() == [
        "training the tokenizer: 1kB of 1kB, 1m01s",
        "tokenizing: 0B, 200 tokens/s, 10s",
        "waiting for process 7: 11s",
    ]


def test_a_terminal_has_a_bar_that_leaves_nothing_and_never_hides_the_cursor(clock, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    here, there = pty.openpty()
    with os.fdopen(there, "w") as stream:
        with Progress("tokenizing [red]x", 1000, stream, clock) as progress:
            clock.now += 0.5
            progress(100, 10)
            os.write(there, b"|")
            clock.now += 1.0
            progress(400, 85)
            shown = written(here, stream)
        cleared = written(here, stream)
    os.close(here)
    nothing, shown = shown.split("|")
    assert nothing == ""
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)
    assert re.search(r"tokenizing \[red\]x [━╺╸]+ *500B of 1kB, 63 tokens/s, 2s left", plain)
    hidden = shown.rfind("\x1b[?25l")
    assert hidden < shown.rfind("\x1b[?25h")
    # It is drawn once more, and its line erased.
    assert cleared.count("\n") == 1
    assert cleared.endswith("\x1b[1A\x1b[2K")


def test_no_standard_error_at_all(monkeypatch):
    monkeypatch.setattr("sys.stderr", None)
    with Progress("tokenizing", 1, clock=iter([0.0, 99.0]).__next__) as progress:
        progress(1, 1)
