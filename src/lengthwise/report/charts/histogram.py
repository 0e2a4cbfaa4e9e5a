"""The lengths of a corpus in powers of two: how many sequences, and where the tokens are."""

from collections.abc import Sequence
from dataclasses import dataclass

from lengthwise.report.charts.svg import Chart, brief, element, hint, percent, plot
from lengthwise.report.charts.ticks import Axis, share_labels, value_axis
from lengthwise.report.units import count, share, tokens

_HEIGHT = 200
_MOST_LABELS = 9


@dataclass(frozen=True, kw_only=True)
class LengthBin:
    """Sequences of ``low`` up to, but not including, ``high`` tokens; without ``high``, all longer ones."""

    low: int
    high: int | None
    num_sequences: int
    num_tokens: int

    @property
    def name(self) -> str:
        """The range, in words."""
        return f"{tokens(self.low)} and more" if self.high is None else f"{tokens(self.low)} to {tokens(self.high)}"


def length_histogram(bins: Sequence[LengthBin], *, label: str) -> Chart | None:
    """Two bars a bin, share of the sequences and share of the tokens; None without sequences."""
    bins = _trimmed(bins)
    num_sequences, num_tokens = sum(b.num_sequences for b in bins), sum(b.num_tokens for b in bins)
    if not num_sequences or not num_tokens:
        return None
    shares = [(b.num_sequences / num_sequences, b.num_tokens / num_tokens) for b in bins]
    y = value_axis([s for pair in shares for s in pair], title="share of the corpus", labels=share_labels, zero=True)
    bars = [
        _bar(
            (k + 0.12 + 0.39 * which) / len(bins), 0.37 / len(bins), y.at(part), f"s{which}", f"{b.name}: {share(part)}"
        )
        for k, (b, pair) in enumerate(zip(bins, shares))
        for which, part in enumerate(pair)
    ]
    return Chart(
        svg=plot(bars, x=_edges(bins), y=y, height=_HEIGHT, label=label),
        legend=(("s0", "share of sequences"), ("s1", "share of tokens")),
        columns=("length in tokens", "sequences", "share", "tokens", "share"),
        rows=tuple(
            (b.name, count(b.num_sequences), share(share_of_bin), count(b.num_tokens), share(other))
            for b, (share_of_bin, other) in zip(bins, shares)
        ),
    )


def _trimmed(bins: Sequence[LengthBin]) -> Sequence[LengthBin]:
    """Without the empty bins at both ends."""
    used = [k for k, b in enumerate(bins) if b.num_sequences]
    return bins[used[0] : used[-1] + 1] if used else []


def _edges(bins: Sequence[LengthBin]) -> Axis:
    """Bins equally wide, labelled at their boundaries; as many as there is room for, counted from the long end."""
    edges = [b.low for b in bins] + [bins[-1].high]
    stride = -(-len(edges) // _MOST_LABELS)
    shown = [k for k in range(len(edges)) if (len(edges) - 1 - k) % stride == 0]
    return Axis(
        low=0, high=len(bins), ticks=tuple(map(float, shown)), title="length in tokens",
        labels=tuple("∞" if (edge := edges[k]) is None else tokens(edge) for k in shown),
    )  # fmt: skip


def _bar(left: float, width: float, part: float, class_: str, title: str) -> str:
    height = part * _HEIGHT
    return element(
        "rect", hint(title), x=percent(left), width=percent(width), y=brief(_HEIGHT - height),
        height=brief(height), class_=f"fill {class_}",
    )  # fmt: skip
