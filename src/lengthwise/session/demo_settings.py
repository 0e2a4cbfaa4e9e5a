"""What the demo trains, and benchmarks of the same run."""

from pathlib import Path
from typing import Any

from lengthwise.config.run_config import Config, check
from lengthwise.core.run_folder import RunFolder

POLICIES = ("padded", "static", "auto")
NUM_RANKS = 2
DEMO_LENGTHS: dict[str, Any] = {"max_length": 6144, "tokens_per_step": 8192}
"""Lengths of `lengthwise demo`: the longest sequences have more tokens than a rank's fair share of a step, 4,096."""


def demo_config(
    corpus: Path, measured: Path, steps: int, *, max_length: int = 4096, tokens_per_step: int = 16_384
) -> Config:
    """The run of benchmarks, or with ``DEMO_LENGTHS`` that of the demo; sequences over ``max_length`` are split."""
    tree: dict[str, Any] = {
        "name": "demo",
        "data": {
            "index": str(corpus),
            "max_length": max_length,
            "over_length": "split",
            "tokens_per_step": tokens_per_step,
        },
        "model": {"preset": "llama-tiny"},
        "plan": {"profile": str(measured), "batch_size": 4 if max_length < 6144 else 2},
        "optim": {"lr": 2e-3, "warmup_steps": 2},
        "train": {"steps": steps},
    }
    return check(tree)


def demo_share(config: Config) -> int:
    """Tokens of one rank's share of a step: the largest micro-batch worth measuring."""
    assert config.data.tokens_per_step is not None
    return config.data.tokens_per_step // NUM_RANKS


def shared_sequences(folder: Path) -> tuple[int, int]:
    """The number of sequences that ranks of a run computed together, and of all that it computed."""
    plans = RunFolder(folder).read_plans().values()
    counts = [
        (len(micro_batch.pack.ids), pipeline.scheme.degree)
        for plan in plans
        for pipeline in plan.pipelines
        for micro_batch in pipeline.micro_batches
    ]
    return sum(count for count, degree in counts if degree > 1), sum(count for count, _ in counts)
