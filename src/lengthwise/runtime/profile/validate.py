"""Compare the predictions of a two-layer profile with measurements of the whole model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from lengthwise.core.pipeline_config import Method, spread
from lengthwise.runtime.comm.collectives import gather_rows
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.profile.trial import Trial, group_of_degree, measure_memory, measure_time
from lengthwise.runtime.wrap.exchange_script import AttentionExchange, SlotGather

Predict = Callable[[Sequence[int], int, int], tuple[float, float]]
"""A function of lengths, degree and number of recomputed layers: seconds, and bytes above the model state."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predicted and measured time and memory of one micro-batch of the whole model."""

    lengths: tuple[int, ...]
    degree: int
    method: str
    recomputed: int
    predicted_s: float
    measured_s: float
    """The median over repeats of the slowest rank's seconds."""
    predicted_bytes: int
    measured_bytes: int
    """Bytes of the rank that needs most."""

    @property
    def time_error(self) -> float:
        """Predicted over measured seconds, minus one."""
        return self.predicted_s / self.measured_s - 1.0

    @property
    def bytes_error(self) -> float:
        """Predicted over measured bytes, minus one."""
        return self.predicted_bytes / self.measured_bytes - 1.0

    def __str__(self) -> str:
        """One line of text with measured time and memory, and how far off predictions are."""
        longest = f"{len(self.lengths)} x {max(self.lengths):,}"
        packed = longest if len(set(self.lengths)) == 1 else f"up to {longest}"
        shared = f"{self.method} of {self.degree}" if self.degree > 1 else "degree 1"
        return (
            f"{packed} tokens, {shared}, {self.recomputed} recomputed: {self.measured_s * 1e3:.1f} ms "
            f"(predicted {self.time_error:+.0%}), {self.measured_bytes / 2**20:.1f} MiB ({self.bytes_error:+.1%})"
        )


def check_prediction(
    run: PreparedModel,
    predict: Predict,
    *,
    packs: Sequence[tuple[int, ...]],
    degrees: Sequence[int],
    recomputed: Sequence[int],
    method: Method = Method.ULYSSES,
    repeats: int = 3,
) -> list[Prediction]:
    """Measure every pack at every degree with every number of recomputed layers; returns the same on every rank.

    Bytes are those of one micro-batch above the model state. On a GPU that is the allocator's peak. On a CPU it is what
    the forward keeps, and the one recomputed layer that is there in full while it has its backward.
    """
    predictions = []
    for degree in degrees:
        group = group_of_degree(run.world, degree)
        for lengths in packs:
            for count in recomputed:
                flags = spread(count, run.wrapped_model.structure.num_layers)
                trial = None if group is None else Trial(lengths=lengths, group=group, recompute=flags, method=method)
                measured_s, num_bytes = _measure(run, trial, repeats)
                predicted_s, predicted_bytes = predict(lengths, degree, count)
                predictions.append(
                    Prediction(
                        lengths=lengths,
                        degree=degree,
                        method=str(method),
                        recomputed=count,
                        predicted_s=predicted_s,
                        measured_s=measured_s,
                        predicted_bytes=round(predicted_bytes),
                        measured_bytes=num_bytes,
                    )
                )
    run.discard()
    return predictions


def _measure(run: PreparedModel, trial: Trial | None, repeats: int) -> tuple[float, int]:
    """Measure the seconds and bytes of a trial, equal on all ranks."""
    num_bytes = 0
    if trial is not None:
        num_bytes, attended = _held(run, trial)
        trial = replace(trial, attended=attended)
    measure_time(run, trial)  # the first of anything is slow
    times = [timing.time_s if (timing := measure_time(run, trial)) is not None else 0.0 for _ in range(repeats)]
    row = torch.tensor([*times, num_bytes], dtype=torch.float64, device=run.world.device)
    slowest = gather_rows(row).cpu().numpy().max(axis=0)
    return float(np.median(slowest[:-1])), int(slowest[-1])


def _held(run: PreparedModel, trial: Trial) -> tuple[int, tuple[AttentionExchange | SlotGather, ...]]:
    result = measure_memory(run, trial)
    if run.world.device.type == "cuda" or not any(trial.recompute):
        return result.num_bytes, result.attended
    plain = measure_memory(run, replace(trial, recompute=()))
    layers = zip(plain.numbers, plain.layers, plain.inputs, strict=True)
    alive = [kept_bytes - inputs for number, kept_bytes, inputs in layers if trial.recompute[number]]
    return result.num_bytes + max(alive, default=0), result.attended
