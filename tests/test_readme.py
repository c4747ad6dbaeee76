"""The commands of the README on a folder of text, run as they stand, one after another."""

import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SECTION = "## From a folder of text to a model"


def commands():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.partition(f"{SECTION}\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder as a clone is, and in it some text: the modules of Python's own email package, and
    others of json beside it, as files and as rows."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("scripts", "configs"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "texts" / "deeper").mkdir(parents=True)
    (folder / "other").mkdir()
    library = Path(sysconfig.get_path("stdlib"))
    modules = sorted(library.glob("email/*.py"))
    for i, path in enumerate(modules):
        text = path.read_text(encoding="utf-8")
        # Several documents a module, so that some are for validation.
        parts = re.split(r"\n(?=def |class )", text)
        where = folder / "texts" / ("deeper" if i % 2 else "")
        for j, part in enumerate(parts[:6]):
            (where / f"{path.stem}-{j}.txt").write_text(part, encoding="utf-8")
    (folder / "texts" / "one.txt").write_text(modules[0].read_text() * 20, encoding="utf-8")
    others = [
        part
        for path in sorted(library.glob("json/*.py"))
        for part in re.split(r"\n(?=def |class |    def )", path.read_text(encoding="utf-8"))
    ]
    for i, part in enumerate(others):
        (folder / "other" / f"{i}.txt").write_text(part, encoding="utf-8")
    rows = "".join(json.dumps({"id": i, "body": part}) + "\n" for i, part in enumerate(others))
    (folder / "rows.jsonl").write_text(rows, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def ran(folder):
    """The output of each command. Trainings make six updates, else all is as it stands."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(folder / "cache"),
        # Half the time of a compilation goes into code that six updates do not need.
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
    }
    found = {}
    for command in commands():
        program, *arguments = shlex.split(command)
        assert program == "python", command
        if arguments[0] == "scripts/train.py":
            arguments += ["--train.steps", "6", "--optim.warmup_steps", "2"]
        result = subprocess.run(
            [sys.executable, *arguments],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
        found[command] = result.stdout
    return found


def test_each_command_runs(ran, folder):
    verbs = [Path(shlex.split(command)[1]).stem for command in ran]
    trained = ["train", "evaluate", "generate", "train", "train"]
    assert verbs == ["data", "data", "prepare", "data", *trained]
    for run, sources in (("mine", 1), ("one", 1), ("mixed", 2)):
        lines = (folder / "runs" / run / "metrics.jsonl").read_text().splitlines()
        updates = [json.loads(line) for line in lines if '"loss"' in line]
        assert [u["step"] for u in updates] == list(range(1, 7))
        assert len(updates[-1]["source_tokens"]) == sources
        assert updates[-1]["loss"] < updates[0]["loss"]


def test_they_do_what_is_said_of_them(ran, folder):
    describe, rows, prepare, again, train, evaluate, generate, _, mixed = ran.values()
    page = (folder / "before.html").read_text(encoding="utf-8")
    for name in ("best_fit", "padded_buckets", "texts"):
        assert name in page
        assert name in describe
    documents = sum(1 for path in (folder / "texts").rglob("*.txt") if path.stat().st_size)
    assert f"{documents} documents" in prepare
    assert "rows.jsonl" in rows
    # The tokens and the packing that are trained.
    tokens = re.search(r"[0-9,]+ tokens", prepare).group().split()[0]
    assert f" {documents}  {tokens} " in re.sub(" +", "  ", again)
    assert re.search(r"best_fit .* 256 +← configured", again)
    assert "4,096 places of an update" in again
    assert "6 updates of 16 rows" in train  # 4,096 tokens in rows of 256.
    assert re.search(r"validation loss [0-9.]+ nats per token  perplexity", evaluate)
    assert generate.startswith("Once")
    assert "3 shapes, compiled once" in mixed
    assert re.search(r": [0-9.]+ epochs? of stores/mine, [0-9.]+ epochs? of other\n", mixed)
    read = dict(re.findall(r"read +(\S+): .*\((.*)%\)", mixed))
    shares = [float(read[name]) for name in ("stores/mine", "other")]
    assert shares == pytest.approx([75, 25], abs=5)
