"""Text from a model: the same on every mesh and beside any other prompt, and drawn as asked."""

import dataclasses
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlm import cli
from shardlm.arguments import override
from shardlm.checkpoint import CheckpointStore
from shardlm.config import Config, ConfigError, DataConfig, MeshConfig, ModelConfig, TrainConfig
from shardlm.data import from_json, load_data
from shardlm.data.tokenizer import BytesTokenizer, CharactersTokenizer
from shardlm.evaluate import evaluate_run
from shardlm.generate import generate_text
from shardlm.model.loss import capped_logits
from shardlm.observe import RunDirectory
from shardlm.options import EvaluateOptions, GenerateOptions, Sampling
from shardlm.parallel.collectives import Parallel
from shardlm.train.decode import generate, sample
from shardlm.train.evaluate import bits_per_byte, make_evaluate
from shardlm.train.setup import build_engine, build_mesh
from shardlm.train.state import in_stage_order, init_state, shardings

CONFIG = Config(
    mesh=MeshConfig(data=1),
    # Two windows, grouped heads, and weights so large that the likeliest tokens differ.
    model=ModelConfig(
        layers=4, embed=24, heads=8, kv_heads=4, head_dim=6, mlp=24, vocab=257, dtype="float32",
        windows=(3, 0), init_std=0.5, qk_norm=True, logit_softcap=9.0, scan_unroll=0,
    ),
    data=DataConfig(length=16, split="tail"),
    train=TrainConfig(batch=8),
)  # fmt: skip
PROMPTS = ["def f(x):", "a", "§ two", "class Z", "0123456789ab"]


def prepared(config, params=None):
    """The engine of a configuration, and its initial parameters or these."""
    engine = build_engine(config, build_mesh(config))
    if params is None:
        begin = jax.jit(
            lambda: init_state(engine.transformer, engine.optimizer, 1)["params"],
            out_shardings=shardings(engine.abstract["params"]),
        )
        return engine, begin()
    return engine, jax.device_put(params, shardings(engine.abstract["params"]))


def on(data, model, replica=1, context=1, stage=1, rounds=1):
    mesh = MeshConfig(
        data=data,
        model=model,
        replica=replica,
        context=context,
        stage=stage,
        stage_rounds=rounds,
    )
    return dataclasses.replace(CONFIG, mesh=mesh)


@pytest.fixture(scope="module")
def one():
    return prepared(CONFIG)


BYTES = from_json('{"tokenizer": "bytes"}')


@pytest.fixture(scope="module")
def greedy(one):
    """12 likeliest tokens after each prompt, on one device."""
    return generate(*one, BYTES, PROMPTS, Sampling(tokens=12, temperature=0))


@pytest.mark.parametrize("mesh", [(2, 2), (1, 8), (2, 1, 2), (2, 2, 1, 2), (2, 2, 1, 1, 2)])
def test_greedy_text_is_the_same_on_every_mesh(mesh, one, greedy):
    engine, params = prepared(on(*mesh), jax.device_get(one[1]))
    params = in_stage_order(params, engine.transformer)
    texts = generate(engine, params, BYTES, PROMPTS, Sampling(tokens=12, temperature=0))
    assert texts == greedy
    assert len(set(greedy)) == len(PROMPTS)


def test_several_prompts_are_each_alone(one, greedy):
    for prompt in (1, 4):
        alone = generate(*one, BYTES, [PROMPTS[prompt]], Sampling(tokens=12, temperature=0))
        assert alone == [greedy[prompt]]


def test_greedy_tokens_are_those_of_a_model_without_a_cache(one, monkeypatch):
    """The likeliest next token at every place of the finished text, from one forward pass."""
    engine, params = one
    prompt = "def f(x):"
    drawn = []

    class Endless(BytesTokenizer):
        end_of_document = None

    def keep(tokenizer, before, new):
        """The ids, which text may lose."""
        drawn.extend(int(i) for i in new)
        return ""

    monkeypatch.setattr("shardlm.train.decode.decode_after", keep)
    generate(engine, params, Endless(), [prompt], Sampling(tokens=12, temperature=0))
    ids = np.array([[*BYTES.encode(prompt), *drawn]], np.int32)
    par = Parallel(engine.rules)

    @jax.jit
    def likeliest(params, tokens):
        positions = jnp.arange(tokens.shape[1])[None]
        ones = jnp.ones_like(tokens)
        ctx = engine.transformer.context(par, engine.dtype, "xla", ones, positions)
        x, head, *_ = engine.transformer.hidden(params, tokens, positions, ctx)
        model = engine.config.model
        return capped_logits(x[0], head, model.vocab_size, model.logit_softcap, par).argmax(-1)

    expected = np.asarray(likeliest(params, ids))[len(prompt) - 1 : -1]
    assert drawn == expected.tolist()


def test_drawn_text_depends_on_the_seed_and_the_place_only(one):
    engine, params = prepared(on(2, 2), jax.device_get(one[1]))
    sampling = Sampling(tokens=8, temperature=1.5, seed=3)
    here = generate(*one, BYTES, ["ab", "ab", "ab"], sampling)
    assert generate(engine, params, BYTES, ["ab", "ab", "ab"], sampling) == here
    assert len(set(here)) == 3
    other = dataclasses.replace(sampling, seed=4)
    assert generate(*one, BYTES, ["ab", "ab", "ab"], other) != here


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        # Probabilities .5, .25, .15, .1 in another order.
        (Sampling(temperature=1), [0.15, 0.5, 0.1, 0.25]),
        (Sampling(temperature=0.5), [0.0225, 0.25, 0.01, 0.0625]),
        (Sampling(temperature=1, top_k=2), [0, 0.5, 0, 0.25]),
        (Sampling(temperature=1, top_k=9), [0.15, 0.5, 0.1, 0.25]),
        (Sampling(temperature=1, top_p=0.76), [0.15, 0.5, 0, 0.25]),
        (Sampling(temperature=1, top_p=0.74), [0, 0.5, 0, 0.25]),
        (Sampling(temperature=1, top_p=0.01), [0, 1, 0, 0]),
        (Sampling(temperature=1, top_p=1e-50), [0, 1, 0, 0]),  # 0 in fp32
        (Sampling(temperature=1e-3), [0, 1, 0, 0]),
        (Sampling(temperature=1, top_k=3, top_p=0.8), [0, 0.5, 0, 0.25]),
        (Sampling(temperature=0), [0, 1, 0, 0]),
    ],
)
def test_tokens_are_drawn_with_these_probabilities(sampling, kept):
    logits = jnp.log(jnp.array([0.15, 0.5, 0.1, 0.25]))
    keys = jax.random.split(jax.random.key(0), 4000)
    drawn = jax.jit(jax.vmap(lambda key: sample(key, logits, sampling)))(keys)
    share = np.bincount(drawn, minlength=4) / len(keys)
    expected = np.array(kept) / sum(kept)
    assert (share[expected == 0] == 0).all()
    # Four standard deviations of a share.
    np.testing.assert_allclose(share, expected, atol=4 * np.sqrt(0.25 / len(keys)))


@pytest.mark.parametrize(
    ("logits", "sampling", "kept"),
    [
        ([1, 3, 1, 1, 3], Sampling(top_k=1), {1}),
        ([1, 3, 1, 1, 3], Sampling(top_k=3), {0, 1, 4}),
        ([1, 3, 1, 1, 3], Sampling(top_k=4), {0, 1, 2, 4}),
        ([0, 0, 0, 0, 0], Sampling(top_k=2), {0, 1}),
        ([0, 0, 0, 0, 0], Sampling(top_p=0.5), {0, 1, 2}),
        ([0, 0, 0, 0, 0], Sampling(top_k=4, top_p=0.5), {0, 1}),
    ],
)
def test_of_equally_likely_tokens_no_more_are_kept(logits, sampling, kept):
    logits = jnp.array(logits, jnp.float32)
    keys = jax.random.split(jax.random.key(0), 400)
    drawn = jax.jit(jax.vmap(lambda key: sample(key, logits, sampling)))(keys)
    assert set(np.asarray(drawn).tolist()) == kept


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ({"tokens": 0}, "tokens is 0: it must be from 1 to 1048576"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": 1e-40}, "temperature is 1e-40: it must be 0, or at least 0.001"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0: it must be above 0 and at most 1"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_sampling_is_checked(flags, part):
    with pytest.raises(ConfigError, match=part):
        Sampling(**flags)


def test_prompts_are_checked(one):
    engine, params = one
    with pytest.raises(ConfigError, match="prompt is empty"):
        generate(engine, params, BYTES, ["a", ""], Sampling())
    characters = from_json('{"tokenizer": "characters", "characters": "ab"}')
    with pytest.raises(ConfigError, match="prompt is 'ax': character 1 of the text, 'x'"):
        generate(engine, params, characters, ["b", "ax"], Sampling())
    learned = engine._replace(config=override(CONFIG, {"model.positions": "learned"}))
    with pytest.raises(ConfigError, match="learned positions up to 16: ask for at most 13 tokens"):
        generate(learned, params, BYTES, ["abc"], Sampling(tokens=14))


@pytest.fixture(scope="module")
def run(one, tmp_path_factory):
    """A run directory with checkpoints of updates 4 and 7, which a process still owns."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "text.txt").write_text("to be or not to be, that is the question\n" * 9)
    config = override(
        CONFIG,
        {
            "run.dir": str(folder / "run"),
            "data.sources": (str(folder / "text.txt"),),
            "eval.prompt": "to",
        },
    )
    with RunDirectory.open(folder / "run") as directory:
        directory.write_config(config)
        (directory.path / "tokenizer.json").write_text(BYTES.to_json())
        engine, params = one
        data = load_data(config)
        store = CheckpointStore(directory.checkpoints_path)
        for step in (4, 7):
            scaled = jax.tree.map(lambda x, step=step: x * (step / 7), params)
            state = {"params": scaled, "opt": {"count": jnp.int32(step)}}
            store.save(step, state, {"tokens": 0, "data": data.fingerprint}, wait=True)
        # What the run itself would log.
        validation = dataclasses.replace(config, train=TrainConfig(batch=8))
        loss = make_evaluate(engine._replace(config=validation), data.validation)
        yield directory.path, loss(params, lambda: False)
        store.close()


MESH = {"mesh.data": 1, "mesh.model": 1}


def test_a_run_that_is_training_can_be_used(run, greedy, capsys):
    path, _ = run
    prompts = (PROMPTS[1], PROMPTS[3])
    options = GenerateOptions(run_dir=str(path), prompt=prompts, tokens=12, temperature=0)
    assert generate_text(options, MESH) == list(zip(prompts, (greedy[1], greedy[3]), strict=True))
    flags = f"{path} --prompt be --prompt=or --tokens 6 --temperature 0 --mesh.data 2 --step 4"
    capsys.readouterr()
    assert cli.run(cli.generate, [*flags.split(), "--mesh.model", "2"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("be")
    assert f"{path} after update 4, seed 0, temperature 0" in captured.err


def test_a_checkpoint_that_goes_away_while_it_is_read(run, monkeypatch):
    """The run removes an old one: the newest is taken instead."""
    path, _ = run
    steps = [[4], [4], [4, 7]]
    monkeypatch.setattr(CheckpointStore, "steps", lambda self: steps.pop(0) if steps else [4, 7])
    os.rename(path / "checkpoints" / "4", path / "4")
    try:
        assert len(generate_text(GenerateOptions(run_dir=str(path), tokens=1), MESH)) == 1
    finally:
        os.rename(path / "4", path / "checkpoints" / "4")


def test_evaluation_is_the_one_that_was_logged(run, capsys):
    path, logged = run
    options = EvaluateOptions(str(path))
    found = evaluate_run(options, MESH)
    assert (found["step"], found["eval_loss"]) == (7, logged)
    assert found["perplexity"] == pytest.approx(np.exp(logged))
    assert found["bits_per_byte"] == pytest.approx(np.log2(np.exp(logged)))
    assert bits_per_byte(logged, CharactersTokenizer("ab")) is None
    assert cli.run(cli.evaluate, [str(path), "--mesh.data", "1"]) == 0
    said = f"{logged:.4f} nats per token, {found['bits_per_byte']:.4f} bits per byte  perplexity"
    assert said in capsys.readouterr().out
    other = evaluate_run(options, {"mesh.data": 3, "mesh.model": 2})
    assert other["eval_loss"] == pytest.approx(logged, rel=1e-6)
    assert evaluate_run(EvaluateOptions(str(path), 4), MESH)["eval_loss"] != logged


def test_mistakes_in_run_directories(run, tmp_path, capsys):
    path, _ = run
    (tmp_path / "config.yaml").write_text("data: {sources: [x]}")
    cases = {
        f"{tmp_path}/none": "is no run, which is a directory with a config.yaml",
        str(tmp_path): "tokenizer.json cannot be read",
        f"{path} --step 5": "step is 5, and the complete checkpoints in",
        f"{path} --mesh.data 16": "the mesh asks for 16 devices (data 16) and there are 8",
        f"{path} --mesh.data 1 --mesh.model 3": "model.heads is 8 and mesh.model is 3",
        f"{path} --run.simulate_devices 4": "JAX is already running with 8 cpu devices",
    }
    for flags, part in cases.items():
        for verb in (cli.generate, cli.evaluate):
            capsys.readouterr()
            assert cli.run(verb, flags.split()) == 2
            captured = capsys.readouterr()
            assert part in captured.err
            assert captured.err.count("\n") == 1
    (path.parent / "text.txt").write_text("another text\n" * 40)
    assert cli.run(cli.evaluate, [str(path), "--mesh.data", "1"]) == 2
    assert "was trained on other text" in capsys.readouterr().err
