"""What `lengthwise memory` prints: whether a length fits, and the longest sequence of every scheme."""

from lengthwise.core.wording import needed_and_available
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
        if limits.fits:
            _print_fits(limits)
    if model.unpriced:
        console.print(f"not priced in {model.name}: {model.unpriced}", soft_wrap=True)


def _answer(limits: MemoryLimits) -> str:
    """Whether the length fits, under which scheme with the least work, and how full a device is."""
    best = limits.fits[0]
    peak, available = needed_and_available(best.peak_bytes, limits.cluster.device.memory_bytes)
    longest = limits.longest
    return (
        f"a sequence of {limits.length:,} tokens fits: the least work is under {best.candidate.scheme.name}, with "
        f"{peak} of {available} on each device at its peak; it fits under {len(limits.fits):,} schemes in all, and the "
        f"{_longest_what(limits)} that any scheme fits is {longest.max_tokens:,} tokens, under {longest.scheme.name}"
    )


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
    console.print(f"{_longest_what(limits)} in tokens:")
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
        rows.setdefault((scheme.degree, scheme.num_stages, str(scheme.methods[0])), []).append(candidate)
    for (degree, stages, method), members in rows.items():
        longest = {candidate.scheme.num_recomputed: candidate.max_tokens for candidate in members}
        cells = [f"{longest[level]:,}" if longest.get(level) else "-" for level in levels]
        shown.add_row(str(degree), str(stages), method, memory(members[0].state_bytes), *cells)
    console.print(shown)
    console.print(f"longest: {limits.longest.max_tokens:,} tokens under {limits.longest.scheme.name}", soft_wrap=True)


def _print_fits(limits: MemoryLimits) -> None:
    """The schemes that hold the length with the least work."""
    from rich.table import Table

    from lengthwise.report.units import memory, seconds

    stdout().print(f"\n{len(limits.fits):,} schemes fit a sequence of {limits.length:,} tokens, the least work first")
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
