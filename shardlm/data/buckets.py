"""Rows of several lengths in one update.

A compiled step has one shape for each length, and each length has room for a whole update, so that
one program serves every mixture of lengths. What is not used of the room is neither read nor sent.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Buckets(NamedTuple):
    """A batch whose rows are of S lengths, in micro-batches of equally many positions.

    With micro-batches of M = `micro_batch` * `data.length` positions over all devices, part s holds
    rows of L_s positions, R_s = M / L_s to a micro-batch, and has room for K_s of those: its arrays
    are [K_s·R_s, L_s], and `rows` [K_s·R_s]. Split over W devices, a device has K_s·R_s / W
    consecutive rows, and its k-th micro-batch is the k-th R_s / W of them. So a micro-batch is not
    a run of consecutive rows of the whole array, unless W is 1.
    """

    counts: Any
    """int32 [S]: the micro-batches of each part that are run, from its first on; at most K_s. With
    `data.balance` dynamic int32 [W, S]: those that each device runs."""
    parts: tuple[Mapping[str, Any], ...]
    """A flat batch for each length. What the micro-batches that are not run hold is of no
    consequence."""
