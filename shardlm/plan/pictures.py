"""Pictures of what each device holds and works on, one for each axis, from the real shardings."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import numpy as np

from shardlm.config import Config, DataConfig, MeshConfig, ModelConfig, MoeConfig, TrainConfig
from shardlm.mesh import make_mesh
from shardlm.mesh.axes import AXES
from shardlm.mesh.pictures import Part, who_holds
from shardlm.parallel.sequence import chunks_of
from shardlm.train.engine import Engine
from shardlm.train.setup import build_engine
from shardlm.train.step import batch_sharding

DEVICES = 4
ROWS, LENGTH = 8, 64
COLOURS = ("#7fb3d5", "#f5b971", "#8fce9a", "#e59ca5", "#b9a4d8", "#c9b29b", "#f0a8d0", "#b5bd61")


def example(axis: str, devices: int = DEVICES) -> Engine:
    """The engine of a small model, a mixture for `expert`, with one axis of so many devices."""
    model = ModelConfig(layers=4, embed=64, heads=8, kv_heads=4, mlp=128, vocab=256)
    if axis == "expert":
        model = dataclasses.replace(model, moe=MoeConfig(8))
    sizes: Any = dict.fromkeys(AXES, 1) | {axis: devices}
    config = Config(
        mesh=MeshConfig(**sizes),
        model=model,
        data=DataConfig(length=LENGTH),
        train=TrainConfig(batch=ROWS),
    )
    return build_engine(config, make_mesh(config.mesh))


def panels(engine: Engine) -> dict[str, tuple[dict[Part, list[int]], tuple[str, str]]]:
    """What each panel shows: parts of two dimensions with the devices that have them, and what the
    dimensions, down and across, are."""
    params = engine.abstract["params"]
    layer = params["layers"]
    shown: dict[str, tuple[Any, tuple[str, ...]]] = {
        "layers.attn.q.kernel": (layer["attn"]["q"]["kernel"], ("layers", "embed", "heads", "")),
        "layers.attn.o.kernel": (layer["attn"]["o"]["kernel"], ("layers", "heads", "", "embed")),
    }
    if "experts" in layer["mlp"]:
        up = layer["mlp"]["experts"]["up"]["kernel"]
        shown["layers.mlp.experts.up.kernel"] = (up, ("layers", "experts", "embed", "mlp"))
    else:
        up = layer["mlp"]["up"]["kernel"]
        shown["layers.mlp.up.kernel"] = (up, ("layers", "embed", "mlp"))
    shown["embed.table"] = (params["embed"]["table"], ("vocab", "embed"))
    return {"tokens of an update": (_tokens(engine), ("rows", "place in the row"))} | {
        name: _plane(leaf, dims) for name, (leaf, dims) in shown.items()
    }


def _plane(leaf: Any, dims: tuple[str, ...]) -> tuple[dict[Part, list[int]], tuple[str, str]]:
    """Two dimensions of an array that one axis splits: the one that is split, and another."""
    parts = who_holds(leaf)
    named = [d for d, name in enumerate(dims) if name]
    split = [d for d in named if len({part[d] for part in parts}) > 1]
    assert len(split) <= 1, f"{dims} are split over several dimensions"
    down, across = sorted([*split, *(d for d in reversed(named) if d not in split)][:2])
    return (
        {(part[down], part[across]): devices for part, devices in parts.items()},
        (dims[down], dims[across]),
    )


def _tokens(engine: Engine) -> dict[Part, list[int]]:
    """Which device works on which tokens outside the heads and hidden units that `model` splits."""
    mesh = engine.mesh
    rows = batch_sharding(engine).devices_indices_map((ROWS,))
    chunks = chunks_of(mesh.shape["context"], engine.config.mesh.context_comm)
    size = LENGTH // chunks.size
    parts: dict[Part, list[int]] = {}
    for place, device in np.ndenumerate(mesh.devices):
        start, stop, _ = rows[device][0].indices(ROWS)
        for chunk in chunks[place[mesh.axis_names.index("context")]]:
            part = ((start, stop), (int(chunk) * size, (int(chunk) + 1) * size))
            parts.setdefault(part, []).append(device.id)
    return {part: sorted(devices) for part, devices in parts.items()}


def draw_axis(axis: str, path: str | Path) -> None:
    """Draw what four devices of an axis hold, as PNG.

    Args:
      axis: one of `AXES`.
      path: of the file.
    """
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    shown = panels(example(axis))
    figure = Figure(figsize=(2.6 * len(shown), 2.7), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (name, (parts, dims)) in zip(
        figure.subplots(1, len(shown)), shown.items(), strict=True
    ):
        height, width = (max(part[d][1] for part in parts) for d in (0, 1))
        for (rows, columns), devices in parts.items():
            everywhere = len(devices) == DEVICES
            axes.add_patch(
                Rectangle(
                    (columns[0], rows[0]),
                    columns[1] - columns[0],
                    rows[1] - rows[0],
                    facecolor="#e8e8e8" if everywhere else COLOURS[devices[0] % len(COLOURS)],
                    edgecolor="black",
                    linewidth=0.8,
                )
            )
            text = f"all {DEVICES}" if everywhere else " ".join(map(str, devices))
            centre = (sum(columns) / 2, sum(rows) / 2)
            axes.text(*centre, text, ha="center", va="center", fontsize=9)
        axes.set(xlim=(0, width), ylim=(height, 0), ylabel=dims[0], xlabel=dims[1])
        axes.set_title(name, fontsize=8)
        axes.tick_params(labelsize=6)
    figure.suptitle(f"{axis} {DEVICES}", fontsize=10)
    figure.savefig(path)


def draw_axes(directory: str | Path) -> list[Path]:
    """Draw each axis; needs 4 devices.

    Args:
      directory: where the pictures go.

    Returns:
      The files.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / f"{axis}.png" for axis in AXES]
    for axis, path in zip(AXES, paths, strict=True):
        draw_axis(axis, path)
    return paths
