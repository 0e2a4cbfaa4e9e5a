"""The longest sequence that each parallel configuration holds, and the cheapest configuration for a length."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lengthwise.core.errors import InfeasibleError, InputError
from lengthwise.core.garbage import collection_paused
from lengthwise.core.specs import ClusterSpec, ModelSpec
from lengthwise.core.wording import GIB, counted, needed_and_available
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.plan.space.candidate import Candidate, most_tokens
from lengthwise.plan.space.search_space import SearchSpace
from lengthwise.session.ladder_rungs import LadderRung, memory_ladder
from lengthwise.session.length_candidates import LengthSearch, holding_more, priced, schemes_of


@dataclass(frozen=True, kw_only=True)
class FittingPipeline:
    """One sequence alone on one pipeline of a candidate that holds it."""

    candidate: Candidate
    device_s: float
    """Seconds of work, over all devices of the pipeline."""
    time_s: float
    """Seconds from the first stage to the last."""
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class MemoryLimits:
    """What fits on a cluster."""

    model: ModelSpec
    cluster: ClusterSpec
    candidates: tuple[Candidate, ...]
    """Every scheme with no, half and all of its layers recomputed, those that hold nothing included; with whole and
    with sharded gradients, where both are allowed."""
    length: int | None = None
    """The sequence that was asked for."""
    fits: tuple[FittingPipeline, ...] = ()
    """Schemes that hold it, the least work first; with offload, tiles and a state on the host where that pays or longer
    sequences need it, with groups of heads, or else slices, where nothing else holds it."""
    ladder: tuple[LadderRung, ...] = ()
    """The longest sequence with each thing in turn that frees memory; where no length is asked for."""

    @property
    def longest(self) -> Candidate:
        """The scheme that holds the longest sequence."""
        fitting = (fit.candidate for fit in self.fits)
        return max((*self.candidates, *fitting), key=lambda candidate: candidate.max_tokens)

    def to_json(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        fits = [
            {
                **_describe(fit.candidate),
                "device_s": fit.device_s,
                "time_s": fit.time_s,
                "peak_gib": fit.peak_bytes / GIB,
            }
            for fit in self.fits
        ]
        return {
            "model": self.model.name,
            "num_params": self.model.num_params,
            "num_layers": self.model.num_layers,
            "not_priced": self.model.unpriced or None,
            "cluster": self.cluster.name,
            "host_memory_gib": self.cluster.device.host_memory_bytes / GIB,
            "memory_gib": self.cluster.device.memory_bytes / GIB,
            "margin_gib": self.cluster.device.margin_bytes / GIB,
            "longest": _describe(self.longest),
            "schemes": [_describe(candidate) for candidate in self.candidates],
            "length": self.length,
            "cheapest": fits[0] if fits else None,
            "fits": fits if self.length else None,
            "ladder": [rung.to_json() for rung in self.ladder] if not self.length else None,
        }


@collection_paused()
def memory_limits(
    model: ModelSpec,
    cluster: ClusterSpec,
    search_space: SearchSpace,
    *,
    dtype: str,
    length: int | None = None,
    narrow_gradients: bool = False,
) -> MemoryLimits:
    """Find what fits, and what holds a sequence of ``length`` tokens with the least work.

    ``narrow_gradients``: gradients are added up in ``dtype``, not in float32.

    Raises:
        InputError: no scheme within the limits has a cost.
        InfeasibleError: no scheme fits a token, or none fits ``length``.
    """
    if 0 < model.max_positions < (length or 0):
        raise InputError(
            f"a sequence of {length:,} tokens is longer than the {model.max_positions:,} positions that {model.name} "
            f"has learned; give --length {model.max_positions} or less, or a model with rotary positions"
        )
    cost = AnalyticCost(model=model, cluster=cluster, dtype=dtype, narrow_gradients=narrow_gradients)
    num_layers = model.num_layers
    asked, levels = search_space, tuple(dict.fromkeys((0, num_layers // 2, num_layers)))
    candidates = tuple(priced(schemes_of(search_space, cost, recomputed=levels), cost, cluster))
    if search_space.methods is None and most_tokens(candidates) < (length or 1):
        search_space = search_space.widest
        candidates = tuple(priced(schemes_of(search_space, cost, recomputed=levels), cost, cluster))
    on_host = cost.with_state_on_host()
    costs = (cost, on_host)[: 1 + on_host.state_on_host]
    if not length:
        ladder = memory_ladder(asked, cost, on_host)
        if not ladder:
            spare = priced(schemes_of(search_space, on_host), on_host, cluster) if on_host.state_on_host else ()
            _check_any_fits([*candidates, *spare], costs, asked)
        return MemoryLimits(model=model, cluster=cluster, candidates=candidates, ladder=ladder)
    search = LengthSearch(search_space=search_space, costs=costs)
    every = search.candidates_for(length)
    fitting = [candidate for candidate in every if candidate.max_tokens >= length]
    if not fitting:
        _check_any_fits(every, costs, asked)
        every = holding_more(search.candidates_for, most_tokens(every)) or every
        fitting = [candidate for candidate in every if candidate.max_tokens >= length]
    if not fitting:
        _refuse(every, length, cluster)
    fits = [_fit(candidate, length) for candidate in fitting]
    fits.sort(key=lambda fit: (fit.device_s, fit.candidate.num_devices))
    return MemoryLimits(model=model, cluster=cluster, candidates=candidates, length=length, fits=tuple(fits))


def _check_any_fits(candidates: Sequence[Candidate], costs: Sequence[AnalyticCost], search_space: SearchSpace) -> None:
    """Raise if none of the candidates holds a token: ``InputError`` where there are none at all, as by their limits."""
    model, cluster = costs[0].model, costs[0].cluster
    on = f"{model.name} on {cluster.name}"
    if not candidates:
        raise InputError(f"no scheme of {on} fits with these --methods and limits; allow more")
    if not most_tokens(candidates):
        raise search_space.refusal(costs, cluster, model.num_layers, subject=f"{on}: ")


def _refuse(candidates: Sequence[Candidate], length: int, cluster: ClusterSpec) -> None:
    leanest = max(candidates, key=lambda candidate: candidate.max_tokens)
    if leanest.is_limited_by_host:
        needed, available = needed_and_available(leanest.host_bytes(length), cluster.device.host_memory_bytes)
        raise InfeasibleError(
            f"a sequence of {counted(length, 'token')} puts {needed} per device into host memory under the leanest "
            f"scheme, {leanest.scheme.name}; a device's share of the host has {available}. The longest that fits has "
            f"{counted(leanest.max_tokens, 'token')}. Give --host-memory if there is more, or more or larger devices.",
            what="a sequence", value=length, limit=leanest.max_tokens, unit="tokens",
        )  # fmt: skip
    needed, available = needed_and_available(int(leanest.peak_bytes(np.asarray(length))), cluster.device.memory_bytes)
    raise InfeasibleError(
        f"a sequence of {counted(length, 'token')} needs {needed} per device under the leanest scheme, "
        f"{leanest.scheme.name}; a device has {available}. The longest that fits has "
        f"{counted(leanest.max_tokens, 'token')}. Use more or larger devices, or allow more schemes with --max-degree, "
        "--max-stages and --methods.",
        what="a sequence", value=length, limit=leanest.max_tokens, unit="tokens",
    )  # fmt: skip


def _fit(candidate: Candidate, length: int) -> FittingPipeline:
    stage_s = float(candidate.times_s(np.array([length]))[0]) + candidate.overhead_s
    return FittingPipeline(
        candidate=candidate,
        device_s=stage_s * candidate.num_devices,
        time_s=stage_s * candidate.flow_stages,
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
        "offloaded_layers": scheme.num_offloaded,
        "tile_tokens": scheme.tile_tokens,
        "sharded_gradients": scheme.shard_gradients,
        "slices": scheme.slices,
        "state_gib": candidate.state_bytes / GIB,
        "max_tokens": candidate.max_tokens,
    }
