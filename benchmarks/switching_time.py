"""The time of a step right after another strategy over its time right after itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median, quantiles

from method_ranks import Ranks
from pages import Section, at_most
from switching_runs import POOL, Ran, plan_of, random_order
from switching_runs import visits as visit

REPEATS = 3
"""Steps of a strategy at a visit: right after another one, right after itself, and so once more as a control."""


@dataclass
class Visits:
    """Strategies in random order, each for some steps on the same sequences. Made when first asked for."""

    ranks: Ranks
    rounds: int
    order: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.order = random_order(self.rounds, seed=0)

    @cached_property
    def first_times(self) -> Mapping[str, Sequence[Sequence[Ran]]]:
        """Strategy -> the steps of its first visit ever, each on every rank."""
        return dict(zip(POOL, _by_step(self.ranks.run(visit, [*POOL], repeats=2, seed=10_000))))

    @cached_property
    def found(self) -> Sequence[Sequence[Sequence[Ran]]]:
        """Visit, step, rank; every strategy has been seen before."""
        assert self.first_times
        return _by_step(self.ranks.run(visit, self.order, repeats=REPEATS, seed=0))

    def of(self, name: str) -> list[Sequence[Sequence[Ran]]]:
        """The visits of one strategy."""
        return [steps for held, steps in zip(self.order, self.found) if held == name]

    @cached_property
    def moves(self) -> list[bool]:
        """Of each visit, whether its strategy computes with other weights than the one before, on any rank."""
        layouts = {name: plan_of(name, 0, seed=0).holdings(0) for name in POOL}
        before = [*POOL][-1]
        found = []
        for name in self.order:
            found.append(layouts[name] != layouts[before])
            before = name
        return found

    @cached_property
    def extra_s(self) -> float:
        """Median seconds that a step takes more right after another strategy."""
        return median(_time_s(steps[0]) - _time_s(steps[1]) for steps in self.found)

    @cached_property
    def first_extra_s(self) -> float:
        """Median over strategies of the seconds that the first step ever takes more: groups and routes are made."""
        return median(_time_s(steps[0]) - _time_s(steps[1]) for steps in self.first_times.values())


def section(visits: Visits) -> Section:
    """By strategy, and over all."""
    everything = list(visits.found)
    moved = [steps for steps, moves in zip(everything, visits.moves) if moves]
    same = [steps for steps, moves in zip(everything, visits.moves) if not moves]
    rows = [[name, *_cells(visits.of(name)), *_first_cells(visits.first_times[name])] for name in POOL]
    rows += [["all", *_cells(everything), f"{visits.first_extra_s * 1e3:+,.0f}"]]
    rows += [["all, where the layout changes", *_cells(moved), ""]]
    rows += [["all, where it does not", *_cells(same), ""]] if same else []
    return Section(
        title="Time of a step",
        text=f"Strategies in random order, {REPEATS} steps of each on the same sequences. *After another*: the first "
        "over the second, which is the same step right after itself; in brackets the quartiles. *Control*: the third "
        "over the second, where nothing changes; its quartiles are the noise. *Processor*: the first over the second "
        "in seconds of processor, all ranks together, which other programs on the machine disturb less. *Laying out* "
        "is the time of a rank in `hold` and in posting the pulls, median over visits of the mean over ranks. *First "
        "ever*: milliseconds that the very first step under a strategy takes more than the second; process groups "
        "and routes are made then, and kept. Strategies that compute with the same weights on every rank (all whole "
        "ones) have one layout: between them nothing changes.",
        head=(
            "strategy",
            "visits",
            "step, ms",
            "after another",
            "control",
            "processor",
            "laying out after another, ms",
            "after itself, ms",
            "first ever, ms",
        ),
        rows=rows,
        goals=(
            at_most(
                "time of a step right after another strategy over right after itself, median of all visits",
                _ratio(everything, 0),
                1.10,
                "x",
            ),
            at_most("the same, visits where the layout changes", _ratio(moved, 0), 1.10, "x"),
            at_most(
                "the same in seconds of processor, all ranks, visits where the layout changes",
                median(_processor_ratios(moved)),
                1.10,
                "x",
            ),
        ),
    )


def _by_step(found: Sequence[Sequence[Sequence[Ran]]]) -> list[list[list[Ran]]]:
    """From [rank][visit][step] to [visit][step][rank]."""
    return [[list(ranks) for ranks in zip(*steps)] for steps in zip(*found)]


def _time_s(step: Sequence[Ran]) -> float:
    """Of the slowest rank; all began together."""
    return max(one.time_s for one in step)


def _ratios(visits: Sequence[Sequence[Sequence[Ran]]], step: int) -> list[float]:
    return [_time_s(steps[step]) / _time_s(steps[1]) for steps in visits]


def _processor_ratios(visits: Sequence[Sequence[Sequence[Ran]]]) -> list[float]:
    """Of the first step over the second, all ranks together."""
    sums = [[sum(one.processor_s for one in step) for step in steps] for steps in visits]
    return [after_another / after_itself for after_another, after_itself, *_ in sums]


def _ratio(visits: Sequence[Sequence[Sequence[Ran]]], step: int) -> float:
    return median(_ratios(visits, step))


def _cells(visits: Sequence[Sequence[Sequence[Ran]]]) -> list[str | int]:
    times_ms = [_time_s(steps[1]) * 1e3 for steps in visits]
    layouts = [median(_layout_ms(steps[at]) for steps in visits) for at in (0, 1)]
    return [
        len(visits),
        f"{median(times_ms):,.0f}",
        *(_with_quartiles(_ratios(visits, at)) for at in (0, 2)),
        f"{median(_processor_ratios(visits)):.2f}",
        *(f"{layout_ms:.1f}" for layout_ms in layouts),
    ]


def _with_quartiles(ratios: Sequence[float]) -> str:
    if len(ratios) < 3:
        return f"{median(ratios):.2f}"
    low, middle, high = quantiles(ratios, n=4, method="inclusive")
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def _layout_ms(step: Sequence[Ran]) -> float:
    """Mean over ranks."""
    seconds = [span.duration_s for one in step for span in one.timeline.spans if span.name == "layout"]
    return sum(seconds) / len(step) * 1e3


def _first_cells(steps: Sequence[Sequence[Ran]]) -> list[str]:
    return [f"{(_time_s(steps[0]) - _time_s(steps[1])) * 1e3:+,.0f}"]
