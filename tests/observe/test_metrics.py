"""metrics.jsonl over resumes, values that are not finite, and reading a step late."""

import json
import math

import jax
import jax.numpy as jnp
import pytest

from shardlm.observe import (
    DelayedMetrics,
    MetricsError,
    MetricsWriter,
    read_metrics,
    update_record,
)


def record(step, **changes):
    values = {
        "step": step,
        "loss": 2.5 / step,
        "grad_norm": 0.5,
        "learning_rate": 1e-3,
        "tokens": 100 * step,
        "seconds": 0.25,
        "data_seconds": 0.001,
        "tokens_per_second": 400.0,
        "mfu": None,
        "balance": 1.0,
        "balance_run": 1.0,
        "source_tokens": (60 * step, 40 * step),
        "epochs": (0.5 * step, 0.1 * step),
        "device_seconds": None,
        "device_speeds": None,
        "skipped": False,
        "mixture": {},
    }
    return update_record(**(values | changes))


def steps_of(path):
    return [line["step"] for line in read_metrics(path)]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def test_a_line_has_the_keys_of_the_contract_and_is_there_at_once(path):
    writer = MetricsWriter(path)
    writer.write(record(1, tokens=2**40 + 1))
    (line,) = path.read_text().splitlines()
    assert list(json.loads(line)) == [
        *("step", "loss", "grad_norm", "learning_rate", "tokens", "seconds"),
        *("data_seconds", "tokens_per_second", "mfu", "balance", "balance_run"),
        *("source_tokens", "epochs", "device_seconds", "device_speeds", "skipped"),
    ]
    assert json.loads(line)["tokens"] == 2**40 + 1
    assert json.loads(line)["mfu"] is None
    assert json.loads(line)["skipped"] == 0
    writer.sync()
    writer.close()


def test_numbers_survive_exactly(path):
    writer = MetricsWriter(path)
    loss = float(jnp.float32(1) / 3)
    writer.write(record(1, loss=loss, learning_rate=5e-324, mfu=0.1))
    writer.close()
    (line,) = read_metrics(path)
    assert (line["loss"], line["learning_rate"], line["mfu"]) == (loss, 5e-324, 0.1)


def test_not_finite_is_null_and_named(path):
    writer = MetricsWriter(path)
    writer.write(record(1, loss=math.nan, grad_norm=-math.inf, skipped=True))
    writer.close()
    text = path.read_text()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    (line,) = read_metrics(path)
    assert line["loss"] is None
    assert line["not_finite"] == {"loss": "nan", "grad_norm": "-inf"}
    assert line["skipped"] == 1


@pytest.mark.parametrize("cut", [1, 20, 90])
@pytest.mark.parametrize("restored", [0, 3, 5])
def test_after_a_kill_and_a_resume_the_file_cannot_tell(path, restored, cut):
    """Five lines with an evaluation at 3, and a sixth that was cut off in the middle."""
    writer = MetricsWriter(path)
    whole = []
    for step in range(1, 6):
        lines = [record(step)] + ([{"step": 3, "eval_loss": 1.5}] if step == 3 else [])
        for line in lines:
            writer.write(line)
        whole += lines
    writer.close()
    expected = path.read_text()
    with open(path, "a") as file:
        file.write(json.dumps(record(6))[:cut])

    writer = MetricsWriter(path)
    assert writer.truncate_after(restored) == restored
    for line in whole:
        if line["step"] > restored:
            writer.write(line)
    writer.close()
    assert path.read_text() == expected
    assert sorted(p.name for p in path.parent.iterdir()) == [path.name]


def test_resuming_twice_and_from_an_empty_file(path):
    writer = MetricsWriter(path)
    assert writer.truncate_after(0) == 0
    for step in range(1, 8):
        writer.write(record(step))
    assert writer.truncate_after(6) == 6
    writer.write(record(7))
    assert writer.truncate_after(4) == 4
    writer.write(record(5))
    writer.close()
    assert steps_of(path) == [1, 2, 3, 4, 5]


def test_a_gap_before_the_restored_step_is_told(path):
    writer = MetricsWriter(path)
    writer.write(record(1))
    writer.write({"step": 2, "eval_loss": 1.0})
    assert writer.truncate_after(4) == 1
    writer.close()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"step": 1}\nnonsense\n{"step": 2}\n', "2: not a line of metrics: 'nonsense'"),
        ('{"step": 1}\n[2]\n{"step": 3}\n', ":2: not a line"),
        ('{"loss": 1}\n{"step": 1}\n', ":1: not a line"),
        ('{"step": 3}\n{"step": 2}\n', ":2: step 2 comes after step 3"),
        ('{"step": 3, "loss": 1}\n{"step": 3, "loss": 1}\n', ":2: step 3 comes after step 3"),
    ],
)
def test_a_damaged_file_is_named_and_left_alone(path, text, message):
    path.write_text(text)
    writer = MetricsWriter(path)
    with pytest.raises(MetricsError, match=message):
        writer.truncate_after(9)
    writer.close()
    assert path.read_text() == text


def test_a_last_line_of_rubbish_goes(path):
    path.write_bytes(b'{"step": 1}\n\x00\x00\xff\n')
    writer = MetricsWriter(path)
    writer.truncate_after(9)
    writer.close()
    assert path.read_text() == '{"step": 1}\n'


def test_metrics_come_one_step_late_and_time_adds_up():
    clock = iter([0.0, 1.0, 3.5, 4.0, 10.0, 10.5])
    delayed = DelayedMetrics(clock=lambda: next(clock))
    add = jax.jit(lambda x: {"loss": x + 0.5, "tokens": jnp.int32(7)})
    assert delayed.push(1, add(1.0)) is None
    first = delayed.push(2, add(2.0))
    assert (first.step, first.values, first.seconds) == (1, {"loss": 1.5, "tokens": 7}, 1.0)
    assert type(first.values["tokens"]) is int
    second = delayed.push(3, add(3.0))
    assert (second.step, second.seconds) == (2, 2.5)
    third = delayed.flush()
    assert (third.step, third.values["loss"], third.seconds) == (3, 3.5, 0.5)
    assert delayed.flush() is None
    delayed.start()  # an evaluation took 6 s
    assert delayed.push(4, add(4.0)) is None
    assert delayed.flush().seconds == 0.5
