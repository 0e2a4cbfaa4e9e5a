"""Values of all sequences of a step, gathered from the ranks that computed them, and the slope of a loss by each.

The chain rule lets a loss of values of many sequences be differentiated in two halves: its derivative by each value is
a number that every rank can compute once it has all values; then each micro-batch's backward begins with the numbers
of its own sequences (Gao et al., 2021, section 3, for contrastive losses). U units of M sequences, S = U M of a step.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lengthwise.core.errors import InputError
from lengthwise.core.step_plan import StepPlan
from lengthwise.runtime.comm.collectives import sum_over_ranks
from lengthwise.runtime.comm.world import DistContext
from lengthwise.runtime.loop.call_order import RankOperation, RankReports, bits_of, float_of, sync_ranks
from lengthwise.runtime.wrap.collator import PackCollator
from lengthwise.runtime.wrap.gradient_changes import leaves_of
from lengthwise.runtime.wrap.unit_members import Units

CoupledLoss = Callable[..., Tensor]
"""From values ``[S, ...]`` of the step's sequences, or ``[U, M, ...]`` of its units, the loss of the step; or from
``[S, ...]`` and ``[S]``, the unit of each sequence, where it has a second parameter without a default."""


@dataclass(kw_only=True)
class Coupling:
    """How a run's steps couple their sequences."""

    loss_of: CoupledLoss
    keep_forwards: Callable[[StepPlan], frozenset[tuple[int, int]]]
    """The micro-batches, by pipeline and number in it, whose forwards keep what the backward needs."""


MOST_AXES = 6
"""Axes of the values of a sequence."""
SAME_LOSS = 1e-6
"""Relative difference of a loss on two ranks, whose devices may round differently."""
INDEPENDENT = "a number that does not depend on them"
DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True, kw_only=True)
class SequenceValues:
    """What a rank says of the sequences of one micro-batch."""

    numbers: Sequence[int]
    """The numbers of the sequences."""
    values: Tensor
    """[s, ...] without a graph, equal on every rank that shares the micro-batch."""
    is_first: bool
    """Whether this rank says it for the ranks that share the micro-batch."""


@dataclass(frozen=True, kw_only=True)
class Coupled:
    """The loss of a step, and its derivative by each value."""

    loss: float
    slopes: Tensor
    """[S, ...] in the order of ``rows``."""
    gradients: dict[str, Tensor]
    """Its derivatives by parameters of the model that it reads itself, by name."""
    rows: dict[int, int]
    """The row of each sequence by its number."""

    def of(self, numbers: Sequence[int]) -> Tensor:
        """[s, ...] the derivatives by the values of some sequences."""
        return self.slopes[[self.rows[number] for number in numbers]]


def report_forwards(world: DistContext, step: int, said: Sequence[SequenceValues], *, is_void: bool) -> RankReports:
    """Report that this rank's forwards are done, and of what form its values are; every rank calls this.

    ``is_void``: this rank cannot go on with the step, for lack of memory or because its loop left it.

    Raises:
        CheckError: ranks are at different operations.
    """
    form = [int(is_void)]
    if said:
        first = said[0].values
        form += [1 + DTYPES.index(first.dtype), first.dim() - 1, *first.shape[1:]]
    reports = sync_ranks(world, RankOperation.COUPLE, step, values=form)
    reports.check_same()
    return reports


def form_of_values(reports: RankReports) -> tuple[list[int], torch.dtype]:
    """The shape of a sequence's values after its first axis, and their dtype, by what all ranks reported.

    Raises:
        InputError: values of different ranks have different forms; every rank raises it.
    """
    forms = {row[1 : 3 + MOST_AXES]: rank for rank, row in reversed(list(enumerate(reports.values))) if row[1]}
    if len(forms) > 1:
        (form, first), (other, second), *_ = sorted(forms.items(), key=lambda form: form[1])
        raise InputError(
            f"step {reports.steps[0]}: step.couple got values of {_form_text(form)} on rank {first} and of "
            f"{_form_text(other)} on rank {second}; give the same for every sequence"
        )
    ((dtype, axes, *sizes),) = forms
    return list(sizes[:axes]), DTYPES[dtype - 1]


def couple(
    world: DistContext,
    plan: StepPlan,
    collator: PackCollator,
    said: Sequence[SequenceValues],
    *,
    form: tuple[list[int], torch.dtype],
    loss_of: CoupledLoss,
    parameters: Mapping[str, Tensor],
) -> Coupled:
    """Gather the values of all sequences of a step and differentiate its loss by them; every rank calls this.

    ``parameters``: of the model, which the loss may read as well.

    Raises:
        InputError: ``loss_of`` fails, returns no number, one that does not depend on the values, or different numbers
            on different ranks, or reads other tensors that require a gradient; every rank raises it.
    """
    packs = [planned.pack for pipeline in plan.pipelines for planned in pipeline.micro_batches]
    numbers = sorted(number for pack in packs for number in collator.members(collator.computed(pack)))
    rows = {number: row for row, number in enumerate(numbers)}
    shape, dtype = form
    rows_SX = torch.zeros(len(numbers), *shape, dtype=dtype, device=world.device)
    for part in said:
        if part.is_first:
            rows_SX[[rows[number] for number in part.numbers]] = part.values.to(rows_SX.device)
    values = sum_over_ranks(rows_SX).requires_grad_()  # every row has one summand that is not zero, so it is exact
    by_unit, slopes, loss, gradients = values, None, torch.zeros(()), dict[str, Tensor]()
    problem = sizes_problem(loss_of, collator.units)
    try:
        with torch.enable_grad():
            if takes_unit_ids(loss_of):
                loss = loss_of(values, _unit_ids(numbers, collator.units).to(world.device))
            elif not problem:
                by_unit = values if collator.units is None else values.unflatten(0, (-1, collator.units.num_members))
                loss = loss_of(by_unit)
            problem = problem or _problem_of_loss(loss, list(by_unit.shape))
            read = {} if problem else _parameters_in(loss, values, parameters)
            if not problem:
                slopes, *of_read = torch.autograd.grad(loss, [values, *read.values()], allow_unused=True)
                problem = "" if slopes is not None else _returned(list(by_unit.shape), INDEPENDENT)
                gradients = dict(zip(read, of_read))
    except InputError as error:
        problem = error.marked
    except Exception as error:
        problem = f"coupled_loss failed on values {list(by_unit.shape)}: {type(error).__name__}: {error}"
    own_loss = float("nan") if problem else float(loss.detach())
    reports = sync_ranks(world, RankOperation.COUPLE, plan.step, values=[bits_of(own_loss)], note=problem)
    reports.check_same()
    if any(reports.notes):
        raise InputError(f"step {plan.step}: {reports.notes_text()}")
    losses = [float_of(bits) for bits in reports.column(0)]
    if any(abs(loss - own_loss) > SAME_LOSS * abs(own_loss) for loss in losses):
        by_rank = ", ".join(f"{loss:.9g}" for loss in losses)
        raise InputError(
            f"step {plan.step}: coupled_loss made {by_rank} on ranks 0 to {len(losses) - 1} of the same values; let it "
            "depend on its argument alone"
        )
    assert slopes is not None, "a loss without a problem was differentiated"
    return Coupled(loss=own_loss, slopes=slopes, gradients=gradients, rows=rows)


def _parameters_in(loss: Tensor, values: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters of the model that a loss reads beside the values.

    Raises:
        InputError: it reads another tensor that requires a gradient.
    """
    names = {id(parameter): name for name, parameter in parameters.items()}
    parameters_read = dict[str, Tensor]()
    for read in leaves_of(loss):
        if read is values:
            continue
        if id(read) not in names:
            raise InputError(
                f"coupled_loss reads a tensor {list(read.shape)} that requires a gradient and is no parameter of the "
                "model, so it would get none; make it an nn.Parameter of one of the model's modules, or detach it"
            )
        parameters_read[names[id(read)]] = read
    return dict(sorted(parameters_read.items()))


def takes_unit_ids(loss_of: CoupledLoss) -> bool:
    """Whether a coupled loss has a second parameter without a default: the unit of each sequence."""
    try:
        parameters = inspect.signature(loss_of).parameters.values()
    except (TypeError, ValueError):  # a function of C
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional and p.default is inspect.Parameter.empty for p in parameters) > 1


def sizes_problem(loss_of: CoupledLoss, units: Units | None) -> str:
    """Why a coupled loss cannot take units for their numbers of members; an empty string: it can."""
    if units is None or units.num_members is not None or takes_unit_ids(loss_of):
        return ""
    return (
        f"coupled_loss has one parameter, the values [U, M, ...] of units, and units have {units.sizes_text} sequences "
        "here; with a second one, coupled_loss(values, unit_ids), it gets values [S, ...] and the unit [S] of each"
    )


def _unit_ids(numbers: Sequence[int], units: Units | None) -> Tensor:
    """[S] which unit of the step, from 0, each of its sequences belongs to."""
    of_each = np.asarray(numbers) if units is None else units.unit_of(numbers)
    return torch.from_numpy(np.unique(of_each, return_inverse=True)[1])


def _problem_of_loss(loss: object, shape: list[int]) -> str:
    """What is wrong with what ``coupled_loss`` returned; an empty string: nothing."""
    if not isinstance(loss, Tensor):
        what = type(loss).__name__
    elif loss.dim() or not loss.is_floating_point():
        what = f"{str(loss.dtype).removeprefix('torch.')} of shape {list(loss.shape)}"
    elif not loss.requires_grad:
        what = INDEPENDENT
    else:
        return ""
    return _returned(shape, what)


def _returned(shape: list[int], what: str) -> str:
    return f"coupled_loss takes the values {shape} of all sequences and returns one number made of them; got {what}"


def check_values(values: object, count: int, *, form: Tensor | None) -> Tensor:
    """The values of a micro-batch of ``count`` sequences, in float32 or more.

    ``form``: values of other sequences, of the same shape and dtype.

    Raises:
        InputError: they are not one value, or one array, for each sequence.
    """
    if not isinstance(values, Tensor) or not values.dim() or len(values) != count:
        got = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise InputError(
            f"step.couple takes one value, or one array, for each of the {count} sequences of this micro-batch, "
            f"[{count}, ...], made of micro_batch.per_sequence; got {got}"
        )
    if not values.is_floating_point() or values.dim() - 1 > MOST_AXES:
        raise InputError(
            f"step.couple takes real values with at most {MOST_AXES} axes for a sequence; got {values.dtype} of shape "
            f"{list(values.shape)}"
        )
    checked = values if values.dtype in DTYPES else values.float()
    if form is not None and (checked.dtype, checked.shape[1:]) != (form.dtype, form.shape[1:]):
        raise InputError(
            f"step.couple got values {list(checked.shape[1:])} in {checked.dtype} for each sequence of this "
            f"micro-batch and {list(form.shape[1:])} in {form.dtype} for others; give the same for every sequence"
        )
    return checked


def _form_text(form: tuple[int, ...]) -> str:
    dtype, axes, *sizes = form
    return f"{['s', *sizes[:axes]]} in {str(DTYPES[dtype - 1]).removeprefix('torch.')}".replace("'", "")
