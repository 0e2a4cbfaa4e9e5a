"""Settings of all tests."""

import signal

from hypothesis import settings

settings.register_profile("busy machine", deadline=None)  # no test is about how long it takes
settings.load_profile("busy machine")

signal.signal(
    signal.SIGINT, signal.default_int_handler
)  # a shell's background job ignores it, and so would its children
