"""`lengthwise.simulate`: plans in virtual time, and their figures over all steps; needs no torch."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import fsum
from pathlib import Path
from statistics import mean, median
from typing import Any

from lengthwise.core.arguments import arguments_checked
from lengthwise.core.atomic_write import shell_word
from lengthwise.core.errors import InputError, LengthwiseError
from lengthwise.core.json_lines import read_jsonl
from lengthwise.core.read_file import brief
from lengthwise.core.run_folder import RunFolder
from lengthwise.core.step_plan import StepPlan, most_devices, step_with_other_devices
from lengthwise.core.wording import GIB, whole_number
from lengthwise.sim.engine import simulate as simulate_step
from lengthwise.sim.sim_options import SimOptions
from lengthwise.sim.step_summary import SimulatedStep, summary


@arguments_checked
def simulate(
    plans: StepPlan | Sequence[StepPlan] | str | Path,
    *,
    jitter: float = 0.0,
    stragglers: Mapping[int, float] | None = None,
    overlap: float | None = None,
    seed: int = 0,
    timelines: bool = False,
) -> list[SimulatedStep]:
    """Execute plans in virtual time.

        steps = lengthwise.simulate(plans, stragglers={3: 1.5}, timelines=True)
        print(steps[0].step_time_s, steps[0].idle, steps[0].timeline.spans[0])

    Args:
        plans: what `lengthwise.plan` returned, one of them, or a file of plans: plans.jsonl of a run or of
            `lengthwise plan --out`, in which the last plan of a step and policy counts.
        jitter: sigma of a lognormal factor of mean 1 on the time of every micro-batch, such as 0.1.
        stragglers: rank -> how many times slower it computes, at least 1.
        overlap: share of the update that runs beneath computation, from 0 to 1, instead of what the plan says; None:
            as the plan says.
        seed: decides the jitter.
        timelines: also make the timeline of each step: which rank does what when, and its memory.

    Returns:
        One `SimulatedStep` a plan, with step_time_s, peak_bytes, busy_s of each rank, idle and bubble as shares of the
        device time, all parts of it in `losses`, and `timeline` where asked for.

    Raises:
        InputError: there is no plan, a value is out of its range, or a straggler is not a rank of the plans.
    """
    if stragglers is not None and not isinstance(stragglers, Mapping):
        raise InputError(f"stragglers={brief(stragglers)}: give a dictionary of ranks and factors, such as {{3: 1.5}}")
    options = SimOptions(jitter=jitter, stragglers=dict(stragglers or {}), overlap=overlap, seed=seed)
    if isinstance(plans, str | Path):
        plans = read_plans(Path(plans))
    plans = list(plans) if isinstance(plans, Iterable) else [plans]
    if not plans or not all(isinstance(plan, StepPlan) for plan in plans):
        raise InputError(f"plans={brief(plans)}: give what lengthwise.plan returned, or a file of plans")
    if not timelines:
        return [summary(plan, options) for plan in plans]
    return [replace(summary(plan, options), timeline=simulate_step(plan, options)) for plan in plans]


def read_plans(path: Path, *, steps: int | None = None) -> list[StepPlan]:
    """The first ``steps`` plans of a file, a JSON object a line; None: all.

    Of a step that a run trained twice the last plan counts. In a file that lies in no run folder, so does the last one
    of a step and a policy: it may hold the plans of several policies one after another.

    Raises:
        InputError: there are none, or one is damaged.
    """
    is_of_run = path.name == RunFolder(path.parent).plans.name and RunFolder(path.parent).config.is_file()
    rows: dict[tuple[str, str | None], dict[str, Any]] = {}
    for row in read_jsonl(path):
        key = brief(row.get("step")), None if is_of_run else brief(row.get("policy"))
        if key in rows or steps is None or len(rows) < steps:
            rows[key] = row
    if not rows:
        raise InputError(f"no plans in {path}; make some with: lengthwise plan --out {shell_word(path)}")
    return [_plan(row, path) for row in rows.values()]


def ends_within_line(path: Path) -> bool:
    """Whether a process that wrote the file was killed within its last line, which ``read_plans`` leaves out."""
    return not path.read_bytes().endswith(b"\n")


def parse_straggler(text: str) -> tuple[int, float]:
    """The rank and its factor in ``RANK:FACTOR``.

    Raises:
        InputError: the text has another form.
    """
    words, _, factor = text.partition(":")
    rank = whole_number(words)
    try:
        if rank is None:
            raise ValueError
        return rank, float(factor)
    except ValueError:
        raise InputError(
            f"--straggler {brief(text)[1:-1]} is not RANK:FACTOR, such as 3:1.5 for rank 3 half as fast again"
        ) from None


def figures(plans: Sequence[StepPlan], steps: Sequence[SimulatedStep]) -> dict[str, Any]:
    """Throughput and losses over the simulated steps; tokens are those trained, padding left out.

    Steps weigh by their device-seconds, also where they are of several numbers of devices.
    """
    tokens = [plan.num_computed_tokens * (1 - plan.padding_fraction) for plan in plans]
    total_s, bound_s = fsum(step.step_time_s for step in steps), fsum(plan.lower_bound_s for plan in plans)
    device_s = [plan.num_devices * step.step_time_s for plan, step in zip(plans, steps)]

    def share(name: str) -> float:
        return fsum(getattr(step.losses, name) * weight for step, weight in zip(steps, device_s)) / fsum(device_s)

    parts = ("compute", "communicate", "bubble", "imbalance", "switch", "update")
    return {
        "policy": ", ".join(dict.fromkeys(plan.policy for plan in plans)),
        "num_steps": len(plans),
        "num_devices": most_devices(plans),
        "step_with_other_devices": step_with_other_devices(plans),
        "tokens_per_s": sum(tokens) / total_s,
        "tokens_per_s_per_gpu": sum(tokens) / fsum(device_s),
        "step_time_s": mean(step.step_time_s for step in steps),
        "idle": share("idle"),
        **{name: share(name) for name in parts},
        "padding": 1 - sum(tokens) / sum(plan.num_computed_tokens for plan in plans),
        "gap": fsum(plan.time_s for plan in plans) / bound_s - 1 if bound_s else 0.0,
        "gap_median": median(plan.gap for plan in plans),
        "peak_gib": max(step.peak_bytes for step in steps) / GIB,
    }


def _plan(row: dict[str, Any], path: Path) -> StepPlan:
    try:
        return StepPlan.from_json(row)
    except LengthwiseError as error:
        raise type(error)(f"{path}, step {brief(row.get('step'))}: {error}") from None
