"""A user's script without a main guard is run once, though proposals are searched in other processes."""

import subprocess
import sys

SCRIPT = """
import lengthwise
print("begun")
compared = lengthwise.compare([700, 90, 4000, 350] * 50, model="llama-tiny", cluster="4x8xH100-80GB", steps=1,
                              policies=["hydraulis"])
print(compared.clusters[0].ranked[0].policy)
"""


def test_a_script_that_compares_many_devices_needs_no_main_guard(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    ran = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0 and ran.stdout.split() == ["begun", "hydraulis"] and not ran.stderr, ran.stderr
