"""How many devices the rows of an update are dealt to, without touching one."""

from shardlm.arguments import override
from shardlm.config import Config
from shardlm.mesh.axes import BATCH_AXES, batch_ways, check_axes, check_sizes, resolve_sizes

WAYS = 8
"""Where a run has one, or the devices that are there decide: this many, or the most below that the
micro-batch divides by."""


def dealt_ways(config: Config, vocab: int) -> tuple[int, str]:
    """Devices of the batch, and a sentence on where the number comes from.

    Args:
      vocab: of the tokenizer.

    Raises:
      ConfigError: sizes of the mesh that cannot be, or that batch or model do not divide over.
    """
    devices = config.run.simulate_devices
    sizes = resolve_sizes(config.mesh, devices) if devices else check_axes(config.mesh)
    # An axis that the devices decide divides nothing yet.
    known = {axis: max(n, 1) for axis, n in sizes.items()}
    check_sizes(override(config, {"model.vocab": config.model.vocab or vocab}), known)
    unknown = [axis for axis in BATCH_AXES if sizes[axis] == -1]
    least = batch_ways(known)
    if least > 1 and not unknown:
        named = " x ".join(f"{axis} {sizes[axis]}" for axis in BATCH_AXES if sizes[axis] > 1)
        return least, f"{least} devices, as the mesh says: {named}"
    why = "the mesh has one device for the batch"
    if unknown:
        why = f"mesh.{unknown[0]} is -1, so that the devices that are there decide"
    # Multiples of the sizes that are known.
    rows = config.micro_batch
    ways = max(n for n in range(least, max(WAYS, least) + 1, least) if rows % n == 0)
    if ways == 1:
        return (
            1,
            f"{why}, and the rows of a micro-batch, {rows}, divide over no number up to {WAYS}",
        )
    return ways, f"{ways} devices as an example: {why}"
