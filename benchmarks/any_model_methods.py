"""Models of transformers on two or more ranks that share one sequence, under each method: time over that of Ulysses.

    python benchmarks/any_model_methods.py [--ranks 2] [--tokens 4096] [--rounds 5]

Ranks are processes of one thread joined by Gloo, started here. In every round all methods take turns with one
micro-batch, forward and backward, of two layers of width 256 with 8 heads, 4 of keys and values; printed are medians of
ratios within a round. A table for benchmarks/README.md goes to standard output.
"""

import argparse
import os
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from method_ranks import Ranks

from lengthwise.config.optimizer_settings import OptimizerSettings
from lengthwise.core.batch import NEXT_TOKEN
from lengthwise.core.pipeline_config import Method
from lengthwise.runtime.comm.world import start_world
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.profile.trial import Trial, group_of_degree, measure_time
from lengthwise.runtime.verify.trace import trace_model
from lengthwise.runtime.wrap.collator import PackCollator
from lengthwise.runtime.wrap.wrapped_model import WrappedModel

SIZES = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 1 << 20,
}  # fmt: skip
MODELS = {
    "causal": ("LlamaForCausalLM", {}),
    "window of 256": ("MistralForCausalLM", {"sliding_window": 256}),
    "soft-capped": ("Gemma2ForCausalLM", {"layer_types": ["full_attention"] * 2, "attn_implementation": "eager"}),
    "sinks": (
        "GptOssForCausalLM",
        {
            "layer_types": ["full_attention"] * 2,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "rope_parameters": {"rope_type": "default"},
        },
    ),
}
METHODS = (Method.ULYSSES, Method.RING, Method.ULYSSES_RING, Method.ALL_GATHER)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    methods = [method for method in METHODS if method is not Method.ULYSSES_RING or options.ranks > 3]
    print("| attention |", " | ".join(map(str, methods)), "|\n| --- |", " --- |" * len(methods))
    ranks = Ranks(options.ranks)
    for name in MODELS:
        times = ranks.run(partial(measure, name, options.tokens, options.rounds, methods))[0]
        ratios = [median(row[i] / row[0] for row in times) for i in range(len(methods))]
        print(f"| {name} |", " | ".join(f"{ratio:.2f}" for ratio in ratios), "|", flush=True)
    print(f"\nLoad average {os.getloadavg()[0]:.1f}.")


class Counting:
    """A corpus of one sequence."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    def tokens(self, sequence: int) -> np.ndarray:
        """Token ids that count up."""
        return np.arange(self._num_tokens) % SIZES["vocab_size"]


def measure(name: str, num_tokens: int, rounds: int, methods: list[Method]) -> list[list[float]]:
    """Seconds of a micro-batch of one sequence, for every round and method."""
    import transformers

    transformers.logging.set_verbosity_error()
    model: Any = getattr(transformers, MODELS[name][0])
    torch.manual_seed(0)
    run = PreparedModel.with_optimizer(
        WrappedModel(model(model.config_class(**SIZES, **MODELS[name][1])).train()),
        start_world("cpu"),
        collator=PackCollator(source=Counting(num_tokens), objective=NEXT_TOKEN),
        optimizer=OptimizerSettings(),
        seed=0,
    )
    trace_model(run)
    group = group_of_degree(run.world, run.world.size)
    assert group is not None
    times = []
    for number in range(rounds + 1):
        timings = [measure_time(run, Trial(lengths=(num_tokens,), group=group, method=m)) for m in methods]
        if number:  # the first of anything is slow
            times.append([timing.time_s for timing in timings if timing is not None])
    run.close()
    return times


if __name__ == "__main__":
    main()
