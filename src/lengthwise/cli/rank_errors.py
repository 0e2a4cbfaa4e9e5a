"""How a rank under torchrun reports an error: once for all ranks, and in torchrun's own summary."""

import json
import os
import time
from contextlib import suppress
from pathlib import Path

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""Names the file from which torchrun reads why this rank failed."""
SAME_ERROR_WITHIN_S = 1.0
"""How long other ranks leave it to the first to tell an error that all ranks meet."""


def is_first() -> bool:
    """Return whether this is rank 0, which says how the run goes, or no rank at all."""
    return os.environ.get("RANK", "0") == "0"


def note_for_torchrun(message: str) -> None:
    """Have torchrun's summary of failures show ``message`` in place of advice on how to see a traceback."""
    file = os.environ.get(ERROR_FILE_VARIABLE)
    if not file:
        return
    details = {"py_callstack": message, "timestamp": str(int(time.time()))}
    with suppress(OSError):
        Path(file).write_text(json.dumps({"message": {"message": message, "extraInfo": details}}))
