"""What `lengthwise demo` trains, and benchmarks of the same run."""

from pathlib import Path
from typing import Any

from lengthwise.config.run_config import Config, check

POLICIES = ("padded", "static", "auto")
NUM_RANKS = 2


def demo_config(corpus: Path, measured: Path, steps: int) -> Config:
    """What the demo trains: sequences to 4,096 tokens, longer ones split, 16,384 tokens a step."""
    tree: dict[str, Any] = {
        "name": "demo",
        "data": {"index": str(corpus), "max_length": 4096, "over_length": "split", "tokens_per_step": 16_384},
        "model": {"preset": "llama-tiny"},
        "plan": {"profile": str(measured), "batch_size": 4},
        "optim": {"lr": 2e-3, "warmup_steps": 2},
        "train": {"steps": steps},
    }
    return check(tree)


def demo_share(config: Config) -> int:
    """Tokens of one rank's share of a step: the largest micro-batch worth measuring."""
    assert config.data.tokens_per_step is not None
    return config.data.tokens_per_step // NUM_RANKS
