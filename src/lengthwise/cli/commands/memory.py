"""`lengthwise memory`: the longest sequence that each scheme holds, and the cheapest scheme for a length."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import typer

from lengthwise.cli.shared_options import (
    MAX_DEVICES,
    MAX_TOKENS,
    DeviceName,
    DevicesPerNode,
    Dtype,
    DtypeOption,
    Json,
    MaxDegree,
    MaxStages,
    MemoryGib,
    Methods,
    ModelName,
)  # fmt: skip
from lengthwise.core.errors import InfeasibleError, InputError
from lengthwise.core.pipeline_config import PipelineConfig
from lengthwise.core.specs import ClusterSpec, ModelSpec
from lengthwise.core.wording import GIB, needed_and_available
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.plan.space.candidate import Candidate
from lengthwise.plan.space.search_space import SearchSpace
from lengthwise.session.console import emit_json, stdout
from lengthwise.session.planning_args import find_model, make_cluster, parse_methods

SHOWN = 5
"""Schemes that the table for a length lists."""


@dataclass(frozen=True, kw_only=True)
class FittingPipeline:
    """One sequence alone on one pipeline of a candidate that holds it."""

    candidate: Candidate
    device_s: float
    """Seconds of work, over all devices of the pipeline."""
    time_s: float
    """Seconds from the first stage to the last."""
    peak_bytes: int


def run(
    model: ModelName,
    device: DeviceName,
    gpus: Annotated[int, typer.Option(min=1, max=MAX_DEVICES, metavar="N", help="Devices of the cluster.")] = 8,
    length: Annotated[
        int | None, typer.Option(min=1, max=MAX_TOKENS, metavar="TOKENS", help="What fits this long a sequence?")
    ] = None,
    hbm: MemoryGib = None,
    devices_per_node: DevicesPerNode = None,
    max_degree: MaxDegree = None,
    max_stages: MaxStages = None,
    methods: Methods = None,
    dtype: DtypeOption = Dtype.BFLOAT16,
    json: Json = False,
) -> None:
    """Show the longest sequence, or pack, of every scheme, and what would fit a given length at the least cost."""
    spec = find_model(model)
    cluster = make_cluster(device, gpus, devices_per_node=devices_per_node, memory_gib=hbm)
    search_space = SearchSpace(
        max_degree=max_degree, max_stages=max_stages, methods=parse_methods(methods), head_layers=spec.head_layers
    )
    cost = AnalyticCost(model=spec, cluster=cluster, dtype=dtype.value)
    layers = spec.num_layers
    levels = tuple(dict.fromkeys((0, layers // 2, layers)))
    candidates = list(_known(search_space.schemes(layers, cluster, recomputed=levels), cost, cluster))
    _check_any_fits(candidates, spec, cluster)
    every = _known(search_space.schemes(layers, cluster), cost, cluster) if length else ()
    fits = sorted(
        (_fit(candidate, length) for candidate in every if length and candidate.max_tokens >= length),
        key=lambda fit: (fit.device_s, fit.candidate.num_devices),
    )
    if length and not fits:
        _refuse(candidates, length, cluster)
    if json:
        emit_json(_document(spec, cluster, candidates, fits, length))
    else:
        _print(spec, cluster, candidates)
        if length:
            _print_fits(fits, length)


def _known(schemes: Sequence[PipelineConfig], cost: AnalyticCost, cluster: ClusterSpec) -> Iterator[Candidate]:
    """Kinds of the schemes that ``cost`` has a price for and the cluster has the devices for, fitting or not."""
    for scheme in schemes:
        candidate = Candidate(scheme=scheme, cost=cost, num_cluster_devices=cluster.num_devices)
        try:
            if scheme.num_devices <= cluster.num_devices and candidate.max_tokens >= 0:
                yield candidate
        except InputError:
            continue  # such as more devices than the model has heads


def _check_any_fits(candidates: Sequence[Candidate], spec: ModelSpec, cluster: ClusterSpec) -> None:
    if not candidates:
        raise InputError(f"no scheme of {spec.name} fits on {cluster.name} with these --methods and limits; allow more")
    if not any(candidate.max_tokens for candidate in candidates):
        state_bytes = min(candidate.state_bytes for candidate in candidates)
        least, available = needed_and_available(state_bytes, cluster.device.memory_bytes)
        raise InfeasibleError(
            f"{spec.name} on {cluster.name}: no scheme fits a token; weights, gradients and each device's share of the "
            f"optimizer take at least {least}, a device has {available}. "
            "Use more or larger devices, or allow more schemes with --max-degree, --max-stages and --methods."
        )


def _refuse(candidates: Sequence[Candidate], length: int, cluster: ClusterSpec) -> None:
    leanest = max(candidates, key=lambda candidate: candidate.max_tokens)
    needed, available = needed_and_available(int(leanest.peak_bytes(np.asarray(length))), cluster.device.memory_bytes)
    raise InfeasibleError(
        f"a sequence of {length:,} tokens needs {needed} per device under the leanest scheme, "
        f"{leanest.scheme.name}; a device has {available}. The longest that fits has "
        f"{leanest.max_tokens:,} tokens. Use more or larger devices, or allow more schemes with --max-degree, "
        "--max-stages and --methods."
    )


def _fit(candidate: Candidate, length: int) -> FittingPipeline:
    stage_s = float(candidate.times_s(np.array([length]))[0]) + candidate.overhead_s
    return FittingPipeline(
        candidate=candidate,
        device_s=stage_s * candidate.num_devices,
        time_s=stage_s * candidate.num_stages,
        peak_bytes=int(candidate.peak_bytes(np.asarray(length))),
    )


def _describe(candidate: Candidate) -> dict[str, Any]:
    scheme = candidate.scheme
    return {
        "scheme": scheme.name,
        "degree": scheme.degree,
        "stages": scheme.num_stages,
        "method": str(scheme.methods[0]),
        "recomputed_layers": scheme.num_recomputed,
        "state_gib": candidate.state_bytes / GIB,
        "max_tokens": candidate.max_tokens,
    }


def _document(
    spec: ModelSpec,
    cluster: ClusterSpec,
    candidates: Sequence[Candidate],
    fits: Sequence[FittingPipeline],
    length: int | None,
) -> dict[str, Any]:
    chosen = [
        {
            **_describe(fit.candidate),
            "device_s": fit.device_s,
            "time_s": fit.time_s,
            "peak_gib": fit.peak_bytes / GIB,
        }
        for fit in fits
    ]
    return {
        "model": spec.name,
        "num_params": spec.num_params,
        "num_layers": spec.num_layers,
        "cluster": cluster.name,
        "not_priced": spec.unpriced or None,
        "memory_gib": cluster.device.memory_bytes / GIB,
        "longest": _describe(max(candidates, key=lambda candidate: candidate.max_tokens)),
        "schemes": [_describe(candidate) for candidate in candidates],
        "length": length,
        "cheapest": chosen[0] if chosen else None,
        "fits": chosen if length else None,
    }


def _print(spec: ModelSpec, cluster: ClusterSpec, candidates: Sequence[Candidate]) -> None:
    from rich.table import Table

    from lengthwise.report.units import compact, memory

    console = stdout()
    console.print(
        f"{spec.name}, {compact(spec.num_params)} parameters, on {cluster.name}, "
        f"{cluster.device.memory_bytes / GIB:g} GiB a device",
        soft_wrap=True,
    )
    if spec.unpriced:
        console.print(f"not priced: {spec.unpriced}", soft_wrap=True)
    levels = sorted({candidate.scheme.num_recomputed for candidate in candidates})
    console.print("longest sequence, or pack, in tokens:")
    shown = Table(box=None, pad_edge=False)
    for heading in ("degree", "stages"):
        shown.add_column(heading, justify="right")
    shown.add_column("method")
    shown.add_column("state", justify="right")
    for level in levels:
        shown.add_column(f"recompute {level} of {spec.num_layers}", justify="right")
    rows: dict[tuple[int, int, str], list[Candidate]] = {}
    for candidate in candidates:
        scheme = candidate.scheme
        rows.setdefault((scheme.degree, scheme.num_stages, str(scheme.methods[0])), []).append(candidate)
    for (degree, stages, method), held in rows.items():
        longest = {candidate.scheme.num_recomputed: candidate.max_tokens for candidate in held}
        cells = [f"{longest[level]:,}" if longest.get(level) else "-" for level in levels]
        shown.add_row(str(degree), str(stages), method, memory(held[0].state_bytes), *cells)
    console.print(shown)
    best = max(candidates, key=lambda candidate: candidate.max_tokens)
    console.print(f"longest: {best.max_tokens:,} tokens under {best.scheme.name}", soft_wrap=True)


def _print_fits(fits: Sequence[FittingPipeline], length: int) -> None:
    from rich.table import Table

    from lengthwise.report.units import memory, seconds

    console = stdout()
    console.print(
        f"\n{len(fits):,} schemes hold a sequence of {length:,} tokens; the least work is under", soft_wrap=True
    )
    shown = Table(box=None, pad_edge=False)
    shown.add_column("scheme")
    for heading in ("device-seconds", "time", "peak", "longest"):
        shown.add_column(heading, justify="right")
    for fit in fits[:SHOWN]:
        shown.add_row(
            fit.candidate.scheme.name, f"{fit.device_s:,.2f}", seconds(fit.time_s), memory(fit.peak_bytes),
            f"{fit.candidate.max_tokens:,}",
        )  # fmt: skip
    console.print(shown)
