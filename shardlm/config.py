"""The configuration: every key, its type, its default and its help, and nothing else.

Frozen dataclasses are the only place where a key is defined. `shardlm.arguments` makes them YAML
keys and flags of the same dotted names, with jsonargparse. This module imports no jax, so that
`--help` is immediate and a mistake is reported before any device is touched.

Values are checked in `shardlm.validation`, and against the mesh in `shardlm.mesh.axes`.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal


class ConfigError(ValueError):
    """A configuration that cannot be used: what is wrong, in which key, and what would be right."""


@dataclass(frozen=True)
class RunConfig:
    """Where the run lives and how it starts."""

    dir: str = "runs/run"
    """Directory of this run: config.yaml, metrics.jsonl, checkpoints/. The same command resumes."""
    seed: int = 0
    """Seed of the initial values, the order of the data and dropout."""
    fresh: bool = False
    """Refuse a directory that already holds a run instead of resuming it."""
    simulate_devices: int = 0
    """Run on this many simulated CPU devices; 0 uses the devices that are there."""
    log_every_steps: int = 10
    """Print a progress line every this many updates (metrics.jsonl has every one)."""


@dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh axes. One may be -1: whatever the devices leave.

    `data` splits the examples and, by `shard_params`, the training state. `model` splits heads,
    hidden units and vocabulary. `expert` splits the experts of mixture layers, and outside them the
    examples. `replica` holds whole copies.
    """

    replica: int = 1
    """Copies of the whole model, each with its own examples."""
    stage: int = 1
    """Splits the layers into runs of consecutive ones, through which micro-batches go in turn."""
    data: int = -1
    """Splits the examples and, by `shard_params`, the training state."""
    expert: int = 1
    """Splits the experts of mixture layers, and outside them the examples."""
    context: int = 1
    """Splits one sequence."""
    model: int = 1
    """Splits heads, hidden units and vocabulary, and the residual stream over the sequence."""
    shard_params: Literal["all", "optimizer", "none"] = "all"
    """What `data` splits beside the examples. all: parameters are gathered layer by layer;
    optimizer: masters and moments are split, the parameters gathered once an update; none: every
    device holds everything."""
    context_comm: Literal["ring", "gather", "ulysses"] = "ring"
    """What travels over `context`. ring: keys and values, a device's at a time; gather: all of them
    at once; ulysses: queries, keys and values, so that each device has all tokens of some heads."""
    stage_rounds: int = 1
    """Runs of layers of each device of `stage`: a micro-batch goes round so many times. More rounds
    idle less and send more."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (Su et al., arXiv 2104.09864) and its scaling to longer texts."""

    theta: float = 10_000.0
    """Base of the frequencies."""
    scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    """How frequencies are stretched beyond `original_length`."""
    factor: float = 1.0
    """How many times longer than `original_length`."""
    original_length: int = 8192
    """Length that the unscaled frequencies were trained on."""
    low: float = 1.0
    """Rotations over `original_length` below which a frequency is fully stretched
    (llama3 low_freq_factor; yarn beta_slow)."""
    high: float = 4.0
    """Rotations above which a frequency is left alone
    (llama3 high_freq_factor; yarn beta_fast, usually 32)."""


@dataclass(frozen=True)
class MoeConfig:
    """Mixture of experts (Shazeer et al., arXiv 1701.06538): the feed-forward part of every layer
    is `experts` of them, each of `model.mlp` hidden units, and a token goes through `top_k`."""

    experts: int = 0
    """Experts of a layer (E); 0: one feed-forward part for all tokens."""
    top_k: int = 2
    """Experts that a token goes to."""
    capacity_factor: float = 0.0
    """Most tokens of a row that an expert takes, as a multiple of its even share (tokens · top_k /
    experts); those that come later in the row go without it. 0: no limit, nothing is dropped."""
    gating: Literal["softmax", "sigmoid"] = "softmax"
    """Weights of the experts from the router's logits: softmax over all experts, or the sigmoid of
    each."""
    normalize: bool = True
    """Divide the weights of the chosen experts by their sum."""
    shared_experts: int = 0
    """Experts that every token goes through besides, as one of so many times the hidden units."""
    balance_loss: float = 0.01
    """Coefficient of the load-balancing loss (arXiv 2101.03961), of each row and layer."""
    z_loss: float = 0.0
    """Coefficient of the router's squared log normaliser (arXiv 2202.08906), in each layer."""
    bias_rate: float = 0.0
    """Change, in every update, of a bias that leads tokens from busy experts to idle ones
    (arXiv 2408.15664); 0: no bias."""


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer."""

    layers: int = 4
    """Number of layers."""
    embed: int = 256
    """Width of the residual stream (D)."""
    heads: int = 4
    """Query heads (H)."""
    kv_heads: int | None = None
    """Key and value heads; default: as many as `heads`."""
    head_dim: int | None = None
    """Width of a head (K); default: embed / heads."""
    mlp: int = 688
    """Hidden units of the feed-forward part, or of each expert (F)."""
    moe: MoeConfig = MoeConfig()
    """A mixture of experts in place of the feed-forward part."""
    vocab: int | None = None
    """Tokens (V); default: what the tokenizer has. Stored padded; padding is never predicted."""
    norm: Literal["rms", "layer"] = "rms"
    """RMSNorm (arXiv 1910.07467) or LayerNorm (arXiv 1607.06450)."""
    norm_eps: float = 1e-6
    """Added to the mean square or variance."""
    positions: Literal["rotary", "learned", "none"] = "rotary"
    """How a token knows its place."""
    rope: RopeConfig = RopeConfig()
    """Rotary frequencies."""
    activation: Literal["swiglu", "geglu", "gelu", "relu2"] = "swiglu"
    """Gated (swiglu, geglu: arXiv 2002.05202) or plain (gelu; relu2: arXiv 2109.08668). gelu is the
    tanh approximation."""
    bias: bool = False
    """Biases in every linear layer but the output head, and in every norm."""
    qk_norm: bool = False
    """RMSNorm of queries and keys, a head at a time (arXiv 2302.05442)."""
    tied: bool = False
    """One matrix for the embedding and the output head."""
    logit_softcap: float = 0.0
    """Bound c of the output logits, c·tanh(x/c) (arXiv 2408.00118); 0 is off."""
    attention_softcap: float = 0.0
    """The same for attention scores; 0 is off."""
    windows: tuple[int, ...] = (0,)
    """Sliding windows in tokens, a pattern repeated over the layers; 0 sees everything before."""
    dropout: float = 0.0
    """Probability of dropping an element of each residual branch and of the embedding."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute dtype. auto: bfloat16 on accelerators; on CPU what is faster with this jax."""
    attention: Literal["auto", "xla", "blockwise", "cudnn"] = "auto"
    """Implementation. auto: blockwise, and xla for decoding."""
    attention_block: int = 128
    """Queries and keys of a block of the blockwise attention."""
    scan_unroll: int = 1
    """Layers, or repetitions of `windows`, unrolled per iteration of the scan over them; 0 unrolls
    all (faster on simulated devices and on CPU, longer to compile)."""
    init_std: float = 0.02
    """Standard deviation of embeddings; matrices have the lesser of this and 1/sqrt(fan in)."""
    zero_init_output: bool = False
    """Start the last matrix of each residual branch at zero, else at init_std/sqrt(2 layers)."""

    @property
    def kv(self) -> int:
        """Key and value heads, resolved."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def k_dim(self) -> int:
        """Width of a head, resolved."""
        return self.embed // self.heads if self.head_dim is None else self.head_dim

    @property
    def gated(self) -> bool:
        """Whether the feed-forward part has a gate matrix."""
        return self.activation in ("swiglu", "geglu")

    @property
    def vocab_size(self) -> int:
        """Vocabulary once the tokenizer is known (see `shardlm.data`)."""
        if self.vocab is None:
            raise ConfigError("model.vocab is not set, and no tokenizer has filled it in")
        return self.vocab

    @property
    def vocab_padded(self) -> int:
        """Rows stored: a multiple of 128 from 1,024 on, else of 8. It does not depend on the mesh,
        so that a checkpoint has one shape everywhere."""
        multiple = 128 if self.vocab_size >= 1024 else 8
        return math.ceil(self.vocab_size / multiple) * multiple


@dataclass(frozen=True)
class DataConfig:
    """What is read and how it becomes rows."""

    sources: tuple[str, ...] = ("stdlib",)
    """Files, directories, globs or URLs of text (.txt, .md, code, .jsonl, .parquet, Hugging Face
    datasets on disk), token arrays (.npy), stores made by `shardlm prepare`; `hf:NAME` streams a
    dataset; `stdlib` is the running Python's own library."""
    weights: tuple[float, ...] = ()
    """Share of each source in every update, by rows; default: the sources are one text."""
    field: str = "text"
    """Field or column that holds the text. A name with dots, such as a.b, is b within a, unless
    there is one named a.b."""
    errors: Literal["error", "replace", "skip"] = "error"
    """What becomes of a document that is not UTF-8: an error, U+FFFD in place of the bytes, or the
    document is left out; the last two are counted."""
    tokenizer: str | None = None
    """bytes: any text, 256 ids and one that ends a document; characters: one id for each that
    occurs; a tokenizer.json, a sentencepiece .model, or tiktoken:NAME. Default: that of the
    stores among the sources, else bytes."""
    cache: str | None = None
    """Where text that no store holds is kept tokenized, by its content; default: `shardlm` in
    $XDG_CACHE_HOME, or in ~/.cache. What is there may be removed at any time."""
    length: int = 256
    """Tokens of a row (T)."""
    packing: Literal["concat", "best_fit", "none", "padded_buckets"] = "concat"
    """concat: documents end to end, cut every T tokens; best_fit: whole documents side by side;
    none: a row for each; padded_buckets: as best_fit, in rows of several lengths."""
    overlap: int = 0
    """Tokens of the piece before that a piece of a document longer than a row repeats, as context
    only (not with concat)."""
    buckets: int = 4
    """How many lengths rows have with padded_buckets: data.length, half of it, a quarter, and so
    on."""
    batch_tokens: int | None = None
    """Places of an update, padding among them, instead of train.batch: a multiple of `length`."""
    balance: Literal["none", "tokens", "work", "dynamic"] = "work"
    """How the rows of an update are dealt to devices: in their order, or so that the tokens of
    each, its work (attention counted), or with dynamic its time by measured speeds, are level."""
    validation: float = 0.1
    """Share of the text kept for validation."""
    split: Literal["documents", "tail"] = "documents"
    """documents: whole ones, chosen by a hash of their text; tail: the end of each source."""
    prefetch: int = 2
    """Batches prepared ahead of the step."""


@dataclass(frozen=True)
class TrainConfig:
    """The update."""

    batch: int = 16
    """Sequences of one update, over all devices. It never changes with the mesh."""
    micro_batch: int | None = None
    """Sequences that go through at once, over all devices; default: the whole batch."""
    steps: int = 1000
    """Updates of the whole run."""
    remat: Literal["none", "full"] = "none"
    """full: keep only each layer's input and compute the rest again in the backward pass."""
    loss_chunk: int = 1024
    """Tokens whose logits exist at a time on a device; 0: all at once."""
    z_loss: float = 0.0
    """Coefficient of the squared log normaliser (arXiv 2204.02311); the reported loss is
    without it."""


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer and schedule."""

    name: Literal["adamw", "lion", "adafactor", "sgd", "muon"] = "adamw"
    """muon: for the matrices inside the layers, adamw for the rest."""
    learning_rate: float = 1e-3
    """Peak learning rate."""
    matrix_learning_rate: float = 0.02
    """Peak learning rate of the matrices that muon updates."""
    schedule: Literal["constant", "cosine", "linear", "wsd"] = "cosine"
    """After warm-up. wsd: constant, then linear decay over the last
    `decay_fraction`."""
    warmup_steps: int = 100
    """Updates of linear warm-up from 0."""
    decay_fraction: float | None = None
    """Share of `train.steps` that the decay takes, of what warm-up leaves; default: all (wsd:
    0.2)."""
    final_fraction: float = 0.1
    """Learning rate at the end, as a fraction of the peak."""
    weight_decay: float = 0.1
    """Decoupled decay of matrices and embeddings; never of norms or biases."""
    clip_norm: float = 1.0
    """Largest global gradient norm; 0: no clipping."""
    b1: float = 0.9
    """Decay of the first moment (adamw, also muon's), weight of it in the update (lion), momentum
    (sgd)."""
    b2: float = 0.95
    """Decay of the second moment (adamw, also muon's), of the first moment (lion)."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    max_skipped: int = 10
    """Consecutive updates skipped for NaN or infinite gradients after which the run ends."""


@dataclass(frozen=True)
class CheckpointConfig:
    """When the state is saved. The last state always is."""

    every_steps: int = 500
    """Updates between saves; 0: only by time and at the end."""
    every_minutes: float = 15.0
    """Minutes between saves; 0: only by steps and at the end."""
    keep: int = 2
    """Newest checkpoints kept."""
    keep_every: int = 0
    """Keep every checkpoint whose step is a multiple of this for ever; 0: none."""


@dataclass(frozen=True)
class EvalConfig:
    """Loss over the whole validation split, and a sample at the end."""

    every_steps: int = 0
    """Updates between evaluations; 0: only at the end."""
    batch: int | None = None
    """Sequences at a time; default: train.micro_batch."""
    prompt: str = "\n"
    """Start of the sample written at the end of the run."""
    sample_tokens: int = 200
    """Length of that sample; 0: none."""


@dataclass(frozen=True)
class Config:
    """Everything about a run."""

    run: RunConfig = field(default_factory=RunConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)

    @property
    def batch(self) -> int:
        """Sequences of an update, resolved; of rows of several lengths, as many of the longest as
        have its places."""
        tokens = self.data.batch_tokens
        return self.train.batch if tokens is None else tokens // self.data.length

    @property
    def micro_batch(self) -> int:
        """Sequences of a micro-batch, resolved."""
        return self.batch if self.train.micro_batch is None else self.train.micro_batch

    @property
    def micro_batches(self) -> int:
        """Micro-batches of an update."""
        return self.batch // self.micro_batch


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted keys and values of a configuration (or of one of its sections), in order."""
    flat: dict[str, Any] = {}
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            flat |= flatten(value, f"{prefix}{f.name}.")
        else:
            flat[prefix + f.name] = value
    return flat
