"""No attention across documents: of any documents in rows, changing one moves no other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from shardlm.config import MeshConfig, ModelConfig
from shardlm.mesh import AxisRules, make_mesh
from shardlm.model.blockwise import UNROLLED
from shardlm.model.loss import capped_logits
from shardlm.model.transformer import Transformer
from shardlm.parallel.collectives import Parallel

B, T, VOCAB = 2, 38, 29
FORMS = {
    "xla": ("xla", 16, 1),
    "written out": ("blockwise", 8, 1),
    "loops": ("blockwise", 4, 1),
    "split over two devices": ("blockwise", 4, 2),
}
"""What runs on CPU: implementations, blocks, which do not divide T, and devices of `model`, which
split the rows between the matrices."""
assert 8 * UNROLLED >= T > 4 * UNROLLED


class Model:
    """fp32 logits [B, T, V] of a form, compiled once for all examples."""

    def __init__(self, quick_jit, implementation, block, ways):
        model = ModelConfig(
            layers=3,
            embed=12,
            heads=6,
            kv_heads=2,
            head_dim=4,
            mlp=10,
            vocab=VOCAB,
            windows=(7, 0),
            qk_norm=True,
            attention_block=block,
        )
        transformer = Transformer(model, T)
        mesh = make_mesh(MeshConfig(data=1, model=ways), jax.devices()[:ways])
        par = Parallel(AxisRules(mesh.shape))
        rng = np.random.default_rng(0)
        self.params = jax.tree.map(
            lambda x: rng.normal(0, 0.6, x.shape).astype(np.float32), transformer.abstract()
        )
        specs = jax.tree.map(
            par.rules.spec, transformer.dims, is_leaf=lambda x: isinstance(x, tuple)
        )

        def run(params, tokens, positions, segments):
            dtype = jnp.dtype("float32")
            ctx = transformer.context(par, dtype, implementation, segments, positions)
            x, head, *_ = transformer.hidden(params, tokens, positions, ctx)
            logits = capped_logits(x.reshape(B * T, -1), head, VOCAB, 0.0, par)
            return logits.reshape(B, T, -1)

        split = jax.shard_map(
            run, mesh=mesh, in_specs=(specs, P(), P(), P()), out_specs=P(None, None, "model")
        )
        self.run = quick_jit(split)

    def __call__(self, tokens, segments):
        begins = np.diff(segments, axis=1, prepend=-1) != 0
        place = np.arange(T)
        positions = place - np.maximum.accumulate(np.where(begins, place, 0), axis=1)
        positions = np.where(segments > 0, positions, 0).astype(np.int32)
        return np.asarray(self.run(self.params, tokens, positions, segments))[..., :VOCAB]


@pytest.fixture(scope="module")
def model_of(quick_jit):
    return functools.cache(lambda form: Model(quick_jit, *FORMS[form]))


@st.composite
def packings(draw):
    """Segments of documents of any lengths, and padding or none, and one of them to change: its
    row and its number, 0 for the padding."""
    segments = np.zeros((B, T), np.int32)
    for row in segments:
        ends = sorted(draw(st.sets(st.integers(1, T), min_size=1, max_size=9)))
        for number, (begin, end) in enumerate(zip([0, *ends], ends, strict=False), start=1):
            row[begin:end] = number
    row = draw(st.integers(0, B - 1))
    number = draw(st.sampled_from(sorted({*segments[row].tolist()})))
    return segments, row, number, draw(st.integers(0, 2**32 - 1))


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=50, deadline=None)
@given(example=packings())
def test_changing_a_document_moves_no_other(model_of, form, example):
    """Logits of all others, to every bit. The document's own are those of it without the others: to
    every bit at the same place, and but for the order of sums at the start of a row."""
    model, (segments, row, number, seed) = model_of(form), example
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCAB, (B, T)).astype(np.int32)
    its = np.zeros((B, T), bool)
    its[row] = segments[row] == number
    before = model(tokens, segments)

    # Every id is another one.
    changed = np.where(its, (tokens + rng.integers(1, VOCAB, (B, T))) % VOCAB, tokens)
    after = model(changed.astype(np.int32), segments)
    others = ~its & (segments > 0)
    assert after[others].tobytes() == before[others].tobytes()
    assert (after[its] != before[its]).any(-1).all()
    if number == 0:
        return

    alone = model(np.where(its, tokens, 0).astype(np.int32), np.where(its, segments, 0))
    assert alone[its].tobytes() == before[its].tobytes()
    size = its.sum()
    first, ones = np.zeros((2, B, T), np.int32)
    first[1 - row, :size], ones[1 - row, :size] = tokens[its], 1
    moved = model(first, ones)[1 - row, :size]
    np.testing.assert_allclose(moved, before[its], rtol=0, atol=1e-5 * np.abs(before[its]).max())
