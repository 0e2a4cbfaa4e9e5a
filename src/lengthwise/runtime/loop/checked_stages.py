"""Which cuts into stages and slices a run has compared with its whole model: each when a plan first has it."""

from collections.abc import Callable

from lengthwise.core.sliced_passes import is_sliced
from lengthwise.core.step_plan import StepPlan
from lengthwise.runtime.loop.prepared_model import PreparedModel

CheckStages = Callable[[tuple[int, ...], bool, bool], None]
"""Raises an error unless stages of these numbers of layers can be computed, with backwards split or whole, and with
micro-batches in slices or whole."""


class CheckedStages:
    """The cuts of plans that were compared, or need not be."""

    def __init__(self, prepared: PreparedModel) -> None:
        self._is_cuttable, self._layers = prepared.is_cuttable, prepared.wrapped_model.layers
        self._checked: set[tuple[tuple[int, ...], bool, bool]] = set()

    def compare(self, plan: StepPlan, check: CheckStages | None) -> None:
        """Compare what is new in a plan; every rank calls this. ``check``: None where no plan has stages."""
        cuts = {(line.scheme.stage_layers, line.scheme.zero_bubble, is_sliced(line)) for line in plan.pipelines}
        for stage_layers, splits, slices in sorted(cuts - self._checked):
            is_known = self._layers.may_slice if slices else self._layers.may_split if splits else self._is_cuttable
            if (slices or len(stage_layers) > 1) and check is not None and not is_known:
                check(stage_layers, splits, slices)
            self._checked.add((stage_layers, splits, slices))
