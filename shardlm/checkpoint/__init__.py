"""Saving and restoring a run's state."""

from shardlm.checkpoint.policy import SavePolicy
from shardlm.checkpoint.store import CheckpointError, CheckpointStore, SaveError

__all__ = ["CheckpointError", "CheckpointStore", "SaveError", "SavePolicy"]
