"""A run that was killed, stopped, moved to another mesh, changed or finished, and started again."""

import json
import shutil
import signal

import numpy as np
import pytest

from shardlm import cli
from shardlm.checkpoint import CheckpointStore
from shardlm.config import Config, DataConfig, OptimConfig, TrainConfig
from shardlm.data import load_data
from shardlm.data.subwords import train_bpe
from shardlm.observe import RunDirectory, read_metrics
from shardlm.train.resume import write_config
from shardlm.train.start import Start

# An epoch has 4.25 updates: 11 are 2.6 epochs. Muon keeps state of two kinds, dropout draws from
# the seed and the step, and only a cosine would show a schedule that starts again.
FLAGS = (
    "--train.steps 11 --checkpoint.every_steps 2 --eval.every_steps 5 --optim.name muon "
    "--optim.schedule cosine --model.dropout 0.1 --train.micro_batch 6"
)

KILL_AFTER_LINE = """
from shardlm.observe import MetricsWriter
write = MetricsWriter.write
def kill_after(self, record):
    write(self, record)
    if record["step"] == {step} and "{key}" in record:
        os.kill(os.getpid(), signal.SIGKILL)
MetricsWriter.write = kill_after
"""

KILL_IN_SAVE = """
from shardlm.checkpoint import CheckpointStore
save = CheckpointStore.save
def kill_in_save(self, step, *args, **kwargs):
    save(self, step, *args, **kwargs)
    if step == {step}:
        os.kill(os.getpid(), signal.SIGKILL)
CheckpointStore.save = kill_in_save
"""


def same_state(a, b):
    """Bit-equal, leaf by leaf."""
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert a[name].tobytes() == b[name].tobytes(), name


def test_kills_leave_no_trace(runs, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert runs.train(whole, FLAGS) == 0
    reached = []
    for moment in (
        # Two in the second epoch; the third while the last but one save is being written.
        KILL_AFTER_LINE.format(step=5, key="eval_loss"),
        KILL_AFTER_LINE.format(step=7, key="loss"),
        KILL_IN_SAVE.format(step=10),
    ):
        process = runs.process(killed, FLAGS, moment)
        _, errors = process.communicate(timeout=300)
        assert process.returncode == -signal.SIGKILL, errors
        reached.append(read_metrics(killed / "metrics.jsonl")[-1]["step"])
    assert reached == [5, 7, 10]
    assert runs.train(killed, FLAGS) == 0
    assert runs.figures(killed) == runs.figures(whole)
    same_state(runs.state(killed, 11), runs.state(whole, 11))
    steps = [r["step"] for r in read_metrics(whole / "metrics.jsonl") if "loss" in r]
    assert steps == list(range(1, 12))


def test_another_mesh_has_the_same_leaves_and_next_loss(runs, finished, tmp_path, capsys):
    """Saved on data 2. Over model 4 the 2 key/value heads are stored whole."""
    here, there = finished(tmp_path / "here"), finished(tmp_path / "there")
    saved = runs.state(here, 6)
    for mesh in ("1,1", "3,1", "1,2", "4,2", "1,4"):
        same_state(runs.state(here, 6, mesh), saved)
    assert runs.train(here, "--train.steps 7") == 0
    assert "kv heads" not in capsys.readouterr().out
    assert runs.train(there, "--train.steps 7 --mesh.data 2 --mesh.model 4") == 0
    assert (
        "kv heads    2, which do not divide over model: each is computed on 2 devices, and their "
        "weights are whole on all 4\n" in capsys.readouterr().out
    )
    losses = [runs.figures(run)[-2]["loss"] for run in (here, there)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    config = RunDirectory(there).read_config()
    assert (config.mesh.data, config.mesh.model, config.train.steps) == (2, 4, 7)


def test_layers_of_stages_are_saved_in_their_order(runs, tmp_path):
    """Saved on 2 stages in 2 rounds, which hold layers 0, 2, 1, 3: goes on there to the bit, and on
    one stage as there."""
    deep = "--model.layers 4 --train.micro_batch 6"
    stages = f"{deep} --mesh.stage 2 --mesh.stage_rounds 2"
    straight, stopped, moved = (tmp_path / name for name in ("straight", "stopped", "moved"))
    assert runs.train(straight, f"{stages} --train.steps 8") == 0
    assert runs.train(stopped, f"{stages} --train.steps 6") == 0
    shutil.copytree(stopped, moved)
    assert runs.train(stopped, f"{stages} --train.steps 8") == 0
    same_state(runs.state(stopped, 8), runs.state(straight, 8))
    assert runs.train(moved, f"{deep} --mesh.model 2 --train.steps 8") == 0
    losses = [[f["loss"] for f in runs.figures(run)[-3:-1]] for run in (straight, moved)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    there = runs.state(moved, 8)
    for name, leaf in runs.state(straight, 8).items():
        np.testing.assert_allclose(there[name], leaf, rtol=0, atol=1e-5, err_msg=name)


def test_more_steps_are_those_of_a_longer_run(runs, finished, tmp_path, capsys):
    """With a constant rate a run that was made longer is one that was longer from the start."""
    extended, whole = finished(tmp_path / "extended"), tmp_path / "whole"
    capsys.readouterr()
    assert runs.train(extended, "--train.steps 9 --eval.every_steps 3") == 0
    assert (
        "train.steps 6 -> 9: the learning rate of update 7 stays 0.01\n" in capsys.readouterr().out
    )
    assert runs.train(whole, "--train.steps 9 --eval.every_steps 3") == 0
    assert runs.figures(extended) == runs.figures(whole)
    same_state(runs.state(extended, 9), runs.state(whole, 9))


@pytest.mark.parametrize(
    ("first", "steps", "said"),
    [
        # Linear from 0.01 to 0: after update 4 of 4, update 5 has 0; of 8, half the peak at 4.
        (4, 8, "train.steps 4 -> 8: the learning rate of update 5 is 0.00375, not 0"),
        (2, 5, "train.steps 4 -> 5: the learning rate of update 3 is 0.004, not 0.0025"),
        (2, 2, "train.steps 4 -> 2: no update is left"),
        (2, 4, None),
    ],
)
def test_a_changed_schedule_is_said(first, steps, said, tmp_path):
    optim = OptimConfig(schedule="linear", final_fraction=0, warmup_steps=0, learning_rate=0.01)
    before = Config(optim=optim, train=TrainConfig(steps=4))
    now = Config(optim=optim, train=TrainConfig(steps=steps))
    (tmp_path / "text.txt").write_text("ab" * 100)
    data = load_data(
        Config(data=DataConfig(sources=(str(tmp_path / "text.txt"),), validation=0.0, length=4))
    )
    lines = []
    start = Start(now, RunDirectory(tmp_path), before, data)
    write_config(start, now, first, 0, lines.append)
    assert lines == ([said] if said else [])
    written = RunDirectory(tmp_path).read_config()
    assert written == (now if said else None)


def test_a_finished_run_says_so_and_changes_nothing(runs, finished, tmp_path, capsys):
    run = finished(tmp_path / "run")
    flags = "--eval.every_steps 3 --checkpoint.every_steps 3"
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    capsys.readouterr()
    assert runs.train(run, flags) == 0
    output = capsys.readouterr().out
    assert "this run has finished after 6 updates" in output
    assert "continue with: " in output
    after = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    changed = {name for name in before if before[name] != after[name]}
    assert changed <= {".lock", "config.yaml"}
    assert RunDirectory(run).read_config().run.dir == str(run)
    assert CheckpointStore(run / "checkpoints").steps() == [3, 6]


def test_keys_that_are_free_are_taken_over(runs, finished, tmp_path):
    run = finished(tmp_path / "run")
    assert runs.train(run, "--checkpoint.keep 7 --run.log_every_steps 2") == 0
    config = RunDirectory(run).read_config()
    assert (config.checkpoint.keep, config.run.log_every_steps) == (7, 2)


REFUSED = {
    "--model.mlp 28 --optim.b2 0.9": ["model.mlp: 20 -> 28", "optim.b2: 0.95 -> 0.9"],
    "--run.seed 1": ["run.seed: 0 -> 1"],
    "--train.batch 6": ["train.batch: 12 -> 6"],
    "--train.steps 5": ["train.steps is 5", "has made 6 updates"],
    "--run.fresh true": ["is not empty, and run.fresh is true"],
}


@pytest.mark.parametrize("flags", REFUSED)
def test_another_run_is_refused(flags, runs, finished, tmp_path, capsys):
    run = finished(tmp_path / "run")
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p.name != ".lock"}
    capsys.readouterr()
    assert runs.train(run, flags) == 2
    error = capsys.readouterr().err
    for part in REFUSED[flags]:
        assert part in error
    assert error.count("\n") == 1
    assert {p: p.read_bytes() for p in before} == before


def test_the_text_may_lie_elsewhere_and_must_be_the_same(runs, finished, text, tmp_path, capsys):
    """As a file of another name, or as a store."""
    run, stays = finished(tmp_path / "run"), finished(tmp_path / "stays")
    moved, store, other = tmp_path / "moved.txt", tmp_path / "store", tmp_path / "other.txt"
    moved.write_bytes(text.read_bytes())
    other.write_bytes(text.read_bytes().replace(b"mat", b"tam"))
    prepare = [str(store), "--data.sources", str(text), "--data.tokenizer", "characters"]
    assert cli.run(cli.prepare, prepare) == 0
    for steps, source in ((7, moved), (8, store)):
        assert runs.train(run, f"--train.steps {steps} --data.sources {source}") == 0
        assert RunDirectory(run).read_config().data.sources == (str(source),)
        assert runs.train(stays, f"--train.steps {steps}") == 0
    assert runs.figures(run) == runs.figures(stays)

    capsys.readouterr()
    assert runs.train(run, f"--train.steps 9 --data.sources {other}") == 2
    error = capsys.readouterr().err
    assert f"data.sources: ('{store}',) -> ('{other}',), where the text or its ids differ" in error
    store.rename(tmp_path / "renamed")
    # One device, whose batches need not be those of the mesh.
    evaluate = [str(run), "--mesh.data", "1", "--data.sources"]
    logged = [r["eval_loss"] for r in runs.figures(run) if "eval_loss" in r][-1]
    for source in (tmp_path / "renamed", moved):
        capsys.readouterr()
        assert cli.run(cli.evaluate, [*evaluate, str(source)]) == 0
        found = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert found["eval_loss"] == pytest.approx(logged, rel=1e-6)
    for wrong, part in (
        ([*evaluate, str(other)], f"than data.sources {other} hold now, so its validation split"),
        (evaluate[:-1], f"data.sources: '{store}' does not exist"),
    ):
        assert cli.run(cli.evaluate, wrong) == 2
        assert part in capsys.readouterr().err


def test_the_tokenizer_may_lie_elsewhere_and_must_be_the_same(runs, text, tmp_path, capsys):
    first, moved, other = (tmp_path / name for name in ("a.json", "b.json", "c.json"))
    for path, vocab in ((first, 262), (other, 258)):
        path.write_text(train_bpe([text.read_text()], vocab).to_json())
    run = tmp_path / "run"
    assert runs.train(run, f"--train.steps 2 --data.tokenizer {first}") == 0
    first.rename(moved)
    capsys.readouterr()
    assert cli.run(cli.evaluate, [str(run), "--mesh.data", "1"]) == 0
    assert runs.train(run, f"--train.steps 3 --data.tokenizer {moved}") == 0
    capsys.readouterr()
    assert runs.train(run, f"--train.steps 4 --data.tokenizer {other}") == 2
    assert f"data.tokenizer: {moved} -> {other}" in capsys.readouterr().err


def test_without_a_checkpoint_another_configuration_is_a_new_run(runs, tmp_path, finished):
    run = finished(tmp_path / "run")
    for step in (3, 6):
        (run / "checkpoints" / str(step)).rename(tmp_path / str(step))
    assert runs.train(run, "--run.seed 1 --eval.every_steps 3 --data.tokenizer bytes") == 0
    assert [r["step"] for r in runs.figures(run)] == [1, 2, 3, 3, 4, 5, 6, 6]
    assert RunDirectory(run).read_config().run.seed == 1
    assert '"bytes"' in (run / "tokenizer.json").read_text()
