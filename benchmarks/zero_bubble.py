"""What plans and real ranks gain from split backwards that fill the waits of pipelines (zero bubble, ZB-H1).

    python benchmarks/zero_bubble.py --plan       # simulated: no torch, some twenty minutes of one core
    python benchmarks/zero_bubble.py --measure 2  # two stages, or four: processes of one thread with Gloo, a minute
    python benchmarks/zero_bubble.py --prepared 2 # the same of a model of transformers that is prepared

Planned: the same global batches with `zero_bubble` none and auto. Measured: the same packs on a pipeline of one rank a
stage under 1F1B and with split backwards, in turn. Each prints the rows of a table.
"""

import argparse
import os
import time
from dataclasses import replace
from math import exp, log
from statistics import fmean, median

import lengthwise
from lengthwise.session.plan_lengths import TOKENS_PER_DEVICE

MODELS = ("llama-7b", "llama-13b", "llama-32b", "llama-3-70b")
CORPORA = ("commoncrawl", "githubcode")
TOKENS = {"commoncrawl": (2 * TOKENS_PER_DEVICE,), "githubcode": (None,)}
"""Of a step, a device; None: the default, at least the longest sequence."""


def print_plans(models: list[str], gpus: int, steps: int, *, methods: list[str] | None, recompute: str) -> None:
    """Seconds of the same steps with and without, and of planning them; last the geometric mean of the gains."""
    print("| model | lengths | tokens | 1F1B | zero bubble | faster by | plans that split | planning | fastest plan |")
    gains = []
    for model in models:
        for corpus in CORPORA:
            for tokens in TOKENS[corpus]:
                seconds, taken_s = {}, {}
                for mode in ("none", "auto"):
                    start_s = time.perf_counter()
                    plans = lengthwise.plan(
                        corpus, model=model, cluster=f"{gpus // 8}x8xH100-80GB", steps=steps, methods=methods,
                        tokens_per_step=None if tokens is None else int(gpus * tokens), recompute=recompute,
                        zero_bubble=mode,
                    )  # fmt: skip
                    seconds[mode], taken_s[mode] = fmean(p.time_s for p in plans), time.perf_counter() - start_s
                num_split = sum(any(p.scheme.zero_bubble for p in plan.pipelines) for plan in plans)
                gains.append(seconds["none"] / seconds["auto"])
                per_step = sum(m.pack.num_tokens for p in plans[0].pipelines for m in p.micro_batches)
                print(
                    f"| {model} | {corpus} | {per_step:,} | {seconds['none']:.3f} s | {seconds['auto']:.3f} s | "
                    f"**{gains[-1]:.3f}x** | {num_split} of {steps} | {taken_s['auto'] / taken_s['none']:.2f}x | "
                    f"{plans[0].strategy_words} |",
                    flush=True,
                )
    print(f"geometric mean: {exp(fmean(map(log, gains))):.4f}x")


def print_measured(stages: int, rounds: int) -> None:
    """Idle share and time of steps on real ranks, beside what the simulator says of the same plans."""
    from method_ranks import Ranks
    from pipeline import busy_s, span_s
    from pipeline_runs import (
        CAPACITY,
        SPEC,
        Lengths,
        batch_of,
        filled,
        measured_profile,
        one_step,
        problem_of,
        stage_cost,
    )

    from lengthwise.core.pass_order import PipelineSchedule
    from lengthwise.core.pipeline_config import uniform_scheme
    from lengthwise.core.timeline import merge
    from lengthwise.sim.engine import simulate

    print("| stages | lengths like | schedule | micro-batches | idle | predicted | time |")
    ranks = Ranks(stages)
    try:
        scheme = uniform_scheme(SPEC.num_layers, stages=stages)
        cost = stage_cost(ranks.run(measured_profile, repeats=1)[0], scheme)
        for drawn in (Lengths("commoncrawl", CAPACITY), Lengths("commoncrawl", CAPACITY // 4)):
            idle, predicted, spans_s = ({False: [], True: []} for _ in range(3))
            for step in range(rounds + 1):
                for is_split in (False, True):
                    problem = problem_of(cost, replace(scheme, zero_bubble=is_split))
                    plan = filled(problem, batch_of(drawn, step))
                    timeline = merge(ranks.run(one_step, plan, drawn, PipelineSchedule.ONE_F_ONE_B))
                    if step:  # the first one makes groups and buffers
                        idle[is_split].append(1 - sum(busy_s(timeline)) / (stages * span_s(timeline)))
                        predicted[is_split].append(simulate(plan).idle_fraction)
                        spans_s[is_split].append(span_s(timeline))
            count = len(plan.pipelines[0].micro_batches)
            for is_split, name in ((False, "1F1B"), (True, "zero bubble")):
                ratio = median(mine / base for mine, base in zip(spans_s[is_split], spans_s[False]))
                print(
                    f"| {stages} | {drawn.name} | {name} | {count} | {median(idle[is_split]):.1%} | "
                    f"{median(predicted[is_split]):.1%} | {ratio:.3f}x |",
                    flush=True,
                )
    finally:
        ranks.close()
    print(f"load average {os.getloadavg()[0]:.1f}")


def train_prepared(rounds: int, stages: int) -> tuple[list[float], list[float], float]:
    """On every rank: seconds of steps of a prepared Llama on ``stages`` stages under both schedules in turn, and of
    what split backwards leave for later the predicted share of a micro-batch.
    """
    import numpy as np
    import torch
    from pipeline_runs import CAPACITY, SPEC, TOKENS, Lengths, batch_of, filled, problem_of
    from transformers import LlamaConfig, LlamaForCausalLM

    from lengthwise.core.pipeline_config import uniform_scheme

    os.environ["LOCAL_WORLD_SIZE"], os.environ["LOCAL_RANK"] = os.environ["WORLD_SIZE"], os.environ["RANK"]
    lengths, random = batch_of(Lengths("commoncrawl", CAPACITY), 0).lengths, np.random.default_rng(0)
    rows = [random.integers(0, SPEC.vocab_size, length) for length in lengths]
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=SPEC.hidden_size, intermediate_size=SPEC.ffn_size, num_hidden_layers=SPEC.num_layers,
        num_attention_heads=SPEC.num_heads, num_key_value_heads=SPEC.num_kv_heads, vocab_size=SPEC.vocab_size,
        use_cache=False,
    )  # fmt: skip
    run = lengthwise.prepare(
        LlamaForCausalLM(config), rows, sequences_per_step=len(rows), steps=2 * rounds + 2, policy="static",
        max_degree=1, max_stages=stages, device="cpu", verbose=False, lr=1e-4,
        profile=f"{os.environ['TMPDIR']}/zero-bubble.json",
    )  # fmt: skip
    cost, scheme = run.planner.planner.problem.cost.base, uniform_scheme(SPEC.num_layers, stages=stages)
    problems = [problem_of(cost, replace(scheme, zero_bubble=is_split)) for is_split in (False, True)]
    assert sum(lengths) == TOKENS
    run.planner = lambda batch: filled(problems[batch.step % 2], batch)
    seconds: tuple[list[float], list[float]] = ([], [])
    for step in run.steps():
        torch.distributed.barrier()
        began = time.perf_counter()
        for micro_batch in step:
            step.backward(run.model(**micro_batch.inputs).loss)
        step.update()
        if step.number > 1:
            seconds[step.number % 2].append(time.perf_counter() - began)
    split = [m for m in step.plan.pipelines[0].micro_batches if m.weights_s]
    share = sum(m.weights_s for m in split) / sum(m.time_s for m in step.plan.pipelines[0].micro_batches)
    run.close()
    return *seconds, share


def print_prepared(stages: int, rounds: int) -> None:
    """Time of steps of a prepared model with split backwards, over 1F1B."""
    import tempfile

    from method_ranks import Ranks

    with tempfile.TemporaryDirectory() as folder:
        os.environ["TMPDIR"] = folder
        ranks = Ranks(stages)
        try:
            of_ranks = ranks.run(train_prepared, rounds, stages)
        finally:
            ranks.close()
    whole_s, split_s, share = of_ranks[0]
    ratios = sorted(split / whole for split, whole in zip(split_s, whole_s))
    print(f"{stages} stages of a prepared Llama, zero bubble over 1F1B: {median(ratios):.3f}x, in {len(ratios)} pairs ")
    print(f"{ratios[0]:.3f} to {ratios[-1]:.3f}; {share:.0%} of a micro-batch can wait; 1F1B {median(whole_s):.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--measure", type=int, metavar="STAGES")
    parser.add_argument("--prepared", type=int, metavar="STAGES")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--methods", help="how devices share a layer; default: as plans choose")
    parser.add_argument("--recompute", default="auto")
    parser.add_argument("--gpus", type=int, default=64)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    if options.plan:
        methods = options.methods.split(",") if options.methods else None
        print_plans(
            options.models.split(","), options.gpus, options.steps, methods=methods, recompute=options.recompute
        )
    if options.measure:
        print_measured(options.measure, options.rounds)
    if options.prepared:
        print_prepared(options.prepared, options.rounds)


if __name__ == "__main__":
    main()
