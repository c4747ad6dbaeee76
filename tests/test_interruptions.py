"""`shardlm prepare` as a process that is stopped, killed, or has no room: one message, the exit
status, nothing half-written, and the same command afterwards makes the same files."""

import errno
import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from shardlm import cli
from shardlm import prepare as command
from shardlm.data import Preparation, subwords
from shardlm.data import prepare as preparing
from shardlm.data.inputs import list_inputs
from shardlm.data.readers import Reading
from shardlm.data.tokenizer import BytesTokenizer

SHARD_TOKENS = 20_000
ROOT = Path(__file__).parents[1]

DRIVER = """
import functools, multiprocessing, os, resource, signal, time
import shardlm.prepare as command
from shardlm.data import prepare as preparing
command.Preparation = functools.partial(command.Preparation, shard_tokens={shard_tokens})
write = preparing._write
def writing(path, number, parts):
    info = write(path, number, parts)
    if number == 1:
        {do}
    return info
preparing._write = writing
{before}
from shardlm.cli import *
leave(run(prepare))
"""


@pytest.fixture(scope="module")
def words():
    random = np.random.default_rng(0)
    letters = "abcdefghijklmnopqrstuvwxyzäß"
    return ["".join(random.choice(list(letters), random.integers(2, 9))) for _ in range(500)]


@pytest.fixture(scope="module")
def folder(words, tmp_path_factory):
    """12 files of rows, a chunk each, of some 100,000 ids together."""
    random = np.random.default_rng(1)
    folder = tmp_path_factory.mktemp("texts")
    for i in range(12):
        rows = [{"text": " ".join(random.choice(words, 40))} for _ in range(70)]
        (folder / f"{i:02}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return folder


@pytest.fixture(scope="module")
def tokenizer(words, tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(subwords.train_bpe([" ".join(words)], 600).to_json())
    return path


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(
        command, "Preparation", functools.partial(Preparation, shard_tokens=SHARD_TOKENS)
    )


def arguments(store, folder, tokenizer, workers=1):
    return [
        *(str(store), "--data.sources", str(folder), "--data.tokenizer", str(tokenizer)),
        *("--workers", str(workers)),
    ]


@pytest.fixture(scope="module")
def whole(folder, tokenizer, tmp_path_factory):
    """The files of a preparation that nothing disturbed."""
    path = tmp_path_factory.mktemp("whole") / "store"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            command, "Preparation", functools.partial(Preparation, shard_tokens=SHARD_TOKENS)
        )
        assert cli.run(cli.prepare, arguments(path, folder, tokenizer)) == 0
    found = contents(path)
    assert "00003.tokens" in found
    return found


def contents(path):
    return {p.name: p.read_bytes() for p in path.iterdir() if p.name != ".lock"}


def driver(after="pass", before=""):
    """A command that runs some Python after its second shard, or before all."""
    return DRIVER.format(do=after, before=before, shard_tokens=SHARD_TOKENS)


def start(args, after="pass", before="", **kwargs):
    code = driver(after, before)
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code, *args],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **kwargs,
    )


STOPPED = "stopped by signal {}; the shards that are finished are kept: the same command goes on\n"
LOST = (
    r"error: process \d+, which tokenized, was ended by signal 9 \(.*memory.*\): the shards that "
    r"are finished are kept; give the same command again.*\n"
)
FULL = r"error: \[Errno 27\] File too large: '.*/store/00002\.tokens'\n"


@pytest.mark.parametrize(
    "workers, do, status, message",
    [
        (1, "os.killpg(0, signal.SIGINT)", 130, STOPPED.format(2)),
        (2, "os.killpg(0, signal.SIGINT)", 130, STOPPED.format(2)),
        (2, "os.killpg(0, signal.SIGTERM)", 143, STOPPED.format(15)),
        (2, "os.kill(os.getpid(), signal.SIGKILL)", -9, ""),
        (2, "[child.kill() for child in multiprocessing.active_children()]", 1, LOST),
        (1, "resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))", 1, FULL),
    ],
)
def test_in_the_middle(workers, do, status, message, folder, tokenizer, whole, tmp_path, capsys):
    store = tmp_path / "store"
    process = start(arguments(store, folder, tokenizer, workers), do)
    # The workers have the same standard error: its end is that of the last of them.
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (status, "")
    assert re.fullmatch(message, errors)
    left = contents(store)
    assert "store.json" not in left
    assert left["00000.tokens"] == whole["00000.tokens"]
    assert not [name for name in left if name.endswith(".tmp")]
    assert cli.run(cli.prepare, arguments(store, folder, tokenizer)) == 0
    assert contents(store) == whole


def test_ctrl_c_while_the_workers_start(folder, tokenizer, tmp_path):
    """None of them says anything of it."""
    before = """
from shardlm.data import workers
spawned = workers.ThreadPoolExecutor
def interrupted(number):
    os.killpg(0, signal.SIGINT)
    return spawned(number)
workers.ThreadPoolExecutor = interrupted
# Nobody ends them before they have begun.
close = workers.Workers.close
workers.Workers.close = lambda self: (time.sleep(1), close(self))
"""
    process = start(arguments(tmp_path / "store", folder, tokenizer, 3), before=before)
    assert process.communicate(timeout=60) == ("", STOPPED.format(2))
    assert process.returncode == 130


@pytest.mark.parametrize("call", ["replace", "fsync"])
def test_a_full_disk_at_each_write_in_turn(call, tmp_path, monkeypatch):
    """Every write goes through these calls; the n-th one fails."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for i in range(2):
        (texts / f"{i}.jsonl").write_text('{"text": "ab"}\n' * 50)

    def prepare(store):
        inputs = list_inputs(str(texts))
        return Preparation(inputs, Reading(), BytesTokenizer(), shard_tokens=100).into(store)

    real, done, fails = getattr(os, call), 0, 0

    def failing(*args):
        nonlocal done
        done += 1
        if done == fails:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        prepare(tmp_path / "whole")
    # A tokenizer, how far it is before the first shard and after each, two files for each of two
    # shards, a manifest; each file and its directory are synced.
    calls = (1 + 3 + 4 + 1) * (2 if call == "fsync" else 1)
    assert done == calls
    for fails in range(1, calls + 1):
        store, done = tmp_path / f"store{fails}", 0
        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing)
            with pytest.raises(OSError, match="No space left on device") as caught:
                prepare(store)
        assert caught.value.filename.startswith(f"{store}/")
        assert not [*store.glob("*.tmp"), *store.glob(".*.tmp")]
        prepare(store)
        assert contents(store) == contents(tmp_path / "whole")


def test_a_disk_that_is_too_small(folder, tokenizer, whole, tmp_path):
    """A real one, in the memory and a name space of its own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=128k none {disk}"
    found = subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True, text=True)
    if found.returncode:
        pytest.skip(f"no right to mount a file system: {found.stderr.strip()}")
    args = arguments(disk / "store", folder, tokenizer)
    prepare = shlex.join([sys.executable, "-c", driver(), *args])
    script = (
        f"{mount} && {{ {prepare}; echo $?; ls -A {disk}/store; }} && "
        f"mount -o remount,size=9m {disk} && {prepare} && cp -r {disk}/store {tmp_path}/copy"
    )
    result = subprocess.run(
        ["unshare", "-m", "sh", "-c", script],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert re.fullmatch(r"error: \[Errno 28\] No space left .*/store/.*'\n", result.stderr)
    status, *names = result.stdout.splitlines()
    assert status == "1"
    assert "00000.tokens" in names
    assert not any(name.endswith(".tmp") for name in names)
    assert contents(tmp_path / "copy") == whole


def test_a_tokenizer_is_trained_once(folder, tmp_path, monkeypatch, capsys):
    """An interruption keeps it, for the same text and settings only."""
    text = tmp_path / "texts"
    shutil.copytree(folder, text)
    trainings = []

    def training(texts, vocab):
        trainings.append(vocab)
        return subwords.train_bpe(texts, vocab)

    monkeypatch.setattr(command, "train_bpe", training)

    def prepare(store, vocab, *more):
        flags = ["--tokenizer.train", "bpe", "--tokenizer.vocab", str(vocab), "--workers", "1"]
        return cli.run(cli.prepare, [str(store), "--data.sources", str(text), *flags, *more])

    def interrupted(*args):
        raise OSError(errno.ENOSPC, "full", "disk")

    with monkeypatch.context() as patch:
        patch.setattr(preparing, "_write", interrupted)
        for _ in range(3):
            assert prepare(tmp_path / "store", 400) == 1
    assert trainings == [400]
    assert prepare(tmp_path / "store", 400) == 0
    assert prepare(tmp_path / "store", 400) == 0
    assert trainings == [400]
    assert prepare(tmp_path / "whole", 400) == 0
    assert trainings == [400, 400]
    assert contents(tmp_path / "store") == contents(tmp_path / "whole")
    # A finished store of something else is refused before a training.
    assert prepare(tmp_path / "store", 401) == 2
    assert prepare(tmp_path / "store", 400, "--data.errors", "skip") == 2
    assert capsys.readouterr().err.count("finished store of other text") == 2
    assert trainings == [400, 400]
    # Without a finished shard, another tokenizer, other text and an altered one begin anew.
    with monkeypatch.context() as patch:
        patch.setattr(preparing, "_write", interrupted)
        assert prepare(tmp_path / "other", 401) == 1
        assert prepare(tmp_path / "other", 402) == 1
        with open(text / "00.jsonl", "a") as file:
            file.write('{"text": "zzz zzz zzz"}\n')
        assert prepare(tmp_path / "other", 402) == 1
        assert trainings[2:] == [401, 402, 402]
        (tmp_path / "other" / "tokenizer.json").write_text('{"tokenizer": "bytes"}')
        assert prepare(tmp_path / "other", 402) == 1
    assert trainings[2:] == [401, 402, 402, 402]


def test_ctrl_c_while_a_library_trains(folder, tmp_path):
    """A sleep stands for the library, which nothing interrupts either."""
    before = """
def training(texts, vocab):
    list(texts)
    os.killpg(0, signal.SIGINT)
    time.sleep(300)
command.train_bpe = training
"""
    store = tmp_path / "store"
    began = time.monotonic()
    process = start(
        [str(store), "--data.sources", str(folder), "--tokenizer.train", "bpe"], before=before
    )
    assert process.communicate(timeout=60) == ("", STOPPED.format(2))
    assert process.returncode == 130
    assert time.monotonic() - began < 30
    assert not store.exists()


def test_two_processes_at_once(folder, tokenizer, whole, tmp_path, capsys):
    """The second is refused, also before it trains a tokenizer, and the first goes on."""
    store = tmp_path / "store"
    args = arguments(store, folder, tokenizer)
    process = start(args, "print('ready', flush=True); input()", stdin=subprocess.PIPE)
    assert process.stdout.readline() == "ready\n"
    trained = [str(store), "--data.sources", str(folder), "--tokenizer.train", "bpe"]
    for second in (args, trained):
        assert cli.run(cli.prepare, second) == 2
        owner = rf"process {process.pid} on .* is preparing {store}: wait for it to end"
        assert re.match(rf"error: {owner}", capsys.readouterr().err)
    _, errors = process.communicate("\n", timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert contents(store) == whole
