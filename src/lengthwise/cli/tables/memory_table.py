"""What `lengthwise memory` prints: whether a length fits, and the longest sequence of every scheme."""

from lengthwise.core.wording import counted, needed_and_available
from lengthwise.plan.space.candidate import Candidate
from lengthwise.session.console import stdout
from lengthwise.session.memory_limits import MemoryLimits

SHOWN = 5
"""Schemes that the table for a length lists."""


def print_memory_limits(limits: MemoryLimits, *, table: bool) -> None:
    """Print the answer for a length in a line, and the tables where they are asked for or no length is."""
    from lengthwise.report.units import compact

    console, model, cluster = stdout(), limits.model, limits.cluster
    if limits.fits:
        console.print(_answer(limits), soft_wrap=True)
    if table or not limits.fits:
        console.print(
            f"{model.name}, {compact(model.num_params)} parameters, on {cluster.name}, "
            f"{cluster.device.memory_in_words} a device",
            soft_wrap=True,
        )
        _print_schemes(limits)
        if limits.ladder:
            _print_ladder(limits)
        if limits.fits:
            _print_fits(limits)
    if model.unpriced:
        console.print(f"not priced in {model.name}: {model.unpriced}", soft_wrap=True)


def _answer(limits: MemoryLimits) -> str:
    """Whether the length fits, under which scheme with the least work, and how full a device is."""
    best = limits.fits[0]
    peak, available = needed_and_available(best.peak_bytes, limits.cluster.device.memory_bytes)
    longest, asked = limits.longest, counted(limits.length or 0, "token")
    return (
        f"a sequence of {asked} fits: the least work is under {best.candidate.scheme.name}, with {peak}"
        f" of {available} on each device at its peak{_on_host(best.candidate, limits.length or 0)}; "
        f"it fits under {len(limits.fits):,} of the schemes that were looked at for it, of which the "
        f"{_longest_what(limits)} is {longest.max_tokens:,} tokens, under {longest.scheme.name}"
    )


def _on_host(candidate: Candidate, length: int) -> str:
    """What is in host memory, if anything is."""
    from lengthwise.report.units import memory

    num_bytes = candidate.host_bytes(length)
    state = " and the optimizer's state" if getattr(candidate.cost, "state_on_host", False) else ""
    what = "saved tensors" if candidate.scheme.offload else ""
    return f" and {memory(num_bytes)} of {(what + state).removeprefix(' and ')} on the host" if num_bytes else ""


def _longest_what(limits: MemoryLimits) -> str:
    """What a scheme's most tokens are; a sequence has no more of them than learned positions."""
    positions = limits.model.max_positions
    return f"largest pack (of sequences up to {positions:,} tokens)" if positions else "longest sequence, or pack,"


def _print_schemes(limits: MemoryLimits) -> None:
    """Longest sequence of every scheme, by how many layers are recomputed."""
    from rich.table import Table

    from lengthwise.report.units import memory

    console, candidates, num_layers = stdout(), limits.candidates, limits.model.num_layers
    levels = sorted({candidate.scheme.num_recomputed for candidate in candidates})
    sharded = "; z2: gradients are sharded" if any(c.scheme.shard_gradients for c in candidates) else ""
    console.print(f"{_longest_what(limits)} in tokens{sharded}:")
    shown = Table(box=None, pad_edge=False)
    for heading in ("degree", "stages"):
        shown.add_column(heading, justify="right")
    shown.add_column("method")
    shown.add_column("state", justify="right")
    for level in levels:
        shown.add_column(f"recompute {level} of {num_layers}", justify="right")
    rows: dict[tuple[int, int, str], list[Candidate]] = {}
    for candidate in candidates:
        scheme = candidate.scheme
        method = f"{scheme.methods[0]}{' z2' if scheme.shard_gradients else ''}"
        rows.setdefault((scheme.degree, scheme.num_stages, method), []).append(candidate)
    for (degree, stages, method), members in rows.items():
        longest = {candidate.scheme.num_recomputed: candidate.max_tokens for candidate in members}
        cells = [f"{longest[level]:,}" if longest.get(level) else "-" for level in levels]
        shown.add_row(str(degree), str(stages), method, memory(members[0].state_bytes), *cells)
    console.print(shown)
    best = limits.longest
    under = f"{best.max_tokens:,} tokens under {best.scheme.name}" if best.max_tokens else "none fits"
    console.print(f"longest: {under}", soft_wrap=True)


def _print_ladder(limits: MemoryLimits) -> None:
    """The longest sequence with each thing in turn that frees memory, and what it costs in time."""
    from rich.table import Table

    from lengthwise.report.units import memory, seconds

    stdout().print(
        "\nthe memory ladder: each rung does what those before it do. Time, tokens per second and host memory are "
        "those of its longest sequence; slower: than the rung before, at the longest sequence of that",
        soft_wrap=True,
    )
    shown = Table(box=None, pad_edge=False)
    shown.add_column("rung")
    shown.add_column("scheme")
    for heading in ("longest", "time", "tokens/s", "host", "slower"):
        shown.add_column(heading, justify="right")
    for rung in limits.ladder:
        shown.add_row(
            rung.name, rung.longest.scheme.name, f"{rung.longest.max_tokens:,}", seconds(rung.longest_s),
            f"{rung.tokens_per_s:,.0f}", memory(rung.host_bytes) if rung.host_bytes else "-",
            f"x {rung.slowdown:.2f}" if rung.slowdown else "-",
        )  # fmt: skip
    stdout().print(shown)


def _print_fits(limits: MemoryLimits) -> None:
    """The schemes that hold the length with the least work."""
    from rich.table import Table

    from lengthwise.report.units import memory, seconds

    asked = counted(limits.length or 0, "token")
    stdout().print(f"\n{len(limits.fits):,} schemes fit a sequence of {asked}, the least work first")
    shown = Table(box=None, pad_edge=False)
    shown.add_column("scheme")
    for heading in ("device-seconds", "time", "peak", "longest"):
        shown.add_column(heading, justify="right")
    for fit in limits.fits[:SHOWN]:
        shown.add_row(
            fit.candidate.scheme.name, f"{fit.device_s:,.2f}", seconds(fit.time_s), memory(fit.peak_bytes),
            f"{fit.candidate.max_tokens:,}",
        )  # fmt: skip
    stdout().print(shown)
