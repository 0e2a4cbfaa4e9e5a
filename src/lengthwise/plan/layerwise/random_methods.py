"""Plans with random methods, degrees and stages, to show that switching changes nothing but time.

A method for every layer of every micro-batch, and, where that is left open, degree and stages for every step.
"""

import random
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from lengthwise.core.batch import GlobalBatch
from lengthwise.core.errors import InfeasibleError, InputError, Setting
from lengthwise.core.pipeline_config import WEIGHTS_OF, Method, PipelineConfig
from lengthwise.core.planned_micro_batch import PlannedMicroBatch
from lengthwise.core.step_plan import StepPlan
from lengthwise.core.wording import needed_and_available
from lengthwise.plan.planner import Planner

NUM_MIXES = 64
"""Different draws; costs remember what each of them costs."""


@dataclass(frozen=True, kw_only=True)
class RandomMethods:
    """Plans as ``planner`` does, then draws the methods: a function of seed and step alone, equal on every rank."""

    planner: Planner
    seed: int

    def __call__(self, batch: GlobalBatch) -> StepPlan:
        """The plan for one global batch.

        Raises:
            InfeasibleError: as the planner, or a micro-batch does not fit under the methods drawn for it.
        """
        plan = self.planner(batch)
        if self.planner.problem.candidates[0].scheme.degree == 1:
            return plan  # nobody shares a layer
        drawn = random.Random(f"{self.seed}/{batch.step}")
        pipelines = tuple(
            replace(
                pipeline, micro_batches=tuple(self._mixed(m, pipeline.scheme, drawn) for m in pipeline.micro_batches)
            )
            for pipeline in plan.pipelines
        )
        before, after = (
            sum(m.time_s for pipeline in side for m in pipeline.micro_batches) for side in (plan.pipelines, pipelines)
        )
        time_s = plan.time_s * after / before
        return replace(plan, pipelines=pipelines, time_s=time_s, lower_bound_s=min(time_s, plan.lower_bound_s))

    @cached_property
    def _mixes(self) -> list[tuple[Method, ...]]:
        """What layers may run, as far as costs know."""
        scheme, cost = self.planner.problem.candidates[0].scheme, self.planner.problem.cost
        able = []
        for method, weights in WEIGHTS_OF.items():
            if weights is scheme.weights:
                try:
                    cost.overhead_s(replace(scheme, methods=(method,) * scheme.num_layers))
                except InputError:  # it cannot share this model among so many devices
                    continue
                able.append(method)
        drawn = random.Random(self.seed)
        return [tuple(drawn.choices(able, k=scheme.num_layers)) for _ in range(NUM_MIXES)]

    def _mixed(self, micro_batch: PlannedMicroBatch, scheme: PipelineConfig, drawn: random.Random) -> PlannedMicroBatch:
        problem = self.planner.problem
        methods = drawn.choice(self._mixes)
        recompute = micro_batch.recompute or scheme.recompute
        ran_as, tokens = replace(scheme, methods=methods, recompute=recompute), micro_batch.pack.num_tokens
        peak = int(problem.cost.peak_bytes(np.asarray(tokens), ran_as, num_devices=problem.num_devices))
        if peak > problem.memory_bytes:
            needed, available = needed_and_available(peak, problem.memory_bytes)
            raise InfeasibleError(
                f"a micro-batch of {tokens:,} tokens needs {needed} per device under random methods; a device has "
                f"{available}; set {Setting.MAX_TOKENS} lower, or name one method",
                what=f"a micro-batch of {tokens:,} tokens", value=peak, limit=problem.memory_bytes, unit="bytes",
            )  # fmt: skip
        time_s = float(problem.cost.time_s(micro_batch.pack.computed_lengths, ran_as))
        comm_s = float(problem.cost.comm_times_s(np.asarray(micro_batch.pack.computed_lengths), ran_as).sum())
        return replace(micro_batch, methods=methods, peak_bytes=peak, time_s=time_s, comm_s=comm_s)


@dataclass(frozen=True, kw_only=True)
class RandomStrategies:
    """Draws the strategy of every step, then its methods: a function of seed and step alone, equal on every rank."""

    members: tuple[RandomMethods, ...]
    seed: int

    def __call__(self, batch: GlobalBatch) -> StepPlan:
        """The plan for one global batch.

        Raises:
            InfeasibleError: as :class:`RandomMethods`.
        """
        return random.Random(f"{self.seed}/{batch.step}/strategy").choice(self.members)(batch)


def random_strategies(planner: Planner, *, seed: int) -> RandomStrategies:
    """Draw one of the planner's degrees and numbers of stages whose pipelines tile the cluster at each step."""
    problem = planner.problem
    members = [
        RandomMethods(planner=replace(planner, problem=replace(problem, candidates=candidates)), seed=seed)
        for candidates in problem.families.values()
        if problem.num_devices % candidates[0].num_devices == 0 and candidates[0].max_tokens >= problem.max_length
    ]
    if not members:
        raise InfeasibleError(
            f"no strategy to draw: no degree and number of stages tile {problem.num_devices} devices and hold the "
            f"longest sequence ({problem.max_length:,} tokens); raise {Setting.MAX_DEGREE} or set {Setting.MAX_LENGTH}",
            what="the longest sequence", value=problem.max_length, unit="tokens",
        )  # fmt: skip
    return RandomStrategies(members=tuple(members), seed=seed)
