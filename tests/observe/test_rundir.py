"""Who may use a run directory."""

import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from shardlm.config import Config, ConfigError, RunConfig
from shardlm.files import Occupied, OwnedDirectory
from shardlm.observe import RunDirectory, RunDirectoryError

HOLD = (
    "import sys, time\n"
    "from shardlm.observe.rundir import RunDirectory\n"
    "RunDirectory.open(sys.argv[1])\n"
    "print('held', flush=True)\n"
    "time.sleep(60)\n"
)


def test_makes_the_directory_and_keeps_the_configuration(tmp_path):
    config = Config(run=RunConfig(dir="x", seed=3))
    with RunDirectory.open(tmp_path / "runs" / "a", fresh=True) as run:
        assert run.read_config() is None
        run.write_config(Config())
        run.write_config(config)
        assert run.read_config() == config
    with RunDirectory.open(tmp_path / "runs" / "a") as run:
        assert run.read_config() == config
        assert run.metrics_path.name == "metrics.jsonl"
        assert run.checkpoints_path.name == "checkpoints"
    assert sorted(p.name for p in run.path.iterdir()) == [".lock", "config.yaml"]


def test_a_second_process_is_refused_and_a_kill_frees_the_directory(tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout.readline() == "held\n"
        with pytest.raises(RunDirectoryError, match=f"process {child.pid} on .* is using"):
            RunDirectory.open(tmp_path)
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.communicate()
    with RunDirectory.open(tmp_path), pytest.raises(RunDirectoryError, match=f"{os.getpid()} on"):
        RunDirectory.open(tmp_path)
    RunDirectory.open(tmp_path).close()


def test_reading_needs_no_lock(tmp_path):
    with RunDirectory.open(tmp_path) as run:
        run.write_config(Config())
        assert RunDirectory(tmp_path).read_config() == Config()


def test_fresh_refuses_a_run_and_leaves_it_alone(tmp_path):
    with RunDirectory.open(tmp_path) as run:
        run.write_config(Config())
    with pytest.raises(RunDirectoryError, match=r"not empty, and run.fresh is true"):
        RunDirectory.open(tmp_path, fresh=True)
    RunDirectory.open(tmp_path).close()


def test_fresh_accepts_what_a_start_that_failed_leaves(tmp_path):
    RunDirectory.open(tmp_path, fresh=True).close()
    (tmp_path / ".config.yaml.tmp").write_text("half")
    RunDirectory.open(tmp_path, fresh=True).close()


def test_a_directory_in_which_nothing_was_made_is_as_it_was_before(tmp_path):
    there = tmp_path / "there"
    there.mkdir()
    for path in (there, tmp_path / "runs" / "a"):
        with RunDirectory.open(path):
            assert [p.name for p in path.iterdir()] == [".lock"]
        assert [p.name for p in tmp_path.iterdir()] == ["there"]
        assert not list(there.iterdir())
    for path in (tmp_path / "runs" / ("a" * 300), tmp_path / "runs" / "a" / "b\0"):
        with pytest.raises((RunDirectoryError, ValueError)):
            RunDirectory.open(path)
        assert [p.name for p in tmp_path.iterdir()] == ["there"]


def test_a_lock_that_its_owner_removes_keeps_nobody_out_and_lets_one_in(tmp_path, monkeypatch):
    """One process opens the lock, and the owner removes it before it is taken."""
    path, real = tmp_path / "run", os.open
    first = RunDirectory.open(path)

    def opening(file, *args):
        descriptor = real(file, *args)
        if str(file).endswith(".lock"):
            monkeypatch.undo()
            first.close()
            assert not path.exists()
        return descriptor

    monkeypatch.setattr(os, "open", opening)
    with RunDirectory.open(path):
        assert [p.name for p in path.iterdir()] == [".lock"]
        with pytest.raises(RunDirectoryError, match=f"process {os.getpid()} on .* is using"):
            RunDirectory.open(path)


def test_starts_at_the_same_moment_do_not_disturb_one_another(tmp_path):
    """Each makes the directories above its own, and removes them where nothing was made."""
    at_once = threading.Barrier(4, timeout=60)

    def start(k):
        found = Counter()
        for i in range(150):
            at_once.wait()
            path = tmp_path / f"{i}" / ("runs", "runs/a", "runs/b", "runs/a")[k]
            try:
                OwnedDirectory(path, lambda path=path: list(path.iterdir())).close()
                found["owned"] += 1
            except Occupied:
                found["occupied"] += 1
        return found

    with ThreadPoolExecutor(4) as pool:
        total = sum(pool.map(start, range(4)), Counter())
    assert total.total() == 4 * 150
    assert total["owned"] >= 3 * 150


def test_a_foreign_directory_is_refused_and_not_touched(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(RunDirectoryError, match=r"no config.yaml, so it is no run .it has thesis"):
        RunDirectory.open(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "a").write_text("")
    for path in (tmp_path / "a", tmp_path / "a" / "b"):
        with pytest.raises(RunDirectoryError, match=r"run.dir is .*(File exists|Not a directory)"):
            RunDirectory.open(path)


def test_a_directory_that_cannot_be_written_to(tmp_path, monkeypatch):
    def refuse(path, *args):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(RunDirectoryError, match=r"Permission denied .*name a directory that can"):
        RunDirectory.open(tmp_path)


def test_a_read_only_directory(unprivileged):
    unprivileged.chmod(0o555)
    for path in (unprivileged, unprivileged / "a"):
        with pytest.raises(RunDirectoryError, match="Permission denied"):
            RunDirectory.open(path)


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints"])
def test_parts_that_cannot_be_written_to_are_found_at_the_start(unprivileged, name):
    with RunDirectory.open(unprivileged) as run:
        run.write_config(Config())
        run.metrics_path.touch()
        run.checkpoints_path.mkdir()
    (unprivileged / name).chmod(0o555)
    with pytest.raises(RunDirectoryError, match=f"Permission denied .*{name}.; name a directory"):
        RunDirectory.open(unprivileged)


def test_a_damaged_configuration_names_the_line(tmp_path):
    with RunDirectory.open(tmp_path) as run:
        run.config_path.write_text("run:\n  sed: 1\n")
        with pytest.raises(ConfigError, match=r"config.yaml:2: run.sed is not a key; .* run.seed"):
            run.read_config()
        run.config_path.write_bytes(b"\xff")
        with pytest.raises(ConfigError, match=r"config.yaml cannot be read"):
            run.read_config()
