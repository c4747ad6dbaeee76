"""Draw what each device holds, a picture for each axis: `python scripts/draw_shardings.py`."""

from pathlib import Path

from shardlm.mesh import simulate_devices
from shardlm.plan.pictures import DEVICES, draw_axes

if __name__ == "__main__":
    simulate_devices(DEVICES)
    for path in draw_axes(Path(__file__).parents[1] / "docs" / "shardings"):
        print(path)
