"""Hydraulis, Figure 10 with Table 3: its gain over its baselines, and what that gain depends on."""

from dataclasses import replace

from paper_configurations import PUBLISHED, SCENARIOS, Compared, Scenario, cell_of, compare
from paper_page import Figure, Row
from plots import Panel, picture

STEPS = 6
CORPORA = {"CommonCrawl": ("cc", False), "GitHub": ("gh", False), "GitHub, longer left out": ("gh", True)}
"""Name -> data, and whether sequences longer than the context are left out instead of cut."""
WHY = {
    "tuned": "baselines whose packs are not padded, and switches that move bytes alone",
    "static shapes": "Megatron-LM with every pack padded to the context",
    "2 s switches": "HotSPa with the seconds that were seen of its switches, Megatron-LM without padding",
    "both": "the baselines as published",
}
"""Assumptions about the baselines, each with what it is."""


def gains() -> Figure:
    """Gain over the better baseline in every scenario of 32K and 100K tokens, under each assumption."""
    compared = {
        corpus: [_compared(scenario, data, drops_longer=drops) for scenario in _scenarios()]
        for corpus, (data, drops) in CORPORA.items()
    }
    groups = [f"{scenario.model.removeprefix('llama-').upper()}, {scenario.num_devices}" for scenario in _scenarios()]
    panels = [
        Panel(
            title=f"{corpus}, 32K context, 100K tokens a step", x_title="model, GPUs", y_title="gain (x)",
            bars={name: [_gain(one, name) for one in results] for name in WHY}, groups=groups,
        )
        for corpus, results in compared.items()
    ]  # fmt: skip
    rows = []
    for corpus, results in compared.items():
        for name, why in WHY.items():
            values = [gain for one in results if (gain := _gain(one, name))]
            rows.append(
                Row(
                    what=f"{corpus}, {name}", published="{} to {}x, all scenarios".format(*PUBLISHED),
                    ours=f"{min(values):.2f} to {max(values):.2f}x", why=why,
                )
            )  # fmt: skip
    svg = picture("Hydraulis, Figure 10: gain over the better of Megatron-LM and HotSPa", *panels, columns=1)
    text = (
        f"Workload F2 of Table 3, {STEPS} simulated steps each under the published costs; DeepSpeed, F1, F3 and the "
        "seconds are in the [published tables]"
        "(../benchmarks/paper_tables.md#hydraulis-table-3-its-baselines-under-its-own-costs). "
        "*GitHub*'s lengths are ParaDySe's table cut at the context, a heavier tail than Hydraulis may have had."
    )
    return Figure(svg=svg, rows=tuple(rows), text=text)


def _scenarios() -> list[Scenario]:
    return [scenario for scenario in SCENARIOS if "F2" in scenario.workloads]


def _compared(scenario: Scenario, data: str, *, drops_longer: bool) -> Compared:
    cell = replace(cell_of(scenario, "F2", data), drops_longer=drops_longer)
    return compare(cell, scenario, cell.batches(STEPS))


def _gain(compared: Compared, assumption: str) -> float | None:
    megatron_s = compared.padded_s if assumption in ("static shapes", "both") else compared.megatron_s
    hotspa_s = compared.slow_hotspa_s if assumption in ("2 s switches", "both") else compared.hotspa_s
    times_s = [time_s for time_s in (megatron_s, hotspa_s) if time_s is not None]
    return min(times_s) / compared.hydraulis_s if times_s and compared.hydraulis_s else None
