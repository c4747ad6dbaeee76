"""The commands as a user meets them: mistakes, statuses, and the commands that a run prints."""

import os
import re
import resource
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from shardlm import cli
from shardlm.arguments import parse_options
from shardlm.config import Config, EvalConfig, RunConfig
from shardlm.observe import RunDirectory, read_metrics
from shardlm.options import TEXT_KEYS, EvaluateOptions
from shardlm.train.commands import Commands

ROOT = Path(__file__).parents[1]
FLAGS = (
    "--run.simulate_devices 8 --mesh.data 2 --data.split tail --data.length 11 "
    "--model.layers 1 --model.embed 24 --model.heads 4 --model.kv_heads 2 --model.mlp 20 "
    "--train.batch 4 --train.steps 300 --optim.warmup_steps 2 --eval.sample_tokens 0"
)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the cat sat on the mat. " * 40)
    return path


def status(verb, argv):
    """Exit status of a command that is called here."""
    try:
        return cli.run(verb, argv)
    except SystemExit as end:
        return end.code


def assert_refused(capsys, argv, *parts, verb=cli.train):
    capsys.readouterr()
    assert status(verb, argv) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1, captured.err
    for part in parts:
        assert part in captured.err


CONFIGURATION = {
    "--optim.learning_rat 1": ["--optim.learning_rat is not a flag; did you mean"],
    "--train.steps ten": ["train.steps is 'ten': it must be a whole number"],
    "--model.embed 30 --model.heads 4": ["model.embed is 30", "28 or 32 would do"],
    "--model.heads 4 --model.kv_heads 3": ["model.kv_heads is 3", "one of 1, 2, 4"],
    "--train.batch 6 --train.micro_batch 4": ["6", "4", "4 or 8 would do"],
    "--mesh.data 3": ["train.batch is 4 and data 3 split it 3 ways", "3 or 6 would do"],
    "--mesh.data 8 --train.batch 16 --train.micro_batch 4": ["train.micro_batch is 4", "8 would"],
    "--mesh.data 1 --mesh.model 8": ["model.heads is 4 and mesh.model is 8", "8 would do"],
    "--mesh.data 16": ["asks for 16 devices (data 16) and there are 8"],
    "--mesh.data -1 --mesh.model -1": ["only one may be"],
    "--mesh.stage 2": ["model.layers is 1 and mesh.stage is 2: 2 does not divide 1"],
    "--run.simulate_devices 4": ["JAX is already running with 8 cpu devices"],
    "--eval.sample_tokens 9 --data.tokenizer characters --eval.prompt X": ["eval.prompt is 'X'"],
    "--model.vocab 99": ["model.vocab is 99", "has 257 ids"],
    "--model.layers 100000000": ["the training state of 321,600,012,360 parameters takes"],
}


@pytest.mark.parametrize("flags", CONFIGURATION)
def test_configurations_that_cannot_be_used(flags, text, tmp_path, capsys):
    jax.devices()  # JAX runs, whichever tests came before.
    run = tmp_path / "run"
    argv = [*FLAGS.split(), "--data.sources", str(text), "--run.dir", str(run), *flags.split()]
    assert_refused(capsys, argv, *CONFIGURATION[flags])
    assert not run.exists()


def test_data_that_cannot_be_used(tmp_path, capsys):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 " * 100)
    (tmp_path / "short.txt").write_text("four")
    (tmp_path / "folder").mkdir()
    cases = {
        "missing.txt": "missing.txt",
        "empty.txt": "empty.txt",
        "latin.txt": "latin.txt is not UTF-8: byte 0xe9 at offset 3",
        "short.txt": "only 1 row of data.length 11 (4 tokens)",
        "folder": "folder",
    }
    for name, part in cases.items():
        argv = [*FLAGS.split(), "--run.dir", str(tmp_path / "runs" / "run")]
        assert_refused(capsys, [*argv, "--data.sources", str(tmp_path / name)], part)
        assert not (tmp_path / "runs").exists()


def test_what_the_system_refuses(unprivileged, capsys):
    (unprivileged / "text.txt").write_text("four")
    (unprivileged / "text.txt").chmod(0)
    (unprivileged / "locked").mkdir(mode=0o500)
    argv = [*FLAGS.split(), "--data.sources", str(unprivileged / "text.txt"), "--run.dir"]
    assert_refused(
        capsys,
        [*argv, str(unprivileged / "run")],
        "text.txt cannot be read (Permission denied)",
    )
    assert_refused(capsys, [*argv, str(unprivileged / "locked")], "Permission denied", "run.dir")


def test_directories_that_cannot_be_used(text, tmp_path, capsys):
    argv = [*FLAGS.split(), "--data.sources", str(text), "--run.dir"]
    assert_refused(capsys, [*argv, str(text / "run")], "Not a directory", "can be written to")
    assert_refused(capsys, [*argv, "/proc/run"], "run.dir is /proc/run", "can be written to")
    assert_refused(capsys, [*argv, str(tmp_path)], "has no config.yaml, so it is no run")
    with RunDirectory.open(tmp_path / "run"):
        assert_refused(capsys, [*argv, str(tmp_path / "run")], f"process {os.getpid()} on")
        assert {path.name for path in (tmp_path / "run").iterdir()} == {".lock"}
    with RunDirectory.open(tmp_path / "run") as directory:
        directory.config_path.write_text("model: {layers: many}")
    assert_refused(capsys, [*argv, str(tmp_path / "run")], "config.yaml:1: model.layers is 'many'")
    (tmp_path / "run" / "config.yaml").write_text("")
    assert_refused(capsys, [*argv, str(tmp_path / "run")], "config.yaml is empty, though it was")
    for name in ("metrics.jsonl", "loss.png", "tokenizer.json", "config.yaml"):
        (tmp_path / name / name).mkdir(parents=True)
        (tmp_path / name / "config.yaml").touch(exist_ok=True)
        assert_refused(capsys, [*argv, str(tmp_path / name)], f"{name} is a directory, where a run")
    for name in ("a\0b", os.fsdecode(b"d\xff")):
        assert_refused(capsys, [*argv, name], "run.dir is", "must be UTF-8 text without NUL")


def test_mistakes_are_reported_before_jax_is_loaded(text, tmp_path):
    """In less than 1.5 s of the processor, for all of them together."""
    code = f"""
import sys
from shardlm import cli
from shardlm.observe import RunDirectory
flags = {FLAGS.split()!r} + ["--run.dir", {str(tmp_path / "run")!r}]
def status(verb, *argv):
    try: return cli.run(verb, argv)
    except SystemExit as end: return end.code
assert status(cli.train, "--optim.learning_rat", "1") == 2
assert status(cli.train, "--train.batch", "6", "--train.micro_batch", "4") == 2
assert status(cli.train, *flags, "--data.sources", "no such file") == 2
with RunDirectory.open({str(tmp_path / "run")!r}):
    assert status(cli.train, *flags, "--data.sources", {str(text)!r}) == 2
assert status(cli.generate) == 2
assert status(cli.generate, "x", "--top_p", "2") == 2
assert status(cli.evaluate, "x", "--stepp", "2") == 2
assert status(cli.generate, "--help") == 0
assert "jax" not in sys.modules
"""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    command = [sys.executable, "-W", "error", "-c", code]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 1.5


def test_options_of_the_other_verbs(capsys):
    cases = {
        "": "RUN_DIR is missing (--help says what it is)",
        "run --prompt": "--prompt: expected one argument",
        "run --top_k 1.5": "top_k is 1.5: it must be a whole number",
        "run --top_p 2": "top_p is 2.0: it must be above 0 and at most 1",
        "run --temprature 1": "--temprature is not a flag; did you mean --temperature?",
        "run --train.steps 3": "--train.steps is not a flag",
        "run --mesh 3": "--mesh is a section",
        "run extra": "unrecognized arguments: extra",
    }
    for flags, part in cases.items():
        assert_refused(capsys, flags.split(), part, verb=cli.generate)
    assert status(cli.generate, ["--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for word in ("generate RUN_DIR", "--prompt", "--mesh.model", "--run.simulate_devices"):
        assert word in text
    assert "Divides the logits; 0 takes the likeliest. (type: float; default: 0.8)" in text


def test_an_argument_that_is_missing_is_named_as_in_the_usage_line(capsys):
    for verb, argv, name in (
        (cli.prepare, [], "STORE"),
        (cli.data, ["describe"], "CONFIGURATION"),
        (cli.evaluate, ["--step", "3"], "RUN_DIR"),
        (cli.bench, [], "NAME"),
    ):
        assert_refused(capsys, argv, f": {name} is missing (--help says what it is)", verb=verb)
        assert status(verb, [*argv, "--help"]) == 0
        assert re.match(rf"usage: .*\b{name}\b", capsys.readouterr().out)
    assert status(cli.data, []) == 2
    assert "usage: shardlm data describe CONFIGURATION" in capsys.readouterr().err


def test_an_empty_path_is_not_the_working_directory(text, tmp_path, monkeypatch, capsys):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    sources = ["--data.sources", str(text)]
    assert_refused(capsys, ["", *sources], "STORE is empty: name a dir", verb=cli.prepare)
    for verb in (cli.evaluate, cli.generate):
        assert_refused(capsys, [""], "RUN_DIR is empty: name the directory of a run", verb=verb)
    assert_refused(capsys, [*sources, "--run.dir", ""], "run.dir is empty: name a directory")
    assert_refused(capsys, [*sources, "--data.cache", ""], "data.cache is empty: name a directory")
    assert not list((tmp_path / "here").iterdir())


def test_flags_that_keep_the_value_of_the_run(capsys):
    def parse(flags):
        _, values = parse_options(EvaluateOptions, (), flags.split(), kept=TEXT_KEYS)
        return values

    assert parse("run") == {}
    assert parse("run --data.sources a b") == {"data.sources": ("a", "b")}
    assert parse("run --data.cache c --data.sources=a") == {
        "data.sources": ("a",),
        "data.cache": "c",
    }
    assert status(cli.evaluate, ["--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.count("default: that of the run)") == 2
    assert_refused(capsys, ["run", "--data.source", "a"], "mean --data.sources?", verb=cli.evaluate)


def test_unexpected_failures_keep_their_traceback():
    def broken(argv):
        raise RuntimeError("a fault of ours")

    with pytest.raises(RuntimeError, match="a fault of ours"):
        cli.run(broken, [])


def test_a_full_disk_is_one_message(capsys):
    def full(argv):
        raise OSError(28, "No space left on device")

    assert cli.run(full, []) == 1
    assert capsys.readouterr().err == "error: [Errno 28] No space left on device\n"


def test_a_file_that_is_gone_is_one_message(tmp_path, capsys):
    assert cli.run(lambda argv: (tmp_path / "gone").read_text(), []) == 1
    assert (
        capsys.readouterr().err
        == f"error: [Errno 2] No such file or directory: '{tmp_path}/gone'\n"
    )


def test_text_that_the_terminal_cannot_show():
    code = (
        "from shardlm.cli import *; leave(run(lambda argv: print('caf\\u00e9 \\ufffd') or 0, []))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (result.stdout, result.stderr) == ("caf? ?\n", "")


def test_output_that_nobody_reads():
    code = "from shardlm.cli import *; leave(run(lambda argv: print('a' * 10**6) or 0, []))"
    command = (
        f"{shlex.quote(sys.executable)} -c {shlex.quote(code)} | head -c 1; exit ${{PIPESTATUS[0]}}"
    )
    result = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (141, "a", "")


def test_commands_are_quoted_and_can_be_typed_again(monkeypatch, tmp_path):
    (tmp_path / "train.py").touch()
    (tmp_path / "generate.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setattr(sys, "executable", str(tmp_path / "env" / "python"))
    config = Config(run=RunConfig(dir="my run", fresh=True), eval=EvalConfig(prompt="def "))
    argv = ["--train.steps", "5", "--run.fresh=1", "--run.dir", "my run", "--data.sources", "a*"]
    commands = Commands.of(config, argv)
    assert commands.resume == (
        "env/python train.py --train.steps 5 --run.dir 'my run' --data.sources 'a*' "
        "--run.fresh false"
    )
    assert commands.longer == (
        "env/python train.py --run.dir 'my run' --data.sources 'a*' --run.fresh false "
        "--train.steps 2000"
    )
    assert commands.generate == "env/python generate.py 'my run' --prompt 'def '"
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "bin" / "shardlm"), "train"])
    config = Config(eval=EvalConfig(prompt="\n"))
    assert Commands.of(config, []).resume == "bin/shardlm train"
    assert Commands.of(config, []).generate == "bin/shardlm generate runs/run"


def test_printed_commands_work(text, tmp_path):
    """Stopped, resumed by the command it prints, continued by the next, and used by the last."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    run = tmp_path / "my run"
    flags = [*FLAGS.split(), "--data.sources", str(text), "--data.validation", "0"]
    argv = [*flags, "--run.fresh", "true", "--run.dir", str(run), "--run.log_every_steps", "1"]
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "scripts/train.py", *argv],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("first update"):
            process.send_signal(signal.SIGTERM)
            break
    output, errors = process.communicate(timeout=300)
    assert (process.returncode, errors) == (143, "")
    stopped = int(re.search(r"stopped by signal 15 after update (\d+)", output)[1])
    assert 1 <= stopped < 300

    def follow(output, name):
        command = re.search(rf"^{name} with: (.*)$", output, re.MULTILINE)[1]
        assert shlex.split(command)[1].startswith("scripts/")
        result = subprocess.run(
            command, shell=True, cwd=ROOT, env=environment, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    output = follow(output, "resume")
    assert f"resuming after update {stopped}" in output
    longer = follow(output, "continue")
    assert "train.steps 300 -> 600: the learning rate of update 301 is 0.000" in longer
    assert [record["step"] for record in read_metrics(run / "metrics.jsonl")] == [*range(1, 601)]
    assert RunDirectory(run).read_config().train.steps == 600
    assert follow(longer, "generate").startswith("\n")


def test_usage(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["--help"])
    assert end.value.code == 0
    output = capsys.readouterr().out
    for verb in cli.VERBS:
        assert re.search(rf"^  {verb} +\w", output, re.MULTILINE)
        assert (ROOT / "scripts" / f"{verb}.py").is_file()
    code = "from shardlm.cli import main; main(['trian'])"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert "usage: shardlm VERB" in result.stderr
