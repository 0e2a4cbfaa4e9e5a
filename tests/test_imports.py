"""What must be importable without torch is."""

import subprocess
import sys

TORCH_FREE = [
    "lengthwise.cli.commands.index", "lengthwise.cli.commands.stats", "lengthwise.cli.commands.plan", "lengthwise.cli.commands.simulate",
    "lengthwise.cli.commands.report", "lengthwise.cli.commands.config", "lengthwise.cli.commands.analyze", "lengthwise.models.hf_config",
]  # fmt: skip


def test_modules_import_without_torch():
    code = f"import sys; sys.modules['torch'] = None; import {', '.join(TORCH_FREE)}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
