"""Memory over the time of one step: a staircase for every group of ranks that hold the same bytes at the same times."""

from collections.abc import Sequence
from dataclasses import dataclass

from lengthwise.core.timeline import Timeline
from lengthwise.core.wording import GIB
from lengthwise.report.charts.lines import NUM_COLOURS, Point, thin
from lengthwise.report.charts.svg import WIDTH, Chart, brief, limit_line, path, plot, shortened, stretched
from lengthwise.report.charts.ticks import Axis, range_axis, second_labels, value_axis
from lengthwise.report.units import memory, seconds, significant

_MIB = 2**20
_HEIGHT = 200


@dataclass(frozen=True, kw_only=True)
class _Group:
    """Ranks with equal samples."""

    ranks: tuple[int, ...]
    samples: tuple[tuple[float, int], ...]
    """Time of each change, in seconds, and the bytes from then on."""

    @property
    def name(self) -> str:
        ranks = ", ".join(map(str, self.ranks[:3]))
        more = f" and {len(self.ranks) - 3:,} more" if len(self.ranks) > 3 else ""
        return f"rank{'s' if len(self.ranks) > 1 else ''} {ranks}{more}"

    @property
    def peak(self) -> tuple[int, float]:
        """Most bytes and when they are first held, in seconds."""
        time_s, num_bytes = max(self.samples, key=lambda sample: (sample[1], -sample[0]))
        return num_bytes, time_s

    @property
    def least_bytes(self) -> int:
        return min(num_bytes for _, num_bytes in self.samples)


def memory_chart(timeline: Timeline, *, label: str, device_bytes: int | None = None) -> Chart | None:
    """Bytes over time of at most six groups of ranks, from the highest peak to the lowest; None without samples.

    ``device_bytes``, the memory of a device, is a line across.
    """
    end_s = timeline.step_time_s
    groups = _shown(_groups(timeline))
    if not groups or end_s <= 0:
        return None
    highest = max(group.peak[0] for group in groups)
    unit, word = (GIB, "GiB") if highest >= GIB / 10 else (_MIB, "MiB")
    x = range_axis(0.0, end_s, title="time since the start of the step", labels=second_labels)
    y = value_axis([0.0, max(highest, device_bytes or 0) / unit], title=f"{word} per device", zero=True)
    peaks = [_size(group.peak[0], unit, word) for group in groups]
    shapes = [
        path(_staircase(group, unit, end_s, x, y), f"line s{k}", f"{group.name}, peak {peaks[k]}")
        for k, group in enumerate(groups)
    ]
    labels: list[str] = []
    if device_bytes:
        line, words = limit_line(f"memory of a device, {memory(device_bytes)}", y.at(device_bytes / unit), _HEIGHT)
        shapes.append(line)
        labels.append(words)
    return Chart(
        svg=plot([stretched(shapes, _HEIGHT), *labels], x=x, y=y, height=_HEIGHT, label=label, end_s=end_s),
        legend=tuple((f"s{k}", shortened(group.name, 60)) for k, group in enumerate(groups)),
        columns=("", "peak", "at", "least"),
        rows=tuple(
            (group.name, peaks[k], seconds(group.peak[1]), _size(group.least_bytes, unit, word))
            for k, group in enumerate(groups)
        ),
    )


def _groups(timeline: Timeline) -> list[_Group]:
    """All ranks with samples, those with equal ones together, the highest peak first."""
    samples_of: dict[int, list[tuple[float, int]]] = {}
    for sample in sorted(timeline.memory, key=lambda sample: (sample.time_s, sample.rank)):
        samples_of.setdefault(sample.rank, []).append((sample.time_s, sample.num_bytes))
    ranks_of: dict[tuple[tuple[float, int], ...], list[int]] = {}
    for rank in sorted(samples_of):
        ranks_of.setdefault(tuple(samples_of[rank]), []).append(rank)
    groups = [_Group(ranks=tuple(ranks), samples=samples) for samples, ranks in ranks_of.items()]
    return sorted(groups, key=lambda group: (-group.peak[0], group.ranks))


def _shown(groups: Sequence[_Group]) -> list[_Group]:
    """Choose as many groups as there are colours, evenly, the first and the last among them."""
    if len(groups) <= NUM_COLOURS:
        return list(groups)
    return [groups[k * (len(groups) - 1) // (NUM_COLOURS - 1)] for k in range(NUM_COLOURS)]


def _staircase(group: _Group, unit: int, end_s: float, x: Axis, y: Axis) -> str:
    """Level until the next change, then straight up or down; level until the step ends."""
    changes: list[Point] = thin([(time_s, num_bytes / unit) for time_s, num_bytes in group.samples])
    steps = [f"H{brief(x.at(time_s) * WIDTH)}V{brief((1 - y.at(size)) * _HEIGHT)}" for time_s, size in changes[1:]]
    first_s, first = changes[0]
    start = f"M{brief(x.at(first_s) * WIDTH)} {brief((1 - y.at(first)) * _HEIGHT)}"
    return "".join([start, *steps, f"H{brief(x.at(end_s) * WIDTH)}"])


def _size(num_bytes: int, unit: int, word: str) -> str:
    return f"{significant(num_bytes / unit, 3)} {word}"
