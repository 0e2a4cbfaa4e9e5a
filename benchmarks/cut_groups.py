"""Groups of rollouts whose prompts are computed once, simulated on 64 H100: whole, and cut where a step is faster.

    python benchmarks/cut_groups.py

Writes its section of shared_prefixes.md: seconds of a step that `auto` predicts for units that stay whole and for units
that may be cut in parts, the tokens that parts repeat, and the processor seconds of planning both ways.
"""

from dataclasses import replace
from statistics import fmean, median
from time import process_time

import numpy as np
from pages import Section, rewrite, say

from lengthwise.core.batch import GlobalBatch, attention_length
from lengthwise.core.pipeline_config import Method
from lengthwise.core.prefix_tree import ROOT, PrefixTree
from lengthwise.core.specs import model_preset
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.plan.cut_units import plan_with_cuts
from lengthwise.plan.planner import Planner
from lengthwise.plan.policies import prepare
from lengthwise.plan.space.search_space import SearchSpace, make_problem
from lengthwise.session.planning_args import find_cluster

CLUSTER, MODEL, STEPS = "8x8xH100-80GB", "llama-7b", 3
CASES = ((16, 16, 0.5), (64, 16, 0.5), (64, 8, 0.8), (256, 8, 0.5))
"""Prompts of a step, rollouts of each, and the share of all tokens that are prompts'."""
ANSWER, CAP = 2048, 16384
"""Median and most tokens of an answer."""


def trees_of_step(rng: np.random.Generator, prompts: int, members: int, share: float) -> list[PrefixTree]:
    """The prefix trees of a step's groups: a prompt and its answers."""
    trees = []
    for _ in range(prompts):
        answers = np.clip(rng.lognormal(np.log(ANSWER), 1.0, members), 16, CAP).astype(int)
        prompt = max(16, round(float(answers.mean()) * share / (1 - share)))
        bounds = (0, *np.cumsum([prompt, *answers]).tolist())
        leaves = tuple(range(1, members + 1))
        trees.append(PrefixTree(bounds=bounds, parents=(ROOT, *[0] * members), leaves=leaves))
    return trees


def batch_of(step: int, trees: list[PrefixTree]) -> GlobalBatch:
    """The batch of a step, in which each group is one sequence of its distinct tokens."""
    return GlobalBatch(
        step=step, ids=tuple(range(len(trees))), lengths=tuple(tree.num_slots for tree in trees),
        attention_lengths=tuple(attention_length(tree.num_slots, tree.num_pairs) for tree in trees),
    )  # fmt: skip


def section() -> Section:
    """Every case, whole and cut."""
    cluster, spec, rows = find_cluster(CLUSTER), model_preset(MODEL), []
    for prompts, members, share in CASES:
        rng = np.random.default_rng(0)
        steps = [trees_of_step(rng, prompts, members, share) for _ in range(STEPS)]
        batches = [batch_of(step, trees) for step, trees in enumerate(steps)]
        problem = make_problem(
            AnalyticCost(model=spec, cluster=cluster, dtype="bfloat16"), cluster=cluster, num_layers=spec.num_layers,
            max_length=max(max(batch.lengths) for batch in batches), samples=[np.array(b.lengths) for b in batches],
            search_space=SearchSpace(head_layers=spec.head_layers, methods=(Method.ULYSSES, Method.RING)),
        )  # fmt: skip
        planner = Planner(policy="auto", problem=replace(problem, is_waited_for=True))
        prepare("auto", planner.problem)
        whole_s, cut_s, repeated, times_s = [], [], [], ([], [])
        for batch, trees in zip(batches, steps):
            start_s = process_time()
            whole_s.append(planner(batch).time_s)
            times_s[0].append(process_time() - start_s)
            cut = plan_with_cuts(planner, batch, trees.__getitem__)
            times_s[1].append(process_time() - start_s - times_s[0][-1])
            cut_s.append(cut.plan.time_s)
            repeated.append(cut.repeated_tokens / batch.num_tokens)
        plan_ms = " / ".join(f"{median(of) * 1e3:.0f}" for of in times_s)
        faster = fmean(whole_s) / fmean(cut_s)
        rows.append(
            (prompts, members, f"{share * 100:.0f}%", f"{fmean(whole_s):.2f} s", f"{fmean(cut_s):.2f} s",
             f"{faster:.3f}x", f"{fmean(repeated) * 100:.1f} %", f"{plan_ms} ms")
        )  # fmt: skip
        print(rows[-1], flush=True)
    return Section(
        title="Groups cut over ranks, simulated",
        text=f"Seconds of a step of {MODEL} on {CLUSTER} under `auto`, where a group stays whole (shared by several "
        "ranks where balance needs it) and with `cut_units=True`, whose plans are the faster of both; means over "
        f"{STEPS} steps. Repeated: tokens of prompts that are computed in several parts. Planning: processor "
        "milliseconds, whole and cut, medians.",
        head=("prompts", "rollouts each", "prompts' tokens", "whole", "cut", "faster", "repeated", "planning"),
        rows=rows,
        measured=("planning",),
    )


if __name__ == "__main__":
    rewrite("shared_prefixes", [say(section())])
