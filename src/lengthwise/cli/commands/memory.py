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
from lengthwise.core.specs import GIB, ClusterSpec, ModelSpec, model_preset, needed_and_available
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.plan.space.candidate import Candidate
from lengthwise.plan.space.search_space import SearchSpace
from lengthwise.session.console import emit_json, stdout
from lengthwise.session.planning_args import make_cluster, parse_methods

SHOWN = 5
"""Schemes that the table for a length lists."""


@dataclass(frozen=True, kw_only=True)
class FittingPipeline:
    """One sequence alone on one pipeline of a kind that holds it."""

    kind: Candidate
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
    devices_per_node: DevicesPerNode = 8,
    max_degree: MaxDegree = None,
    max_stages: MaxStages = None,
    methods: Methods = None,
    dtype: DtypeOption = Dtype.BFLOAT16,
    json: Json = False,
) -> None:
    """Show the longest sequence, or pack, of every scheme, and what would fit a given length at the least cost."""
    spec = model_preset(model)
    cluster = make_cluster(device, gpus, devices_per_node=devices_per_node, memory_gib=hbm)
    pool = SearchSpace(
        max_degree=max_degree, max_stages=max_stages, methods=parse_methods(methods), head_layers=spec.head_layers
    )
    cost = AnalyticCost(model=spec, cluster=cluster, dtype=dtype.value)
    layers = spec.num_layers
    levels = tuple(dict.fromkeys((0, layers // 2, layers)))
    kinds = list(_known(pool.schemes(layers, cluster, recomputed=levels), cost, cluster))
    _check_any_fits(kinds, spec, cluster)
    every = _known(pool.schemes(layers, cluster), cost, cluster) if length else ()
    fits = sorted(
        (_fit(kind, length) for kind in every if length and kind.max_tokens >= length),
        key=lambda fit: (fit.device_s, fit.kind.num_devices),
    )
    if length and not fits:
        _refuse(kinds, length, cluster)
    if json:
        emit_json(_document(spec, cluster, kinds, fits, length))
    else:
        _print(spec, cluster, kinds)
        if length:
            _print_fits(fits, length)


def _known(schemes: Sequence[PipelineConfig], cost: AnalyticCost, cluster: ClusterSpec) -> Iterator[Candidate]:
    """Kinds of the schemes that ``cost`` has a price for and the cluster has the devices for, fitting or not."""
    for scheme in schemes:
        kind = Candidate(scheme=scheme, cost=cost, num_cluster_devices=cluster.num_devices)
        try:
            if scheme.num_devices <= cluster.num_devices and kind.max_tokens >= 0:
                yield kind
        except InputError:
            continue  # such as more devices than the model has heads


def _check_any_fits(kinds: Sequence[Candidate], spec: ModelSpec, cluster: ClusterSpec) -> None:
    if not kinds:
        raise InputError(f"no scheme of {spec.name} fits on {cluster.name} with these --methods and limits; allow more")
    if not any(kind.max_tokens for kind in kinds):
        state_bytes = min(kind.state_bytes for kind in kinds)
        least, available = needed_and_available(state_bytes, cluster.device.memory_bytes)
        raise InfeasibleError(
            f"{spec.name} on {cluster.name}: no scheme fits a token; weights, gradients and each device's share of the "
            f"optimizer take at least {least}, a device has {available}. "
            "Use more or larger devices, or allow more schemes with --max-degree, --max-stages and --methods."
        )


def _refuse(kinds: Sequence[Candidate], length: int, cluster: ClusterSpec) -> None:
    leanest = max(kinds, key=lambda kind: kind.max_tokens)
    needed, available = needed_and_available(int(leanest.peak_bytes(np.asarray(length))), cluster.device.memory_bytes)
    raise InfeasibleError(
        f"a sequence of {length:,} tokens needs {needed} per device under the leanest scheme, "
        f"{leanest.scheme.name}; a device has {available}. The longest that fits has "
        f"{leanest.max_tokens:,} tokens. Use more or larger devices, or allow more schemes with --max-degree, "
        "--max-stages and --methods."
    )


def _fit(kind: Candidate, length: int) -> FittingPipeline:
    stage_s = float(kind.times_s(np.array([length]))[0]) + kind.overhead_s
    return FittingPipeline(
        kind=kind,
        device_s=stage_s * kind.num_devices,
        time_s=stage_s * kind.num_stages,
        peak_bytes=int(kind.peak_bytes(np.asarray(length))),
    )


def _describe(kind: Candidate) -> dict[str, Any]:
    scheme = kind.scheme
    return {
        "scheme": scheme.name,
        "degree": scheme.degree,
        "stages": scheme.num_stages,
        "method": str(scheme.methods[0]),
        "recomputed_layers": scheme.num_recomputed,
        "state_gib": kind.state_bytes / GIB,
        "max_tokens": kind.max_tokens,
    }


def _document(
    spec: ModelSpec,
    cluster: ClusterSpec,
    kinds: Sequence[Candidate],
    fits: Sequence[FittingPipeline],
    length: int | None,
) -> dict[str, Any]:
    chosen = [
        {
            **_describe(fit.kind),
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
        "memory_gib": cluster.device.memory_bytes / GIB,
        "longest": _describe(max(kinds, key=lambda kind: kind.max_tokens)),
        "schemes": [_describe(kind) for kind in kinds],
        "length": length,
        "cheapest": chosen[0] if chosen else None,
        "fits": chosen if length else None,
    }


def _print(spec: ModelSpec, cluster: ClusterSpec, kinds: Sequence[Candidate]) -> None:
    from rich.table import Table

    from lengthwise.report.units import compact, memory

    console = stdout()
    console.print(
        f"{spec.name}, {compact(spec.num_params)} parameters, on {cluster.name}, "
        f"{cluster.device.memory_bytes / GIB:g} GiB a device",
        soft_wrap=True,
    )
    levels = sorted({kind.scheme.num_recomputed for kind in kinds})
    console.print("longest sequence, or pack, in tokens:")
    shown = Table(box=None, pad_edge=False)
    for heading in ("degree", "stages"):
        shown.add_column(heading, justify="right")
    shown.add_column("method")
    shown.add_column("state", justify="right")
    for level in levels:
        shown.add_column(f"recompute {level} of {spec.num_layers}", justify="right")
    rows: dict[tuple[int, int, str], list[Candidate]] = {}
    for kind in kinds:
        scheme = kind.scheme
        rows.setdefault((scheme.degree, scheme.num_stages, str(scheme.methods[0])), []).append(kind)
    for (degree, stages, method), held in rows.items():
        longest = {kind.scheme.num_recomputed: kind.max_tokens for kind in held}
        cells = [f"{longest[level]:,}" if longest.get(level) else "-" for level in levels]
        shown.add_row(str(degree), str(stages), method, memory(held[0].state_bytes), *cells)
    console.print(shown)
    best = max(kinds, key=lambda kind: kind.max_tokens)
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
            fit.kind.scheme.name, f"{fit.device_s:,.2f}", seconds(fit.time_s), memory(fit.peak_bytes),
            f"{fit.kind.max_tokens:,}",
        )  # fmt: skip
    console.print(shown)
