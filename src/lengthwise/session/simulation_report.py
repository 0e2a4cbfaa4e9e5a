"""The page of a simulation: figures over all steps, and the timelines that say most."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from lengthwise.core.step_plan import StepPlan
from lengthwise.core.wording import GIB, counted
from lengthwise.report.pages.run_text import KeyFigure, start_facts
from lengthwise.report.pages.simulation_page import ShownStep, SimulationPage, render_simulation
from lengthwise.report.units import MISSING, count, hours, memory, seconds, share
from lengthwise.session.provenance import provenance
from lengthwise.sim.engine import simulate
from lengthwise.sim.sim_options import SimOptions
from lengthwise.sim.step_summary import SimulatedStep


def simulation_html(
    plans: Sequence[StepPlan], steps: Sequence[SimulatedStep], options: SimOptions, document: dict[str, Any], *,
    device_bytes: int | None = None,
) -> str:  # fmt: skip
    """The page: figures over all steps, timeline and memory of a typical step and of the one that idles longest.

    ``device_bytes``, the memory of a device, is a line above what is used; None: it is not known.
    """
    up_to = "" if document["step_with_other_devices"] is None else "up to "
    return render_simulation(
        SimulationPage(
            title=f"Policy {document['policy']} on {up_to}{counted(document['num_devices'], 'device')}",
            headline=" · ".join(_conditions(document["num_steps"], options)),
            tiles=(
                KeyFigure("tokens per second", count(document["tokens_per_s"]), "padding not counted"),
                KeyFigure("step time", seconds(document["step_time_s"]), "mean over steps"),
                KeyFigure("idle", share(document["idle"]), "of the device time"),
                KeyFigure("padding", share(document["padding"]), "of the computed tokens"),
                KeyFigure("gap to the bound", share(document["gap"]), "planned time of all steps above their bounds"),
                KeyFigure("peak memory", memory(document["peak_gib"] * GIB), "of the device that holds most"),
                *_known(
                    KeyFigure("MFU", share(document["mfu"]), "of the model's FLOPs, without recompute"),
                    KeyFigure("hours", hours(document["hours"]), "of the whole training"),
                    KeyFigure("cost", count(document["cost"]), "of the whole training"),
                ),
            ),
            shares=_parts(document),
            shown=tuple(replace(step, device_bytes=device_bytes) for step in _shown(plans, steps, options)),
            columns=("step", "time", "planned", "bound", "idle", "bubble", "imbalance", "padding", "peak"),
            rows=tuple(_row(plan, step) for plan, step in zip(plans, steps)),
            facts=tuple(start_facts(provenance())),
        )
    )


def _known(*figures: KeyFigure) -> list[KeyFigure]:
    return [figure for figure in figures if figure.value != MISSING]


def _shown(plans: Sequence[StepPlan], steps: Sequence[SimulatedStep], options: SimOptions) -> Iterator[ShownStep]:
    """The steps that are drawn, each with the reason."""
    middle_s = median(step.step_time_s for step in steps)
    typical = min(range(len(steps)), key=lambda k: abs(steps[k].step_time_s - middle_s))
    worst = max(range(len(steps)), key=lambda k: steps[k].idle * steps[k].step_time_s * plans[k].num_devices)
    chosen = [(typical, "A typical step", "its time is the closest to the median")]
    if worst != typical:
        chosen.append((worst, "The worst step", "it idles longest"))
    for k, title, reason in chosen:
        lost = f"{share(steps[k].bubble)} are bubbles and {share(steps[k].losses.imbalance)} imbalance"
        caption = f"Step {plans[k].step:,}: {reason}. Of its device time, {lost}."
        yield ShownStep(title=title, caption=caption, timeline=simulate(plans[k], options))


def _parts(document: dict[str, Any]) -> tuple[tuple[str, str, float], ...]:
    """What device time goes to, in colours of the timelines."""
    return (
        ("compute", "k-compute", document["compute"]),
        ("communicate", "k-communicate", document["communicate"]),
        ("switch strategies", "s1", document["switch"]),
        ("bubbles within pipelines", "s5", document["bubble"]),
        ("imbalance between pipelines", "k-wait", document["imbalance"]),
        ("update weights", "k-update", document["update"]),
    )


def _conditions(num_steps: int, options: SimOptions) -> list[str]:
    parts = [counted(num_steps, "step")]
    return [*parts, options.in_words] if options.in_words else parts


def _row(plan: StepPlan, step: SimulatedStep) -> tuple[str, ...]:
    return (
        f"{step.step:,}", seconds(step.step_time_s), seconds(plan.time_s), seconds(plan.lower_bound_s),
        share(step.idle), share(step.bubble), share(step.losses.imbalance), share(plan.padding_fraction),
        memory(step.peak_bytes),
    )  # fmt: skip
