"""A prepared model between updates: what loops did to its weights and gradients, and whether ranks did the same."""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Self

from torch import nn

from lengthwise.core.errors import CheckError, InfeasibleError, InputError, LengthwiseError
from lengthwise.core.step_plan import StepPlan
from lengthwise.core.wording import counted
from lengthwise.runtime.comm.differences import ranks_text
from lengthwise.runtime.comm.world import DistContext
from lengthwise.runtime.loop.brought_items import BroughtBatch, SequenceColumns
from lengthwise.runtime.loop.call_order import RankOperation, RankReports, sync_ranks
from lengthwise.runtime.loop.changed_settings import ChangedSettings
from lengthwise.runtime.loop.foreign_optimizers import ForeignOptimizers
from lengthwise.runtime.loop.fsdp2 import Fsdp2State
from lengthwise.runtime.loop.loop_gradients import LoopGradients
from lengthwise.runtime.loop.manual_changes import inspect_weights
from lengthwise.runtime.loop.optimizer_methods import OptimizerMethods
from lengthwise.runtime.loop.plan_limits import PlanLimits
from lengthwise.runtime.loop.planned_pipelines import check_executable, check_pack_sizes
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.loop.slice_limits import slice_problem
from lengthwise.runtime.loop.watched_parameters import WatchedParameters
from lengthwise.runtime.state.sharded import ShardedState
from lengthwise.runtime.wrap.collator import PackCollator
from lengthwise.runtime.wrap.wrapped_model import WrappedModel

_log = logging.getLogger("lengthwise")
MOST_NAMED = 3
"""Changed settings that a message names."""


class WatchedModel(PreparedModel):
    """A prepared model that a loop trains, and whose weights and gradients it may change by hand."""

    check_again: Callable[[], None] | None = None
    """Compares packs with the stock model, as ``prepare`` did; None: nobody can."""
    compares_changes = False
    """Whether packs are compared again where a loop has changed settings of the model."""
    changes_of_items: Callable[[Iterable[SequenceColumns]], dict[str, str]] | None = None
    """What items have that packs are to be compared with again, in words, by name; None: nobody looks."""
    plan_limits = PlanLimits()
    """What plans may have, whether the planner of ``prepare`` made them or another."""
    next_step: int
    meets_after_steps = False
    """Whether ranks wait for each other after the last step, too, as for what callbacks ask for."""

    def __init__(
        self,
        wrapped_model: WrappedModel,
        world: DistContext,
        *,
        collator: PackCollator,
        state: ShardedState | Fsdp2State,
        seed: int = 0,
    ) -> None:
        super().__init__(wrapped_model, world, collator=collator, state=state, seed=seed)
        self.parameters = WatchedParameters(self.model, state.named if isinstance(state, ShardedState) else None)
        self.gradients, self.settings = LoopGradients(state), ChangedSettings(self.model)
        self.foreign_optimizers = ForeignOptimizers(
            wrapped_model.structure.parameters.items(),
            state.optimizer if isinstance(state, Fsdp2State) else None,
            allowed=lambda: wrapped_model.is_plain,
        )
        if isinstance(state, ShardedState):
            OptimizerMethods(self, state, partial(self._come_between_steps, leaves=False))
        self._changed_settings: dict[str, str] = {}
        """What has changed since packs were compared, in words, by name."""
        self._last_failure, self._is_closed = "", False
        """Why the step comes again."""
        self.num_recompiles = 0
        """Graphs that this rank compiled in the last step; those of the check before the run are not counted."""

    def __enter__(self) -> Self:
        """Return the run, which is closed where the ``with`` statement ends."""
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def check_plan(self, plan: StepPlan, *, stage_problem: str, is_coupled: bool) -> None:
        """Raise ``InputError`` unless a plan suits the model and the ranks; they all have the same plan.

        ``stage_problem``: why the model cannot be cut into stages; ``is_coupled``: whether a loss couples sequences.
        """
        model = self.wrapped_model
        check_executable(
            plan, model.structure.num_layers, self.world.size, stage_problem=stage_problem,
            has_tiles=bool(model.tiles), can_recompute=self.can_recompute,
            keeps_attention=model.layers.may_keep_attention, split_problem=self.split_problem,
            slice_problem=slice_problem(self, is_coupled=is_coupled),
        )  # fmt: skip
        check_pack_sizes(plan, model.max_tokens(self.collator))
        self.plan_limits.check(plan, model, is_coupled=is_coupled)

    def _release(self, *, is_together: bool | None = None) -> None:
        self._is_closed = True
        self.foreign_optimizers.close()
        self.gradients.hide()
        super()._release(is_together=is_together)

    def inspect(self) -> tuple[str, int, bool]:
        """Return a problem of the model or "", the fingerprint of this rank's weights, and whether they changed."""
        return inspect_weights(self.state, self.parameters, is_whole=self.gather is None)

    def keep_changes(self, operation: RankOperation, call: str) -> None:
        """Adopt changes that loops made to weights, where every rank makes the same ``call`` between two steps.

        Raises:
            CheckError: ranks call different things, or the model or its copies are not as they should be.
        """
        problem, fingerprint, is_changed = self.inspect()
        values = [fingerprint, int(is_changed)]
        reports = sync_ranks(self.world, operation, self.next_step, values=values, note=problem)
        reports.check_same()
        if any(reports.notes):
            raise CheckError(f"{call}: {reports.notes_text()}")
        self.take_over_changes(reports, call, columns=(0, 1))

    def take_over_changes(self, reports: RankReports, where: str, *, columns: tuple[int, int]) -> None:
        """Adopt changes that loops made to weights between updates, if every rank made the same.

        ``columns``: which of the reported values are the fingerprint and the flag of :meth:`inspect`.

        Raises:
            CheckError: copies of the model differ between ranks.
        """
        fingerprints = reports.column(columns[0])
        other = [rank for rank, value in enumerate(fingerprints) if value != fingerprints[0]]
        if other:
            self.discard()
            message = (
                f"{where}: the weights on {ranks_text(other)} are not those on rank 0, so a loop changed them in some "
                "ranks alone; change weights in the same way on every rank, or on none"
            )
            self.note_failure(message)
            raise CheckError(message)
        if any(reports.column(columns[1])) and not isinstance(self.state, Fsdp2State):
            self.state.local_weights().adopt()
            self.log_on_first_rank("%s: weights were changed by hand since the last update; the change is kept", where)

    def has_changed_settings(self, brought: BroughtBatch | None = None) -> bool:
        """Whether a loop has changed what the model holds, or items that it ``brought`` have what none before had, so
        that packs are compared again; called once a step.
        """
        if self.wrapped_model.checkpointing.switch_off() and self.world.is_first:
            _log.warning("the model's activation checkpointing is left out again: plans choose it; see recompute=")
        self._changed_settings = self.settings.changes() if self.compares_changes else {}
        if self.compares_changes and brought is not None and self.changes_of_items is not None:
            self._changed_settings |= self.changes_of_items(brought.sequences.values())
        return bool(self._changed_settings)

    def compare(self) -> None:
        """Compare packs with the stock model again, with the weights and settings of the moment; every rank calls this.

        Between two steps: after a change of what the model does not hold, such as a setting of ``loss=``, or every so
        many steps, as values that weights reach may begin to mix tokens (a capacity, a norm of a whole tensor).

        Raises:
            CheckError: packs change what the model learns, ranks call different things, or a step is being computed.
            InputError: it cannot be computed.
            InfeasibleError: there is no memory for it.
        """
        assert self.check_again is not None, "prepare makes runs that can be compared"
        if self.wrapped_model.is_plain and not self._is_closed:
            raise CheckError("run.compare() within run.plain(), where the model computes as before; call it outside")
        self._come_between_steps("run.compare()", may_leave=False)
        sync_ranks(self.world, RankOperation.COMPARE, self.next_step).check_same()
        if isinstance(self.state, ShardedState):
            self.state.finish_pull()
        changes = self.wrapped_model.late_changes
        with nullcontext() if changes is None else changes.muted(self.next_step):
            self.check_again()
        self.settings.note()

    def meet(self, operation: RankOperation = RankOperation.GATHER) -> None:
        """Wait until all ranks are here, between two steps, before they communicate otherwise.

        Raises:
            CheckError: a rank has closed the run, or is at another operation; the message says which, where and why.
        """
        if self.world.size > 1:
            sync_ranks(self.world, operation, self.next_step).check_same()

    @contextmanager
    def plain(self) -> Iterator[nn.Module]:
        """Let the model compute as before ``prepare``, as :meth:`PreparedModel.plain` does."""
        if self.gather is not None and not (self.wrapped_model.is_plain or self.gather.is_begun):
            self.meet()
        with super().plain() as model:
            yield model

    def frozen(self, model: nn.Module, *, layers: str | None = None, check: bool = True) -> nn.Module:
        """Prepare a frozen model as :meth:`PreparedModel.frozen` does."""
        self.meet()
        return super().frozen(model, layers=layers, check=check)

    @property
    def is_closed(self) -> bool:
        """Whether the model was given back."""
        return self._is_closed

    def check_open(self, call: str) -> None:
        """Raise ``CheckError`` if the run is closed."""
        if self._is_closed:
            message = f"{call} after run.close(), which gave the model back; call it before, or prepare it again"
            raise CheckError(self.world.departures[0] if self.world.departures else message)

    def _come_between_steps(self, call: str, *, may_leave: bool = True, leaves: bool = True) -> None:
        """Leave a step that an error ended, or that has not begun; raise ``CheckError`` if one is being computed.

        ``leaves``: whether such a step is left, or goes on after the call.
        """
        raise NotImplementedError

    def _compare_changed(self, step: int) -> None:
        """Compare packs with the model again, as settings have changed on a rank; every rank calls this.

        Raises:
            LengthwiseError: with these settings, packs change what the model learns, or it cannot be computed.
        """
        changed = self._changed_settings
        named = [f"{name} {change}" for name, change in changed.items()][:MOST_NAMED]
        more = (
            f" and {counted(len(changed) - MOST_NAMED, 'other setting')} changed" if len(changed) > MOST_NAMED else ""
        )
        what = ", ".join(named) + more if named else "settings or items of another rank changed"
        self.log_on_first_rank("step %d: %s: packs are compared with the stock model again", step, what)
        try:
            self.compare()
        except InfeasibleError as error:
            if self.world.is_first:
                _log.warning("step %d: %s, and packs were not compared again: %s", step, what, error)
        except LengthwiseError as error:
            raise error.with_message(f"step {step}: since prepare, {what}, and now {error.marked}") from None
        self.settings.note(changed)

    def note_failure(self, reason: str) -> None:
        """Store the reason why the step comes again, for later messages."""
        self._last_failure = reason

    def sharded_state(self) -> ShardedState:
        """Return the state that checkpoints have; raise ``InputError`` if FSDP2 holds it."""
        if isinstance(self.state, Fsdp2State):
            raise InputError(
                "checkpoints of a model that FSDP2 holds are written with torch.distributed.checkpoint: "
                "get_state_dict(model, run.state.optimizer) and run.stream.state_dict()"
            )
        return self.state

    def begin_update(self) -> None:
        """Begin a step, of which gradients that were left before it are no part."""
        self.gradients.forget_left(self.next_step)
        super().begin_update()

    def end_update(self, step: int) -> None:
        """End a step: note its gradients, and count and log the graphs that this rank compiled in it, if any."""
        self.gradients.end()
        compiled = self.wrapped_model.compiled
        self.num_recompiles = 0 if compiled is None else compiled.recompiles()
        if self.num_recompiles:
            _log.info("step %d: rank %d compiled %d graphs", step, self.world.rank, self.num_recompiles)

    def log_on_first_rank(self, message: str, *values: object) -> None:
        """Log a message once for all ranks."""
        if self.world.is_first:
            _log.info(message, *values)
