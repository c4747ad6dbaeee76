"""A small parameter tree of odd sizes with every role, stacked and one layer at a time."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

LAYERS, EMBED, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB = 2, 12, 6, 2, 5, 20, 16
LAYER_SHAPES = {
    "attn_norm": {"scale": (EMBED,), "bias": (EMBED,)},
    "attn": {
        "q": {"kernel": (EMBED, HEADS, HEAD_DIM), "bias": (HEADS, HEAD_DIM)},
        "k": {"kernel": (EMBED, KV_HEADS, HEAD_DIM)},
        "q_norm": {"scale": (HEAD_DIM,)},
        "o": {"kernel": (HEADS, HEAD_DIM, EMBED)},
    },
    "mlp": {"up": {"kernel": (EMBED, MLP)}, "down": {"kernel": (MLP, EMBED)}},
}
SHAPES = {
    "embed": {"table": (VOCAB, EMBED)},
    "layers": jax.tree.map(
        lambda shape: (LAYERS, *shape), LAYER_SHAPES, is_leaf=lambda x: isinstance(x, tuple)
    ),
    "final_norm": {"scale": (EMBED,)},
    "head": {"kernel": (EMBED, VOCAB)},
}


class Trees:
    """Makes and compares trees. Through numpy: a jax operation would compile once a shape."""

    small: ClassVar = {"w": (3, 4), "nested": {"b": (5,), "s": ()}}

    @staticmethod
    def full(value: float, shapes: Any = SHAPES) -> Any:
        return Trees.make(lambda shape: np.full(shape, value), shapes)

    @staticmethod
    def random(seed: int, shapes: Any = SHAPES) -> Any:
        generator = np.random.default_rng(seed)
        return Trees.make(lambda shape: generator.normal(size=shape), shapes)

    @staticmethod
    def make(function: Any, shapes: Any) -> Any:
        return jax.tree.map(
            lambda shape: jnp.asarray(np.asarray(function(shape), np.float32)),
            shapes,
            is_leaf=lambda x: isinstance(x, tuple),
        )

    @staticmethod
    def unstack(tree: Any) -> Any:
        layers = {
            str(i): jax.tree.map(lambda x, i=i: jnp.asarray(np.asarray(x)[i]), tree["layers"])
            for i in range(LAYERS)
        }
        return tree | {"layers": layers}

    @staticmethod
    def leaves(tree: Any) -> dict[str, np.ndarray]:
        return {
            jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf)
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        }

    @staticmethod
    def assert_same_bits(left: Any, right: Any) -> None:
        assert jax.tree.structure(left) == jax.tree.structure(right)
        for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
            assert a.dtype == b.dtype
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.fixture(scope="session")
def trees() -> type[Trees]:
    return Trees
