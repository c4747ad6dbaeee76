"""Which device holds which part of an array, read off its sharding and drawn in text."""

from typing import Any

Part = tuple[tuple[int, int], ...]
"""From where to where, in each dimension."""


def who_holds(leaf: Any) -> dict[Part, list[int]]:
    """Each part of an array, and the ids of the devices that hold it, in order.

    Args:
      leaf: an array, or a `ShapeDtypeStruct` with a sharding.
    """
    parts: dict[Part, list[int]] = {}
    for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
        part = tuple(s.indices(n)[:2] for s, n in zip(index, leaf.shape, strict=True))
        parts.setdefault(part, []).append(device.id)
    return {part: sorted(parts[part]) for part in sorted(parts)}


def picture_sharding(leaf: Any) -> str:
    """A grid of the parts of an array with the devices that hold each: the last dimension that is
    split goes across, the others down.

    Args:
      leaf: as for `who_holds`.
    """
    parts = who_holds(leaf)
    split = [d for d in range(leaf.ndim) if len({part[d] for part in parts}) > 1]
    across = split[-1] if split else None

    def named(part: Part, dims: list[int]) -> str:
        return ", ".join(
            f"{part[d][0]}:{part[d][1]}" if d in dims else ":" for d in range(leaf.ndim)
        )

    down = [d for d in split if d != across]
    rows: dict[str, dict[str, str]] = {}
    for part, devices in parts.items():
        column = named(part, [] if across is None else [across])
        rows.setdefault(named(part, down), {})[column] = " ".join(map(str, devices))
    columns = list(next(iter(rows.values())))
    table = [["", *columns], *([name, *row.values()] for name, row in rows.items())]
    widths = [max(len(row[i]) for row in table) for i in range(len(columns) + 1)]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in table
    )
