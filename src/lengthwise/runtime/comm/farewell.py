"""Tells waiting ranks that this rank's program has ended, and by which error.

For programs of users, which end wherever they end; ``lengthwise train`` says it itself.
"""

import atexit
import sys
from types import TracebackType

from lengthwise.runtime.comm.activity import ACTIVITY


class Farewell:
    """Reports the end of this process to ranks that wait for it."""

    def __init__(self) -> None:
        self._reason = "its program ended"
        self._before = sys.excepthook
        self._has_begun = False

    def begin(self) -> None:
        """Note errors that nobody catches, which are shown as before, and wait for the end."""
        if self._has_begun:
            return
        self._has_begun, self._before = True, sys.excepthook
        sys.excepthook = self._note
        atexit.register(self.say)

    def say(self) -> None:
        """Tell whoever asks why this rank did not come."""
        if ACTIVITY.peers is not None:
            ACTIVITY.peers.say_failed(self._reason)

    def _note(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        text = str(error).strip()
        self._reason = f"its program ended at {ACTIVITY.place} by {kind.__name__}" + (f": {text}" if text else "")
        self.say()
        self._before(kind, error, trace)
        if ACTIVITY.peers is not None:
            ACTIVITY.peers.wait_until_heard()


FAREWELL = Farewell()
"""That of this process."""
