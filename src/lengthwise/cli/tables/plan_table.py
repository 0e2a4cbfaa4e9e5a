"""What `lengthwise plan` prints: a row a step."""

from lengthwise.core.step_plan import StepPlan
from lengthwise.session.console import stdout


def print_plans(plans: list[StepPlan]) -> None:
    """Print what each step holds, its predicted time, and its gap to the bound."""
    from rich.table import Table

    from lengthwise.report.units import seconds, share

    shown = Table(title=f"policy {plans[0].policy} on {plans[0].num_devices} devices", box=None, pad_edge=False)
    for heading in ("step", "seqs", "tokens", "longest", "packs", "padding", "predicted", "bound", "gap"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for plan in plans:
        packs = [m.pack for pipeline in plan.pipelines for m in pipeline.micro_batches]
        lengths = [length for pack in packs for length in pack.lengths]
        shown.add_row(
            str(plan.step), f"{len(lengths):,}", f"{sum(lengths):,}", f"{max(lengths):,}", f"{len(packs):,}",
            share(plan.padding_fraction), seconds(plan.time_s), seconds(plan.lower_bound_s), f"{plan.gap:.2%}",
        )  # fmt: skip
    stdout().print(shown)
