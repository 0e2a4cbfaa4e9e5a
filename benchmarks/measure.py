"""What the benchmarks share: the demo's corpus, runs of a policy, and where results go."""

import json
import platform
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from lengthwise.cli.commands import index, profile
from lengthwise.cli.train_config import launch
from lengthwise.core.run_folder import RunFolder
from lengthwise.report.run_summary import RunSummary, summarise
from lengthwise.session.demo_settings import NUM_RANKS, demo_config, demo_share

RESULTS = Path(__file__).parent / "results"


def prepare(work: Path, steps: int) -> Path:
    """Index the demo's corpus, profile its model, and return the configuration's path."""
    work.mkdir(parents=True, exist_ok=True)
    index.run(out=work / "index", python_stdlib=True, train_bpe=8192)
    config = demo_config(work / "index", work / "profile.json", steps)
    config.save(work / "config.yaml")
    profile_again(work)
    return work / "config.yaml"


def profile_again(work: Path) -> None:
    """Measure the model anew, because this machine changes speed from minute to minute."""
    from lengthwise.config.run_config import load

    share = demo_share(load(work / "config.yaml", []))
    out = work / "profile.json"
    profile.run(work / "config.yaml", [], out=out, nproc=NUM_RANKS, max_tokens=share, repeats=3)


def run_policy(work: Path, policy: str, number: int) -> RunSummary:
    """Train the configuration of ``work`` under ``policy`` on real ranks; what an earlier benchmark left is removed."""
    folder = RunFolder(work / f"{policy}-{number}")
    shutil.rmtree(folder.path, ignore_errors=True)
    launch(folder, [str(work / "config.yaml"), f"plan.policy={policy}"], nproc=NUM_RANKS)
    return summarise(folder)


def save(name: str, figures: dict) -> None:
    """Write ``figures`` with commit, machine and date."""
    RESULTS.mkdir(exist_ok=True)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    where = {"commit": commit, "date": datetime.now(UTC).strftime("%Y-%m-%d"), "machine": machine()}
    (RESULTS / f"{name}.json").write_text(json.dumps({**where, **figures}, indent=1) + "\n")
    sys.stdout.write(json.dumps({**where, **figures}, indent=1) + "\n")


def machine() -> str:
    """The processor and how many cores of it there are."""
    import os

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{os.cpu_count()} cores of {names[0] if names else platform.processor()}, {platform.system()}"
