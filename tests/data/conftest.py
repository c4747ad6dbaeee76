"""Hypothesis without a deadline: the time of an example says nothing on a shared machine."""

from hypothesis import settings

settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")
