"""What `lengthwise plan` prints: quantiles over the steps and the schemes they use, and a row a step."""

from typing import Any

from lengthwise.core.step_plan import StepPlan
from lengthwise.core.wording import counted
from lengthwise.session.console import stdout

MOST_ROWS = 10
"""Steps whose rows are printed unasked."""
MOST_SCHEMES = 8


def print_plans(plans: list[StepPlan], summary: dict[str, Any], *, verbose: bool) -> None:
    """Print a row a step where they are few or asked for, then what the steps have in common."""
    if verbose or len(plans) <= MOST_ROWS:
        _print_steps(plans)
    if len(plans) > 1:
        _print_summary(summary)


def _print_steps(plans: list[StepPlan]) -> None:
    """Print what each step holds, its predicted time, and its gap to the bound."""
    from rich.table import Table

    from lengthwise.report.units import seconds, share

    used, num_devices = max(plan.num_used for plan in plans), plans[0].num_devices
    devices = counted(num_devices, "device")
    devices = devices if used == num_devices else f"{used:,} of {devices}"
    shown = Table(title=f"policy {plans[0].policy} on {devices}", box=None, pad_edge=False)
    for heading in ("step", "seqs", "tokens", "longest", "packs", "padding", "predicted", "bound", "gap"):
        shown.add_column(heading, justify="right")
    for plan in plans:
        packs = [m.pack for pipeline in plan.pipelines for m in pipeline.micro_batches]
        lengths = [length for pack in packs for length in pack.lengths]
        shown.add_row(
            str(plan.step), f"{len(lengths):,}", f"{sum(lengths):,}", f"{max(lengths):,}", f"{len(packs):,}",
            share(plan.padding_fraction), seconds(plan.time_s), seconds(plan.lower_bound_s), f"{plan.gap:.2%}",
        )  # fmt: skip
    stdout().print(shown)


def _print_summary(summary: dict[str, Any]) -> None:
    """Print quantiles of step time and gap, and the share of the tokens under each scheme."""
    from rich.table import Table

    from lengthwise.report.units import seconds, share

    console = stdout()
    console.print(
        f"{counted(summary['num_steps'], 'step')} of policy {summary['policy']} on "
        f"{counted(summary['num_devices'], 'device')}, "
        f"{summary['tokens_per_step']:,.0f} tokens each on average",
        soft_wrap=True,
    )
    shown = Table(box=None, pad_edge=False)
    shown.add_column("")
    for quantile in summary["step_time_s"]:
        shown.add_column(quantile, justify="right")
    shown.add_row("predicted step time", *map(seconds, summary["step_time_s"].values()))
    shown.add_row("gap to the bound", *(f"{gap:.2%}" for gap in summary["gap"].values()))
    console.print(shown)
    schemes = summary["schemes"]
    words = [f"{name} {share(of['token_share'])} of the tokens" for name, of in list(schemes.items())[:MOST_SCHEMES]]
    more = f", {len(schemes) - MOST_SCHEMES} more" if len(schemes) > MOST_SCHEMES else ""
    console.print(f"schemes: {', '.join(words)}{more}", soft_wrap=True)


def beyond_words(beyond: dict[str, Any]) -> str:
    """Say how sure predictions are of the sequence that is farthest beyond the profile."""
    from lengthwise.report.units import seconds

    return (
        f"beyond the profile, whose longest sequence has {beyond['longest_measured']:,} tokens: a micro-batch with one "
        f"of {beyond['longest']:,} under {beyond['scheme']} is predicted at {seconds(beyond['time_s'])}, and at "
        f"{seconds(beyond['low_s'])} to {seconds(beyond['high_s'])} when any one measurement is left out; profile "
        "longer ones with: lengthwise profile --max-length"
    )
