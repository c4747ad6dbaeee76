"""The loss curve as a picture."""

import logging
import math
import warnings
from pathlib import Path

from shardlm.observe.metrics import read_metrics


def plot_loss(metrics: str | Path, picture: str | Path, title: str = "") -> bool:
    """Draw training and validation loss, in nats, against updates.

    Args:
      metrics: a metrics.jsonl.
      picture: a PNG file to write.
      title: above the plot.

    Returns:
      False when there is nothing to draw yet, and nothing was written.
    """
    records = read_metrics(metrics)
    train = [(r["step"], r["loss"]) for r in records if "loss" in r]
    evaluated = [(r["step"], r["eval_loss"]) for r in records if r.get("eval_loss") is not None]
    if not train:
        return False
    # Here, since the import takes longer than all the other work of this module.
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps = [step for step, _ in train]
    losses = [math.nan if loss is None else loss for _, loss in train]
    axes.plot(steps, losses, linewidth=1, color="tab:blue", label="training")
    if evaluated:
        axes.plot(*zip(*evaluated, strict=True), "o-", color="tab:orange", label="validation")
    axes.set(xlabel="updates", ylabel="loss (nats per token)")
    axes.set_title(title, parse_math=False)
    axes.grid(alpha=0.3)
    axes.legend()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # In the title.
        figure.savefig(picture)
    return True
