"""Pictures of shardings: what is drawn is what the devices have."""

import collections

import numpy as np
import pytest

from shardlm.mesh import AXES
from shardlm.plan.pictures import DEVICES, draw_axis, example, panels

# Which panels an axis divides; the others are whole on all devices.
DIVIDED = {
    "replica": {"tokens of an update"},
    "stage": {"layers.attn.q.kernel", "layers.attn.o.kernel", "layers.mlp.up.kernel"},
    "data": {
        "tokens of an update",
        "layers.attn.q.kernel",
        "layers.attn.o.kernel",
        "layers.mlp.up.kernel",
        "embed.table",
    },
    "expert": {"tokens of an update", "layers.mlp.experts.up.kernel"},
    "context": {"tokens of an update"},
    "model": {
        "layers.attn.q.kernel",
        "layers.attn.o.kernel",
        "layers.mlp.up.kernel",
        "embed.table",
    },
}


@pytest.mark.parametrize("axis", AXES)
def test_panels_show_every_place_once(axis):
    for name, (parts, _) in panels(example(axis)).items():
        shape = [max(part[d][1] for part in parts) for d in (0, 1)]
        owners = np.zeros((*shape, DEVICES), int)
        share = collections.Counter()
        for (rows, columns), devices in parts.items():
            for device in devices:
                owners[slice(*rows), slice(*columns), device] += 1
                share[device] += np.prod([b - a for a, b in (rows, columns)])
        copies = 1 if name in DIVIDED[axis] else DEVICES
        assert (owners.sum(-1) == copies).all(), name
        assert owners.max() == 1
        # All devices have as much.
        assert set(share.values()) == {np.prod(shape) * copies / DEVICES}, name


def test_a_picture_is_written(tmp_path):
    draw_axis("context", tmp_path / "context.png")
    assert (tmp_path / "context.png").read_bytes().startswith(b"\x89PNG")
