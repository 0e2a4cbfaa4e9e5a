"""Simulate thousands of steps: the figures of each without its timeline."""

from dataclasses import dataclass

import numpy as np

from lengthwise.core.step_plan import StepPlan
from lengthwise.core.timeline import Timeline
from lengthwise.sim.pipeline import PipelineRun
from lengthwise.sim.sim_options import EXACT, SimOptions
from lengthwise.sim.simulate_step import StepRun, run_step
from lengthwise.sim.time_losses import Losses


@dataclass(frozen=True, kw_only=True, eq=False)
class SimulatedStep:
    """The figures of a simulated step. Equal, up to rounding, to the figures of its :class:`Timeline`."""

    step: int
    step_time_s: float
    losses: Losses
    peak_bytes: int
    """Peak bytes of the rank that holds most."""
    busy_s: np.ndarray
    """[num_ranks] seconds in which a rank does not wait: computing, communicating, updating."""
    timeline: Timeline | None = None
    """Which rank does what when, where it was asked for."""

    @property
    def idle(self) -> float:
        """Share of the device-seconds in which a rank waits."""
        return self.losses.idle

    @property
    def bubble(self) -> float:
        """Share of the device-seconds in which a stage waits for other stages of its pipeline."""
        return self.losses.bubble


def summary(plan: StepPlan, options: SimOptions = EXACT) -> SimulatedStep:
    """Execute a plan as :func:`lengthwise.sim.engine.simulate` does, and return its figures alone.

    Raises:
        InputError: a straggler is not a rank of the plan.
    """
    step = run_step(plan, options)
    waiting_s = np.zeros(plan.num_devices)
    communicate_s = bubble_s = imbalance_s = 0.0
    peak_bytes = 0
    for phase, strategy in zip(step.phases, plan.strategies):
        first_idle, phase_s = plan.num_devices - strategy.num_idle, phase.end_s - phase.start_s
        waiting_s[first_idle:] += phase_s
        imbalance_s += phase_s * strategy.num_idle
        for run in phase.pipelines:
            degree = run.pipeline.scheme.degree
            late_s = phase.end_s - run.end_s
            imbalance_s += late_s * len(run.pipeline.ranks)
            first = run.memory_of(0)  # whatever a later stage holds, the first one has held too
            peak_bytes = max(peak_bytes, max(num_bytes for _, num_bytes in first))
            for stage in range(len(run.stages)):
                gaps_s, communicating_s = _times_s(run, stage)
                waiting_s[list(run.pipeline.ranks_of(stage))] += gaps_s + late_s
                bubble_s += degree * gaps_s
                communicate_s += degree * communicating_s
    busy_s = step.end_s - waiting_s
    busy_s.setflags(write=False)
    split = _split(step, communicate_s=communicate_s, bubble_s=bubble_s, imbalance_s=imbalance_s)
    return SimulatedStep(step=plan.step, step_time_s=step.end_s, losses=split, peak_bytes=peak_bytes, busy_s=busy_s)


def _times_s(run: PipelineRun, stage: int) -> tuple[float, float]:
    """Seconds that a stage waits for other stages, and that it communicates."""
    gaps_s = communicating_s = 0.0
    now_s = run.start_s
    for stage_pass in run.stages[stage]:
        gaps_s += stage_pass.start_s - now_s
        communicating_s += run.comm_shares[stage_pass.number] * (stage_pass.end_s - stage_pass.start_s)
        now_s = stage_pass.end_s
    return gaps_s + run.end_s - now_s, communicating_s


def _split(step: StepRun, *, communicate_s: float, bubble_s: float, imbalance_s: float) -> Losses:
    """Device-seconds as shares of the step."""
    num_devices = step.plan.num_devices
    switch_s = num_devices * sum(phase.switch_end_s - phase.end_s for phase in step.phases)
    update_s = num_devices * (step.end_s - step.meet_s)
    total_s = num_devices * step.end_s
    computing_s = total_s - communicate_s - bubble_s - imbalance_s - switch_s - update_s
    whole_s = total_s or 1.0
    return Losses(
        compute=computing_s / whole_s,
        communicate=communicate_s / whole_s,
        bubble=bubble_s / whole_s,
        imbalance=imbalance_s / whole_s,
        switch=switch_s / whole_s,
        update=update_s / whole_s,
        padding=step.plan.padding_fraction,
    )
