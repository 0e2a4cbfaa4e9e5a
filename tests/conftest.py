"""Settings of all tests."""

from hypothesis import settings

settings.register_profile("busy machine", deadline=None)  # no test is about how long it takes
settings.load_profile("busy machine")
