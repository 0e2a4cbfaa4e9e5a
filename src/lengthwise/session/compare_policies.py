"""Policies on the same global batches: planned, simulated, summed up."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import fsum
from statistics import median
from time import perf_counter

import numpy as np

from lengthwise.core.batch import GlobalBatch
from lengthwise.core.cost import CostModel
from lengthwise.core.device_spec import DEVICES, GBIT, GBYTE
from lengthwise.core.errors import InfeasibleError, LengthwiseError, errors_spelt, first_line
from lengthwise.core.lengths import LengthIndex
from lengthwise.core.planned_micro_batch import PlannedMicroBatch
from lengthwise.core.specs import ClusterSpec, ModelSpec
from lengthwise.core.step_plan import Pipeline, StepPlan
from lengthwise.core.wording import GIB
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.cost.overlapped import with_overlap
from lengthwise.cost.separable import SeparableCost
from lengthwise.plan.heterogeneous.adaptive_pipelines import candidate_families
from lengthwise.plan.heterogeneous.hydraulis import published_space
from lengthwise.plan.heterogeneous.propose.beforehand import Space, searching
from lengthwise.plan.planner import Planner
from lengthwise.plan.policies import prepare
from lengthwise.plan.space.memory_ladder import OffloadMode
from lengthwise.plan.space.problem import PlanningProblem, PricedBatch
from lengthwise.plan.space.search_space import SearchSpace, first_batches, make_problem, sample_lengths
from lengthwise.report.pages.compare_results import NO_BUDGET, ClusterResult, ComparedStep, PolicyResult, TrainingBudget
from lengthwise.session.measured_profile import MeasuredProfile
from lengthwise.session.planning_args import COMMAND_LINE, Spelling, check_longest
from lengthwise.sim.engine import simulate
from lengthwise.sim.sim_options import EXACT, SimOptions
from lengthwise.sim.step_summary import SimulatedStep, summary

WORTH_OTHER_PROCESSES = 32
"""Devices from which on searching proposals takes longer than starting a process for it."""
SEARCHED: dict[str, Space] = {"hydraulis": published_space, "auto": candidate_families}
"""Policies that propose strategies, and what of."""

TIMED = 2
"""Steps whose planning is timed; of the others, a policy that has others as moves need not plan again what they did."""

OnStep = Callable[[str, int], None]
"""Hears which policy is at work, and how many more steps it is done with."""


@dataclass(frozen=True, kw_only=True)
class PolicyComparison:
    """What does not change between clusters."""

    model: ModelSpec
    dtype: str
    search_space: SearchSpace
    policies: tuple[str, ...]
    lengths: LengthIndex
    num_steps: int
    seed: int
    spelling: Spelling = COMMAND_LINE
    """How errors name settings."""
    budget: TrainingBudget = NO_BUDGET
    """Tokens of the whole training, and the price of a device where it is not the device's own."""

    simulation: SimOptions = EXACT
    """How plans are executed in virtual time."""
    profile: MeasuredProfile | None = None
    """Measurements that costs are fitted to; None: costs come from the data sheet of the device."""

    overlap: float | None = None
    """The share of every update that computation hides; None: as its parts and the passes say."""

    def cost(self, cluster: ClusterSpec, *, state_on_host: bool = False) -> CostModel:
        """The costs of the model on a cluster; ``state_on_host``: with the optimizer's state in host memory."""
        with errors_spelt(self.spelling):
            base: SeparableCost = (
                self.profile.cost(self.model, cluster)
                if self.profile
                else AnalyticCost(model=self.model, cluster=cluster, dtype=self.dtype, state_on_host=state_on_host)
            )
            return with_overlap(base, self.overlap)

    def _may_offload_state(self, cluster: ClusterSpec) -> bool:
        """Whether the optimizer's state may be in host memory where longer sequences need it."""
        may_offload = self.search_space.offload is not OffloadMode.NONE
        return may_offload and self.profile is None and cluster.device.host_bytes_per_s > 0

    def enter(self, cluster: ClusterSpec, *, tokens_per_step: int) -> "ComparedCluster":
        """A cluster with token budget of its global batches, and whether any scheme holds all sequences there."""
        problem, refused = None, None
        try:
            problem = make_problem(
                self.cost(cluster),
                cluster=cluster,
                num_layers=self.model.num_layers,
                max_length=self.lengths.max_length,
                search_space=self.search_space,
                samples=sample_lengths(self.lengths, tokens_per_step=tokens_per_step, seed=self.seed),
                spare=self.cost(cluster, state_on_host=True) if self._may_offload_state(cluster) else None,
            )
            check_longest(problem, self.lengths)
        except InfeasibleError as error:
            error.spell, problem, refused = self.spelling, None, error
        return ComparedCluster(cluster=cluster, tokens_per_step=tokens_per_step, problem=problem, refused=refused)

    @contextmanager
    def ahead(self, entries: Sequence["ComparedCluster"]) -> Iterator[None]:
        """Meanwhile, other processes search what takes longest, where that pays for starting them."""
        large = [
            entry.problem for entry in entries if entry.problem and entry.problem.num_devices >= WORTH_OTHER_PROCESSES
        ]
        spaces = [space for name, space in SEARCHED.items() if name in self.policies]
        workers = min(len(large) * len(spaces), os.cpu_count() or 1)
        if workers < 1:
            yield
            return
        with searching(large, spaces, workers=workers):
            yield

    def batches(self, entry: "ComparedCluster") -> list[GlobalBatch]:
        """The global batches that every policy plans on a cluster."""
        return first_batches(self.lengths, steps=self.num_steps, tokens_per_step=entry.tokens_per_step, seed=self.seed)

    def _failure(self, policy: str, error: Exception) -> str:
        """Why a policy cannot be compared, in one line."""
        if isinstance(error, LengthwiseError):
            return error.spelt(self.spelling)
        return f"policy {policy} fails, which is its fault: {type(error).__name__}: {first_line(error)}"

    def run(self, entry: "ComparedCluster", *, with_steps: bool, on_step: OnStep) -> ClusterResult:
        """Every policy on a cluster; one that cannot hold some sequence, or fails, says why, and the others go on.

        Args:
            entry: the cluster.
            with_steps: also keep one typical step of every policy, for the page.
            on_step: hears of progress.
        """
        drawn = self.batches(entry)
        results, planners, batches = [], {}, list[PricedBatch]()
        if entry.problem is None:
            results = [PolicyResult(policy=name, refused=str(entry.refused)) for name in self.policies]
        else:
            batches = [PricedBatch(entry.problem, batch) for batch in drawn]
            for name in self.policies:
                planners[name] = Planner(policy=name, problem=entry.problem)
                try:
                    results.append(
                        play(planners[name], batches, self.simulation, spelling=self.spelling, on_step=on_step)
                    )
                except Exception as error:  # of whatever class: the other policies are compared
                    if len(self.policies) == 1:
                        raise
                    results.append(PolicyResult(policy=name, refused=self._failure(name, error)))
        num_tokens, device = sum(batch.num_tokens for batch in drawn), entry.cluster.device
        flops = fsum(float(self.model.train_flops(np.asarray(batch.lengths)).sum()) for batch in drawn)
        price = self.budget.price_per_hour
        cluster_result = ClusterResult(
            num_devices=entry.cluster.num_devices,
            cluster=entry.name,
            tokens_per_step=round(num_tokens / len(drawn)),
            policies=tuple(results),
            token_budget=entry.tokens_per_step,
            network_gbit_per_s=device.network_bytes_per_s / GBIT,
            link_gbyte_per_s=device.link_bytes_per_s / GBYTE,
            flops_per_token=flops / num_tokens,
            peak_flops_per_s=device.peak_flops_per_s(self.dtype),
            budget=replace(self.budget, price_per_hour=device.price_per_hour if price is None else price),
        )
        return _with_steps(cluster_result, planners, batches, self.simulation) if with_steps else cluster_result


@dataclass(frozen=True, kw_only=True)
class ComparedCluster:
    """A cluster, ready to be played on."""

    cluster: ClusterSpec
    tokens_per_step: int
    problem: PlanningProblem | None
    """None where nothing can run, for the reason in ``refused``."""
    refused: InfeasibleError | None = None

    @property
    def name(self) -> str:
        """The cluster's name, with memory, network and links of its devices where they are not those of the preset."""
        device = self.cluster.device
        preset, changes = DEVICES.get(device.name, device.without_margin()), []
        if device.without_margin().memory_bytes != preset.memory_bytes:
            changes.append(f"{device.memory_bytes / GIB:g} GiB")
        if device.network_bytes_per_s != preset.network_bytes_per_s:
            changes.append(f"{device.network_bytes_per_s / GBIT:g} Gbit/s")
        if device.link_bytes_per_s != preset.link_bytes_per_s:
            changes.append(f"{device.link_bytes_per_s / GBYTE:g} Gbyte/s within nodes")
        return f"{self.cluster.name} at {', '.join(changes)}" if changes else self.cluster.name


def play(
    planner: Planner, batches: Sequence[PricedBatch], simulation: SimOptions, *, spelling: Spelling, on_step: OnStep
) -> PolicyResult:
    """One policy on all batches, or why it cannot run."""
    name = planner.policy
    played: list[_Played] = []
    on_step(name, 0)
    try:
        start_s = perf_counter()
        prepare(name, planner.problem)
        preparing_s = perf_counter() - start_s
        times_s = []
        for number, batch in enumerate(batches):
            if number < TIMED:  # as if no other policy had planned it
                batch = PricedBatch(planner.problem, batch.batch)
            start_s = perf_counter()
            plan = planner.plan(batch)
            times_s.append(perf_counter() - start_s)
            played.append(_Played.of(plan, planner.problem, simulation))
            on_step(name, 1)
    except InfeasibleError as error:
        on_step(name, len(batches) - len(played))
        return PolicyResult(policy=name, refused=error.spelt(spelling))
    result = _result(name, [priced.batch for priced in batches], played)
    return replace(result, preparing_s=preparing_s, planning_s=min(times_s[:TIMED]))


@dataclass(frozen=True, kw_only=True)
class _Played:
    """What is kept of a step: plans of a thousand devices are large."""

    summary: SimulatedStep
    device_s: float
    padding_s: float
    num_computed_tokens: int
    planned_s: float
    bound_s: float
    strategy: str
    num_used: int

    @classmethod
    def of(cls, plan: StepPlan, problem: PlanningProblem, simulation: SimOptions) -> "_Played":
        step = summary(plan, simulation)
        return cls(
            summary=step,
            device_s=step.step_time_s * plan.num_devices,
            padding_s=fsum(_padding_s(problem, p, m) for p in plan.pipelines for m in p.micro_batches),
            num_computed_tokens=plan.num_computed_tokens,
            planned_s=plan.time_s,
            bound_s=plan.lower_bound_s,
            strategy=plan.strategy_words,
            num_used=plan.num_used,
        )


def _padding_s(problem: PlanningProblem, pipeline: Pipeline, micro_batch: PlannedMicroBatch) -> float:
    """Device-seconds of computation that the same sequences without padding would not take."""
    if not micro_batch.pack.padded_to or not micro_batch.time_s:
        return 0.0
    needed_s = problem.candidates[0].cost.time_s(micro_batch.pack.lengths, pipeline.scheme_of(micro_batch))
    computing = 1.0 - micro_batch.comm_s / micro_batch.time_s
    return max(0.0, micro_batch.time_s - needed_s) * computing * pipeline.scheme.num_devices


def _result(policy: str, batches: Sequence[GlobalBatch], played: Sequence[_Played]) -> PolicyResult:
    """Figures over all steps, shares weighted by time."""
    num_tokens = sum(batch.num_tokens for batch in batches)
    time_s = fsum(step.summary.step_time_s for step in played)
    device_s, bound_s = fsum(step.device_s for step in played), fsum(step.bound_s for step in played)
    spent_s = {
        name: fsum(getattr(step.summary.losses, name) * step.device_s for step in played)
        for name in ("compute", "communicate", "bubble", "imbalance", "switch", "update")
    }
    padding_s = min(spent_s["compute"], fsum(step.padding_s for step in played))
    spent_s |= {"compute": spent_s["compute"] - padding_s, "padding": padding_s}
    return PolicyResult(
        policy=policy,
        tokens_per_s=num_tokens / time_s,
        step_time_s=time_s / len(played),
        idle=(spent_s["bubble"] + spent_s["imbalance"]) / device_s,
        bubble=spent_s["bubble"] / device_s,
        padding=1.0 - num_tokens / sum(step.num_computed_tokens for step in played),
        gap=fsum(step.planned_s for step in played) / bound_s - 1.0 if bound_s else 0.0,
        peak_bytes=max(step.summary.peak_bytes for step in played),
        spent_s=spent_s,
        times_s=tuple(step.summary.step_time_s for step in played),
        planned_s=tuple(step.planned_s for step in played),
        bounds_s=tuple(step.bound_s for step in played),
        strategies=tuple(step.strategy for step in played),
        num_used=max(step.num_used for step in played),
    )


def _with_steps(
    cluster: ClusterResult, planners: dict[str, Planner], batches: Sequence[PricedBatch], simulation: SimOptions
) -> ClusterResult:
    """With the step whose time under the fastest policy is nearest to the median, under every policy that can run."""
    if not cluster.ranked:
        return cluster
    times_s = cluster.ranked[0].times_s
    typical = min(range(len(times_s)), key=lambda k: abs(times_s[k] - median(times_s)))
    plans = {result.policy: planners[result.policy].plan(batches[typical]) for result in cluster.ranked}
    return replace(
        cluster,
        steps={name: ComparedStep(plan=plan, timeline=simulate(plan, simulation)) for name, plan in plans.items()},
    )
