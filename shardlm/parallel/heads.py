"""Which key/value heads each device of `model` computes.

Query heads are split evenly, in their order, and so are key/value heads where `model` divides them.
Where it does not, as few copies of each as it divides are split in their place.
"""

import math

import numpy as np


def kv_copies(devices: int, kv_heads: int) -> int:
    """Copies of each key/value head: the least that makes `devices` divide them; 1 if it does so
    already."""
    return devices // math.gcd(devices, kv_heads)


def kv_heads_of(devices: int, kv_heads: int) -> np.ndarray:
    """Key/value heads of each device: int32 [devices, heads of a device].

    Those of a device are for equally many of its query heads each, in their order; one may come
    twice.
    """
    copies = kv_copies(devices, kv_heads)
    return (np.arange(kv_heads * copies, dtype=np.int32) // copies).reshape(devices, -1)
