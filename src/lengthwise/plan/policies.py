"""Policies by name: which sequences share a micro-batch, and which device computes it.

All take the sequences of the sampler as they are; they differ in what they balance.
"""

import numpy as np

from lengthwise.core.batch import GlobalBatch, Pack
from lengthwise.core.errors import InputError
from lengthwise.core.specs import nearest
from lengthwise.plan.planner import Planner, Policy
from lengthwise.plan.solve.binpack import first_fit_decreasing
from lengthwise.plan.solve.makespan import longest_first


def _padded(planner: Planner, batch: GlobalBatch) -> list[list[Pack]]:
    """A fixed number of sequences per micro-batch, in sampler order, each padded to its longest; dealt in turn."""
    share = -(-len(batch.ids) // planner.num_devices)
    size = planner.batch_size or max(1, min(planner.max_tokens // planner.max_length, share))
    packs = []
    for start in range(0, len(batch.ids), size):
        lengths = batch.lengths[start : start + size]
        packs.append(Pack(ids=batch.ids[start : start + size], lengths=lengths, padded_to=max(lengths)))
    return [packs[device :: planner.num_devices] for device in range(planner.num_devices)]


def _static(planner: Planner, batch: GlobalBatch) -> list[list[Pack]]:
    """Packs filled to the longest length of the run (the context length), dealt in turn: as many for every device."""
    packs = _fill(batch, min(planner.max_length, planner.max_tokens))
    return [packs[device :: planner.num_devices] for device in range(planner.num_devices)]


def _packed(planner: Planner, batch: GlobalBatch) -> list[list[Pack]]:
    """Packs filled to what memory holds, but at least one for each device; to the device with the fewest tokens."""
    share = max(max(batch.lengths), -(-batch.num_tokens // planner.num_devices))
    packs = _fill(batch, min(planner.max_tokens, share))
    devices: list[list[Pack]] = [[] for _ in range(planner.num_devices)]
    for pack in sorted(packs, key=lambda pack: -pack.num_tokens):
        min(devices, key=lambda held: sum(p.num_tokens for p in held)).append(pack)
    return devices


def _balanced(planner: Planner, batch: GlobalBatch) -> list[list[Pack]]:
    """Sequences to devices by predicted time, longest first; then the fewest micro-batches that memory allows."""
    times_s = planner.cost.sequence_times_s(np.asarray(batch.lengths), planner.scheme)
    jobs = longest_first(times_s, planner.num_devices)
    return [_fill(_subset(batch, sorted(held)), planner.max_tokens) if held else [] for held in jobs]


def _subset(batch: GlobalBatch, positions: list[int]) -> GlobalBatch:
    return GlobalBatch(
        step=batch.step,
        ids=tuple(batch.ids[i] for i in positions),
        lengths=tuple(batch.lengths[i] for i in positions),
    )


def _fill(batch: GlobalBatch, capacity: int) -> list[Pack]:
    return [
        Pack(ids=tuple(batch.ids[i] for i in items), lengths=tuple(batch.lengths[i] for i in items))
        for items in first_fit_decreasing(batch.lengths, capacity)
    ]


POLICIES: dict[str, Policy] = {"padded": _padded, "static": _static, "packed": _packed, "balanced": _balanced}


def find_policy(name: str) -> Policy:
    """The policy called ``name``.

    Raises:
        InputError: there is none; the message suggests the nearest.
    """
    if name not in POLICIES:
        raise InputError(f"no policy {name!r}; {nearest(name, POLICIES)}")
    return POLICIES[name]
