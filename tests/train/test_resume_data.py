"""Rows that are packed, mixed or of several lengths, in runs that are killed, stopped and moved to
other devices: what is fed, and what is learnt."""

import json
import os
import random
import shutil
import signal

import pytest

from shardlm.data import Buckets, Loader, Share
from shardlm.observe import MetricsWriter, read_metrics

STEPS = 12
# Rows of 12 in micro-batches of 4; with buckets also 8 rows of 6.
FLAGS = (
    f"--train.steps {STEPS} --data.tokenizer bytes --data.split documents --data.validation 0 "
    "--data.length 12 --data.buckets 2 --train.micro_batch 4 --model.dropout 0.1 "
    "--eval.every_steps 0 --checkpoint.every_steps 100 --mesh.data 1"
)
KINDS = {
    "mixture": "--data.packing best_fit --data.overlap 3 --data.weights 3 1",
    "padded_buckets": "--data.packing padded_buckets",
}
DOCUMENTS = {"mixture": [41, 20], "padded_buckets": [77]}
"""Of each source: 12 updates are 2.5 epochs and a little."""
KILLED_AFTER = 7
"""The update whose line is the last of a run that is killed."""

KILL = """
from shardlm.observe import MetricsWriter
write = MetricsWriter.write
def kill_after(self, record):
    write(self, record)
    if record["step"] == {step}:
        os.kill(os.getpid(), signal.SIGKILL)
MetricsWriter.write = kill_after
"""


@pytest.fixture(scope="module")
def flags_of(tmp_path_factory):
    """Flags of a kind, with sources of their own."""

    def make(kind):
        folder = tmp_path_factory.mktemp(kind)
        draw = random.Random(kind)
        for i, count in enumerate(DOCUMENTS[kind]):
            sizes = [1 + min(int(draw.lognormvariate(1.7, 0.8)), 40) for _ in range(count)]
            rows = [json.dumps({"text": "".join(draw.choices("abcdefg ", k=n))}) for n in sizes]
            (folder / f"{i}.jsonl").write_text("\n".join(rows))
        sources = " ".join(str(path) for path in sorted(folder.iterdir()))
        return f"{FLAGS} {KINDS[kind]} --data.sources {sources}"

    return {kind: make(kind) for kind in KINDS}


class Fed:
    """The rows of each update that runs of this process were given, by their numbers."""

    def __init__(self, monkeypatch):
        self.steps, self.loader = {}, None
        iterate = Loader.iterate

        def recording(loader, start_step=0, share=Share()):
            self.loader = loader
            updates = iterate(loader, start_step, share)
            for step, update in enumerate(updates, start=start_step):
                self.steps[step] = rows_by_number(update.batch)
                yield update

        monkeypatch.setattr(Loader, "iterate", recording)

    def take(self):
        taken, self.steps = self.steps, {}
        return taken


def rows_by_number(batch):
    found = {}
    for part in batch.parts if isinstance(batch, Buckets) else [batch]:
        for i, number in enumerate(part["rows"].tolist()):
            if part["segments"][i].any():
                assert number not in found
                found[number] = [part[key][i].tolist() for key in ("tokens", "targets", "segments")]
    return found


@pytest.fixture
def fed(monkeypatch):
    return Fed(monkeypatch)


def stop_after(monkeypatch, step):
    """SIGTERM once the line of an update is written, which is while the next one is made."""
    write = MetricsWriter.write

    def sending(self, record):
        write(self, record)
        if record["step"] == step:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(MetricsWriter, "write", sending)


def same_state(a, b):
    """Bit-equal, leaf by leaf."""
    assert a.keys() == b.keys()
    assert all(a[name].tobytes() == b[name].tobytes() for name in a)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kill_and_a_stop_leave_no_trace(kind, runs, flags_of, fed, monkeypatch, tmp_path):
    """Both in the second epoch of 2.5; and on more devices the run goes on with the same rows."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    flags = flags_of[kind]
    assert runs.train(whole, flags) == 0
    uninterrupted = fed.take()
    assert sorted(uninterrupted) == list(range(STEPS))
    epoch = fed.loader.updates_per_epoch
    assert 2.5 * epoch <= STEPS
    # A save is waited for by the next one: a run killed in update 8 goes on from 5 to 7.
    assert epoch <= 5 < 9 < 2 * epoch

    save = f"{flags} --checkpoint.every_steps 1"
    process = runs.process(broken, save, KILL.format(step=KILLED_AFTER))
    _, errors = process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL, errors
    assert read_metrics(broken / "metrics.jsonl")[-1]["step"] == KILLED_AFTER
    with monkeypatch.context() as patch:
        stop_after(patch, KILLED_AFTER + 1)
        assert runs.train(broken, flags) == 128 + signal.SIGTERM
    stopped = fed.take()
    moved = tmp_path / "moved"
    if kind == "padded_buckets":
        shutil.copytree(broken, moved)
    assert runs.train(broken, flags) == 0
    finished = fed.take()

    assert 5 <= min(stopped) <= 7
    assert 8 <= min(finished) == max(stopped) + 1 <= 9
    assert max(finished) == STEPS - 1
    for step, rows in (stopped | finished).items():
        assert rows == uninterrupted[step]
    assert runs.figures(broken) == runs.figures(whole)
    same_state(runs.state(broken, STEPS), runs.state(whole, STEPS))

    if moved.exists():
        assert runs.train(moved, f"{flags} --mesh.data 2") == 0
        assert fed.take() == finished
        for ours, theirs in zip(runs.figures(moved), runs.figures(whole), strict=True):
            assert ours["tokens"] == theirs["tokens"]
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
