"""Key/value heads on each device of `model`: those that its query heads read."""

import math

from hypothesis import given
from hypothesis import strategies as st

from shardlm.parallel.heads import kv_copies, kv_heads_of

few = st.integers(1, 12)


@given(few, few, few)
def test_each_query_head_finds_its_own(devices, kv_heads, more):
    heads = math.lcm(devices, kv_heads) * more
    found = kv_heads_of(devices, kv_heads)
    here, each = heads // devices, found.shape[1]
    for head in range(heads):
        device, local = divmod(head, here)
        # As `attend` does with the heads of one device.
        assert found[device, local // (here // each)] == head // (heads // kv_heads)


@given(few, few)
def test_copies_are_the_fewest(devices, kv_heads):
    copies = kv_copies(devices, kv_heads)
    assert min(n for n in range(1, 200) if n * kv_heads % devices == 0) == copies
    found = kv_heads_of(devices, kv_heads)
    assert (found.reshape(-1) == sorted(list(range(kv_heads)) * copies)).all()


def test_one_head_for_all():
    assert kv_heads_of(4, 1).tolist() == [[0]] * 4
    assert kv_heads_of(2, 3).tolist() == [[0, 0, 1], [1, 2, 2]]
    assert kv_heads_of(2, 4).tolist() == [[0, 1], [2, 3]]
