"""What `lengthwise simulate` prints: figures over all steps."""

from typing import Any

from lengthwise.core.wording import GIB, counted
from lengthwise.session.console import stdout


def print_simulation(document: dict[str, Any]) -> None:
    """Print the figures of the simulated steps."""
    from rich.table import Table

    from lengthwise.report.units import MISSING, count, hours, memory, seconds, share

    shown = Table(box=None, pad_edge=False, show_header=False)
    shown.add_column()
    shown.add_column(justify="right", min_width=12)
    for words, value in (
        ("tokens/s", count(document["tokens_per_s"])),
        ("tokens/s per device", count(document["tokens_per_s_per_gpu"])),
        ("step time, mean", seconds(document["step_time_s"])),
        ("idle", share(document["idle"])),
        ("  bubbles within pipelines", share(document["bubble"])),
        ("  imbalance between pipelines", share(document["imbalance"])),
        ("padding", share(document["padding"])),
        ("gap to the bound", f"{document['gap']:.2%}"),
        ("peak memory per device", memory(document["peak_gib"] * GIB)),
        ("MFU", share(document["mfu"])),
        ("hours of the whole training", hours(document["hours"])),
        ("cost of the whole training", count(document["cost"])),
    ):
        if value != MISSING:
            shown.add_row(words, value)
    console = stdout()
    num_steps, policy, num_devices = (document[name] for name in ("num_steps", "policy", "num_devices"))
    up_to = "" if document["step_with_other_devices"] is None else "up to "
    console.print(
        f"{counted(num_steps, 'step')} of policy {policy} on {up_to}{counted(num_devices, 'device')}, simulated",
        soft_wrap=True,
    )
    console.print(shown)
