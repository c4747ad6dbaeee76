"""What a run will cost, read from the compiled program before it is run."""

from shardlm.plan.traffic import Collective, bytes_by_axis, count_traffic, minimum_bytes

__all__ = ["Collective", "bytes_by_axis", "count_traffic", "minimum_bytes"]
