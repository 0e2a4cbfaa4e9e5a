"""What it takes to start anew under another strategy, as systems without switching must, beside a switch."""

from pathlib import Path
from statistics import median
from time import perf_counter

from method_ranks import Ranks
from pages import Section, at_most
from switching_runs import POOL, RANKS, one_step, plan_of, ready, resume, save_checkpoint
from switching_time import Visits

PHASES = ("save", "stop", "start", "build", "load", "first step")
WHAT = {
    "save": "write a checkpoint: master weights and both moments",
    "stop": "end the processes",
    "start": "new processes: imports and process group",
    "build": "build the model and lay out its state",
    "load": "read the checkpoint",
    "first step": "first step under the other strategy",
}


def once(ranks: Ranks, folder: Path, name: str) -> tuple[Ranks, dict[str, float]]:
    """New ranks that go on under another strategy, and the seconds of each phase, of the slowest rank."""
    ranks.run(one_step, plan_of(next(iter(POOL)), 0, seed=0), seed=0)  # moments are there to be saved
    seconds = {"save": max(ranks.run(save_checkpoint, str(folder)))}
    start_s = perf_counter()
    ranks.close()
    seconds["stop"] = perf_counter() - start_s
    start_s = perf_counter()
    ranks = Ranks(RANKS)
    ranks.run(ready)
    seconds["start"] = perf_counter() - start_s
    resumed = ranks.run(resume, str(folder), name)
    return ranks, {**seconds, **{phase: max(one[phase] for one in resumed) for phase in resumed[0]}}


def section(ranks: Ranks, folder: Path, visits: Visits, *, times: int) -> Section:
    """Start anew some times; the ranks given are ended by the first."""
    switch_s, first_s = visits.extra_s, visits.first_extra_s
    found: list[dict[str, float]] = []
    for number in range(times):
        ranks, seconds = once(ranks, folder, [*POOL][1 + number % (len(POOL) - 1)])
        found.append(seconds)
    ranks.close()
    medians = {phase: median(seconds[phase] for seconds in found) for phase in PHASES}
    total_s = median(sum(seconds.values()) for seconds in found)
    rows = [[WHAT[phase], f"{medians[phase]:.3f}"] for phase in PHASES]
    rows += [
        ["**starting anew, in all**", f"{total_s:.3f}"],
        ["**a switch**: what a step takes more right after another strategy", f"{switch_s:+.4f}"],
        ["the same, the first time ever that the strategy is used", f"{first_s:+.4f}"],
    ]
    return Section(
        title="Starting anew instead",
        text="A job without switching changes its strategy by saving, ending its processes, and starting new ones. "
        f"Seconds, medians of {times}, of the slowest rank. Nothing but two cores and a small model is in it: no "
        "dataset is opened, no GPU is initialised, nothing is compiled.",
        head=("what", "seconds"),
        rows=rows,
        goals=(at_most("a switch over starting anew, in seconds", switch_s / total_s, 0.01, "%"),),
        after="Published: ParaDySe (case study) measures 31 s for one such change, GPT on GRCh38: 2 to 3 s of "
        "imports, 5 s of data, 22 s of building the model, 1 s of Adam. HotSPa switches without restarting and pays "
        "nearly 2 s a step for it, of 6.7 s (Hydraulis, section 8.2: GitHub, 7B, 8 GPUs). Both are on GPUs and with "
        "models a thousand times as large: not comparable in seconds, only in kind.",
    )
