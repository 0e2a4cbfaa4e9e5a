"""What must be importable without torch is."""

import subprocess
import sys

TORCH_FREE = [
    "lengthwise.cli.index", "lengthwise.cli.stats", "lengthwise.cli.plan", "lengthwise.cli.simulate",
    "lengthwise.cli.report", "lengthwise.cli.config", "lengthwise.cli.analyze", "lengthwise.runtime.model.hf_config",
]  # fmt: skip


def test_modules_import_without_torch():
    code = f"import sys; sys.modules['torch'] = None; import {', '.join(TORCH_FREE)}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
