"""Where a run's numbers come from: version, commit, date, machine, software, command line and folder of each start."""

import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lengthwise.core.atomic_write import shell_quoted
from lengthwise.core.run_folder import PROVENANCE, RunFolder
from lengthwise.core.specs import ClusterSpec
from lengthwise.core.version import __version__

MOST_STARTS = 100
"""Starts that provenance.json holds: the first one and the last ones."""
_GIT_PATIENCE_S = 5


def add_start(folder: RunFolder, cluster: ClusterSpec) -> None:
    """Add this start of a run to its provenance.json; a damaged file begins anew."""
    try:
        starts = folder.read_json(PROVENANCE).get("starts", [])
    except ValueError:
        starts = []
    starts = [*(starts if isinstance(starts, list) else []), _start(cluster)]
    folder.write_json(PROVENANCE, {"starts": starts[:1] + starts[1:][-(MOST_STARTS - 1) :]})


def provenance() -> dict[str, Any]:
    """Where the numbers of this process come from: date, command, software and host."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(map(shell_quoted, ["lengthwise", *sys.argv[1:]])),
        "lengthwise_version": __version__,
        "commit": _commit(Path(__file__).resolve().parent),
        "python_version": platform.python_version(),
        "torch_version": _version("torch"),
        "host": platform.node(),
    }


def _start(cluster: ClusterSpec) -> dict[str, Any]:
    on_gpu = cluster.device.name != "cpu"
    return {
        **provenance(),
        "folder": str(Path.cwd()),
        "num_ranks": cluster.num_devices,
        "device": cluster.device.name,
        "device_memory_bytes": cluster.device.memory_bytes if on_gpu else None,
    }


def _commit(package: Path) -> str | None:
    """The commit of the checkout that holds the package, with -dirty if files differ; None outside of one."""
    try:
        _git(package, "ls-files", "--error-unmatch", Path(__file__).name)  # not a checkout around an environment
        return _git(package, "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=_GIT_PATIENCE_S, check=True).stdout.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
