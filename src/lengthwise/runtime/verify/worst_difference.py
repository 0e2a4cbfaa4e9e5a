"""Where loss and gradients that were computed in two ways differ most."""

from dataclasses import dataclass

import torch

from lengthwise.runtime.comm.collectives import sum_over_ranks
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.verify.precision import Tolerance
from lengthwise.runtime.verify.stock_call import GradientResult, parameter_names


@dataclass(frozen=True, kw_only=True)
class WorstDifference:
    """The largest difference, relative to its limit."""

    ratio: float
    relative: float
    name: str


def worst_difference(
    run: PreparedModel, packed: GradientResult, alone: GradientResult, tolerance: Tolerance
) -> WorstDifference:
    """Find where loss and gradients computed in two ways differ most, relative to the tolerance."""
    relative = 0.0
    if packed.loss is not None and alone.loss is not None:
        relative = abs(packed.loss - alone.loss) / max(abs(alone.loss), 1e-6)
    candidates = [WorstDifference(ratio=_ratio(relative, tolerance.relative), relative=relative, name="the loss")]
    if packed.gradients:
        rows = [
            torch.stack([(got.double() - expected.double()).norm(), expected.double().norm()])
            for got, expected in zip(packed.gradients, alone.gradients)
        ]
        norms_of_parts = torch.stack(rows)
        if run.gather is not None:
            norms_of_parts = sum_over_ranks(norms_of_parts.square()).sqrt()
        errors, norms = norms_of_parts.T.cpu()
        limits = tolerance.relative * norms.clamp(min=tolerance.floor * float(norms.norm()))
        ratios = (errors / limits.clamp(min=1e-300)).nan_to_num(torch.inf)
        worst = int(ratios.argmax())
        name = f"the gradient of {parameter_names(run)[worst]}"
        relative = float(errors[worst] / norms[worst]) if norms[worst] else float(errors[worst])
        candidates.append(WorstDifference(ratio=float(ratios[worst]), relative=relative, name=name))
    return max(candidates, key=lambda candidate: candidate.ratio)


def _ratio(value: float, limit: float) -> float:
    return value / limit if value == value else float("inf")
