"""Which tokens of a row each device of `context` has.

A row is cut into chunks of equal length. Split by a ring or by gathered keys, device i of N has
chunks i and 2N - 1 - i of 2N ("zigzag", Brandon et al., arXiv 2311.09431): of a causal sequence an
early chunk, whose queries see little, and a late one, whose queries see much, so that all devices
have the same work. Ulysses splits heads where there is work, so a device has one chunk.
"""

from collections.abc import Mapping

import numpy as np


def chunks_of(devices: int, comm: str) -> np.ndarray:
    """Numbers of the chunks that each device has: int32 [devices, chunks of a device].

    Args:
      devices: size of `context`.
      comm: `mesh.context_comm`.
    """
    first = np.arange(devices, dtype=np.int32)
    if devices == 1 or comm == "ulysses":
        return first[:, None]
    return np.stack([first, 2 * devices - 1 - first], axis=1)


def row_multiple(sizes: Mapping[str, int], comm: str) -> int:
    """What the length of a row must be a multiple of: `context` cuts it into chunks, and `model`
    splits the tokens of each device."""
    return chunks_of(sizes.get("context", 1), comm).size * sizes.get("model", 1)
