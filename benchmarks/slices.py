"""What plans and real ranks gain from micro-batches in slices of tokens, which leave pipelines the bubble of one slice.

    python benchmarks/slices.py --plan        # simulated: no torch, some ten minutes of one core
    python benchmarks/slices.py --measure 2   # two stages, or four: processes of one thread with Gloo, a minute or two

Planned: the same global batches with `slices` none and auto. Measured: one sequence of half a step's tokens and packs
of short ones, on a pipeline of one rank a stage, whole and in slices, in turn. Each prints the rows of a table.
"""

import argparse
import os
import time
from dataclasses import replace
from math import exp, log
from statistics import fmean, median

import numpy as np

import lengthwise

GIANTS = (
    ("llama-7b", "8x8xA800-80GB", 524_288),
    ("llama-7b", "8x8xH100-80GB", 1_048_576),
    ("llama-13b", "8x8xA800-80GB", 524_288),
    ("llama-13b", "8x8xH100-80GB", 262_144),
)
"""Model, cluster and tokens of the one long sequence of every step; as many tokens of short ones are beside it."""
CORPORA = (
    ("llama-7b", "8x8xA800-80GB", "commoncrawl"),
    ("llama-7b", "8x8xA800-80GB", "githubcode"),
    ("llama-32b", "8x8xA800-80GB", "githubcode"),
)


LONG = 8192
"""Tokens of the long sequence of a measured step."""


def step_with(longest: int, *, seed: int) -> list[int]:
    """Lengths of a step: one long sequence, and short ones (lognormal, median 1,100) with as many tokens."""
    rng, lengths = np.random.default_rng(seed), [longest]
    while sum(lengths) < 2 * longest:
        lengths.append(int(np.clip(rng.lognormal(7.0, 1.2), 16, 32768)))
    return lengths


def print_plans(steps: int) -> None:
    """Seconds of the same steps with and without slices, and of planning them; last the geometric mean of the gains."""
    print("| model | cluster | lengths | whole | slices | faster by | gap | planning | fastest plan |")
    gains = []
    cases = [(model, cluster, step_with(longest, seed=0), f"one of {longest:,}") for model, cluster, longest in GIANTS]
    for model, cluster, lengths, name in [*cases, *((*case, case[2]) for case in CORPORA)]:
        is_corpus = isinstance(lengths, str)
        seconds, taken_s = {}, {}
        for mode in ("none", "auto"):
            start_s = time.perf_counter()
            plans = lengthwise.plan(
                lengths, model=model, cluster=cluster, steps=steps if is_corpus else 1, slices=mode,
                tokens_per_step=None if is_corpus else sum(lengths),
            )  # fmt: skip
            seconds[mode], taken_s[mode] = fmean(plan.time_s for plan in plans), time.perf_counter() - start_s
        gains.append(seconds["none"] / seconds["auto"])
        print(
            f"| {model} | {cluster} | {name} | {seconds['none']:.3f} s | {seconds['auto']:.3f} s | "
            f"**{gains[-1]:.2f}x** | {plans[0].gap:.0%} | {taken_s['auto'] / taken_s['none']:.2f}x | "
            f"{plans[0].strategy_words} |",
            flush=True,
        )
    print(f"geometric mean: {exp(fmean(map(log, gains))):.3f}x")


def print_measured(stages: int, rounds: int) -> None:
    """Idle share and time of steps on real ranks, beside what the simulator says of the same plans."""
    from method_ranks import Ranks
    from pipeline import busy_s, span_s
    from pipeline_runs import SPEC, Lengths, batch_of, measured_profile, one_step, problem_of, stage_cost

    from lengthwise.core.pass_order import PipelineSchedule
    from lengthwise.core.pipeline_config import uniform_scheme
    from lengthwise.core.timeline import merge
    from lengthwise.plan.heterogeneous.fastest_runs import FastestRuns
    from lengthwise.plan.space.draft_plan import DraftPlan, PipelineDraft
    from lengthwise.plan.space.finished_plan import to_plan
    from lengthwise.plan.space.problem import PricedBatch
    from lengthwise.sim.engine import simulate

    print("| stages | slices | idle | predicted | time |")
    ranks = Ranks(stages)
    try:
        scheme = uniform_scheme(SPEC.num_layers, stages=stages)
        cost = stage_cost(ranks.run(measured_profile, repeats=1)[0], scheme)
        counts, lengths = (1, 2, 4, 8, 16), (LONG, *(LONG // 8,) * 8)
        drawn = Lengths("", LONG, fixed=lengths)
        packs = tuple((position,) for position in range(len(lengths)))
        idle, predicted, spans_s = ({count: [] for count in counts} for _ in range(3))
        for step in range(rounds + 1):
            for count in counts:
                problem = problem_of(cost, replace(scheme, slices=count), capacity=LONG)
                priced, (candidate,) = PricedBatch(problem, batch_of(drawn, step)), problem.candidates
                line = PipelineDraft(candidate=candidate, ranks=tuple(range(stages)), packs=packs)
                draft = FastestRuns(problem.candidates).of(priced, DraftPlan(phases=((line,),)))
                plan = to_plan(priced, draft, policy="by hand")
                timeline = merge(ranks.run(one_step, plan, drawn, PipelineSchedule.ONE_F_ONE_B))
                if step:  # the first one makes groups and buffers
                    idle[count].append(1 - sum(busy_s(timeline)) / (stages * span_s(timeline)))
                    predicted[count].append(simulate(plan).idle_fraction)
                    spans_s[count].append(span_s(timeline))
        for count in counts:
            ratio = median(mine / base for mine, base in zip(spans_s[count], spans_s[1]))
            print(
                f"| {stages} | {count} | {median(idle[count]):.1%} | {median(predicted[count]):.1%} | {ratio:.3f}x |",
                flush=True,
            )
    finally:
        ranks.close()
    print(f"load average {os.getloadavg()[0]:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--measure", type=int, metavar="STAGES")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    if options.plan:
        print_plans(options.steps)
    if options.measure:
        print_measured(options.measure, options.rounds)


if __name__ == "__main__":
    main()
