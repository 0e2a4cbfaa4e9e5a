"""One layer under every method: time beside one device, bytes sent and kept beside closed forms."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from method_ranks import METHODS, Ranks, layer_bytes, layer_seconds
from pages import Goal, Section, at_most

from lengthwise.core.pipeline_config import Method
from lengthwise.core.specs import ModelSpec
from lengthwise.cost.analytic.volume import LayerVolume, layer_volume
from lengthwise.cost.links import Sent

KINDS = ("all_gather", "reduce_scatter", "all_to_all", "ring", "broadcast", "reduce")
CLEAR = 1.10
"""A method is called faster than another if the other takes this many times as long."""


def layer(name: str, *, hidden: int, heads: int, ffn: int, layers: int = 1) -> ModelSpec:
    """A causal Llama layer with as many key/value heads as heads and a vocabulary that costs nothing."""
    return ModelSpec(
        name=name, num_layers=layers, hidden_size=hidden, ffn_size=ffn, num_heads=heads, num_kv_heads=heads,
        head_size=hidden // heads, vocab_size=64,
    )  # fmt: skip


NARROW = layer("narrow", hidden=64, heads=4, ffn=256)
WIDE = layer("wide", hidden=512, heads=8, ffn=1408)

Times = Mapping[int, Sequence[Mapping[Method, float]]]
"""Length -> rounds -> seconds by method, dense among them."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One layer on so many ranks."""

    spec: ModelSpec
    degree: int
    rounds: Mapping[int, int]
    """Length -> how often."""
    times: dict[int, list[dict[Method, float]]] = field(default_factory=dict)


def measure_times(settings: Sequence[Setting], ranks: Mapping[int, Ranks]) -> None:
    """Fill ``times``. In each round dense and every method of every setting take turns, one after another."""
    for length in sorted({length for setting in settings for length in setting.rounds}):
        wanted = [setting for setting in settings if length in setting.rounds]
        warm_up = 1 if length <= 4096 else 0
        for number in range(-warm_up, max(setting.rounds[length] for setting in wanted)):
            alone: dict[ModelSpec, float] = {}
            for setting in wanted:
                if number >= setting.rounds[length]:
                    continue
                if setting.spec not in alone:
                    alone[setting.spec] = _seconds(ranks[1], setting.spec, Method.DENSE, length)
                row = {Method.DENSE: alone[setting.spec]}
                for method in METHODS:
                    row[method] = _seconds(ranks[setting.degree], setting.spec, method, length)
                if number >= 0:
                    setting.times.setdefault(length, []).append(row)


def _seconds(ranks: Ranks, spec: ModelSpec, method: Method, length: int) -> float:
    return max(clock_s for clock_s, _ in ranks.run(layer_seconds, spec, method, (length,)))


def time_section(setting: Setting) -> Section:
    """Every method's time over dense's and over the fastest method's."""
    spec = setting.spec
    rows = []
    for length, rounds in setting.times.items():
        fastest = min(METHODS, key=lambda method: _over(rounds, method, Method.DENSE))
        cells = {
            method: f"{_over(rounds, method, Method.DENSE):.2f} ({_over(rounds, method, fastest):.2f})"
            for method in METHODS
        }
        dense_ms = median(row[Method.DENSE] for row in rounds) * 1e3
        rows.append([f"{length:,}", len(rounds), f"{dense_ms:,.1f}", *map(cells.get, METHODS), fastest])
    return Section(
        title=f"Time of a layer of width {spec.hidden_size} on {setting.degree} ranks",
        text=f"{spec.num_heads} heads of {spec.head_size}, feed-forward {spec.ffn_size}, causal, float32, one "
        f"sequence; {spec.layer_matmul_params:,} weights. Forward and backward as a share of `dense`, which is one "
        "rank doing the whole layer while the others wait; in brackets over the fastest method. Medians over rounds of "
        "ratios within a round."
        + (" **Four ranks share two cores**: at best they halve the time." if setting.degree == 4 else ""),
        head=("tokens", "rounds", "dense, ms", *METHODS, "fastest"),
        rows=rows,
    )


def _over(rounds: Sequence[Mapping[Method, float]], method: Method, other: Method) -> float:
    return median(row[method] / row[other] for row in rounds)


def crossover_section(settings: Sequence[Setting]) -> Section:
    """Where one method overtakes another."""
    rows = []
    for setting in settings:
        for one in METHODS:
            for other in METHODS:
                found = _crossover(setting.times, one, other)
                if found is not None:
                    last, first = found
                    where = f"width {setting.spec.hidden_size}, {setting.degree} ranks"
                    rows.append([where, one, f"{last:,}", other, f"{first:,}"])
    return Section(
        title="Where one method overtakes another",
        text="Pairs whose order turns round. Up to some length the first is faster, from a longer one on the second; "
        f"in between neither is clearly. Faster is by {CLEAR:.2f}x or more in the median and faster in every round, of "
        "at least two. Pairs that are not listed keep their order, or are never that far apart at one of the ends.",
        head=("layer", "faster when short", "to, tokens", "faster when long", "from, tokens"),
        rows=rows,
    )


def _crossover(times: Times, one: Method, other: Method) -> tuple[int, int] | None:
    """The last length of the first run where ``one`` is clearly faster, and the first of the final run of ``other``."""
    ones = [length for length, rounds in times.items() if _is_faster(rounds, one, other)]
    others = [length for length, rounds in times.items() if _is_faster(rounds, other, one)]
    if not ones or not others or max(ones) > min(others):
        return None
    return max(ones), min(others)


def _is_faster(rounds: Sequence[Mapping[Method, float]], one: Method, other: Method) -> bool:
    ratios = [row[other] / row[one] for row in rounds if one in row and other in row]
    return len(ratios) > 1 and min(ratios) > 1 and median(ratios) >= CLEAR


def bytes_sections(ranks: Mapping[int, Ranks], *, lengths: Sequence[int], spec: ModelSpec) -> list[Section]:
    """What is sent and what is kept, beside the closed forms."""
    sent_rows, kept_rows, worst_sent, worst_kept = [], [], 0.0, 0.0
    shown = lengths[-1]
    dense = layer_volume(spec, Method.DENSE, degree=1, dtype="float32").kept_bytes * shown
    for degree in sorted(set(ranks) - {1}):
        for method in METHODS:
            volume = layer_volume(spec, method, degree=degree, dtype="float32")
            for length in lengths:
                found = ranks[degree].run(layer_bytes, spec, method, (length,))
                forward, backward = (_most(each) for each in list(zip(*found))[:2])
                kept = max(one for *_, one in found)
                expected = [_closed(part.tokens, part.weights, length) for part in (volume.forward, volume.backward)]
                worst_sent = max(worst_sent, *(_apart(*pair) for pair in zip((forward, backward), expected)))
                worst_kept = max(worst_kept, abs(kept / (volume.kept_bytes * length) - 1))
            sent_rows.append([degree, method, *_sent_cells(forward, backward, expected)])
            kept_rows.append([degree, method, *_kept_cells(kept, volume, dense, shown)])
    which = f"{', '.join(f'{length:,}' for length in lengths)} tokens, 2 and 4 ranks"
    return [
        Section(
            title="Bytes sent",
            text=f"By the rank that sends most, one layer of width {spec.hidden_size} on {shown:,} tokens, forward + "
            "backward, counted by the group that every collective goes through; in kB.",
            head=("ranks", "method", *(kind.replace("_", " ") for kind in KINDS), "sum", "closed form"),
            rows=sent_rows,
            goals=(_same(f"bytes sent, every method and kind, {which}: difference from the closed form", worst_sent),),
        ),
        Section(
            title="Bytes kept for the backward",
            text="The same layer: storages that autograd's hooks see, weights and rotary tables left out, on the rank "
            "that keeps most. *While it runs*: communication buffers and gathered weights with their gradients, alive "
            "in one layer at a time, from the closed form, not measured.",
            head=("ranks", "method", "kept, kB", "closed form, kB", "of dense", "while it runs, kB"),
            rows=kept_rows,
            goals=(at_most(f"bytes kept, {which}: difference from the closed form", worst_kept, 0.02, "%"),),
        ),
    ]


def _most(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {kind: max(each.get(kind, 0.0) for each in found) for kind in KINDS}


def _closed(tokens: Sent, weights: Sent, length: int) -> dict[str, float]:
    return {kind: getattr(tokens, kind) * length + getattr(weights, kind) for kind in KINDS}


def _apart(measured: Mapping[str, float], expected: Mapping[str, float]) -> float:
    return max(abs(measured[kind] - expected[kind]) for kind in KINDS) / max(1.0, *expected.values())


def _same(what: str, difference: float) -> Goal:
    return Goal(what=what, aim="none", measured=f"{difference:.1e}", met=difference < 1e-9)


def _sent_cells(forward: Mapping[str, float], backward: Mapping[str, float], expected: list) -> list[str]:
    cells = [f"{forward[k] / 1e3:,.0f} + {backward[k] / 1e3:,.0f}" if forward[k] + backward[k] else "" for k in KINDS]
    total = sum(forward.values()) + sum(backward.values())
    return [*cells, f"{total / 1e3:,.1f}", f"{sum(sum(each.values()) for each in expected) / 1e3:,.1f}"]


def _kept_cells(kept: int, volume: LayerVolume, dense: float, length: int) -> list[str]:
    alive = volume.live_bytes * length + max(volume.buffer_bytes, volume.reduce_bytes)
    return [
        f"{kept / 1e3:,.0f}", f"{volume.kept_bytes * length / 1e3:,.0f}", f"{kept / dense:.1%}".replace("%", " %"),
        f"{alive / 1e3:,.0f}",
    ]  # fmt: skip
