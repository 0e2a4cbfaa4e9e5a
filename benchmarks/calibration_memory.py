"""Peak memory that others published beside what our closed forms say of their runs.

Model state, activations and loss are those of *their* runs, which differ from ours: FSDP has float32 weights and
gathers units of a layer in bfloat16, ZeRO-1 has whole weights and float32 gradients, and most compute the loss of all
tokens at once. What layers keep and what their backwards take beside it is what our plans are made of, unchanged.
"""

from collections.abc import Sequence

import numpy as np
from calibration_run import Row
from pages import Section, at_most, say

from lengthwise.core.device_spec import CONTEXT_BYTES
from lengthwise.core.wording import GIB
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.cost.memory_model import largest_unit
from lengthwise.cost.weight_shards import held_params

LOGIT_BYTES = {"whole": 10, "copied": 14, "chunked": 2, "tiled": 0}
"""Of one logit beyond chunks: the loss of all tokens at once has it in bfloat16, in float32, and its gradient, and
where float32 logits stay, these; torchtune computes only the loss in chunks."""
OFF = 0.15
"""Relative error of a row that is explained."""
REASONS = {
    ("torchao", "B200-180GB"): "the page of the same run on H100s has 47.65 GiB: something is not printed",
    ("megatron-lm", "H100-80GB"): "all that the process has: fragments of its allocator and buffers of NCCL and "
    "Transformer Engine are in it",
    ("alst", "H200-141GB"): "the run with tiles; how much its allocator had reserved is not said",
    ("alst", "H100-80GB"): "where activations are on the host, its memory may be the limit",
}
"""Why rows are likely to be off."""
KINDS = ("allocated", "reserved", "device", "stated")


def state_bytes(row: Row, stage: int) -> tuple[float, float]:
    """Bytes of the model state on a rank of ``stage`` as the row's system keeps it; of gradients that a step's only
    backward makes, of which the loss sees none."""
    num_params, unit = row.model.num_params, largest_unit(row.model)
    held = held_params(row.model, row.scheme, stage=stage)
    if row.sharding.startswith("one"):  # weights, moments and gradients in bfloat16, these of one unit where fused
        return 6 * num_params, 2 * (unit if row.sharding == "one-fused" else num_params)
    if row.sharding == "zero1":
        group = row.num_devices // row.num_model_ranks
        if row.system == "colossalai":  # ZeRO-2 keeps a share of the gradients
            return (2 + 16 / group) * held, 0.0
        return (6 + 12 / group) * held, 0.0
    gathered = (2 * 2 + 2 + row.reduced_bytes) * unit
    if "weights" in row.host:
        return gathered, 0.0
    width, moments = (2, 0) if "optimizer" in row.host else (4, 8)
    shard = num_params / row.num_devices
    return (width + moments) * shard + gathered, width * shard


def peak_bytes(row: Row, stage: int) -> float:
    """Bytes at most on a rank of ``stage``, of which a step's gradients come as activations go."""
    cost = AnalyticCost(model=row.model, cluster=row.cluster(row.device))
    tokens, is_last = sum(row.lengths) // row.context, stage == row.scheme.num_stages - 1
    share = tokens / row.scheme.degree
    moments = cost.stage_memory(row.scheme, stage, num_devices=1).moments
    least = min(moment.activations.per_token for moment in moments)
    state, gradients = state_bytes(row, stage)
    totals = [
        moment.activations.at(tokens) + moment.temporary.at(tokens)
        + gradients * (moment.activations.per_token == least)
        for moment in moments
    ]  # fmt: skip
    if is_last:
        logits = LOGIT_BYTES[row.loss] * row.model.vocab_size * share
        if row.loss in ("whole", "copied"):
            totals[-2:] = [moments[-2].activations.per_token * tokens]
        totals.append(totals[-1] + logits)
    return state + max(totals) + kept_beside_bytes(row, stage) * share


def kept_beside_bytes(row: Row, stage: int) -> float:
    """Bytes per token of a rank that a system's layers keep and ours do not.

    Where operations between products are not fused, the activation's output before it meets the gate, and the inputs of
    both norms in float32. Nanotron also keeps both inputs that tensor parallelism has gathered, and ALST in a layer's
    attention queries, keys and values as they are before, in and after the exchange.
    """
    scheme, model = row.scheme, row.model
    kept = sum(not scheme.recompute[layer] for layer in scheme.layers_of_stage(stage))
    kept = 1 if any(scheme.recompute) else kept * (scheme.num_stages - stage)
    unfused = row.is_unfused * (2 * model.ffn_size + 2 * 4 * model.hidden_size)
    gathered = (row.system == "nanotron") * 2 * 2 * model.hidden_size * (scheme.degree - 1)
    is_exchanged = row.system == "alst" and scheme.degree > 1
    exchanged = is_exchanged * 3 * 2 * (model.num_heads + 2 * model.num_kv_heads) * model.head_size
    return float(kept * (unfused + gathered) + exchanged)


def predicted_gib(row: Row) -> tuple[float, float]:
    """Model state, and all, of the fullest stage."""
    context = CONTEXT_BYTES if row.memory_kind == "device" else 0
    stages = [(peak_bytes(row, stage), sum(state_bytes(row, stage))) for stage in range(row.scheme.num_stages)]
    peak, state = max(stages)
    return state / GIB, (peak + context) / GIB


def published_gib(row: Row) -> float:
    """Peak memory as published; of a longest length that fitted, all that the device has."""
    return row.memory_gib or row.device.memory_bytes / GIB


def memory_sections(rows: Sequence[Row]) -> list[Section]:
    """Peak memory, predicted beside published, and longest lengths beside what devices have."""
    printed = [row for row in rows if row.memory_kind in KINDS]
    ratios = np.array([predicted_gib(row)[1] / published_gib(row) for row in printed])
    kinds = np.array([row.memory_kind for row in printed])
    by_kind = [
        (kind, len(mine), f"{np.median(mine):.2f}", f"{mine[np.abs(mine - 1).argmax()]:.2f}")
        for kind in KINDS
        for mine in [ratios[kinds == kind]]
    ]
    off = np.abs(ratios - 1)
    goals = (
        at_most("peak memory, predicted beside published: median", float(np.median(off)), 0.10, "%"),
        at_most("peak memory, predicted beside published: worst", float(off.max()), 0.25, "%"),
    )
    kinds_section = Section(
        title=f"Peak memory: {len(printed)} rows",
        text="Ratio of predicted to published memory. Allocated: by tensors, which is what is predicted. Reserved: by "
        "the allocator, which keeps more. Device: all that the process has; a GiB is added for its context. Stated: "
        "which of these is not said.",
        head=("what is published", "rows", "median ratio", "furthest from 1"),
        rows=by_kind,
        goals=goals,
    )
    table = Section(
        title="Memory, predicted beside published",
        text="GiB of the fullest rank. Model state and loss as the systems have them; what layers keep and what their "
        "backwards take as our plans count it. Where operations are not fused, layers also keep the activation's "
        "output and their norms' inputs in float32; nanotron keeps what tensor parallelism has gathered; ALST has "
        "queries, keys and values of a layer before, in and after their exchange at once, which its code was not read "
        "for. These and the bytes of a logit were decided with published numbers in view.",
        head=("system", "device", "ranks", "run", "what", "published", "predicted", "state", "ratio", "likely reason"),
        rows=[_memory_cells(row) for row in printed],
    )
    longest = Section(
        title="Longest lengths that fitted, beside the device's memory",
        text="ALST's tables give the longest sequence of each configuration, in steps of tens of thousands of tokens "
        "and more: predicted memory should be near what the device has.",
        head=("system", "device", "ranks", "run", "what", "memory", "predicted", "state", "ratio", "likely reason"),
        rows=[_memory_cells(row) for row in rows if row.memory_kind == "longest"],
    )
    return [say(kinds_section), say(table), say(longest)]


def _memory_cells(row: Row) -> tuple[str | int, ...]:
    (state, peak), published = predicted_gib(row), published_gib(row)
    reason = REASONS.get((row.system, row.device.name), "") if abs(peak / published - 1) > OFF else ""
    return (
        row.system, row.device.name, row.num_devices, row.label, row.memory_kind, f"{published:.1f}", f"{peak:.1f}",
        f"{state:.1f}", f"{peak / published:.2f}", reason,
    )  # fmt: skip
