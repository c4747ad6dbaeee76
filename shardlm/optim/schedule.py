"""Learning-rate schedules, exact at their ends."""

import jax
import jax.numpy as jnp
import optax

from shardlm.config import OptimConfig


def make_schedule(optim: OptimConfig, steps: int, peak: float) -> optax.Schedule:
    """Learning rate of update n, counted from 1.

    The first update uses schedule(1), the last schedule(steps). Warm-up is linear from 0, which
    would be update 0, to `peak` at update `warmup_steps`, so that no update is spent on a rate of
    0. An optax count starts at 0: `counted` turns the schedule into one of counts.

    After warm-up: constant; cosine (arXiv 1608.03983) or linear to `final_fraction` of the peak
    over `decay_fraction` of `steps`, then constant; wsd (arXiv 2404.06395) constant, then linear
    over the last `decay_fraction` of `steps`. Never over more than warm-up leaves.

    Args:
      optim: shape of the schedule.
      steps: updates of the whole run.
      peak: largest learning rate.

    Returns:
      Function from an int, or an array of any integer dtype, to a float32 scalar. Past `steps` it
      stays at its last value. After warm-up it is never above `peak` nor below the floor.
    """
    warmup = optim.warmup_steps
    left = max(steps - warmup, 1)
    floor = peak * optim.final_fraction
    fraction = optim.decay_fraction or (0.2 if optim.schedule == "wsd" else 1.0)
    decay = min(max(round(fraction * steps), 1), left)
    end = warmup + decay
    body: optax.Schedule
    if optim.schedule == "constant":
        body, floor = optax.constant_schedule(peak), peak
    elif optim.schedule == "cosine":
        body = optax.cosine_decay_schedule(peak, decay, optim.final_fraction)
    elif optim.schedule == "linear":
        body = optax.linear_schedule(peak, floor, decay)
    else:
        body = optax.linear_schedule(peak, floor, decay, transition_begin=left - decay)
        end = warmup + left
    rise = optax.linear_schedule(0.0, peak, max(warmup, 1))

    def schedule(n: jax.typing.ArrayLike) -> jax.Array:
        n = jnp.asarray(n)
        # The clip takes off the last bit by which a rounded decay can leave its bounds; compiled,
        # it can also end above the floor.
        after = jnp.where(n < end, jnp.clip(body(n - warmup), floor, peak), floor)
        return jnp.asarray(jnp.where(n < warmup, rise(n), after), jnp.float32)

    return schedule


def counted(schedule: optax.Schedule) -> optax.Schedule:
    """The schedule as optax calls it: with the number of updates made before this one."""
    return lambda count: schedule(count + 1)
