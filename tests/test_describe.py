"""`shardlm data describe`: what it prints and writes, whatever the text holds, and its statuses."""

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from shardlm import cli
from shardlm.arguments import override
from shardlm.config import Config, ConfigError
from shardlm.data import load_data
from shardlm.data.shown import visible
from shardlm.describe.ways import dealt_ways

ROOT = Path(__file__).parents[1]
HOSTILE = (
    "<script>alert(1)</script> </div> &amp; \x1b[31mred\x1b]0;title\x07 \0 \x7f \u202e \u2028 "
    "[bold]x[/bold] :smile: \r\n\ttab 'q' \"q\" é日本😀 \N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}"
)


class Page(HTMLParser):
    """What is in a page: its tags with their attributes, and the text of its rows."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.rows, self.masked = set(), set(), [], []
        self._open = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        classes = (dict(attrs).get("class") or "").split()
        if tag != "meta":
            self._open.append((tag, classes))
        if "content" in classes:
            self.rows.append("")
            self.masked.append("")

    def handle_endtag(self, tag):
        assert self._open.pop()[0] == tag

    def handle_data(self, data):
        inside = [name for _, classes in self._open for name in classes]
        if "content" in inside and "padding" not in inside:
            self.rows[-1] += data
            self.masked[-1] += data * ("masked" in inside)


@pytest.fixture
def recipe(tmp_path):
    """A configuration whose name and text are hostile."""
    rows = [json.dumps({"text": HOSTILE[i:] + HOSTILE * (i % 3)}) for i in range(30)]
    (tmp_path / "<i>rows.jsonl").write_text("\n".join(rows))
    path = tmp_path / "<b>.yaml"
    path.write_text(
        f"data: {{sources: ['{tmp_path}/<i>rows.jsonl'], length: 128, packing: best_fit}}\n"
        "model: {embed: 16, heads: 2}\n"
        "train: {batch: 4, steps: 20}\n"
        "optim: {warmup_steps: 0}\n"
    )
    return path


def status(argv):
    try:
        return cli.run(cli.data, argv)
    except SystemExit as end:
        return end.code


def test_the_page_in_html(recipe, tmp_path, capsys):
    file = tmp_path / "page.html"
    assert status(["describe", str(recipe), "--html", str(file)]) == 0
    assert f"the same with whole rows: {file}" in capsys.readouterr().out
    text = file.read_text(encoding="utf-8")
    page = Page(text)
    assert not page.tags & {"script", "b", "link", "img", "iframe", "object", "base"}
    assert not page.attributes & {"src", "href", "onload", "onclick"}
    assert not re.search("url\\(|@import|https?:", text)
    assert not re.search("[\0-\x08\x0b-\x1f\x7f-\x9f\u202e\u2028]", text)
    # The rows are those of the loader; each sign of the text stands for its character.
    config = override(
        Config(),
        {
            "data.sources": (f"{tmp_path}/<i>rows.jsonl",),
            "data.length": 128,
            "data.packing": "best_fit",
            "train.batch": 4,
        },
    )
    loader = load_data(config).train
    expected, masked = [], []
    for step in range(3):
        batch = loader.at(step).batch
        for tokens, targets, segments in zip(
            batch["tokens"], batch["targets"], batch["segments"], strict=True
        ):
            bounds = [0, *(i for i in range(1, 128) if segments[i] != segments[i - 1]), 128]
            parts = [tokens[a:b] for a, b in pairwise(bounds)]
            parts = [p[p != 256].astype("u1").tobytes().decode(errors="replace") for p in parts]
            row = "".join(parts[: segments.max()])
            expected.append(visible(row).replace("↵", "↵\n").replace("␉", "␉\t"))
            masked.append(((targets < 0) & (segments > 0)).sum())
    chosen = [0, 1, 2, 4, 5, 6, 7, 9, 10, 11]  # evenly spaced
    assert [row.replace("⟨end⟩", "") for row in page.rows] == [expected[i] for i in chosen]
    # Without overlap it is the end of each document that predicts nothing.
    assert page.masked == ["⟨end⟩" * masked[i] for i in chosen]


def test_the_page_on_a_terminal(recipe, capsys, monkeypatch):
    """Nothing that the text holds reaches the terminal; without colours, signs say the same."""
    assert status(["describe", str(recipe)]) == 0
    plain = capsys.readouterr().out
    assert all(line.isprintable() for line in plain.split("\n"))
    assert plain.count("⟦⟨end⟩⟧") > 1
    assert "[bold]x[/bold]" in plain
    assert "␛[31mred" in plain
    assert "← configured" in plain
    assert not any(line.endswith(" ") for line in plain.split("\n"))
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert status(["describe", str(recipe)]) == 0
    coloured = capsys.readouterr().out
    assert re.sub("\x1b\\[[0-9;]*m", "", coloured) != coloured
    words = re.sub("\x1b\\[[0-9;]*m", "", coloured).split()
    assert words == plain.split()


def test_rows_without_a_border_between_documents_say_why(recipe, tmp_path, capsys):
    file = tmp_path / "page.html"
    whys = {
        "--data.length 512": None,
        "--data.packing none": "with data.packing none each has one document, or a piece of one",
        "--data.length 16": "tokens on average, rows 16 places",
    }
    for flags, why in whys.items():
        assert status(["describe", str(recipe), "--html", str(file), *flags.split()]) == 0
        for shown in (" ".join(capsys.readouterr().out.split()), file.read_text()):
            assert ("none of these rows has a border" in shown) == (why is not None)
            assert why is None or why in shown


def test_the_legend_has_the_marks_of_the_page_and_no_others(recipe, tmp_path):
    """In the page itself: what the style marks, and signs."""
    plain = tmp_path / "plain.jsonl"
    plain.write_text("\n".join(json.dumps({"text": "plain text " * 9}) for _ in range(30)))
    file = tmp_path / "page.html"
    signs = {
        "↵": "a line feed",
        "␉": "a tab",
        "�": "a part of a character",
        "⟨U+": "not to be seen",
    }
    marks = {
        'class="segment"': "goes on in another row",
        'class="segment ends"': "the document ends",
        "masked": "predict nothing",
        '"id': "without text",
    }
    seen = []
    for flags in (
        "",
        "--data.length 32",
        f"--data.packing none --data.validation 0 --data.sources {plain}",
    ):
        assert status(["describe", str(recipe), "--html", str(file), *flags.split()]) == 0
        legend, rows = file.read_text().partition("<h2>Rows</h2>")[2].split("</ul>")
        for mark, words in (signs | marks).items():
            assert (words in legend) == (mark in rows), (flags, mark)
            seen.append((mark in rows, mark))
        several = re.search(
            r'<div class="row content"><span class="segment[^<]*<.*title="segment 2', rows
        )
        assert ("the next in the row" in legend) == (several is not None)
    assert len({*seen}) > len(signs | marks), "some are in one page and not in another"


def test_what_is_said_of_dealing(recipe, capsys):
    for flags, one in (("", True), ("--train.batch 8 --mesh.data 4", False)):
        assert status(["describe", str(recipe), *flags.split()]) == 0
        out = capsys.readouterr().out
        assert "Balance over 4 devices" in out
        assert ("one row a device: nothing to deal" in out) == one
        assert "dynamic: equal speeds assumed" in out


def test_epochs_of_each_source_with_weights(recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "b.txt").write_text("another text " * 60)
    flags = ["--data.sources", "<i>rows.jsonl", "b.txt", "--data.validation", "0"]
    assert status(["describe", str(recipe), *flags]) == 0
    assert re.search(r"\n  20 updates: [0-9.]+ epochs; 10,240 places\n", capsys.readouterr().out)
    assert status(["describe", str(recipe), *flags, "--data.weights", "3", "1"]) == 0
    out = capsys.readouterr().out
    line = re.search(r"20 updates: (\S+) epochs of <i>rows.jsonl, (\S+) epochs of b.txt; ", out)
    first, second = map(float, line.groups())
    # 20 of 80 rows are of the second, whose 781 tokens are 7 rows.
    assert second == pytest.approx(20 / 7, abs=0.01)
    assert first < second


def test_flags_win_wherever_they_stand(recipe, capsys):
    for argv in (
        ["describe", "--data.packing", "concat", "--train.steps=7", str(recipe)],
        ["describe", str(recipe), "--train.steps", "7", "--data.packing", "concat"],
    ):
        assert status(argv) == 0
        out = capsys.readouterr().out
        assert re.search(r"concat .*← configured", out)
        assert "7 updates: " in out


def test_statuses(recipe, tmp_path, capsys):
    file = str(recipe)
    (tmp_path / "bad.yaml").write_text("data: {lenght: 3}")
    cases = {
        ("describe",): "CONFIGURATION is missing",
        ("describe", "gone.yaml"): "gone.yaml: No such file or directory",
        ("describe", f"{tmp_path}/bad.yaml"): "bad.yaml:1: data.lenght is not a key",
        ("describe", file, "--data.lenght", "3"): "did you mean --data.length?",
        ("describe", file, "--eval.batch", "3"): "--eval.batch is not a flag",
        ("describe", file, "--data.sources", "gone"): "data.sources",
        ("describe", file, "--train.batch", "100000"): "give more text",
        ("describe", file, "--mesh.data", "3"): "train.batch is 4 and data 3 split it 3 ways",
        ("describe", file, "--html", f"{tmp_path}/gone/a"): f"{tmp_path}/gone is no directory",
        ("describe", file, "--html", str(tmp_path)): "which is a directory",
        ("descrbe", file): "usage: shardlm data describe",
        (): "usage: shardlm data describe",
    }
    for argv, part in cases.items():
        assert status(list(argv)) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert part in captured.err
        assert captured.err.count("\n") == 1
    assert status(["--help"]) == 0
    assert status(["describe", "--help"]) == 0
    assert "--html" in capsys.readouterr().out


def test_no_device_is_asked_for(recipe):
    """With a platform that there is not, jax fails as soon as it starts a backend."""
    result = subprocess.run(
        [sys.executable, "-W", "error", "scripts/data.py", "describe", str(recipe)],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "none_such", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert "Balance over 4 devices" in result.stdout


WAYS = {
    "": (4, "4 devices as an example: mesh.data is -1"),
    "batch=24": (8, "8 devices as an example: mesh.data is -1"),
    "batch=24 micro_batch=12": (6, "6 devices as an example: mesh.data is -1"),
    "batch=7": (7, "7 devices as an example"),
    "batch=11": (1, "and the rows of a micro-batch, 11, divide over no number up to 8"),
    "batch=24 data=1": (8, "8 devices as an example: the mesh has one device for the batch"),
    "batch=24 data=3 replica=2": (6, "6 devices, as the mesh says: replica 2 x data 3"),
    "batch=24 data=-1 replica=3": (6, "6 devices as an example: mesh.data is -1"),
    "batch=24 data=12 model=-1": (12, "12 devices, as the mesh says: data 12"),
    "batch=16 simulate_devices=16": (16, "16 devices, as the mesh says: data 16"),
}


@pytest.mark.parametrize("case", WAYS)
def test_devices_that_rows_are_dealt_to(case):
    sections = {"batch": "train", "micro_batch": "train", "simulate_devices": "run"}
    values = dict(word.split("=") for word in case.split())
    keys = {f"{sections.get(name, 'mesh')}.{name}": int(n) for name, n in values.items()}
    config = override(Config(), {"train.batch": 4, "model.embed": 240} | keys)
    ways, why = dealt_ways(config, 257)
    assert ways == WAYS[case][0]
    assert WAYS[case][1] in why


def test_a_mesh_that_the_model_does_not_allow():
    config = override(Config(), {"mesh.model": 3, "mesh.data": 1})
    with pytest.raises(ConfigError, match=r"model.heads is 4 and mesh.model is 3"):
        dealt_ways(config, 257)
