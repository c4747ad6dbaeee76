"""The one error of this package."""

from shardlm.config import ConfigError


class DataError(ConfigError):
    """Text that cannot be trained on: which file or which key, what is required, what would do."""
