"""The one error of this package that is no mistake in the configuration."""


class TrainingError(RuntimeError):
    """A run that cannot go on: what happened and what to do."""
