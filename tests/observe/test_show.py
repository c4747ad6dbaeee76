"""Progress lines, the loss curve, and what is known of devices."""

import io
import json
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest

from shardlm.observe import Console, mfu, peak_flops, peak_memory, plot_loss
from shardlm.observe.console import count, duration


def record(step, **changes):
    values = {"loss": 2.34567, "learning_rate": 1e-3, "tokens_per_second": 12345.6, "mfu": None}
    return {"step": step, "seconds": 2.0, "skipped": 0} | values | changes


def test_progress_lines():
    stream = io.StringIO()
    console = Console(steps=120, every=10, stream=stream)
    console.update(record(1, seconds=100.0))  # compiles: does not count for the time left
    for step in range(2, 21):
        console.update(record(step))
    console.update(record(120, mfu=0.4123, skipped=1))
    console.evaluation(120, 1.87654, None)
    console.evaluation(120, 1.87654, 2.70728)
    assert stream.getvalue().splitlines() == [
        "step   1/120  loss 2.3457 nats per token  lr 1.00e-03  12.3k tokens/s",
        "step  10/120  loss 2.3457 nats per token  lr 1.00e-03  12.3k tokens/s  3m40s left",
        "step  20/120  loss 2.3457 nats per token  lr 1.00e-03  12.3k tokens/s  3m20s left",
        "step 120/120  loss 2.3457 nats per token  lr 1.00e-03  12.3k tokens/s  mfu 41.2%  "
        "0s left  skipped: gradients are not finite",
        "step 120/120  validation loss 1.8765 nats per token",
        "step 120/120  validation loss 1.8765 nats per token, 2.7073 bits per byte",
    ]


def test_durations_and_counts():
    seconds = [0.4, 59.4, 59.6, 185, 3599.7, 7620, 356400]
    texts = ["0s", "59s", "1m00s", "3m05s", "1h00m", "2h07m", "4d03h"]
    assert [duration(s) for s in seconds] == texts
    values = [0.0, 987.0, 999.7, 12345.0, 4.56e6, 7.89e10]
    assert [count(v) for v in values] == ["0", "987", "1k", "12.3k", "4.56M", "78.9G"]


def test_the_loss_curve_is_a_picture(tmp_path):
    metrics, picture = tmp_path / "metrics.jsonl", tmp_path / "loss.png"
    metrics.write_text("")
    assert not plot_loss(metrics, picture)
    assert not picture.exists()
    lines = [{"step": k, "loss": None if k == 4 else 3.0 / k} for k in range(1, 9)]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert plot_loss(metrics, picture, title="run")
    plain = picture.read_bytes()
    metrics.write_text(metrics.read_text() + '{"step": 8, "eval_loss": 0.5}\n{"step": 9, "lo')
    assert plot_loss(metrics, picture, title="run")
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
    assert picture.read_bytes() != plain, "the evaluation is drawn"
    assert plot_loss(metrics, picture, title="d$x_{$y 数据"), "a name, not mathematics"


def test_neither_jax_nor_matplotlib_is_loaded_before_it_is_needed():
    code = "import sys, shardlm.observe; assert not {'jax', 'matplotlib', 'numpy'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_peaks_of_known_devices_only():
    assert peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("TPU v5p") == peak_flops("TPU v5") == 459e12
    assert peak_flops("TPU v5 lite") == 197e12
    for unknown in ("cpu", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GeForce GTX 970", ""):
        assert peak_flops(unknown) is None


def test_mfu_of_known_devices_only():
    h200, other = SimpleNamespace(device_kind="NVIDIA H200"), SimpleNamespace(device_kind="x")
    assert mfu(989e12, [h200] * 4) == pytest.approx(0.25, rel=1e-12)
    assert mfu(1e12, [h200, other]) is None
    assert mfu(1e12, jax.devices("cpu")) is None


def test_peak_memory_sees_what_was_allocated():
    """In a process of its own: here, the peak of other tests would hide it."""
    code = """
import numpy as np
from shardlm.observe import peak_memory
before = peak_memory([])["host"]
values = np.ones(300 * 2**20, np.uint8)
del values
print(peak_memory([])["host"] - before)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert int(run.stdout) == pytest.approx(300 * 2**20, rel=0.02)


def test_device_memory_is_that_of_the_fullest():
    assert peak_memory(jax.devices("cpu"))["device"] is None, "CPU does not count"
    stats = [{"peak_bytes_in_use": 5}, {"peak_bytes_in_use": 9}]
    devices = [SimpleNamespace(memory_stats=lambda s=s: s) for s in stats]
    assert peak_memory(devices)["device"] == 9
