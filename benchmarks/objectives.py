"""Plans of rollouts that ranks bring, beside verl's balancing by sequence length and TRL's fixed micro-batches.

    python benchmarks/objectives.py [--quick] [--parts simulated,apart,planning]

Rollouts: lengths lognormal, a fifth at the cap, 8 or 16 to a prompt. Simulated on 64 H100, and trained by GRPO's loss
on two ranks of this machine, processes of one thread joined by Gloo. Writes objectives.md and results/objectives.json.
"""

import argparse
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean, median
from time import process_time

import numpy as np
import rollout_runs
from balanced_dynamic_batches import recomputing, tuned
from fsdp_lock_step import LockStepBatches, checkpointing, default_limit, fsdp_search_space, with_sharded_state
from method_ranks import Ranks
from pages import Section, at_least, at_most, rewrite, say, write

from lengthwise.core.batch import GlobalBatch, attention_length
from lengthwise.core.pipeline_config import Method
from lengthwise.core.specs import model_preset
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.plan.planner import Planner
from lengthwise.plan.policies import prepare
from lengthwise.plan.space.problem import PlanningProblem, PricedBatch
from lengthwise.plan.space.search_space import SearchSpace, make_problem
from lengthwise.session.planning_args import find_cluster

TITLE = "Batches of one's own: plans of rollouts"
CLUSTER, SHORTEST, CAP = "8x8xH100-80GB", 1024, 32_768
MODELS = ("llama-7b", "llama-13b")
UNITS = ((64, 2), (256, 2), (16, 8), (64, 8))
"""Units of a step that a loss couples, and members of each."""
ROLLOUTS = ((16, 8), (64, 8), (64, 16))
"""Prompts of a step, and rollouts of each."""
FIRST = (
    "Rollouts: lengths lognormal around an eighth of the cap, a fifth of them at the cap. **Simulated**: "
    f"{SHORTEST:,} to {CAP:,} tokens on {CLUSTER}, costs from data sheets, the same for all sides. **Measured**: "
    f"{rollout_runs.SHORTEST} to {rollout_runs.CAP:,} tokens, a Llama of six layers in float32 on two ranks of this "
    "machine. *verl*: its balancer, written from its description (balanced_dynamic_batches.py): the largest "
    "differencing method over ranks, then micro-batches balanced under a limit of tokens; every layer recomputed, as "
    "it is configured unless told otherwise. *verl, tuned*: the same with any fixed degree, method, stages and "
    "recomputation. *verl, FSDP*: as FSDP runs it, ranks waiting for one another in every micro-batch "
    "(fsdp_lock_step.py, with the commits of verl that were read). Each side's fixed configuration and limit are the "
    "fastest for typical batches, unless a limit is given. *static*: a fixed configuration, packs filled by first "
    "fit. *padded*: a fixed number of sequences padded, as TRL's trainers do. verl and TRL "
    "themselves have not been run."
)
SCARCE = "the longest needs two devices"
REPEATS = 9
"""Plans of the same step, the least seconds of which count."""
FSDP_SIDES = ("verl, FSDP", "verl, FSDP, limit", "verl, FSDP, tuned")
SIDES = ("auto", *FSDP_SIDES, "verl", "verl, tuned", "static", "padded")
MEASURED_SIDES = ("auto", "verl 1", "verl 2", "verl, tuned 1", "verl, tuned 2", "static", "padded")
"""verl's with the sequence parallel size, so that what is tuned is what is measured."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer steps; for a look")
    parser.add_argument("--parts", help=f"of {', '.join(PARTS)}: run these, and replace their sections of the page")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    steps = 1 if options.quick else 4
    asked = options.parts.split(",") if options.parts else list(PARTS)
    sections = [say(section) for part in asked for section in PARTS[part](steps)]
    if options.parts:
        rewrite("objectives", sections)
        return
    write("objectives", title=TITLE, first=FIRST + (" **A quick run.**" if options.quick else ""), sections=sections)


PARTS: dict[str, Callable[[int], list[Section]]] = {
    "simulated": lambda steps: [simulated(steps)],
    "apart": lambda steps: [members_apart(steps)],
    "planning": lambda steps: [planning_times()],
    "measured": lambda steps: measured(steps),
}
"""The sections of the page, by the number of steps."""


def problem_of(
    model: str, num_sequences: int, methods: tuple[Method, ...] | None = None, *, is_fsdp: bool = False
) -> PlanningProblem:
    """The planning problem of steps of so many rollouts.

    Args:
        model: a preset.
        num_sequences: rollouts of a step.
        methods: None for those of `lengthwise.plan`.
        is_fsdp: what verl runs under FSDP: Ulysses alone, all of the model's state sharded over all ranks.
    """
    cluster, spec, rng = find_cluster(CLUSTER), model_preset(model), np.random.default_rng(1)
    search_space = SearchSpace(head_layers=spec.head_layers, methods=methods)
    if is_fsdp:
        cluster, search_space = with_sharded_state(cluster, spec, dtype="bfloat16"), fsdp_search_space(spec)
    return make_problem(
        AnalyticCost(model=spec, cluster=cluster, dtype="bfloat16"), cluster=cluster, num_layers=spec.num_layers,
        max_length=CAP, search_space=search_space, samples=[drawn(rng, num_sequences) for _ in range(8)],
    )  # fmt: skip


def drawn(rng: np.random.Generator, count: int) -> np.ndarray:
    """Lengths of the rollouts of a step."""
    return rollout_runs.drawn(rng, count, shortest=SHORTEST, cap=CAP)


def priced(problem: PlanningProblem, samples: Sequence[np.ndarray]) -> list[PricedBatch]:
    """Batches of sequences of these lengths."""
    return [
        PricedBatch(problem, GlobalBatch(step=step, ids=tuple(range(len(lengths))), lengths=tuple(lengths.tolist())))
        for step, lengths in enumerate(samples)
    ]


def simulated(steps: int) -> Section:
    """Every side on the same steps of each model and number of rollouts."""
    rows, over = [], {side: list[float]() for side in SIDES}
    for model in MODELS:
        for prompts, group in ROLLOUTS:
            problem, fsdp = (problem_of(model, prompts * group, is_fsdp=is_fsdp) for is_fsdp in (False, True))
            rng = np.random.default_rng(0)
            times_s, gap = side_times_s(problem, fsdp, [drawn(rng, prompts * group) for _ in range(steps)])
            rows.append((model, prompts, group, f"{times_s['auto']:.2f} s", f"{gap * 100:.1f} %"))
            for side in SIDES[1:]:
                over[side].append(times_s[side] / times_s["auto"])
                rows[-1] += (f"{over[side][-1]:.3f}x",)
    means = {side: float(np.exp(fmean(np.log(ratios)))) for side, ratios in over.items() if ratios}
    return Section(
        title="Simulated on 64 H100",
        text="Seconds of a step of `auto`, its gap to a bound that no plan of the search space beats, and how many "
        f"times as long the others take; means over {steps} steps. *verl, FSDP*: ranks wait for the slowest in "
        "every micro-batch; every layer is recomputed, and the limit is the default, 16,384 tokens per GPU, with "
        "the fastest degree of Ulysses; *limit*: with the fastest limit; *tuned*: with the fastest recomputation "
        "too. Memory holds 1/64 of weights, gradients and optimizer beside two whole layers. *verl*: no rank "
        "waits before the update; any method and stages. Gathering weights costs nothing on either.",
        head=("model", "prompts", "rollouts each", "auto", "gap", *SIDES[1:]),
        rows=rows,
        goals=(
            *(
                at_least(f"`auto` over verl under FSDP, {of} (simulated)", means[side], 1.3, "x")
                for side, of in zip(FSDP_SIDES, ("recomputing, default limit", "recomputing, fastest limit", "tuned"))
            ),
            at_least("`auto` over verl's balancer, recomputing (simulated)", means["verl"], 1.3, "x"),
            at_least("`auto` over verl's balancer, tuned (simulated)", means["verl, tuned"], 1.3, "x"),
        ),
        after="What `auto` gains over verl as configured is recomputation, which it decides pack by pack, and the "
        "waiting; with a limit so high that each rank has one micro-batch, none waits. Where somebody has found "
        "the best fixed configuration for these lengths, the gap of `auto` to the bound shows how little is left: "
        "no balancer could be much faster. Of llama-13b, what FSDP shards leaves room for one stage of Ulysses; "
        "with whole weights `auto` takes two stages, whose bubble is most of its gap. So verl tuned is as fast "
        "there although its ranks wait, as long as gathering is hidden.",
    )


def side_times_s(
    problem: PlanningProblem, fsdp: PlanningProblem, samples: Sequence[np.ndarray]
) -> tuple[dict[str, float], float]:
    """Mean seconds of a step of each side, and the mean gap of `auto`; ``fsdp``: what verl runs under FSDP."""
    times_s, typical, sharded = dict[str, float](), priced(problem, problem.samples[:2]), priced(fsdp, fsdp.samples[:2])
    recomputed = checkpointing(fsdp.candidates)
    policies = (
        tuned(fsdp, recomputed, sharded, run_by=LockStepBatches, limits_of=default_limit),
        tuned(fsdp, recomputed, sharded, run_by=LockStepBatches),
        tuned(fsdp, fsdp.candidates, sharded, run_by=LockStepBatches),
        tuned(problem, recomputing(problem.candidates), typical),
        tuned(problem, problem.candidates, typical),
    )
    for side, policy in zip((*FSDP_SIDES, "verl", "verl, tuned"), policies):
        assert policy is not None, "some configuration holds the longest sequence"
        times_s[side] = fmean(policy.step_s(batch) for batch in priced(policy.problem, samples))
    batches = priced(problem, samples)
    gap = 0.0
    for side in ("auto", "static", "padded"):
        planner = Planner(policy=side, problem=problem)
        plans = [planner(batch.batch) for batch in batches]
        times_s[side] = fmean(plan.time_s for plan in plans)
        gap = fmean(float(plan.gap) for plan in plans) if side == "auto" else gap
    return times_s, gap


def members_apart(steps: int) -> Section:
    """Units that a loss couples, planned whole and member by member."""
    rows = []
    for units, members in UNITS:
        rng = np.random.default_rng(3)
        lengths = [drawn(rng, units * members).reshape(units, members) for _ in range(steps)]
        whole, apart = (planned_times_s(lengths, is_whole=is_whole) for is_whole in (True, False))
        gain = fmean(theirs / ours for theirs, ours in zip(whole, apart))
        rows.append((units, members, f"{fmean(whole):.2f} s", f"{fmean(apart):.2f} s", f"{gain:.3f}x"))
    return Section(
        title="Members of units apart, simulated",
        text="Seconds of a step of llama-7b under `auto` where the members of a unit share a micro-batch, and where "
        "`coupled_loss=` lets each be planned by itself, every member of a length of its own; no forward is computed "
        "twice.",
        head=("units", "members", "whole", "apart", "faster"),
        rows=rows,
        after="A second forward, for micro-batches whose graph does not fit until all are done, costs up to a third "
        "of a step (a quarter where layers are recomputed anyway): more than pairs gain. So units that fit, and whose "
        "loss couples nothing else, are better whole; `coupled_loss=` is for those that do not fit and for losses of "
        "the whole batch.",
    )


def planned_times_s(steps: Sequence[np.ndarray], *, is_whole: bool) -> list[float]:
    """Seconds of steps of units, by lengths of their members [units, members]."""
    cluster, spec = find_cluster(CLUSTER), model_preset("llama-7b")
    planned = [lengths.sum(1) if is_whole else lengths.reshape(-1) for lengths in steps]
    space = SearchSpace(head_layers=spec.head_layers, methods=(Method.ULYSSES, Method.RING))
    problem = make_problem(
        AnalyticCost(model=spec, cluster=cluster, dtype="bfloat16"), cluster=cluster, num_layers=spec.num_layers,
        max_length=max(int(lengths.max()) for lengths in planned), search_space=space, samples=planned,
    )  # fmt: skip
    planner, times_s = Planner(policy="auto", problem=replace(problem, is_waited_for=True)), []
    for step, (lengths, of_members) in enumerate(zip(planned, steps)):
        pairs = (of_members * (of_members + 1) // 2).sum(1)
        attended = [attention_length(int(n), int(count)) for n, count in zip(lengths, pairs)] if is_whole else None
        batch = GlobalBatch(
            step=step, ids=tuple(range(len(lengths))), lengths=tuple(lengths.tolist()),
            attention_lengths=None if attended is None else tuple(attended),
        )  # fmt: skip
        times_s.append(planner(batch).time_s)
    return times_s


def planning_times() -> Section:
    """How long `auto` plans a step of 512 sequences on 64 ranks."""
    rows, medians = [], []
    for model, methods, name in (
        ("llama-7b", (Method.ULYSSES, Method.RING), "ulysses, ring, as `prepare` has them"),
        ("llama-7b", None, "also megatron_ts"),
        ("llama-13b", None, "also megatron_ts; fits with that or in stages alone"),
    ):
        problem = replace(problem_of(model, 512, methods), is_waited_for=True)
        rng = np.random.default_rng(2)
        prepare("auto", problem)
        planner, seconds = Planner(policy="auto", problem=problem), []
        for batch in priced(problem, [drawn(rng, 512) for _ in range(9)]):
            repeats = []
            for _ in range(REPEATS):
                start_s = process_time()
                planner(batch.batch)
                repeats.append(process_time() - start_s)
            seconds.append(min(repeats))
        medians.append(median(seconds))
        rows.append((model, name, f"{medians[-1] * 1e3:.0f} ms", f"{max(seconds) * 1e3:.0f} ms"))
    return Section(
        title="Planning time",
        text="Measured: processor seconds to plan a step of 512 rollouts on 64 ranks under `auto`, as every rank does "
        f"in `run.step`. Nine steps, of each the least of {REPEATS}, beside other programs (load average "
        f"{os.getloadavg()[0]:.1f} on two cores), which lengthen even processor seconds.",
        head=("model", "methods", "median", "longest"),
        rows=rows,
        goals=(
            at_most("planning 512 sequences on 64 ranks in `run.step`, median", medians[0], 0.05, "ms"),
            at_most("the same with methods that shard weights, median", max(medians[1:]), 0.05, "ms"),
        ),
        measured=("median", "longest"),
    )


def measured(steps: int) -> list[Section]:
    """Every side on two ranks, where memory is scarce and where it is not."""
    ranks, sections = Ranks(2), []
    try:
        for limit_gib, name in ((rollout_runs.least_gib(), SCARCE), (None, "memory for all")):
            sides = [side for side in MEASURED_SIDES if limit_gib is None or not side.endswith("1")]
            seconds = ranks.run(rollout_runs.train, sides, steps, limit_gib)[0]
            sections.append(measured_section(seconds, steps, name))
    finally:
        ranks.close()
    return sections


def measured_section(seconds: dict[str, dict[str, list]], steps: int, name: str) -> Section:
    """Ratios of the sides' times, step by step."""
    rows, over, auto = [], dict[str, float](), seconds["auto"]
    for side, of_side in seconds.items():
        wall, over[side] = (
            median(theirs / ours for theirs, ours in zip(of_side[kind], auto[kind])) for kind in ("wall", "cpu")
        )
        schemes = ", ".join(f"{scheme} ({count})" for scheme, count in Counter(of_side["schemes"]).most_common(4))
        rows.append((side, f"{over[side]:.3f}x", f"{wall:.2f}x", schemes))
    memory = "A device holds 0.95 of what the longest sequence needs with all layers recomputed, so two share it."
    return Section(
        title=f"Measured on two CPU ranks, {name}",
        text=f"{rollout_runs.ROLLOUTS} rollouts a step by `run.step(items)`, plans by a data sheet of the cores; "
        f"{steps} steps after one that is not timed, sides take turns step by step. Medians of ratios to `auto` in the "
        "same step. *verl 1*, *verl 2*: with sequence parallel size 1 and 2. *Processor*: seconds of the busiest rank; "
        f"*wall*: of the slower one, beside other programs (load average {os.getloadavg()[0]:.1f} on two cores). "
        + (memory if name == SCARCE else "Memory is not limited.")
        + f" Under those costs plans of `auto` are {fmean(auto['gaps']) * 100:.1f} % above a bound that no plan of the "
        "search space beats.",
        head=("side", "processor", "wall", "parallel configurations (micro-batches)"),
        rows=rows,
        goals=tuple(
            at_least(
                f"`auto` over verl's balancer{of}, the faster size, two CPU ranks, {name} (processor)",
                min(ratio for name_of, ratio in over.items() if name_of[:-2] == side),
                1.15,
                "x",
            )
            for side, of in (("verl", ", recomputing"), ("verl, tuned", ", tuned"))
        ),
        measured=("processor", "wall", "parallel configurations (micro-batches)"),
    )


if __name__ == "__main__":
    main()
