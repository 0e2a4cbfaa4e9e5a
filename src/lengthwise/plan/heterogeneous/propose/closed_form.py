"""Eq. (4) of Hydraulis with fractional numbers of pipelines, which needs no dynamic programme.

Processing sequences of work W on candidate k within a time t takes W N_k / t devices, and splitting an interval of
lengths costs nothing, so the only coupling is the number of devices: every length takes the candidate that needs the
fewest device-seconds, t is their sum over the number of devices, and d_k = W_k / t.
"""

from dataclasses import dataclass

import numpy as np

from lengthwise.plan.heterogeneous.propose.workload import Workload


@dataclass(frozen=True, kw_only=True, eq=False)
class Relaxation:
    """The best fractional strategy."""

    time_s: float
    """Seconds of the average step; no strategy takes less, bubbles and single sequences left out."""
    counts: np.ndarray
    """[K] pipelines of each candidate; they occupy all devices."""
    chosen: np.ndarray
    """[C] the candidate of each class of length."""


def relax(workload: Workload) -> Relaxation:
    """The best fractional strategy for the average step; ties go to the first candidate."""
    device_s = workload.devices[:, None] * workload.charged_s
    chosen = device_s.argmin(axis=0)
    work_s = workload.mean * workload.charged_s[chosen, np.arange(len(chosen))]
    spent_s = np.bincount(chosen, weights=work_s, minlength=len(workload.candidates))
    time_s = float(spent_s @ workload.devices) / workload.num_devices
    return Relaxation(time_s=time_s, counts=spent_s / time_s if time_s else spent_s, chosen=chosen)
