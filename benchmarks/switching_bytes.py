"""Bytes that pulls and pushes send, beside what the layouts say must move, and whatever came before."""

import numpy as np
import torch
from pages import Section, at_most
from switching_runs import POOL, RANKS, SPEC, plan_of
from switching_time import Visits

from lengthwise.core.layout import Layout, transfers
from lengthwise.runtime.models.registry import empty_model
from lengthwise.runtime.state.table import ParameterTable

ELEMENT_BYTES = torch.float32.itemsize


def must_move(owned: Layout, computed: Layout) -> int:
    """Elements that some rank computes with and does not own, counted one by one."""
    total = 0
    for rank in range(owned.num_ranks):
        held, own = _mask(computed, rank), _mask(owned, rank)
        total += int((held & ~own).sum())
    return total


def sent_by_rank(owned: Layout, computed: Layout) -> list[int]:
    """Elements that each rank sends in a pull, of the transfers that ``core.layout`` finds."""
    sent = [0] * owned.num_ranks
    for move in transfers(owned, computed):
        sent[move.source] += move.num_elements * (move.source != move.target)
    return sent


def section(visits: Visits) -> Section:
    """Every strategy."""
    table = ParameterTable.of(empty_model(SPEC))
    owned = table.sharded(RANKS)
    rows, worst, drift = [], 0, 0
    for name in POOL:
        computed = table.propagation(plan_of(name, 0, seed=0).holdings(0))
        expected = must_move(owned, computed) * ELEMENT_BYTES
        steps = [step for found in visits.of(name) for step in found]
        sums = {(sum(one.pulled for one in step), sum(one.pushed for one in step)) for step in steps}
        by_rank = {tuple((one.pulled, one.pushed) for one in step) for step in steps}
        off = max(abs(value - expected) for pair in sums for value in pair)
        sent = [elements * ELEMENT_BYTES for elements in sent_by_rank(owned, computed)]
        off = max(off, *(abs(pair[0] - wanted) for ranks in by_rank for pair, wanted in zip(ranks, sent)))
        worst, drift = max(worst, off), max(drift, len(by_rank) - 1)
        held = [computed.num_held(rank) / table.num_elements for rank in range(RANKS)]
        pulled, pushed = sorted(sums)[0]
        most = max(one.pulled + one.pushed for step in steps for one in step)
        share = f"{min(held):.0%}" if max(held) - min(held) < 0.005 else f"{min(held):.0%} to {max(held):.0%}"
        cells = [f"{count / 1e6:.3f}" for count in (pulled, pushed, expected, most)]
        rows.append([name, share, *cells, off, len(by_rank)])
    return Section(
        title="Bytes of pull and push",
        text="Of one step, all ranks together, in MB, counted where every collective is posted. *Closed form*: "
        "elements that a rank computes with and does not own, counted one by one over the two layouts, summed over "
        "ranks; a push is the same the other way. Both directions move float32 here; with bfloat16 weights a pull is "
        "half of that. *Difference* is the largest of any step and of any rank, whose own share is worked out from "
        "`core.layout.transfers`. *Different counts*: how many distinct byte counts were seen over all steps of a "
        "strategy, whatever strategy came before.",
        head=(
            "strategy",
            "weights a rank computes with",
            "pull",
            "push",
            "closed form, each way",
            "rank that sends most, both ways",
            "difference, bytes",
            "different counts",
        ),
        rows=rows,
        goals=(
            at_most("bytes of every pull and push: difference from the closed form", float(worst), 0.0, "bytes"),
            at_most(
                "bytes of a strategy's pull and push: what depends on the strategy before", float(drift), 0.0, "counts"
            ),
        ),
    )


def _mask(layout: Layout, rank: int) -> np.ndarray:
    mask = np.zeros(layout.num_elements, dtype=bool)
    for start, end in layout.intervals[rank]:
        mask[start:end] = True
    return mask
