"""Runs whose devices are dealt updates by measured times, and what a run says that it has read."""

import json
import re
import signal

import pytest

from shardlm.arguments import parse_config
from shardlm.checkpoint import CheckpointStore
from shardlm.data import load_data
from shardlm.data.balance import Speeds
from shardlm.observe import DelayedMetrics, read_metrics
from shardlm.train.report import describe
from shardlm.train.setup import build_engine, build_mesh, resolve_vocab

# Of 2 devices, the second takes three times as long.
FLAGS = (
    "--mesh.data 2 --mesh.shard_params optimizer --train.steps 16 --train.batch 24 "
    "--train.micro_batch 4 --data.prefetch 1 --data.tokenizer bytes "
)
DYNAMIC = FLAGS + "--data.balance dynamic"

SLOW = """
from shardlm.observe import DelayedMetrics
flush = DelayedMetrics.flush
def slow(self):
    fetched = flush(self)
    if fetched is not None:
        ways = len(fetched.values.get("device_seconds", ()))
        fetched.values["device_seconds"] = [0.1, 0.3, 0.1, 0.1][:ways] or None
    return fetched
DelayedMetrics.flush = slow
"""

KILL_AT_9 = """
from shardlm.observe import MetricsWriter
write = MetricsWriter.write
def kill(self, record):
    write(self, record)
    if record["step"] == 9:
        os.kill(os.getpid(), signal.SIGKILL)
MetricsWriter.write = kill
"""


@pytest.fixture
def slow(monkeypatch):
    monkeypatch.setattr(DelayedMetrics, "flush", DelayedMetrics.flush)
    exec(SLOW, {})  # The same as a process of its own runs.


def test_a_slow_device_is_given_less_and_a_kill_leaves_no_trace(runs, slow, tmp_path, capsys):
    """The slow device has the same work each time, so it seems slower and slower until it has
    less. The mathematics stay those of devices that are dealt alike."""
    whole, killed, alike = tmp_path / "whole", tmp_path / "killed", tmp_path / "alike"
    flags = f"{DYNAMIC} --checkpoint.every_steps 4"
    assert runs.train(whole, flags) == 0
    assert "speeds      1.2" in capsys.readouterr().out
    speeds = [r["device_speeds"] for r in runs.figures(whole) if "loss" in r]
    # Known of update 2 when 3 is under way, and 4, 5 and 6 may be prepared already.
    assert speeds[:6] == [[1.0, 1.0]] * 6
    assert speeds[6][0] > 1.03
    assert speeds[6] < speeds[-1]
    process = runs.process(killed, flags, SLOW + KILL_AT_9)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL, errors
    assert CheckpointStore(killed / "checkpoints").steps()[-1] in (4, 8)  # The save of 8 is new.
    assert runs.train(killed, flags) == 0
    assert runs.figures(killed) == runs.figures(whole)
    one, other = runs.state(killed, 16), runs.state(whole, 16)
    assert all(one[name].tobytes() == other[name].tobytes() for name in other)
    metadata = [CheckpointStore(run / "checkpoints").metadata(16) for run in (whole, killed)]
    assert metadata[0] == metadata[1]
    speeds = Speeds.from_json(metadata[0]["speeds"]).at(99)
    assert speeds[0] / speeds[1] > 1.4

    # Its first decisions are forgotten by now. On other devices all are.
    capsys.readouterr()
    assert runs.train(killed, f"{flags} --train.steps 18") == 0
    assert runs.train(killed, f"{flags} --train.steps 20 --mesh.data 4") == 0
    assert "the speeds of 2 devices are forgotten: there are 4 now" in capsys.readouterr().out

    assert runs.train(alike, FLAGS + "--data.balance work") == 0
    losses = [
        [record["loss"] for record in runs.figures(run) if "loss" in record]
        for run in (whole, alike)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_that_there_is_one_micro_batch_is_said_where_there_are_several_devices(runs, tmp_path):
    for flags, expected in (("2 4", False), ("2 24", True), ("1 24", False)):
        data, micro = flags.split()
        argv = runs.arguments(tmp_path, f"{DYNAMIC} --mesh.data {data} --train.micro_batch {micro}")
        config = parse_config(argv)
        text = load_data(config)
        config = resolve_vocab(config, text)
        engine = build_engine(config, build_mesh(config))
        said = "data.balance is dynamic and an update has one micro-batch, so that a slow device"
        assert (said in describe(engine, text)) == expected


def test_times_are_measured(runs, tmp_path):
    """Within the update, and not alike for both devices."""
    run = tmp_path / "run"
    assert runs.train(run, f"{DYNAMIC} --train.steps 4") == 0
    records = read_metrics(run / "metrics.jsonl")
    for record in records[:4]:
        assert len(record["device_seconds"]) == 2
        assert 0 < min(record["device_seconds"]) < max(record["device_seconds"])
        # The host sees the end of an update a little later than it is.
        assert max(record["device_seconds"]) < 1.5 * record["seconds"]


def test_tokens_and_epochs_of_each_source(runs, text, tmp_path, capsys):
    """In the lines and at the end, and counted on when a run is resumed."""
    small = tmp_path / "small.txt"
    small.write_text("a small text that is read again and again. " * 5)
    run = tmp_path / "run"
    flags = (
        f"--data.sources {text} {small} --data.weights 1 1 --data.validation 0 "
        "--data.tokenizer bytes --train.steps 4"
    )
    assert runs.train(run, flags) == 0
    assert runs.train(run, f"{flags} --train.steps 7") == 0
    records = read_metrics(run / "metrics.jsonl")
    assert [r["step"] for r in records] == list(range(1, 8))
    sizes = [len(text.read_bytes()), len(small.read_bytes())]  # The end of each is predicted too.
    for record in records:
        assert sum(record["source_tokens"]) == record["tokens"]
        assert record["epochs"] == pytest.approx(
            [n / size for n, size in zip(record["source_tokens"], sizes, strict=True)]
        )
    # 7 updates of 12 rows of 11, half of them of each source, whose last row is not full.
    assert records[-1]["source_tokens"] == pytest.approx([462, 462], abs=2 * 11 * 2)
    said = capsys.readouterr().out
    tokens = records[-1]["source_tokens"][1]
    share = tokens / sum(records[-1]["source_tokens"])
    assert f"{small}: {tokens:,} tokens ({share:.1%}), {tokens / sizes[1]:.2f} epochs" in said
    # And those of the whole run at its start.
    first = re.search(
        rf"7 updates of 12 rows: (.+) epochs of {text}, (.+) epochs of {small}\n", said
    )
    assert [float(n) for n in first.groups()] == pytest.approx(records[-1]["epochs"], rel=0.1)
    whole = sum(r["balance"] for r in records) / 7
    assert records[-1]["balance_run"] == pytest.approx(whole, rel=0.02)
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["balance_run"] >= 1
