"""When the state is saved: a decision without a clock or a disk."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SavePolicy:
    """Save every so many updates, every so many minutes, or both; 0 switches either off.

    The loop keeps the step and the time of the last save and hands them in, so that the same
    policy serves any loop. Saves by steps are at multiples of `every_steps`, or, where a loop lets
    one pass, at the next step that it asks about.
    """

    every_steps: int
    every_minutes: float

    def due(self, step: int, now: float, last_step: int, last_time: float) -> bool:
        """Whether the state after update `step` is to be saved.

        Args:
          step: updates done.
          now: seconds on a monotonic clock.
          last_step: step of the last save, or the step at which the run started.
          last_time: when that was, on the same clock.
        """
        if step <= last_step:
            return False
        by_steps = self.every_steps > 0 and step // self.every_steps > last_step // self.every_steps
        by_time = self.every_minutes > 0 and now - last_time >= 60 * self.every_minutes
        return by_steps or by_time
