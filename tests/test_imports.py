"""What must be importable without torch is."""

import subprocess
import sys

import pytest

TORCH_FREE = [
    "lengthwise.cli.index", "lengthwise.cli.stats", "lengthwise.cli.plan", "lengthwise.cli.simulate",
    "lengthwise.cli.report", "lengthwise.cli.config", "lengthwise.runtime.model.hf_config",
]  # fmt: skip


@pytest.mark.parametrize("module", TORCH_FREE)
def test_module_imports_without_torch(module):
    code = f"import sys; sys.modules['torch'] = None; import {module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
