"""Command line and YAML: values, precedence, messages, exit status, start time."""

import dataclasses
import math
import subprocess
import sys
from dataclasses import replace

import pytest

from shardlm.arguments import difference, from_yaml, parse_config, to_yaml
from shardlm.config import Config, ConfigError, DataConfig, EvalConfig, flatten
from shardlm.validation import validate


def parse(flags):
    return parse_config(flags.split())


def test_defaults_are_those_of_the_dataclasses():
    assert parse_config([]) == Config()


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-4", 1e-4), ("1E-4", 1e-4), (".5", 0.5), ("3.", 3.0), ("2", 2.0), ("1_000.5", 1000.5)],
)
def test_numbers_are_floats_in_yaml_and_as_flags(text, value):
    for config in (
        parse_config(["--optim.learning_rate", text]),
        from_yaml(f"optim:\n  learning_rate: {text}\n"),
    ):
        assert type(config.optim.learning_rate) is float
        assert config.optim.learning_rate == value


@pytest.mark.parametrize(
    ("text", "value"),
    [("False", False), ("false", False), ("0", False), ("True", True), ("true", True), ("1", True)],
)
def test_booleans_in_yaml_and_as_flags(text, value):
    assert parse_config(["--run.fresh", text]).run.fresh is value
    assert from_yaml(f"run: {{fresh: {text}}}").run.fresh is value


def test_lists_null_and_text():
    config = parse(
        "--data.sources a.txt --model.windows [8,0] --run.dir 12 --train.micro_batch null "
        "--mesh.data -1 --eval.prompt 1e-4"
    )
    assert config.data.sources == ("a.txt",)
    assert config.model.windows == (8, 0)
    assert config.run.dir == "12"
    assert config.train.micro_batch is None
    assert config.mesh.data == -1
    assert config.eval.prompt == "1e-4"
    assert parse_config(["--data.sources", "[a, b]"]).data.sources == ("a", "b")
    several = parse_config(["--data.sources", "a", "[b]*.txt", "--model.windows", "8", "0"])
    assert several.data.sources == ("a", "[b]*.txt")
    assert several.model.windows == (8, 0)
    assert from_yaml("data.sources: [a, b]").data.sources == ("a", "b")
    assert from_yaml("data: {sources: a, length: 9}").data == DataConfig(sources=("a",), length=9)
    assert from_yaml("model:\n  kv_heads: ~\n").model.kv_heads is None
    assert from_yaml("# nothing\n") == from_yaml("model:\n") == Config()


def test_later_files_and_flags_win(tmp_path):
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("\ufefftrain: {steps: 200, batch: 8}\nmodel.rope: {theta: 5e5}\n")
    second.write_text("train:\n  steps: 300\n")
    config = parse_config(
        [f"--config={first}", "--train.batch", "4", "--config", str(second), "--model.layers=2"]
    )
    assert (config.train.steps, config.train.batch) == (300, 4)
    assert (config.model.rope.theta, config.model.layers) == (5e5, 2)
    assert parse_config(["--train.batch", "4", "--config", str(first)]).train.batch == 8


FAR = replace(
    parse(
        "--model.kv_heads 2 --optim.eps 1e-12 --model.windows 4 0 --train.micro_batch 8 "
        "--run.fresh 1 --model.rope.scaling yarn --model.rope.high 32 --mesh.data 3 "
        "--optim.learning_rate 0.1"
    ),
    data=DataConfig(sources=("no", "1", "a: b", "[x", "ünï\u2028\x85", "")),
    eval=EvalConfig(prompt="\t'\"#\r\n \\ null\ufeff\x07🙂 "),
)


@pytest.mark.parametrize("config", [Config(), FAR], ids=["default", "far"])
def test_yaml_round_trip_is_equal(config, tmp_path, capsys):
    assert from_yaml(to_yaml(config)) == config
    path = tmp_path / "c.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    assert parse_config(["--config", str(path)]) == config
    with pytest.raises(SystemExit) as exit_:
        parse_config(["--config", str(path), "--print_config"])
    assert exit_.value.code == 0
    assert from_yaml(capsys.readouterr().out) == config


def test_difference_lists_keys_old_and_new():
    assert difference(Config(), Config()) == []
    assert difference(
        Config(), parse_config(["--model.rope.theta", "5", "--train.steps", "200"])
    ) == [
        ("model.rope.theta", 10_000.0, 5.0),
        ("train.steps", 1000, 200),
    ]


FLAG_MISTAKES = {
    "--optim.learning_rat 1": "--optim.learning_rat is not a flag; did you mean --optim.learning_r",
    "--learning_rate 1": "--learning_rate is not a flag; did you mean --optim.learning_rate?",
    "--optim.learning 1": "did you mean",
    "--batch 1": "did you mean --train.batch or --eval.batch?",
    "--xyzzy 1": "--xyzzy is not a flag (--help lists them all)",
    "--model 3": "--model is a section: set its keys, as in --model.layers VALUE",
    "--model.layers x": "model.layers is 'x': it must be a whole number",
    "--model.layers true": "model.layers is true: it must be a whole number",
    "--model.layers 1e3": "model.layers is 1000.0: it must be a whole number (write 1000)",
    "--model.layers null": "model.layers is null: it must be a whole number",
    "--model.kv_heads 1.5": "model.kv_heads is 1.5: it must be a whole number, or null",
    "--model.layers": "--model.layers: expected one argument",
    "--run.fresh 2": "run.fresh is 2: it must be true or false",
    "--optim.eps .nan": "optim.eps is nan: it must be a finite number",
    "--optim.eps true": "optim.eps is true: it must be a finite number",
    "--optim.eps [1": "optim.eps is '[1': it must be a finite number",
    "--train.remat ful": "train.remat is 'ful': it must be one of none, full; did you mean full?",
    "--model.windows 4 a": "model.windows is 'a': it must be a whole number",
    "--train.steps -1": "train.steps is -1: it must be at least 1",
    "--train.batch 6 --train.micro_batch 4": "micro_batch must divide the batch (train.batch 4 or",
    # Before what follows from them is looked at.
    "--data.batch_tokens 1000": "data.batch_tokens is 1000 and data.length 256: it must be a mult",
    "--data.batch_tokens 9 --train.micro_batch 4": "data.batch_tokens is 9 and data.length 256",
    "--data.batch_tokens 768 --train.micro_batch 2": "(data.batch_tokens 512 or 1024 would do, or",
    "--data.sources a b --data.weights 1": "data.weights are 1 and data.sources 2",
    "--data.sources a b --data.weights 1 0": "data.weights is [1.0, 0.0]: each must be from 1e-300",
    "--data.sources a b --data.weights 1 1e-13": "to 1e+300 and at least 1e-12 of their sum: leave",
    "--data.sources a b --data.weights 1e308 1e308": "data.weights is [1e+308, 1e+308]: each must",
    "--data.sources a b --data.weights 5e-324 1e-323": "each must be from 1e-300 to 1e+300 and at",
    "--data.sources a b --data.weights 1 .inf": "data.weights is inf: it must be a finite number",
    # At once: divisors are not found by trying all numbers.
    "--train.batch 2000000000 --train.micro_batch 7": "or train.micro_batch 8)",
    "--model.heads 2000000000 --model.kv_heads 7 --model.head_dim 8": "kv_heads must divide heads",
    "--model.dropout 0.9999999999": "model.dropout is 0.9999999999: it must be at most 0.999",
    "--model.windows 4 3000000000": "windows is 3000000000: it must be at most 2147483647",
    f"--model.layers {'9' * 5000}": "it must be a whole number",
    f"--optim.eps {'9' * 400}": "it must be a finite number",
    f"--train.steps {'[' * 3000}": "it must be a whole number",
    "word": "unrecognized arguments: word (write --KEY VALUE",
    "--config /does/not/exist": "--config /does/not/exist: No such file or directory",
    "--config /": "--config /: Is a directory",
}


@pytest.mark.parametrize("flags", FLAG_MISTAKES)
def test_mistakes_in_flags_end_in_one_message(flags, capsys):
    with pytest.raises(SystemExit) as exit_:
        parse_config(flags.split(), prog="shardlm train")
    captured = capsys.readouterr()
    assert exit_.value.code == 2
    assert captured.out == ""
    assert captured.err.startswith("shardlm train: ")
    assert captured.err.count("\n") == 1
    assert FLAG_MISTAKES[flags] in captured.err


def test_weights_made_in_python_are_checked_too():
    for odd in (math.nan, math.inf, -1.0):
        config = Config(data=DataConfig(sources=("a", "b"), weights=(1.0, odd)))
        with pytest.raises(ConfigError, match=r"^data\.weights is \[1\.0, .*each must be from"):
            validate(config)


def test_every_whole_number_has_a_limit(capsys):
    whole = [key for key, value in flatten(Config()).items() if type(value) is int]
    assert {"run.seed", "train.steps", "data.prefetch", "eval.sample_tokens"} <= {*whole}
    for key in whole:
        with pytest.raises(SystemExit) as exit_:
            parse_config([f"--{key}", f"1{'0' * 400}"])
        assert exit_.value.code == 2
        assert f"{key} is 1000" in capsys.readouterr().err
    assert parse(f"--run.seed {2**32 - 1}").run.seed == 2**32 - 1


YAML_MISTAKES = {
    "\nlearning_rate: 1\n": ":2: learning_rate is not a key; did you mean optim.learning_rate?",
    "optim:\n  learning_rat: 1": ":2: optim.learning_rat is not a key; did you mean optim.learn",
    "model:\n  length: 1": ":2: model.length is not a key; did you mean data.length?",
    "model: 3": ":1: model is a section: write keys below it, as in model.layers: VALUE",
    "model: {rope: [1]}": ":1: model.rope is a section: write keys below it, as in model.rope.th",
    "- model": ":1: a configuration has sections",
    "model: {layers: {a: 1}}": ":1: model.layers is {a: 1}: it must be a whole number",
    "model:\n  layers: 1\nmodel.layers: 2": ":3: model.layers is given twice (also line 2)",
    "train:\n  steps: '5'": ":2: train.steps is '5': it must be a whole number",
    "run: {dir: 2024}": ":1: run.dir is 2024: it must be text (in YAML, put it in quotes)",
    "run: {dir: }": ":1: run.dir is null: it must be text",
    "data:\n  sources: [a, 1]": ":2: data.sources is 1: it must be text",
    "model:\n\tlayers: 1": ":2: not valid YAML:",
    "model: {layers: 1\ntrain: 2": ":2: not valid YAML:",
    "model: &a {rope: *a}": ":1: model.rope.rope is not a key",
    "? [a]\n: 1": ":1: ? is not a key",
    "a: 1\n---\nb: 2": "not valid YAML",
    "a: \x07": "not valid YAML",
    f"model: {{layers: {'9' * 5000}}}": "not valid YAML",
    f"model: {{layers: {'[' * 3000}}}": "not valid YAML",
    "train: {steps: !!int abc}": "not valid YAML",
    "run: {dir: !!timestamp foo}": "not valid YAML",
    "run: {dir: !!python/object:os.system x}": "not valid YAML",
}


@pytest.mark.parametrize("text", YAML_MISTAKES)
def test_mistakes_in_yaml_name_file_and_line(text, tmp_path, capsys):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(SystemExit) as exit_:
        parse_config(["--config", str(path)], prog="p")
    message = capsys.readouterr().err
    assert exit_.value.code == 2
    assert message.startswith(f"p: {path}:")
    assert message.count("\n") == 1
    assert YAML_MISTAKES[text] in message
    with pytest.raises(ConfigError):
        from_yaml(text)


def test_a_file_that_is_not_text(tmp_path, capsys):
    path = tmp_path / "c.yaml"
    path.write_bytes(b"run: \xff")
    with pytest.raises(SystemExit):
        parse_config(["--config", str(path)])
    assert f"{path}: not UTF-8 text (byte 5)" in capsys.readouterr().err


def test_help_lists_every_key_with_type_default_and_text(capsys):
    with pytest.raises(SystemExit) as exit_:
        parse_config(["--help"], description="What it does.")
    text = " ".join(capsys.readouterr().out.split())
    assert exit_.value.code == 0
    assert "What it does." in text
    for key in flatten(Config()):
        assert f"--{key} " in text
    assert "Sequences of one update, over all devices." in text
    assert "(type: int or null; default: null)" in text
    assert "(type: adamw|lion|adafactor|sgd|muon; default: adamw)" in text
    assert text.count("(type: ") == len(flatten(Config()))


def test_every_key_has_a_help_text():
    from shardlm.keys import kinds

    assert all(len(kind.help) > 10 for kind in kinds().values())
    assert len(kinds()) <= 100
    assert all(dataclasses.is_dataclass(f.default_factory) for f in dataclasses.fields(Config))


def test_help_needs_no_jax():
    code = (
        "import sys, shardlm.arguments as a\n"
        "try: a.parse_config(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'jax', 'numpy', 'flax', 'orbax', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, capture_output=True)
