"""Signals: the status, what is saved, the command to resume, and how long it takes."""

import os
import signal
import time

import pytest

from shardlm.checkpoint import CheckpointStore
from shardlm.data import ValidationLoader
from shardlm.observe import MetricsWriter
from shardlm.train import loop
from shardlm.train.signals import StopRequest

FLAGS = "--eval.every_steps 3 --checkpoint.every_steps 3"


def send_after(monkeypatch, step, number):
    """Send a signal to this process once the line of an update is written."""
    write = MetricsWriter.write

    def sending(self, record):
        write(self, record)
        if record["step"] == step and "loss" in record:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(MetricsWriter, "write", sending)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_between_updates(number, runs, finished, tmp_path, monkeypatch, capsys):
    stopped = tmp_path / "stopped"
    with monkeypatch.context() as patch:
        send_after(patch, 1, number)
        assert runs.train(stopped, FLAGS) == 128 + number
    output = capsys.readouterr().out
    # The line of an update is written while the next one is made.
    (step,) = CheckpointStore(stopped / "checkpoints").steps()
    assert step in (1, 2)
    assert f"stopped by signal {number:d} after update {step}; everything is saved" in output
    assert "\nresume with: shardlm train --run.simulate_devices 8 " in output
    assert runs.train(stopped, FLAGS) == 0
    assert runs.figures(stopped) == runs.figures(finished(tmp_path / "whole"))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_while_compiling(runs, tmp_path, monkeypatch, capsys):
    """The compiler cannot be interrupted, and is not waited for."""

    def compile_for_long(self, first):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(20)

    monkeypatch.setattr(loop._Run, "_compile", compile_for_long)
    began = time.monotonic()
    assert runs.train(tmp_path / "run", FLAGS) == 143
    assert time.monotonic() - began < 10
    assert "stopped by signal 15 before the first update" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("step", "flags"), [(3, "--eval.batch 2"), (6, "")])
def test_while_evaluating(step, flags, runs, finished, tmp_path, monkeypatch):
    """What was not evaluated is evaluated on resume, in the middle of a run and at its end."""
    stopped, batches = tmp_path / "stopped", ValidationLoader.batches
    calls = []

    def sending(self, batch):
        calls.append(batch)
        for rows in batches(self, batch):
            if len(calls) == step // 3:
                os.kill(os.getpid(), signal.SIGTERM)
                # The main thread sees it within a tenth of a second.
                time.sleep(1)
            yield rows

    with monkeypatch.context() as patch:
        patch.setattr(ValidationLoader, "batches", sending)
        assert runs.train(stopped, f"{FLAGS} {flags}") == 143
    assert runs.figures(stopped)[-1]["step"] == step
    assert "loss" in runs.figures(stopped)[-1]
    assert CheckpointStore(stopped / "checkpoints").latest() == step
    assert runs.train(stopped, FLAGS) == 0
    assert runs.figures(stopped) == runs.figures(finished(tmp_path / "whole"))


def test_a_second_interrupt_does_not_wait(runs, tmp_path):
    """One is noted; the state is being saved, for a minute, when the other comes."""
    before = """
import time
from shardlm.checkpoint import CheckpointStore
from shardlm.observe import MetricsWriter
write = MetricsWriter.write
def interrupt(self, record):
    write(self, record)
    os.kill(os.getpid(), signal.SIGINT)
def slow(self, *args, **kwargs):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
MetricsWriter.write = interrupt
CheckpointStore.save = slow
"""
    process = runs.process(tmp_path, FLAGS, before)
    output, errors = process.communicate(timeout=55)
    assert process.returncode == 130, errors
    assert errors == "interrupted: what was saved before is kept\n"
    assert "stopped by signal" not in output


def test_a_reader_that_leaves_ends_the_run_as_a_signal_would(runs, finished, tmp_path):
    """As in `| head -1`: what was made is saved, and the run goes on from there."""
    with runs.process(tmp_path / "run", f"{FLAGS} --run.log_every_steps 1") as process:
        while not process.stdout.readline().startswith("step 1/6"):
            pass
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 128 + signal.SIGPIPE
    (step,) = CheckpointStore(tmp_path / "run" / "checkpoints").steps()[-1:]
    assert 1 <= step < 6
    assert runs.train(tmp_path / "run", FLAGS) == 0
    assert runs.figures(tmp_path / "run") == runs.figures(finished(tmp_path / "whole"))


def test_the_first_signal_counts():
    def at_once():
        raise KeyboardInterrupt

    with StopRequest(at_once) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.signal == signal.SIGTERM
