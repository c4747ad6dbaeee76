"""Model FLOPs: what the mathematics needs, whatever the program does."""

from shardlm.config import ModelConfig


def matrix_parameters(model: ModelConfig) -> int:
    """Parameters that multiply a token: all matrices and the output head, tied or not, but not the
    embedding look-up, norms or biases. Of a mixture: the router, the experts that a token goes to,
    and the shared ones."""
    attention = 2 * model.embed * model.k_dim * (model.heads + model.kv)
    mlp = (3 if model.gated else 2) * model.embed * model.mlp
    moe = model.moe
    if moe.experts:
        mlp = (moe.top_k + moe.shared_experts) * mlp + model.embed * moe.experts
    return model.layers * (attention + mlp) + model.embed * model.vocab_size


def flops_per_token(model: ModelConfig, length: int) -> float:
    """FLOPs of a token, forward and backward, in rows of `length`.

    6 a matrix parameter (Kaplan et al., arXiv 2001.08361), and for attention 12 · heads · head_dim
    a key that is seen: on average length/2, or w(1 - w/2·length) in a window of w.
    """
    keys = 0.0
    for layer in range(model.layers):
        window = model.windows[layer % len(model.windows)]
        w = min(window, length) if window else length
        keys += w * (1 - w / (2 * length))
    return 6.0 * matrix_parameters(model) + 12.0 * model.heads * model.k_dim * keys
