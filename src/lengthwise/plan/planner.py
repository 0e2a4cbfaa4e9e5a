"""A planner: one policy for one model on one cluster, from a global batch to a step plan."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lengthwise.core.batch import GlobalBatch, Pack
from lengthwise.core.cost import CostModel
from lengthwise.core.errors import InfeasibleError, InputError
from lengthwise.core.lengths import LengthIndex
from lengthwise.core.plan import MicroBatch, Pipeline, StepPlan
from lengthwise.core.scheme import Scheme, homogeneous
from lengthwise.core.specs import GIB
from lengthwise.plan.bounds import dense_lower_bound_s

Policy = Callable[["Planner", GlobalBatch], list[list[Pack]]]
"""Packs of each pipeline."""


@dataclass(frozen=True, kw_only=True)
class Planner:
    """Plans steps of dense pipelines, one per device. Deterministic: equal input, equal plan on every rank."""

    policy: str
    arrange: Policy
    cost: CostModel
    scheme: Scheme
    num_devices: int
    memory_bytes: int
    """Of one device; for messages only, the cost model knows the limit."""
    max_length: int
    """Longest sequence of the run, in tokens."""
    token_limit: int | None = None
    """Most tokens of a micro-batch, where the user wants fewer than memory holds."""
    batch_size: int | None = None
    """Sequences per micro-batch of `padded`; None: the most that fit at ``max_length``, but work for every device."""

    def __post_init__(self) -> None:
        if self.scheme.num_devices != 1:
            raise InputError(
                f"policy {self.policy} plans one device per pipeline, the scheme has degree {self.scheme.degree} and "
                f"{self.scheme.num_stages} stages"
            )

    @cached_property
    def max_tokens(self) -> int:
        """Most tokens of a micro-batch, padding included."""
        fitting = self.cost.max_tokens(self.scheme, num_devices=self.num_devices)
        return min(fitting, self.token_limit) if self.token_limit else fitting

    def check_fits(self, lengths: LengthIndex) -> None:
        """Raise ``InfeasibleError`` if some sequence of the corpus fits nowhere; before anything runs."""
        if lengths.max_length > self.max_tokens:
            self._refuse(int(np.argmax(lengths.lengths)), lengths.max_length)

    def __call__(self, batch: GlobalBatch) -> StepPlan:
        """The plan for one global batch.

        Raises:
            InfeasibleError: a sequence, or a micro-batch of the policy's fixed size, exceeds a device's memory.
        """
        longest = max(batch.lengths)
        if longest > self.max_tokens:
            self._refuse(batch.ids[batch.lengths.index(longest)], longest)
        strategy = homogeneous(self.scheme, self.num_devices)
        update_s = self.cost.update_s(strategy)
        pipelines = tuple(
            Pipeline(ranks=ranks, scheme=self.scheme, micro_batches=self._price(packs))
            for ranks, packs in zip(strategy.ranks, self.arrange(self, batch))
        )
        busiest_s = max(sum(m.time_s for m in pipeline.micro_batches) for pipeline in pipelines)
        time_s, bound_s = busiest_s + update_s, self._lower_bound_s(batch) + update_s
        assert bound_s <= time_s * (1 + 1e-9), f"the bound {bound_s} exceeds the plan it bounds, {time_s}"
        plan = StepPlan(
            step=batch.step,
            policy=self.policy,
            pipelines=pipelines,
            loss_normaliser=max(1, batch.num_targets),
            update_s=update_s,
            time_s=time_s,
            lower_bound_s=min(time_s, bound_s),  # sums in another order round differently
        )
        plan.check_covers(batch)
        return plan

    def _lower_bound_s(self, batch: GlobalBatch) -> float:
        return dense_lower_bound_s(
            self.cost.sequence_times_s(np.asarray(batch.lengths), self.scheme),
            self.cost.overhead_s(self.scheme),
            num_devices=self.num_devices,
            min_micro_batches=-(-batch.num_tokens // self.max_tokens),
        )

    def _price(self, packs: list[Pack]) -> tuple[MicroBatch, ...]:
        priced = []
        for pack in packs:
            if pack.num_tokens > self.max_tokens:
                self._refuse_pack(pack)
            time_s = self.cost.time_s(pack.computed_lengths, self.scheme)
            peak = self.cost.peak_bytes(pack.num_tokens, self.scheme, num_devices=self.num_devices)
            priced.append(MicroBatch(pack=pack, time_s=time_s, peak_bytes=peak))
        return tuple(sorted(priced, key=lambda m: (-m.time_s, m.pack.ids)))

    def _refuse(self, sequence: int, length: int) -> None:
        raise InfeasibleError(f"sequence {sequence} ({length:,} tokens) {self._needs(length)} {self._way_out()}")

    def _way_out(self) -> str:
        if self.max_tokens < 1:
            state = self.cost.peak_bytes(0, self.scheme, num_devices=self.num_devices)
            return (
                f"Weights, gradients and this device's share of the optimizer alone take {state / GIB:.1f} GiB, so no "
                "length fits: use devices with more memory, more of them, a smaller model or a narrower train.dtype."
            )
        recompute = "" if all(self.scheme.recompute) else ", or plan.recompute=true"
        return f"Set data.max_length={self.max_tokens} or less with data.over_length=split{recompute}."

    def _refuse_pack(self, pack: Pack) -> None:
        raise InfeasibleError(
            f"policy {self.policy}: a micro-batch of {len(pack.ids)} sequences padded to {pack.padded_to:,} tokens "
            f"({pack.num_tokens:,} in all) {self._needs(pack.num_tokens)} Lower plan.batch_size or data.max_length."
        )

    def _needs(self, num_tokens: int) -> str:
        if self.token_limit and self.max_tokens == self.token_limit:
            return f"exceeds plan.max_tokens ({self.token_limit:,} tokens per micro-batch)."
        needed = self.cost.peak_bytes(num_tokens, self.scheme, num_devices=self.num_devices)
        return f"needs {needed / GIB:.1f} GiB per device; a device has {self.memory_bytes / GIB:.1f} GiB."
