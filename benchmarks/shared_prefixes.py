"""Groups of rollouts with one prompt: seconds of a step with the prompt computed once, over every sequence by itself.

    python benchmarks/shared_prefixes.py [--rounds 3] [--ranks 2]

A small Llama on ranks of one thread joined by Gloo, the loss of GRPO over columns. Answers are lognormal, and prompts
have the share of all tokens that a row says. Sides take turns in every round, each planned by `auto` from its own
measured profile; figures are medians of ratios within a round, and losses are compared.
"""

import argparse
import os
import resource
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from method_ranks import Ranks
from pages import Goal, Section, at_least, at_most, write

LAYERS, VOCABULARY = 4, 2048
GROUPS, STEPS = 4, 4
"""Groups of a step, and steps, of which the first is not counted."""
CASES = ((128, 8, 0.5), (128, 8, 0.8), (128, 16, 0.8), (128, 16, 0.9), (512, 8, 0.8))
"""Hidden size, rollouts of a prompt, and the share of all tokens that are prompts'."""
ANSWER = 128
"""Median tokens of an answer."""


def sizes(width: int) -> dict[str, int]:
    """Of a Llama of this hidden size."""
    return {
        "hidden_size": width, "intermediate_size": width * 11 // 4, "num_hidden_layers": LAYERS,
        "vocab_size": VOCABULARY,
    }  # fmt: skip


def groups(members: int, share: float) -> list[tuple[dict, ...]]:
    """Units of rollouts for all steps."""
    import numpy as np

    rng = np.random.default_rng(0)
    found = []
    for _ in range(GROUPS * STEPS):
        answers = np.clip(rng.lognormal(np.log(ANSWER), 0.6, members), 4, 4 * ANSWER).astype(int)
        length = round(float(answers.mean()) * share / (1 - share))
        prompt = rng.integers(0, VOCABULARY, length)
        unit = []
        for answer in answers.tolist():
            tokens = np.concatenate([prompt, rng.integers(0, VOCABULARY, answer)])
            mask = (np.arange(len(tokens)) >= length).astype(np.int64)
            columns = {"answer": mask, "advantage": float(rng.normal()), "completion_mask": mask}
            unit.append({"input_ids": tokens, **columns})
        found.append(tuple(unit))
    return found


def train(width: int, members: int, share: float, shares_prefixes: bool, folder: str) -> dict[str, Any]:
    """Seconds and this rank's user-mode seconds of the steps after the first, the last loss, and tokens computed."""
    import torch
    from torch.nn import functional as F
    from transformers import LlamaConfig, LlamaForCausalLM

    import lengthwise

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes(width), num_attention_heads=4, num_key_value_heads=4, use_cache=False))
    profile = Path(folder, f"{width}-{members}-{share}-{shares_prefixes}.json")
    run = lengthwise.prepare(
        model, groups(members, share), sequences_per_step=GROUPS, steps=STEPS, policy="auto", recompute="none",
        loss_columns=("answer", "advantage"), share_prefixes=shares_prefixes, device="cpu",
        check=False, verbose=False, profile=profile, memory_gib=8,
    )  # fmt: skip
    seconds, cpu_seconds, losses, tokens = [], [], [], 0
    for step in run.steps():
        began, user_began = time.perf_counter(), user_seconds()
        for micro_batch in step:
            logits = model(**micro_batch.inputs).logits[0]
            logps = -F.cross_entropy(logits, micro_batch.labels, reduction="none")
            losses_t = -(logps - logps.detach()).exp() * micro_batch.column("advantage", of="targets")
            masked_t = losses_t * micro_batch.column("answer", of="targets")
            step.backward(micro_batch.sum(masked_t) / step.total("answer"), mean_over="step")
        losses.append(step.update().loss)
        seconds.append(time.perf_counter() - began)
        cpu_seconds.append(user_seconds() - user_began)
        tokens += sum(m.pack.num_tokens for pipeline in step.plan.pipelines for m in pipeline.micro_batches)
    run.close()
    return {"seconds": seconds[1:], "cpu_seconds": cpu_seconds[1:], "loss": losses[-1], "tokens": tokens}


def user_seconds() -> float:
    """Processor seconds of this process so far, without those of the system."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_utime


def unique_tokens(members: int, share: float) -> int:
    """Distinct tokens: prompts once, and answers."""
    units = groups(members, share)
    prompts = sum(len(unit[0]["input_ids"]) - int(unit[0]["answer"].sum()) for unit in units)
    return prompts + sum(int(member["answer"].sum()) for unit in units for member in unit)


def multiply_adds(width: int, members: int, share: float, *, shares_prefixes: bool) -> tuple[float, float]:
    """Multiply-adds of all counted steps, forward and backward, and those of attention that no mask hides."""
    hidden, ffn, layers, vocabulary = sizes(width).values()
    tokens = pairs = 0
    for unit in groups(members, share)[GROUPS:]:
        answers = [int(member["answer"].sum()) for member in unit]
        prompt = len(unit[0]["input_ids"]) - answers[0]
        before, sequences = 0, [prompt + answer for answer in answers]
        if shares_prefixes:  # the last token of the prompt is every branch's own
            before, sequences = prompt - 1, [answer + 1 for answer in answers]
        tokens += before + sum(sequences)
        pairs += before * (before + 1) // 2 + sum(size * before + size * (size + 1) // 2 for size in sequences)
    of_layers = 3 * tokens * (4 * hidden**2 + 3 * hidden * ffn)
    of_attention = 7 * pairs * hidden  # two products forward and five backward
    of_head = 4 * tokens * hidden * vocabulary  # logits are made again backward
    return layers * (of_layers + of_attention) + of_head, layers * of_attention


def measure(num_ranks: int, width: int, members: int, share: float, rounds: int) -> dict[str, Any]:
    """Ratios by round of seconds, and of CPU seconds of the busier rank; of tokens; and how far losses differ."""
    ratios, found = {"seconds": list[float](), "cpu_seconds": list[float]()}, {}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            for side in (False, True):
                ranks = Ranks(num_ranks)
                try:
                    found[side] = ranks.run(train, width, members, share, side, folder)
                finally:
                    ranks.close()
            for name, of_rounds in ratios.items():
                apart, shared = (
                    median(max(steps) for steps in zip(*(one[name] for one in found[side]))) for side in (False, True)
                )
                of_rounds.append(apart / shared)
            print(width, members, share, {name: of_rounds[-1] for name, of_rounds in ratios.items()}, flush=True)
    apart, shared = found[False][0], found[True][0]
    products = [multiply_adds(width, members, share, shares_prefixes=side) for side in (False, True)]
    return ratios | {
        "products": products[0][0] / products[1][0],
        "attention": products[0][1] / products[0][0],
        "tokens": apart["tokens"] / shared["tokens"],
        "computed": shared["tokens"] / unique_tokens(members, share),
        "error": abs(apart["loss"] - shared["loss"]) / abs(apart["loss"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    rows, goals = [], list[Goal]()
    for width, members, share in CASES:
        found = measure(options.ranks, width, members, share, options.rounds)
        assert found["error"] < 1e-3, f"the losses differ by {found['error']:.1e}"
        faster, busier = found["seconds"], found["cpu_seconds"]
        between = f"{min(faster):.2f} to {max(faster):.2f}"
        rows.append(
            (
                width, members, f"{share:.0%}", f"{found['attention']:.0%}", f"{found['tokens']:.2f}x",
                f"{found['computed']:.4f}", f"{found['products']:.2f}x", f"{median(busier):.2f}x",
                f"{median(faster):.2f}x", between,
            )
        )  # fmt: skip
        name = f"hidden size {width}, {members} rollouts, prompts of {share:.0%}"
        if share == 0.8:
            goals.append(at_least(f"{name}, CPU seconds of the busier rank", median(busier), 3.0, "x"))
        goals.append(at_most(f"{name}, tokens computed over distinct ones", found["computed"], 1.01, "x"))
    write(
        "shared_prefixes",
        title="Shared prefixes",
        first=(
            f"Measured on {options.ranks} CPU ranks of one thread, both sides in turn in one run, median of "
            f"{options.rounds} rounds: a step of {GROUPS} groups of rollouts under GRPO with `share_prefixes=True`, "
            "over the same step with every sequence by itself."
        ),
        sections=[
            Section(
                title="Steps of groups of rollouts",
                text=(
                    "Fewer tokens bounds what the step can gain where all operators but attention count; what branches "
                    "attend to is the same on both sides. Fewer multiply-adds, of all matrix products and of attention "
                    "without what its mask hides, is what the step gains where every product takes the time of its "
                    "size and nothing else takes any: what CPU seconds have above it is of attention in blocks, which "
                    "computes more of what the mask hides in longer sequences, and of caches, which hold more of "
                    "fewer tokens. Attention's share is that of multiply-adds without sharing: the longer sequences "
                    "are for a model's width, the larger it is. The last token of a prompt, which predicts the answer, "
                    "is computed by every branch. CPU seconds are in user mode, of the busier rank in the median step: "
                    "page faults of large tensors come and go from step to step, mostly without sharing, and are left "
                    "out. Other work on this machine slows the sides of a round by different amounts, which the last "
                    "columns show "
                    f"(load average {os.getloadavg()[0]:.1f} on two cores at the end)."
                ),
                head=(
                    "hidden size",
                    "rollouts of a prompt",
                    "prompts' tokens",
                    "attention",
                    "fewer tokens",
                    "over distinct",
                    "fewer multiply-adds",
                    "fewer CPU seconds",
                    "faster",
                    "rounds",
                ),
                rows=rows,
                goals=tuple(goals),
                measured=("fewer CPU seconds", "faster", "rounds"),
            )
        ],
    )


if __name__ == "__main__":
    main()
