"""A cost model small enough to check by hand, for any scheme."""

from dataclasses import dataclass, field

import numpy as np

from lengthwise.core.batch import GlobalBatch
from lengthwise.core.one_f_one_b import UpdateParts, most_weights_in
from lengthwise.core.pipeline_config import Method
from lengthwise.cost.overlapped import OverlappedCost
from lengthwise.plan.space.candidate import degrees_of, make_candidates, schemes_of, stages_of
from lengthwise.plan.space.problem import PlanningProblem
from lengthwise.plan.space.split_backwards import ZeroBubble, with_split_backwards


@dataclass(frozen=True)
class SimpleCost:
    """T = a l^2 + b l per sequence, c per micro-batch; one GiB per token on one device.

    ``degree`` devices and ``stages`` divide times, each doubling of the degree losing ``loss``; a fully recomputed
    model takes a third more and holds four times the tokens. ``method_factors`` multiply times.
    """

    a_s: float = 1e-4
    b_s: float = 1e-2
    c_s: float = 0.5
    capacity: int = 1000
    loss: float = 0.1
    method_factors: dict[Method, float] = field(default_factory=dict)

    def _factor(self, scheme):
        recomputed = 1 + scheme.num_recomputed / scheme.num_layers / 3
        own = np.mean([self.method_factors.get(method, 1.0) for method in scheme.methods])
        return own * recomputed * (1 + self.loss * np.log2(scheme.degree)) / scheme.num_devices

    def sequence_times_s(self, lengths, scheme):
        length = np.asarray(lengths, dtype=float)
        return (self.a_s * length + self.b_s) * length * self._factor(scheme)

    def overhead_s(self, scheme):
        return self.c_s / scheme.num_stages

    def time_s(self, lengths, scheme):
        return float(self.sequence_times_s(np.asarray(lengths), scheme).sum()) + self.overhead_s(scheme)

    def comm_times_s(self, lengths, scheme):
        return 0.1 * self.sequence_times_s(lengths, scheme) * (scheme.degree > 1)

    def weight_times_s(self, lengths, scheme):
        return self.b_s * np.asarray(lengths, dtype=float) * self._factor(scheme) * most_weights_in(scheme.recompute)

    def update_s(self, strategy):
        return 0.25

    def switch_s(self, before, after):
        return 0.0 if before == after else 0.125

    def peak_bytes(self, num_tokens, scheme, *, num_devices):
        share = self.capacity * 2**30 / self.max_tokens(scheme, num_devices=num_devices)
        return (np.asarray(num_tokens) * share).astype(np.int64)

    def max_tokens(self, scheme, *, num_devices):
        lean = 1 + 3 * scheme.num_recomputed / scheme.num_layers
        return int(self.capacity * scheme.degree * lean)

    def util_tokens(self, scheme):
        return 1


class HiddenUpdates(OverlappedCost):
    """A cost of which passes hide a part of the update: half of it is pushed, a third pulled."""

    def __init__(self, base, slowdown=0.25):
        super().__init__(base)
        self._slowdown = slowdown

    def _parts(self, strategy):
        update_s = self.base.update_s(strategy)
        return UpdateParts(
            pull_s=update_s / 3, push_s=update_s / 2, first_pull_s=update_s / 12, last_push_s=update_s / 8,
            rest_s=update_s / 6, slowdown=self._slowdown,
        )  # fmt: skip


class StagesFitMore(SimpleCost):
    """A device of a pipeline holds more tokens in proportion to its stages, of which each computes fewer layers."""

    def max_tokens(self, scheme, *, num_devices):
        return scheme.num_stages * super().max_tokens(scheme, num_devices=num_devices)


def make_problem(
    cost=None,
    *,
    num_devices=4,
    devices_per_node=8,
    num_layers=4,
    max_length=100,
    recomputed=(0,),
    samples=(),
    **options,
):
    """A problem over every scheme of ``degrees_of`` x ``stages_of`` with method ulysses."""
    cost = cost or SimpleCost()
    schemes = schemes_of(
        num_layers,
        degrees=options.pop("degrees", degrees_of(num_devices, devices_per_node)),
        stages=options.pop("stages", stages_of(num_devices, num_layers)),
        methods=options.pop("methods", (Method.ULYSSES,)),
        recomputed=recomputed,
    )
    candidates = make_candidates(schemes, cost, num_devices=num_devices, token_limit=options.pop("token_limit", None))
    return PlanningProblem(
        candidates=with_split_backwards(candidates, options.pop("zero_bubble", ZeroBubble.NONE)),
        num_devices=num_devices,
        devices_per_node=devices_per_node,
        memory_bytes=cost.capacity * 2**30,
        max_length=max_length,
        samples=tuple(np.asarray(sample) for sample in samples),
        **options,
    )


def make_batch(lengths, step=0):
    """A global batch of sequences 10, 11, ..."""
    return GlobalBatch(step=step, ids=tuple(range(10, 10 + len(lengths))), lengths=tuple(int(n) for n in lengths))
