"""The loop: its clock, its evaluations and samples, failing saves, losses that are not finite."""

import math
import re
import time

import pytest
from jax.errors import JaxRuntimeError

from shardlm.checkpoint import CheckpointStore, SaveError
from shardlm.data import load_data
from shardlm.observe import MetricsWriter, RunDirectory, read_metrics
from shardlm.train import loop


def test_seconds_add_up_to_the_wall_clock(runs, tmp_path, monkeypatch):
    """Updates and evaluations each have their time; between the first line and the last there is
    none that belongs to no line."""
    written = []
    write = MetricsWriter.write

    def timed(self, record):
        written.append((time.perf_counter(), record))
        write(self, record)

    monkeypatch.setattr(MetricsWriter, "write", timed)
    flags = "--train.steps 60 --eval.every_steps 20 --checkpoint.every_steps 25"
    assert runs.train(tmp_path, flags) == 0
    assert len(written) == 63
    # From the first evaluation on: it is compiled within its own time, in which others could hide.
    first = next(i for i, (_, record) in enumerate(written) if "eval_loss" in record)
    wall = written[-1][0] - written[first][0]
    seconds = sum(record["seconds"] for _, record in written[first + 1 :])
    assert seconds == pytest.approx(wall, rel=0.05)


def test_first_update_is_counted_from_the_start_of_the_process(runs, tmp_path):
    began = time.time()
    output, _ = runs.process(
        tmp_path, "--train.steps 2", "import time; time.sleep(3)"
    ).communicate()
    said = float(re.search(r"first update ([\d.]+) s after start", output)[1])
    assert 3 < said < time.time() - began


def test_logged_tokens_are_those_of_the_rows(runs, finished, tmp_path):
    """Over the end of an epoch, which no batch is cut short by."""
    run = finished(tmp_path / "run")
    train = load_data(RunDirectory(run).read_config()).train
    assert train.rows_per_epoch < 6 * 12
    seen = sum(int((train.at(step).batch["targets"] >= 0).sum()) for step in range(6))
    assert [r["tokens"] for r in runs.figures(run) if "loss" in r][-1] == seen


def test_devices_and_arrays_that_are_left_out_are_told(runs, tmp_path, capsys):
    """Biases of gate and up, 500 numbers each, and of q, k and v; and their two moments."""
    flags = "--model.bias true --model.mlp 500 --train.steps 2 --data.validation 0"
    assert runs.train(tmp_path / "2", flags) == 0
    output = capsys.readouterr().out
    assert "mesh        data 2 (2 of 8 cpu, 6 idle)" in output
    assert "whole" not in output
    assert runs.train(tmp_path / "8", f"{flags} --mesh.data 8 --train.batch 16") == 0
    output = capsys.readouterr().out
    assert "mesh        data 8 (8 cpu)" in output
    numbers = 3 * (2 * 500 + (4 + 2 + 2) * 6)
    assert (
        f"whole       15 arrays that data does not divide, {4 * numbers:,} bytes a device" in output
    )


def test_without_validation_nothing_is_evaluated(runs, tmp_path, capsys):
    assert runs.train(tmp_path, "--data.validation 0 --eval.every_steps 2") == 0
    assert "nothing is evaluated, since data.validation is 0" in capsys.readouterr().out
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


def test_batches_of_an_evaluation_fit_any_mesh(runs, finished, tmp_path):
    """7 rows in batches of 5, which 2 devices do not divide: the loss of one batch."""
    run = finished(tmp_path / "run")
    expected = runs.figures(run)[-1]["eval_loss"]
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:-1]))
    assert runs.train(run, "--eval.batch 5") == 0
    assert runs.figures(run)[-1]["step"] == 6
    assert runs.figures(run)[-1]["eval_loss"] == pytest.approx(expected, rel=1e-6)


def test_a_sample_fits_into_learned_positions(runs, tmp_path, capsys):
    """Of 200 tokens asked for, 11 positions leave room for 9 after the prompt."""
    flags = "--model.positions learned --eval.sample_tokens 200 --eval.prompt at --train.steps 2"
    assert runs.train(tmp_path, flags) == 0
    sample = re.search(r"sample after 'at':\n(.*?)\n\n", capsys.readouterr().out, re.DOTALL)[1]
    assert len(sample) == 9


def test_a_failed_save_is_said_and_the_next_one_works(runs, tmp_path, monkeypatch, capsys):
    wait, failures = CheckpointStore.wait, ["disk is full"]

    def failing(self):
        if self._saving == 2 and failures:
            wait(self)
            raise SaveError(failures.pop())
        wait(self)

    monkeypatch.setattr(CheckpointStore, "wait", failing)
    assert runs.train(tmp_path, "--checkpoint.every_steps 2") == 0
    assert "disk is full; saving update 4 now" in capsys.readouterr().out
    assert CheckpointStore(tmp_path / "checkpoints").steps() == [4, 6]


def test_a_save_that_fails_does_not_hide_what_ended_the_run(runs, tmp_path, monkeypatch, capsys):
    wait, failures = CheckpointStore.wait, ["checkpoint 2 was not saved: disk is full"]

    def failing(self):
        wait(self)
        if self._manager is not None and failures:
            raise SaveError(failures.pop())

    def evaluated(params, stopped):
        monkeypatch.setattr(CheckpointStore, "wait", failing)
        return math.inf

    monkeypatch.setattr(loop, "make_evaluate", lambda *_: evaluated)
    assert runs.train(tmp_path, "--checkpoint.every_steps 2") == 1
    said = capsys.readouterr()
    assert "error: the validation loss after update 6 is inf" in said.err
    assert said.err.count("\n") == 1
    assert "checkpoint 2 was not saved: disk is full" in said.out


def test_out_of_memory_says_what_to_do(runs, tmp_path, monkeypatch, capsys):
    def step(state, batch):
        # What XLA says on one device; on several CPU devices it ends the process.
        raise JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 4096 bytes.\nOf which")

    monkeypatch.setattr(loop._Run, "_compile", lambda self, first: step)
    assert runs.train(tmp_path, "--train.micro_batch 6") == 1
    error = capsys.readouterr().err
    assert error.startswith("error: Out of memory allocating 4096 bytes: lower train.micro_batch ")
    assert "(6 of train.batch 12; the result stays the same)" in error
    assert error.count("\n") == 1


def test_a_last_save_that_fails_is_a_failure(runs, tmp_path, monkeypatch, capsys):
    def failing(self, step, *args, **kwargs):
        raise SaveError(f"checkpoint {step} was not saved: disk is full")

    monkeypatch.setattr(CheckpointStore, "save", failing)
    assert runs.train(tmp_path) == 1
    assert capsys.readouterr().err == (
        "error: checkpoint 6 was not saved: disk is full. The run can go on from its beginning\n"
    )


def test_a_rate_that_destroys_the_model_ends_the_run(runs, tmp_path, capsys):
    """Update 1 is finite and ruins the weights; 2 to 4 are skipped. None is saved as good."""
    flags = (
        "--optim.learning_rate 1e30 --optim.warmup_steps 0 --optim.max_skipped 3 "
        "--checkpoint.every_steps 2 --data.validation 0"
    )
    assert runs.train(tmp_path, flags) == 1
    error = capsys.readouterr().err
    assert "the gradients of the last 3 updates, up to 4, are not finite" in error
    assert "lower optim.learning_rate (1e+30)" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "checkpoints").exists()
    assert [r["skipped"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1, 1, 1]

    # The run is over before as many are skipped, and is a failure all the same, each time.
    for _ in range(2):
        assert runs.train(tmp_path, f"{flags} --train.steps 3") == 1
        assert "the gradients of the last 2 updates, up to 3" in capsys.readouterr().err
    assert not (tmp_path / "checkpoints").exists()


def test_a_run_that_made_no_update_is_a_failure(runs, tmp_path, capsys):
    """The untouched state evaluates well; it is what there was before the run."""
    for _ in range(2):
        assert runs.train(tmp_path, "--train.z_loss 1e38") == 1
        error = capsys.readouterr().err
        assert "the gradients of the last 6 updates, up to 6, are not finite" in error
    assert CheckpointStore(tmp_path / "checkpoints").latest() is None


def test_updates_with_nothing_to_predict_have_no_loss_and_end_the_run(runs, tmp_path, capsys):
    """Documents of one character each but one, a row each: loss 0 would be a lie."""
    text = tmp_path / "letters.jsonl"
    text.write_text('{"text": "a"}\n{"text": "b"}\n' * 60 + '{"text": "ab"}\n')
    flags = (
        f"--data.sources {text} --data.split documents --data.validation 0 --data.packing none "
        "--optim.max_skipped 3 --train.steps 9"
    )
    assert runs.train(tmp_path / "run", flags) == 1
    error = capsys.readouterr().err
    assert "had no token to predict, and 2 before it were skipped too" in error
    assert "use data.packing best_fit" in error
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    for record in records:
        assert record["loss"] is None if record["skipped"] else record["loss"] > 0
    assert [r["not_finite"] for r in records if r["skipped"]] == [{"loss": "nan"}] * (
        sum(r["skipped"] for r in records)
    )
    assert [r["skipped"] for r in records[-3:]] == [1, 1, 1]


def test_a_last_update_that_is_skipped_loses_nothing(runs, tmp_path, monkeypatch, capsys):
    """It left the parameters as they were; the evaluation after it says that they are sound."""
    compile_ = loop._Run._compile

    def compiled(self, first):
        step = compile_(self, first)

        def skipping(state, batch):
            state, metrics = step(state, batch)
            return state, metrics | {"consecutive": state["step"] // 6}

        return skipping

    monkeypatch.setattr(loop._Run, "_compile", compiled)
    assert runs.train(tmp_path) == 0
    assert [r.get("skipped") for r in runs.figures(tmp_path)] == [0, 0, 0, 0, 0, 1, None]
    assert CheckpointStore(tmp_path / "checkpoints").latest() == 6


def test_a_validation_loss_that_is_not_finite_is_a_failure(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loop, "make_evaluate", lambda *_: lambda params, stopped: math.inf)
    assert runs.train(tmp_path, "--eval.every_steps 3 --checkpoint.every_steps 4") == 1
    assert "the validation loss after update 6 is inf: lower" in capsys.readouterr().err
    evaluations = [r for r in read_metrics(tmp_path / "metrics.jsonl") if "eval_loss" in r]
    assert [(r["step"], r["eval_loss"]) for r in evaluations] == [(3, None), (6, None)]
    assert CheckpointStore(tmp_path / "checkpoints").steps() == [4]


def test_a_model_that_is_not_finite_at_step_1_ends_the_run(runs, tmp_path, capsys):
    flags = "--model.init_std 3e38 --optim.max_skipped 2"
    assert runs.train(tmp_path, flags) == 1
    error = capsys.readouterr().err
    assert "the gradients of the last 2 updates, up to 2, are not finite" in error
    assert "not even the first was: lower model.init_std (3e+38)" in error
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [r["learning_rate"] for r in records] == [pytest.approx(0.005)] * 2
    assert not (tmp_path / "checkpoints").exists()
