"""Simulated devices, in processes of their own."""

import os
import subprocess
import sys

import pytest

RUN = """
import os, jax
from shardlm import simulate_devices, ConfigError
{before}
try:
    simulate_devices({count})
except ConfigError as error:
    print("refused:", error)
print(len(jax.devices()), jax.devices()[0].platform)
print(os.environ.get("XLA_FLAGS"))
print(jax.config.jax_platforms)
"""
FLAG = "--xla_force_host_platform_device_count="


def lines(count, flags=None, before=""):
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    if flags is not None:
        env["XLA_FLAGS"] = flags
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", RUN.format(count=count, before=before)],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    "flags, kept",
    [
        (None, ""),
        ("--xla_cpu_enable_fast_math=false", "--xla_cpu_enable_fast_math=false "),
        (
            "--xla_force_host_platform_device_count=2",
            "--xla_force_host_platform_device_count=2 ",
        ),
        (f"{FLAG}6 {FLAG}2", f"{FLAG}6 {FLAG}2 "),
    ],
)
def test_flags_are_kept(flags, kept):
    assert lines(6, flags) == ["6 cpu", f"{kept}{FLAG}6", "cpu"]


@pytest.mark.parametrize("flags", [f"{FLAG}6", f"{FLAG}2 {FLAG}6 --xla_cpu_enable_fast_math=false"])
def test_a_flag_that_is_there_is_not_added_again(flags):
    assert lines(6, flags) == ["6 cpu", flags, "cpu"]


def test_twice_is_as_once():
    assert lines(6, before="simulate_devices(6)") == ["6 cpu", f"{FLAG}6", "cpu"]


def test_too_late():
    refused, devices, flags, platforms = lines(
        6, "--xla_cpu_enable_fast_math=false", "jax.devices('cpu')"
    )
    assert refused.startswith(
        "refused: run.simulate_devices is 6, but JAX is already running with 1 cpu devices"
    )
    assert devices == "1 cpu"
    assert (flags, platforms) == ("--xla_cpu_enable_fast_math=false", "None")
    # The number that is there already is no mistake.
    assert lines(3, f"{FLAG}3", "jax.devices('cpu')")[0] == "3 cpu"
    assert lines(0)[0] == "refused: simulate_devices is 0: it must be at least 1"
