"""How a benchmark speaks: a table, then one JSON object with the figures and the machine."""

import json
import os
import platform
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

Say = Callable[[str], None]
"""Shows a line, or a table."""


class Table:
    """Columns as wide as what stands in them."""

    def __init__(self, header: tuple[str, ...]):
        self._rows = [header]

    def add(self, *cells: str) -> None:
        """Add a row."""
        self._rows.append(cells)

    def __str__(self) -> str:
        widths = [max(map(len, column)) for column in zip(*self._rows, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
            for row in self._rows
        )


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
    } | {name: version(name) for name in ("jax", "jaxlib", "flax", "optax")}


def _processor() -> str:
    """The processor's name, and the widest instructions that matter to matrix products."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    names = [x.split(":", 1)[1].strip() for x in text.splitlines() if x.startswith("model name")]
    flags = text.split()
    wide = [flag for flag in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if flag in flags]
    return f"{names[0] if names else platform.machine()} ({', '.join(wide[:2])})"


def print_figures(name: str, figures: dict[str, Any]) -> None:
    """The last line of a benchmark."""
    print(json.dumps({"bench": name, "machine": machine(), "figures": figures}))
