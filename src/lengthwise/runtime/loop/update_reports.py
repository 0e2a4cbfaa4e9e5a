"""What every rank reports when a step is updated, and how these reports may disagree."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lengthwise.core.errors import InfeasibleError
from lengthwise.core.step_plan import StepPlan
from lengthwise.runtime.comm.differences import ranks_text
from lengthwise.runtime.comm.out_of_memory import MicroBatchFailure
from lengthwise.runtime.comm.world import DistContext
from lengthwise.runtime.loop.call_order import RankOperation, RankReports, bits_of, float_of, sync_ranks
from lengthwise.runtime.loop.loop_ledger import MOST_WITHOUT_LOSS, num_planned
from lengthwise.runtime.loop.loss_weighing import Weighing
from lengthwise.runtime.loop.planned_pipelines import LoopMicroBatch
from lengthwise.runtime.wrap.collator import PackCollator
from lengthwise.runtime.wrap.context import PackShard

NUM_DIGESTS = 4
"""Phases whose sequences are compared between the ranks that share them."""


MOST_NAMED = 8
"""Sequences whose numbers a message has."""


@dataclass(frozen=True, kw_only=True)
class OwnUpdate:
    """What this rank brings to an update."""

    weighing: Weighing
    failure: tuple[int, int]
    """Pipeline and micro-batch in which it ran out of memory; -1 if in none."""
    weights: Sequence[int]
    """The fingerprint of its weights, and whether a loop changed them."""
    lr: float
    micro_batches: Sequence[LoopMicroBatch]
    """The micro-batches, or slices of them, that it takes part in."""
    shards: Mapping[int, PackShard]
    """Their shards by position."""
    has_late_gradients: bool = False
    """Whether a backward added to gradients that it had pushed."""

    def report(self, world: DistContext, step: int, problem: str) -> RankReports:
        """Report it to all ranks; ``problem``: why this rank cannot update.

        Raises:
            CheckError: ranks are at different operations.
        """
        fingerprint, is_changed = self.weights
        host_bytes = max((shard.host_bytes for shard in self.shards.values()), default=0)
        values = [
            bits_of(float(self.weighing.by_target)), self.weighing.num_targets, *self.failure, fingerprint,
            int(is_changed), bits_of(self.lr), *read_digests(self.micro_batches, self.shards),
            bits_of(self.weighing.direct), int(self.weighing.uses), host_bytes, int(self.has_late_gradients),
            *self._num_computed(world.rank),
        ]  # fmt: skip
        reports = sync_ranks(world, RankOperation.UPDATE, step, values=values, note=problem)
        reports.check_same(RankOperation.LEAVE, RankOperation.UPDATE)
        return reports

    def _num_computed(self, rank: int) -> tuple[int, int]:
        """Sequences and tokens whose backward came to its end here, on the first rank of the first stage."""
        done = [self.micro_batches[position] for position, shard in self.shards.items() if shard.is_finished]
        packs = [
            micro_batch.pipeline.micro_batches[micro_batch.part.micro_batch].pack
            for micro_batch in done
            if micro_batch.is_first_of_pack and micro_batch.pipeline.ranks[0] == rank
        ]
        return sum(len(pack.ids) for pack in packs), sum(sum(pack.lengths) for pack in packs)


def disagreement_of(reports: RankReports, plan: StepPlan) -> str:
    """Why no rank may update; an empty string: all may."""
    if RankOperation.LEAVE in reports.operations:
        return f"{reports.notes_text()}; so no rank updates, and the step comes again"
    if any(reports.notes):
        return reports.notes_text()
    if len(set(reports.column(6))) > 1:
        rates = ", ".join(f"{float_of(bits):g}" for bits in reports.column(6))
        return f"lr is {rates} on ranks 0 to {len(reports.notes) - 1}; it has to be the same on every rank"
    if differing := _ranks_that_read_differently(reports, plan):
        return (
            f"{ranks_text(differing)} share sequences, but read other tokens or labels for them; give every rank the "
            "same corpus, whose items are the same whenever they are read"
        )
    return not_computed(reports, plan)


def not_computed(reports: RankReports, plan: StepPlan) -> str:
    """Which sequences of ``plan`` had no backward on any rank; an empty string: all had theirs."""
    computed, planned = (sum(reports.column(15)), sum(reports.column(16))), num_planned(plan)
    if computed != planned:
        return (
            f"ranks ran a backward of {computed[0]:,} sequences with {computed[1]:,} tokens, and the step has "
            f"{planned[0]:,} with {planned[1]:,}; compare its plan with the items that were brought"
        )
    return ""


def failures_of(reports: RankReports) -> tuple[MicroBatchFailure, ...]:
    """The micro-batches for which ranks had too little memory."""
    return tuple(
        MicroBatchFailure(rank=rank, pipeline=pipeline, micro_batch=index, host_bytes=host_bytes)
        for rank, (pipeline, index, host_bytes) in enumerate(zip(*map(reports.column, (2, 3, 13))))
        if pipeline >= 0
    )


def failure_text(plan: StepPlan, failure: MicroBatchFailure) -> str:
    """Say which rank ran out of memory, and with how many tokens."""
    pack = plan.pipelines[failure.pipeline].micro_batches[failure.micro_batch].pack
    return f"step {plan.step}: {failure.text} in a micro-batch of {pack.num_tokens:,} tokens"


def without_loss(plan: StepPlan, collator: PackCollator, *, is_skipped: bool = False) -> str:
    """Say which items of a step have no loss between them, and that it is skipped or what helps."""
    packs = [planned.pack for pipeline in plan.pipelines for planned in pipeline.micro_batches]
    ids = sorted({sequence for pack in packs for sequence in pack.ids})
    items = sorted({item for pack in packs for item in collator.items(collator.members(collator.computed(pack)))})
    listed = ", ".join(map(str, items[:MOST_NAMED])) + (", ..." if len(items) > MOST_NAMED else "")
    said = f"step {plan.step}: no token of its {len(ids):,} sequences ({listed}) has a loss, for all labels are ignored"
    if is_skipped:
        return f"{said}; it is skipped: weights and optimizer stay as they are"
    return (
        f"{said}, as in the {MOST_WITHOUT_LOSS - 1} steps before it; leave items without labels out of the corpus, or "
        "raise sequences_per_step or tokens_per_step so that steps have some with labels"
    )


def infeasible(plan: StepPlan, failure: MicroBatchFailure, reason: str, *, num_plans: int) -> InfeasibleError:
    """The error that ends a run whose step did not fit by any of ``num_plans`` plans."""
    pack = plan.pipelines[failure.pipeline].micro_batches[failure.micro_batch].pack
    way_out = failure.way_out or "lower max_length or memory_gib, or "
    return InfeasibleError(
        f"{reason}, after {num_plans} plans; {way_out}use more devices",
        what=f"micro-batch {failure.micro_batch} of pipeline {failure.pipeline}", value=pack.num_tokens, unit="tokens",
    )  # fmt: skip


def read_digests(own: Sequence[LoopMicroBatch], shards: Mapping[int, PackShard]) -> list[int]:
    """Digests of what this rank read of shared sequences, one for each phase; later phases share the last one."""
    digests = [0] * NUM_DIGESTS
    for position, shard in shards.items():
        if own[position].is_first_of_pack:  # other slices read the same
            digests[min(own[position].pipeline.phase, NUM_DIGESTS - 1)] ^= shard.read_digest
    return digests


def _ranks_that_read_differently(reports: RankReports, plan: StepPlan) -> tuple[int, ...]:
    """Ranks of a pipeline that read different things for the same sequences."""
    if plan.num_phases > NUM_DIGESTS or any(pipeline >= 0 for pipeline in reports.column(2)):
        return ()  # ranks of several pipelines cannot be compared; one that failed has not read all
    for pipeline in plan.pipelines:
        digests = reports.column(7 + pipeline.phase)
        if len({digests[rank] for rank in pipeline.ranks}) > 1:
            return pipeline.ranks
    return ()
