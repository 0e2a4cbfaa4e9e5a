"""What must be importable without torch, and without what is slow to import, is."""

import subprocess
import sys

TORCH_FREE = [
    "lengthwise.models.hf_config",
    *(
        f"lengthwise.cli.commands.{name}"
        for name in ("index", "stats", "plan", "simulate", "report", "config", "analyze")
    ),
]


def test_modules_import_without_torch_and_scipy():
    code = f"import sys; sys.modules['torch'] = sys.modules['scipy'] = None; import {', '.join(TORCH_FREE)}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
