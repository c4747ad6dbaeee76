"""Bytes that a compiled step sends between devices, counted in its text, and the least possible.

`compiled.as_text()` is the program after partitioning and optimization, so that what the compiler
added, merged or dropped is counted as it will run. Loops count as often as they go round.
"""

import functools
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from shardlm.config import Config, ConfigError
from shardlm.mesh import AxisRules
from shardlm.mesh.axes import AXES, batch_ways, stage_rounds
from shardlm.model.transformer import Transformer
from shardlm.parallel.collectives import weight_dtype
from shardlm.parallel.heads import kv_copies, kv_heads_of

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
"""The operations that send."""


@dataclass(frozen=True)
class Collective:
    """One collective operation of a program."""

    kind: str
    """One of `KINDS`."""
    axes: tuple[str, ...]
    """Mesh axes along which it sends."""
    bytes: float
    """Bytes a device sends in one run of the program, on a ring, all `count` times together."""
    count: int
    """Times it happens in one run of the program."""
    name: str
    """Name of the instruction."""
    op_name: str
    """Where it comes from, by the program's metadata."""
    result: str
    """Shape of its result."""

    def __str__(self) -> str:
        where = "+".join(self.axes) or "one device"
        return (
            f"{self.kind} over {where}: {self.bytes:,.0f} bytes in {self.count} x {self.result} "
            f"({self.name}, {self.op_name})"
        )


def count_traffic(text: str, mesh: Mesh | AbstractMesh) -> list[Collective]:
    """The collectives of a compiled program.

    A device sends on a ring of N, for each time (Thakur et al., 2005): all-gather (N-1)/N of its
    result, reduce-scatter and all-to-all (N-1)/N of their operand, all-reduce 2(N-1)/N of it,
    collective-permute all of it. Of the branches of a conditional the one that sends most counts.

    Args:
      text: `compiled.as_text()`, of any backend.
      mesh: the mesh that the program was partitioned for.

    Returns:
      Those that more than one device takes part in, in the order of the program.

    Raises:
      ValueError: the text is no compiled program, or a loop with a collective inside has no
        constant number of turns.
    """
    return _Program(text, tuple(mesh.shape.items())).collectives()


def bytes_by_axis(collectives: Sequence[Collective]) -> dict[str, float]:
    """Bytes a device sends along each axis; one over several axes counts in full on each."""
    total: dict[str, float] = {}
    for collective in collectives:
        for axis in collective.axes:
            total[axis] = total.get(axis, 0.0) + collective.bytes
    return total


def minimum_bytes(config: Config, sizes: Mapping[str, int]) -> dict[str, float]:
    """The least that a device must send along each axis in an update, on rings.

    With Ψ parameters a device (its part of those that `model` splits), b bytes of the compute
    dtype (4 for norm scales), gradients of 4 bytes, k micro-batches, N the size of the axis, and
    the factor (N-1)/N everywhere:

    - `data`, shard_params none: 2·4Ψ, an all-reduce of the gradients.
    - `data`, optimizer: (b + 4)Ψ, weights gathered and gradients scattered once (Rajbhandari et
      al., arXiv 1910.02054).
    - `data`, all: k·(2b + 4)Ψ in the layers, weights gathered forward and backward, gradients
      scattered; (b + 4k)Ψ outside (embedding, final norm, head), where one gather does for all.
    - `replica`: 2·4 times what a device stores, an all-reduce of the gradients.
    - `expert`: the same of what it does not split, and k·4·layers·(tokens of a device's
      micro-batch)·top_k·embed·b, tokens to their experts and back, forward and backward, by
      all-to-all with nothing to spare. A capacity factor sends so many times that, no limit
      N/top_k times (see `shardlm.parallel.experts`).
    - `context`: as `replica`, and in each layer and micro-batch, of t tokens of a device's rows and
      heads of together h (queries) and g (keys) numbers, ring and gather: keys and values twice
      and their gradients in fp32, (4b + 8)·t·g; ulysses: queries, keys, values and results, forward
      and backward, 4b·(h + g)·t/N.
    - `model`: k·(8·layers + 4)·(tokens of a device's micro-batch)·embed·b: a layer has 4
      all-gathers and 4 reduce-scatters (Korthikanti et al., arXiv 2205.05198), the split
      embedding and head together 2 and 2. Without recomputation (`train.remat: none`). The
      statistics of the loss (6 numbers a token) and the gradients of norm scales come on top. Of
      key/value heads that it does not divide (see `shardlm.parallel.heads`) it sums gradients, as
      `replica` does; `data` with `all` gathers those of a device, and ulysses sends them in as many
      copies as let `context` divide them.
    - `stage`: as `replica` of what is outside the layers, and for each micro-batch, of a =
      (tokens of a device's micro-batch)·embed·b, 2a for a device between two others, in each round,
      without the factor, and 2a where the loss is dealt to all devices.

    With stages a device has layers/N of the layers, and what is sent forward in them is sent again
    before they are taken backward, since they are run again (`shardlm.parallel.pipeline`): of
    weights 3b in place of 2b, over `expert` 6 for 4, `context` 6b for 4b, `model` 12 for 8. The
    loss, and what the head gathers over `model`, is of 1/N of the tokens. What devices compute and
    send in idle ticks, a share of `Schedule.bubble`, comes on top.

    Leaves that `data` does not divide (see `AxisRules.for_model`) count as replicated.

    Args:
      config: `model.vocab` and `model.dtype` resolved, as in `Engine.config`.
      sizes: size of each mesh axis.

    Returns:
      Axis to bytes, for the axes of more than one device.

    Raises:
      ConfigError: `model.dtype` is auto, or the model does not divide over the axes.
    """
    model = config.model
    if model.dtype == "auto":
        raise ConfigError("model.dtype is auto: bytes need float32 or bfloat16")
    dtype = jnp.dtype(model.dtype)
    rules = AxisRules.for_model(sizes, model, config.mesh.shard_params)
    transformer = Transformer(model, config.data.length)
    micro_batches = config.micro_batches
    size = {axis: sizes.get(axis, 1) for axis in AXES}
    stages, layers = size["stage"], model.layers / size["stage"]
    # Of what layers send: forward, perhaps forward again, and backward.
    forward = 2 if stages > 1 else 1
    data = replica = expert = stage = model_axis = 0.0
    kv_heads = kv_heads_of(size["model"], model.kv).shape[1]
    leaves = jax.tree_util.tree_leaves_with_path(transformer.abstract())
    dims = jax.tree.leaves(transformer.dims, is_leaf=lambda x: isinstance(x, tuple))
    for (path, leaf), names in zip(leaves, dims, strict=True):
        axes = [a for dim, n in zip(names, leaf.shape, strict=True) for a in rules.axes(dim, n)]
        count = math.prod(leaf.shape) / math.prod(
            size[axis] for axis in ("stage", "expert", "model") if axis in axes
        )
        weight = weight_dtype(dtype, path).itemsize
        whole_heads = "kv_heads" in names and "model" not in axes
        if "data" not in axes:
            data += 8 * count
        elif config.mesh.shard_params == "optimizer":
            data += (weight + 4) * count
        else:
            gathers = (forward + 1) * micro_batches if path[0].key == "layers" else 1
            part = kv_heads / model.kv if whole_heads else 1
            data += (gathers * weight + 4 * micro_batches) * count * part
        stored = count / (size["data"] if "data" in axes else 1)
        model_axis += 8 * stored if whole_heads else 0
        replica += 8 * stored
        expert += 0 if "expert" in axes else 8 * stored
        stage += 0 if "stage" in axes else 8 * stored
    tokens = config.micro_batch * config.data.length / batch_ways(size)
    heads, kv = model.heads // size["model"] * model.k_dim, kv_heads * model.k_dim
    if config.mesh.context_comm == "ulysses":
        kv *= kv_copies(size["context"], kv_heads)
        attention = 2 * (forward + 1) * dtype.itemsize * (heads + kv) / size["context"]
    else:
        attention = (2 * (forward + 1) * dtype.itemsize + 8) * kv
    activations = micro_batches * tokens / size["context"] * model.embed * dtype.itemsize
    expert += 2 * (forward + 1) * layers * model.moe.top_k * activations
    whole = {
        "replica": replica,
        "data": data,
        "expert": expert,
        # Gradients of what a device stores, as over `replica`.
        "context": replica + micro_batches * layers * tokens * attention,
        "model": model_axis + (4 * (forward + 1) * layers + 2 + 2 / stages) * activations,
        "stage": stage + 2 * activations / size["model"],
    }
    least = {axis: _ring(n) * whole[axis] for axis, n in size.items() if n > 1}
    if stages > 1:
        rounds = stage_rounds(config.mesh, size)
        least["stage"] += 2 * rounds * activations / size["model"]
    return least


def _ring(n: int) -> float:
    return (n - 1) / n


@dataclass(frozen=True)
class _Instruction:
    name: str
    result: str
    """Text of its type."""
    opcode: str
    rest: str
    """Operands and attributes."""

    def called(self, *attributes: str) -> list[str]:
        """Computations that these attributes name."""
        found = re.findall(rf"\b(?:{'|'.join(attributes)})=(\{{[^}}]*\}}|%[\w.\-]+)", self.rest)
        return [name for group in found for name in re.findall(r"%([\w.\-]+)", group)]


class _Program:
    """The computations of a program, and a walk through them from its entry."""

    def __init__(self, text: str, mesh: tuple[tuple[str, int], ...]) -> None:
        self.mesh = mesh
        self.computations: dict[str, list[_Instruction]] = {}
        self.entry: str | None = None
        body: list[_Instruction] = []
        for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
            if header := re.match(r"(ENTRY )?%([\w.\-]+) .*\{$", line):
                body = self.computations[header[2]] = []
                self.entry = header[2] if header[1] else self.entry
            elif match := re.match(
                r"\s+(?:ROOT )?%([\w.\-]+) = (.*?) ([a-z][a-z\d\-]*)\((.*)", line
            ):
                body.append(_Instruction(*match.groups()))
        if self.entry is None:
            raise ValueError("the text has no ENTRY computation: pass compiled.as_text()")

    def collectives(self) -> list[Collective]:
        assert self.entry is not None
        return list(self._walk(self.entry))

    @functools.cache  # noqa: B019 - a program lives as long as one count
    def _walk(self, computation: str) -> tuple[Collective, ...]:
        """What one run of a computation sends."""
        return tuple(c for i in self.computations[computation] for c in self._sent(i))

    def _sent(self, instruction: _Instruction) -> Iterator[Collective]:
        kind = instruction.opcode.removesuffix("-start")
        if kind in KINDS:
            yield from self._collective(kind, instruction)
        elif instruction.opcode == "while":
            (body,) = instruction.called("body")
            if inner := self._walk(body):
                turns = self._turns(instruction)
                for c in inner:
                    yield replace(c, bytes=c.bytes * turns, count=c.count * turns)
        elif instruction.opcode == "conditional":
            names = ("branch_computations", "true_computation", "false_computation")
            branches = [self._walk(name) for name in instruction.called(*names)]
            yield from max(branches, key=lambda cs: sum(c.bytes for c in cs))
        else:
            for name in instruction.called("calls", "to_apply", "called_computations"):
                yield from self._walk(name)

    def _turns(self, loop: _Instruction) -> int:
        """How often a loop goes round: stated, or the one constant of its condition."""
        if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest):
            return int(known[1])
        (condition,) = loop.called("condition")
        constants = {
            int(i.rest.split(")")[0])
            for i in self.computations[condition]
            if i.opcode == "constant" and re.match(r"[su]\d+\[\]", i.result)
        }
        if len(constants) != 1:
            raise ValueError(
                f"loop {loop.name} has collectives inside, and its number of turns is not in the "
                f"text (constants of its condition: {sorted(constants) or 'none'})"
            )
        return constants.pop()

    def _collective(self, kind: str, instruction: _Instruction) -> Iterator[Collective]:
        groups = self._groups(kind, instruction.rest)
        n = max(len(group) for group in groups)
        axes = _axes(groups, self.mesh)
        if not axes:
            return
        is_async = instruction.opcode.endswith("-start")
        size = float(_type_bytes(instruction.result, skip_scalars=is_async))
        # An asynchronous start returns operand and result, of which the larger is meant here.
        if kind in ("all-gather", "reduce-scatter"):
            if is_async:
                size *= n / (n + 1)
            elif kind == "reduce-scatter":
                size *= n
        elif is_async and (kind != "all-reduce" or instruction.result.startswith("((")):
            size /= 2
        factor = {"all-reduce": 2 * _ring(n), "collective-permute": 1.0}.get(kind, _ring(n))
        op_name = re.search(r'op_name="([^"]*)"', instruction.rest)
        yield Collective(
            kind,
            axes,
            factor * size,
            1,
            instruction.name,
            op_name[1] if op_name else "no op_name",
            re.sub(r"\{[^}]*\}", "", instruction.result),
        )

    def _groups(self, kind: str, rest: str) -> list[list[int]]:
        """Places in the mesh, as counted along it, of the devices that exchange."""
        if kind == "collective-permute":
            pairs = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", rest)
            assert pairs is not None, rest
            return _lists(pairs[1])
        devices = math.prod(n for _, n in self.mesh)
        if named := re.search(
            r"replica_groups=mesh\[([^\]]*)\]"
            r"(?:, device_ids=\(([^)]*(?:\([\d,]*\))?)\))? \{([^}]*)\}",
            rest,
        ):
            return _named_groups(named[1], named[2], named[3])
        if iota := re.search(r"replica_groups=(\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)", rest):
            return [list(map(int, group)) for group in _iota(iota[1])]
        listed = re.search(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}", rest)
        assert listed is not None, rest
        return _lists(listed[1]) or [list(range(devices))]


def _lists(text: str) -> list[list[int]]:
    """{0,1},{2,3}"""
    return [list(map(int, g.split(","))) for g in re.findall(r"\{([\d,]+)\}", text)]


def _iota(text: str) -> np.ndarray:
    """[4,2]<=[2,4]T(1,0), or short [4,2]T(1,0) with the source shaped as the target."""
    match = re.fullmatch(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?", text)
    assert match is not None, text
    shape, source, order = (
        [int(n) for n in part.split(",")] if part else None for part in match.groups()
    )
    assert shape is not None
    ids = np.arange(math.prod(shape)).reshape(source or shape)
    if order:
        ids = ids.transpose(order)
    return ids.reshape(shape) if source else ids


def _named_groups(axes: str, device_ids: str | None, names: str) -> list[list[int]]:
    """mesh['data'=4,'model'=2], device_ids=([4,2]T(1,0)) {'model'}

    A name may have a part of an axis after it: 'data':(2)4 is 4 steps, each 2 further apart than
    the size to the right says: the axis is seen as (2, 4, rest).
    """
    shape = {name: int(n) for name, n in re.findall(r"'([^']+)'=(\d+)", axes)}
    ids = np.arange(math.prod(shape.values()))
    if device_ids:
        listed = re.fullmatch(r"[\d, ]+", device_ids)
        ids = np.array(list(map(int, device_ids.split(",")))) if listed else _iota(device_ids)
    parts = dict.fromkeys(shape, (1, 1))
    for name, before, n in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", names):
        parts[name] = (int(before), int(n)) if n else (1, shape[name])
    split = [(b, n, shape[name] // (b * n)) for name, (b, n) in parts.items()]
    grid = ids.reshape([n for part in split for n in part])
    within = [3 * i + 1 for i in range(len(split))]
    grid = np.moveaxis(grid, within, range(-len(within), 0))
    return [list(map(int, g)) for g in grid.reshape(-1, math.prod(n for _, n, _ in split))]


def _axes(groups: list[list[int]], mesh: tuple[tuple[str, int], ...]) -> tuple[str, ...]:
    """Axes on which members of a group differ."""
    shape = [n for _, n in mesh]
    axes: set[int] = set()
    for group in groups:
        places = np.stack(np.unravel_index(np.array(group), shape))
        axes |= set(np.flatnonzero((places != places[:, :1]).any(1)).tolist())
    return tuple(mesh[i][0] for i in sorted(axes))


_BITS: Mapping[str, int] = (
    {"pred": 8, "token": 0, "s4": 4, "u4": 4}
    | {f"{letter}{bits}": bits for letter, bits in itertools.product("suf", (8, 16, 32, 64))}
    | {"bf16": 16, "c64": 64, "c128": 128}
)


def _type_bytes(text: str, skip_scalars: bool = False) -> float:
    """Bytes of an array type, or of all arrays of a tuple type."""
    total = 0.0
    for name, dims in re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", text):
        if skip_scalars and not dims and name in ("u32", "s32"):
            continue
        bits = _BITS.get(name) or (8 if name.startswith("f8") else None)
        if bits is None:
            raise ValueError(f"unknown element type {name!r} in {text}")
        total += math.prod(int(n) for n in dims.split(",") if n) * bits / 8
    return total
