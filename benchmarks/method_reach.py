"""The longest sequence that fits a fixed number of bytes per rank, by method: measured, not only derived."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from method_layers import layer
from method_ranks import METHODS, Kept, Ranks, execution_of
from pages import Section

from lengthwise.core.pipeline_config import WEIGHTS_OF, Method, WeightPlacement
from lengthwise.core.specs import ModelSpec
from lengthwise.cost.analytic.volume import layer_volume

DEGREE = 4
STEP = 2 * DEGREE
"""Tokens: as many for every rank."""
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and what a rank may use."""

    spec: ModelSpec
    budget_bytes: int


LONG = Case(spec=layer("narrow", hidden=64, heads=4, ffn=256, layers=3), budget_bytes=24 * MIB)
HEAVY = Case(spec=layer("wide", hidden=256, heads=8, ffn=1024, layers=4), budget_bytes=40 * MIB)


@dataclass(frozen=True, kw_only=True)
class Reach:
    """What one method needs."""

    method: Method
    num_tokens: int
    """The longest sequence that fits; 0: none."""
    bytes_per_token: float
    """Measured, of the whole model, on the rank that keeps most."""
    fixed_bytes: int
    """Weights, their gradients, gathered buffers."""
    held_bytes: int
    """At ``num_tokens``, measured."""
    with_live: int
    """The longest if one layer's communication buffers count too."""


def forward_bytes(spec: ModelSpec, method: Method, num_tokens: int) -> tuple[int, int]:
    """What this rank keeps for the backward after the whole forward, loss included; and its weights and gradients."""
    model, execution = execution_of(spec, method, (num_tokens,))
    with Kept(model, execution, integers=True) as kept:
        loss = model.run(execution)
    assert torch.isfinite(loss)
    return kept.num_bytes, sum(2 * one.numel() * one.element_size() for one in model.parameters())


def reach(case: Case, method: Method, ranks: Ranks) -> Reach:
    """By two measurements, a straight line, and a third to prove it."""
    spec = case.spec
    volume = layer_volume(spec, method, degree=DEGREE, dtype="float32")

    def measured(num_tokens: int) -> tuple[int, int]:
        found = ranks.run(forward_bytes, spec, method, num_tokens)
        return max(kept for kept, _ in found), max(state for _, state in found) + round(
            max(volume.buffer_bytes, volume.reduce_bytes)
        )

    (few, fixed), (more, _) = measured(STEP * 16), measured(STEP * 32)
    slope = (more - few) / (STEP * 16)
    rest = fixed + few - slope * STEP * 16

    def longest(per_token: float) -> int:
        return max(0, int((case.budget_bytes - rest) / per_token) // STEP * STEP)

    num_tokens = longest(slope)
    held = measured(num_tokens)[0] + fixed if num_tokens else 0
    while held > case.budget_bytes:
        num_tokens -= STEP
        held = measured(num_tokens)[0] + fixed
    return Reach(
        method=method, num_tokens=num_tokens, bytes_per_token=slope, fixed_bytes=fixed, held_bytes=held,
        with_live=longest(slope + volume.live_bytes),
    )  # fmt: skip


def section(case: Case, ranks: Mapping[int, Ranks], *, title: str, after: str) -> Section:
    """Methods, those that reach farthest first."""
    spec = case.spec
    found = sorted((reach(case, method, ranks[DEGREE]) for method in METHODS), key=lambda one: -one.num_tokens)
    second = next(one.num_tokens for one in found if one.method is not Method.METP)
    rows = [_row(one, spec, second) for one in found]
    return Section(
        title=title,
        text=f"{DEGREE} ranks, {spec.num_layers} layers of width {spec.hidden_size}, {spec.num_heads} heads of "
        f"{spec.head_size}, feed-forward {spec.ffn_size}, float32, no recompute, one causal sequence, "
        f"**{case.budget_bytes // MIB} MiB a rank**: what autograd keeps after the forward with its loss, on the rank "
        "that keeps most (measured), its weights and their gradients (measured), gathered weights and gradients of one "
        "layer (closed form). The optimizer, kernels' workspaces and communication buffers are not counted; the last "
        "column counts the buffers of one layer (closed form).",
        head=(
            "method", "weights", "longest, tokens", "over the best but metp", "bytes a token", "per layer, closed form",
            "fixed, MiB", "held, MiB", "with buffers, tokens",
        ),
        rows=rows,
        after=after,
    )  # fmt: skip


def _row(one: Reach, spec: ModelSpec, second: int) -> list[str]:
    volume = layer_volume(spec, one.method, degree=DEGREE, dtype="float32")
    fits = one.num_tokens > 0
    return [
        one.method, "sharded" if WEIGHTS_OF[one.method] is WeightPlacement.SHARDED else "whole",
        f"{one.num_tokens:,}" if fits else "none", f"{one.num_tokens / second:.2f}x", f"{one.bytes_per_token:,.0f}",
        f"{volume.kept_bytes:,.0f}", f"{one.fixed_bytes / MIB:.1f}", f"{one.held_bytes / MIB:.2f}" if fits else "",
        f"{one.with_live:,}",
    ]  # fmt: skip
