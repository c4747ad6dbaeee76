"""Model FLOPs against a worked value and against counting."""

import dataclasses

import pytest

from shardlm.config import ModelConfig, MoeConfig
from shardlm.model.flops import flops_per_token, matrix_parameters


@pytest.mark.parametrize("tied", [False, True])
def test_worked_value(tied):
    """2 layers of 64, 4 heads, a two-matrix feed-forward part of 256, vocabulary 128, length 32:
    638,976 for matrices and 24,576 for attention."""
    model = ModelConfig(
        layers=2, embed=64, heads=4, mlp=256, vocab=128, activation="gelu", tied=tied
    )
    assert 6 * matrix_parameters(model) == 638_976
    assert flops_per_token(model, 32) == 663_552


def test_grouped_heads_gates_and_wide_heads_are_counted():
    """3 layers: q and o 10 x (6·5), k and v 10 x (2·5), three 10 x 14; head 10 x 21."""
    model = ModelConfig(
        layers=3, embed=10, heads=6, kv_heads=2, head_dim=5, mlp=14, vocab=21, bias=True
    )
    layer = 2 * 10 * 30 + 2 * 10 * 10 + 3 * 10 * 14
    assert matrix_parameters(model) == 3 * layer + 10 * 21


def test_of_a_mixture_what_a_token_goes_through_is_counted():
    """3 layers: 2 of 8 experts and a shared one of three 10 x 14, and a router 10 x 8."""
    dense = ModelConfig(layers=3, embed=10, heads=5, mlp=14, vocab=21)
    mixture = dataclasses.replace(dense, moe=MoeConfig(8, 2, shared_experts=1))
    more = matrix_parameters(mixture) - matrix_parameters(dense)
    assert more == 3 * (2 * 3 * 10 * 14 + 10 * 8)


@pytest.mark.parametrize("windows", [(0,), (5,), (1,), (40,), (7, 0)])
def test_attention_costs_what_is_seen(windows):
    """12 · heads · head_dim for each key that a query sees, the diagonal counted half (so that
    half the square is what no window costs)."""
    length, layers = 32, 3
    model = ModelConfig(
        layers=layers, embed=8, heads=6, kv_heads=2, head_dim=5, mlp=4, vocab=11, windows=windows
    )
    keys = 0.0
    for layer in range(layers):
        window = windows[layer % len(windows)] or length
        diagonal = min(window, length)
        keys += sum(min(i + 1, window) for i in range(length)) - diagonal / 2
    attention = flops_per_token(model, length) - 6 * matrix_parameters(model)
    assert attention == pytest.approx(12 * 6 * 5 * keys / length)
