"""What of a plan a prepared model was not compared in, or is not exact in: plans of any planner are held to it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lengthwise.core.errors import InputError, Setting
from lengthwise.core.pipeline_config import Method
from lengthwise.core.step_plan import Pipeline, StepPlan
from lengthwise.runtime.train.executable import check_undivided

if TYPE_CHECKING:
    from lengthwise.runtime.wrap.wrapped_model import WrappedModel


@dataclass(frozen=True, kw_only=True)
class PlanLimits:
    """The limits of plans of a run, whoever makes them; those that are None limit nothing."""

    max_degree: int | None = None
    """Ranks that may share a sequence, as was asked for or as the comparison with the stock model left it."""
    methods: tuple[Method, ...] | None = None
    """Methods by which ranks may share sequences: those that were compared."""

    def check(self, plan: StepPlan, model: "WrappedModel", *, is_coupled: bool = False) -> None:
        """Raise ``InputError`` naming the first pipeline of ``plan`` that is beyond the limits of ``model``.

        ``is_coupled``: whether the run's loss couples sequences of different micro-batches.
        """
        for number, pipeline in enumerate(plan.pipelines):
            where = f"plan for step {plan.step}: pipelines[{number}]"
            self._check_degree(pipeline, where, model)
            self._check_methods(pipeline, where, model)
            if model.compiled is not None:
                check_undivided(pipeline, where)
            if is_coupled and pipeline.scheme.shard_gradients:
                raise InputError(
                    f"{where} shards gradients over the ranks of a stage, and coupled_loss= computes every micro-batch "
                    "twice; plan with shard_gradients=false"
                )

    def _check_degree(self, pipeline: Pipeline, where: str, model: "WrappedModel") -> None:
        degree, name = pipeline.scheme.degree, type(model.model).__name__
        if degree > 1 and model.by_sequence is not None:
            raise InputError(
                f"{where} has degree {degree}, and {name} is computed sequence by sequence, each on one rank; plan "
                "with degree 1"
            )
        if self.max_degree is not None and degree > self.max_degree:
            raise InputError(
                f"{where} has degree {degree}, and at most {self.max_degree} may share a sequence of {name}: "
                f"{Setting.MAX_DEGREE}={self.max_degree}, as was asked for or as prepare warned that more would not "
                "be exact; plan with a lower degree"
            )

    def _check_methods(self, pipeline: Pipeline, where: str, model: "WrappedModel") -> None:
        if self.methods is None or pipeline.scheme.degree == 1:
            return
        used = {method for planned in pipeline.micro_batches for method in pipeline.methods_of(planned)}
        if others := sorted(used - {Method.DENSE, *self.methods}):
            raise InputError(
                f"{where} shares sequences by {', '.join(others)}, and {type(model.model).__name__} was compared with "
                f"the stock model by {', '.join(self.methods)} alone; plan one of these, or name others in "
                f"{Setting.METHODS}"
            )
