"""What steps really took sets the cost model right while the run goes on, the same on every rank."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from lengthwise.core.cost import CostModel
from lengthwise.core.step_plan import StepPlan
from lengthwise.cost.corrected import CorrectedCost
from lengthwise.cost.profiled.dual_layer import DualLayerCost
from lengthwise.cost.separable import SeparableCost
from lengthwise.plan.planner import Planner
from lengthwise.runtime.comm.collectives import gather_rows
from lengthwise.runtime.comm.out_of_memory import MicroBatchFailure
from lengthwise.runtime.comm.world import DistContext
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.loop.step import Step
from lengthwise.session.calibration import measure_again
from lengthwise.session.run_planner import RunPlanner

_log = logging.getLogger("lengthwise")

EVERY = 8
"""Steps between two looks at what was measured."""
WORTH = 0.05
"""Change of a factor that is worth planning anew for."""
DRIFT = 0.25
"""Change of a factor that is told, and measured again."""
FITS = 0.8
"""Share of the tokens of a micro-batch which did not fit that are taken to do so."""


@dataclass(frozen=True, kw_only=True)
class _StagedTotal:
    """The micro-batches of a pipeline of several stages in one step: seconds of its slowest stage."""

    degree: int
    num_ranks: int
    predicted_s: float
    """Without messages between stages."""
    measured_s: float
    """On this rank's stage; 0 if it has none, NaN where it did not compute all of them."""


class OnlineCalibration(RunPlanner):
    """The planner of a run that watches its steps, and plans with other costs when they have changed."""

    def __init__(
        self,
        world: DistContext,
        cost: SeparableCost,
        plan_with: Callable[[CostModel], Planner],
        *,
        measure_again: Callable[[Any, int], SeparableCost] | None = None,
    ) -> None:
        """``plan_with``: the planner under a cost model; ``measure_again``: the base with a degree measured anew."""
        self._world, self.cost, self._measure_again = world, CorrectedCost(cost), measure_again
        self._predicted_s: dict[int, float] = {}
        self._measured_s: dict[int, float] = {}
        self._peaks: dict[int, float] = {}
        self._of_stages: list[_StagedTotal] = []
        self._num_steps = 0
        self.events: list[dict[str, Any]] = []
        """What was changed, when and why."""
        super().__init__(self.cost, plan_with)

    def on_finish(self, step: Step) -> None:
        """Every rank calls this after every step; every ``EVERY`` of them they share what they measured."""
        self._of_stages += self._staged_totals(step)
        for measured in step.measured:
            pipeline = step.plan.pipelines[measured.pipeline]
            if pipeline.scheme.num_stages > 1:
                continue
            planned, degree = pipeline.micro_batches[measured.micro_batch], pipeline.scheme.degree
            self._predicted_s[degree] = self._predicted_s.get(degree, 0.0) + planned.time_s
            self._measured_s[degree] = self._measured_s.get(degree, 0.0) + measured.time_s
            beyond = planned.peak_bytes - pipeline.state_bytes
            if measured.peak_bytes and beyond > 0:
                self._peaks[degree] = max(self._peaks.get(degree, 0.0), measured.peak_bytes / beyond)
        self._num_steps += 1
        if self._num_steps % EVERY == 0:
            self._refine(step.number)

    def _staged_totals(self, step: Step) -> list["_StagedTotal"]:
        """What the pipelines of several stages in a step were predicted to take, and what this rank's stage took."""
        totals = []
        for number, pipeline in enumerate(step.plan.pipelines):
            count, scheme = len(pipeline.micro_batches), pipeline.scheme
            if scheme.num_stages == 1 or not count:
                continue
            per_token_s, per_call_s = self.cost.sent_s(scheme)  # which a stage waits for; it is not computed
            tokens = sum(planned.pack.num_tokens for planned in pipeline.micro_batches)
            predicted_s = sum(planned.time_s for planned in pipeline.micro_batches)
            times_s = [measured.time_s for measured in step.measured if measured.pipeline == number]
            is_elsewhere = self._world.rank not in pipeline.ranks
            totals.append(
                _StagedTotal(
                    degree=scheme.degree,
                    num_ranks=scheme.num_devices,
                    predicted_s=predicted_s - tokens * per_token_s - count * per_call_s,
                    measured_s=0.0 if is_elsewhere else sum(times_s) if len(times_s) == count else np.nan,
                )
            )
        return totals

    def on_oom(self, step: Step, failures: tuple[MicroBatchFailure, ...]) -> None:
        """Micro-batches did not fit: plan the step again with a memory model under which they do not."""
        self.refuse(step.plan, failures)

    def refuse(self, plan: StepPlan, failures: tuple[MicroBatchFailure, ...]) -> None:
        """Plan with a memory model under which the micro-batches that failed do not fit."""
        factors, base = dict(self.cost.bytes_factors), self.cost.base
        if any(failure.host_bytes for failure in failures):
            base = base.without_offload()
            ranks = ", ".join(str(failure.rank) for failure in failures if failure.host_bytes)
            words = f"the host of rank {ranks} has no memory for what layers save; steps are planned without offload"
            self._note(plan.step, words, warn=True)
        for failure in failures:
            if failure.host_bytes:
                continue
            pipeline = plan.pipelines[failure.pipeline]
            factor = self._factor_that_refuses(plan, failure)
            degree = pipeline.scheme.degree
            factors[degree] = max(factors.get(degree, 1.0), factor)
            tokens = pipeline.micro_batches[failure.micro_batch].pack.num_tokens
            self._note(
                plan.step,
                f"rank {failure.rank} ran out of memory with {tokens:,} tokens at degree {degree}; micro-batches of "
                f"that degree are taken to need {factors[degree]:.2f} times the bytes that were predicted, and the "
                "step is planned again",
                warn=True,
            )
        self._change(CorrectedCost(base, time_factors=self.cost.time_factors, bytes_factors=factors))

    def _factor_that_refuses(self, plan: StepPlan, failure: MicroBatchFailure) -> float:
        """The factor on bytes under which a share of the micro-batch fills the device."""
        pipeline = plan.pipelines[failure.pipeline]
        planned = pipeline.micro_batches[failure.micro_batch]
        tokens, num_devices = int(FITS * planned.pack.num_tokens), plan.num_devices
        scheme = pipeline.scheme_of(planned)
        state, predicted = (int(self.cost.base.peak_bytes(n, scheme, num_devices=num_devices)) for n in (0, tokens))
        return (self.cost.base.memory_limit_bytes - state) / max(1, predicted - state)

    def _refine(self, number: int) -> None:
        degrees = sorted({kind.scheme.degree for kind in self.problem.candidates})
        row = [
            value
            for degree in degrees
            for value in (
                self._predicted_s.get(degree, 0.0),
                self._measured_s.get(degree, 0.0),
                self._peaks.get(degree, 0.0),
            )
        ]
        row += [total.measured_s for total in self._of_stages]
        rows = gather_rows(torch.tensor(row, dtype=torch.float64, device=self._world.device)).cpu().numpy()
        by_degree = rows[:, : 3 * len(degrees)].reshape(len(rows), len(degrees), 3)
        for total, measured_s in zip(self._of_stages, rows[:, 3 * len(degrees) :].max(axis=0)):
            if total.degree in degrees and np.isfinite(measured_s):  # the slowest stage, as was predicted
                seconds = np.array([total.predicted_s, measured_s]) * total.num_ranks
                by_degree[0, degrees.index(total.degree), :2] += seconds
        self._predicted_s, self._measured_s, self._peaks, self._of_stages = {}, {}, {}, []
        times, sizes = dict(self.cost.time_factors), dict(self.cost.bytes_factors)
        base, is_changed = self.cost.base, False
        for degree, shares in zip(degrees, by_degree.transpose(1, 0, 2)):
            predicted, measured = shares[:, 0].sum(), shares[:, 1].sum()
            ratio = float(measured / predicted) if predicted else 1.0
            if abs(ratio - 1) > DRIFT and self._measure_again is not None:
                self._note(
                    number,
                    f"degree {degree} takes {ratio:.2f} times what was predicted; measuring it again",
                    warn=False,
                )
                base, is_changed = self._measure_again(base, degree), True
                times.pop(degree, None)
            elif abs(ratio - 1) > WORTH:
                times[degree], is_changed = times.get(degree, 1.0) * ratio, True
                self._note(
                    number, f"degree {degree} takes {ratio:.2f} times what was predicted", warn=abs(ratio - 1) > DRIFT
                )
            peak = float(np.max(shares[:, 2]))
            if peak > 1.0:
                sizes[degree], is_changed = sizes.get(degree, 1.0) * peak, True
                self._note(number, f"degree {degree} needs {peak:.2f} times the bytes that were predicted", warn=False)
        if is_changed:
            self._change(CorrectedCost(base, time_factors=times, bytes_factors=sizes))

    def _change(self, cost: CorrectedCost) -> None:
        self.cost = cost
        self.plan_under(cost)

    def _note(self, step: int, words: str, *, warn: bool) -> None:
        self.events.append({"step": step, "event": words})
        if self._world.is_first:
            _log.log(logging.WARNING if warn else logging.INFO, "step %d: %s", step, words)


def calibrated(prepared: PreparedModel, cost: CostModel, plan_with: Callable[[CostModel], Planner]) -> RunPlanner:
    """The planner under ``cost``, which follows what steps take if it is one that can."""
    if not isinstance(cost, SeparableCost):
        return RunPlanner(cost, plan_with)
    is_whole = isinstance(cost, DualLayerCost) and cost.gather is None
    again = partial(measure_again, prepared) if is_whole else None
    return OnlineCalibration(prepared.world, cost, plan_with, measure_again=again)
