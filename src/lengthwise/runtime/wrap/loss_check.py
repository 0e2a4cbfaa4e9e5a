"""Check that what a loop hands to ``step.backward`` is a loss that the step can weight.

A micro-batch's loss gets the weight of its targets in the step, so it must be a mean over them. The loss that was
checked before the run is: the model's own, or that of ``loss=``. So a loss is compared with that one; once it was
equal, others that were computed by the same operations, of as many sequences, are taken for it. As the same operations
make another loss of another coefficient, they are compared again: at the update, or now and then. A loss that is not
equal needs its user's word for what it is a mean over.
"""

import logging
from collections import deque
from collections.abc import Sequence
from math import isfinite
from typing import Any, Literal
from weakref import ref

import torch
from torch import Tensor

from lengthwise.core.errors import CheckError, InputError
from lengthwise.runtime.wrap.deferred_loss import DeferredLoss
from lengthwise.runtime.wrap.gradient_changes import graph_of
from lengthwise.runtime.wrap.loss_divisors import DivisorCheck
from lengthwise.runtime.wrap.loss_places import LossPlace, place_of, tells_apart
from lengthwise.runtime.wrap.made_labels import targets_of_loss
from lengthwise.runtime.wrap.missing_tensor import MissingTensor

_log = logging.getLogger("lengthwise")
MeanOver = Literal["targets", "tokens", "units", "step"]
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}
"""Relative difference at most of two computations of one loss, by the narrower dtype of the two.

Measured: 4e-7 of float32, of whatever logits; one and a half units in the last place of 16 bits, and here are two.
"""
HEAD_IN_16_BITS = 5e-4
"""The same where a head in 16 bits computes logits for each of the two, by other products."""
FLOOR = 1.0
"""Smaller losses may differ as one of this size does, for logits are rounded."""
AGAIN_IN_16_BITS = 2e-2
"""The same of losses in 16 bits that were recognized before, and of those below a half: as a model learns, its logits
grow and its loss falls, and rounding is no reason to end a run."""
_16_BITS = (torch.float16, torch.bfloat16)
DEPTH = 6
"""Operations of a loss, from the last one back, by which it is known."""

Signature = tuple[str, ...]


class NotedLoss:
    """The loss of a forward of a prepared model, or the output to compute it from."""

    def __init__(self, loss: Tensor | None, output: Any) -> None:
        """``loss``: that the forward returned; ``output``: that one is to be made of, if it was kept."""
        self._loss = None if loss is None else ref(loss)
        self._version = _version_of(loss)
        self._made_by = None if loss is None or isinstance(loss, DeferredLoss) else loss.grad_fn
        # A copy: a loop may change the loss in place.
        self._value = loss if loss is None or isinstance(loss, DeferredLoss) else loss.detach().clone()
        self.output = output

    @property
    def made_by(self) -> Any:
        """The operation that made the loss; None: the forward returned none, or it was not computed yet."""
        if isinstance(self._value, DeferredLoss):
            return self._value.whole().grad_fn if self._value.is_computed else None
        return self._made_by

    @property
    def value(self) -> Tensor | None:
        """The loss, computed now if it was not; None: the forward returned none."""
        return None if self._value is None else self._value.detach().clone()

    @property
    def computed_value(self) -> Tensor | None:
        """The loss; None: the forward returned none, or it was not computed yet."""
        return None if isinstance(self._value, DeferredLoss) and not self._value.is_computed else self.value

    def is_loss(self, loss: Tensor) -> bool:
        """Whether this is the very tensor that the forward returned, as it returned it."""
        returned = None if self._loss is None else self._loss()
        if isinstance(returned, DeferredLoss):
            return returned.is_made_of(loss)
        return returned is loss and _version_of(loss) == self._version

    def is_in(self, loss: Tensor) -> bool:
        """Whether a loss is the one that the forward returned, or was made of it."""
        return self.is_loss(loss) or (self._made_by is not None and self._made_by in graph_of(loss))


class LossCheck:
    """Recognizes the losses of a run's loop, by value or by the operations that made them.

    Where the value of the checked loss is there anyway, losses that were recognized are compared at the end of each
    step, when the host waits for the device. Where it costs something, one is compared again after 1, 2, 4, ... steps.
    """

    def __init__(self, *, warns: bool = True) -> None:
        """``warns``: whether this rank says what is the same within a wide limit."""
        self._warns, self.divisors = warns, DivisorCheck()
        self._known: set[tuple[Signature, LossPlace]] = set()
        self._later: list[tuple[Tensor, list[Tensor], torch.dtype | None]] = []
        """A loss, the values of the checked one, and the dtype of a head of both, to compare at the update."""
        self._num_steps = self._num_due = 0
        self._num_known = self._last_known = 0
        """Losses that were recognized so far in this step, and in the last one."""
        self._is_missing = self._is_due = False
        """Whether a loss could not be compared, as no output was kept; whether a known one is compared again."""

    def begin(self) -> None:
        """Begin a step."""
        self._later.clear()
        self._is_due = self._num_steps > 0 and self._num_steps & (self._num_steps - 1) == 0
        self._num_steps += 1
        self._num_due += self._is_due
        self._last_known, self._num_known = self._num_known, 0

    def needs_output(self, micro_batch: Any) -> bool:
        """Whether the forward of a micro-batch has to keep what a loss is made of, which costs memory."""
        if self._is_missing or self._is_due:
            return True
        place = place_of(micro_batch)
        return not any(place.is_like(compared) for _, compared in self._known)

    def check(self, loss: Any, wrapped_model: Any, micro_batch: Any, mean_over: MeanOver | None = None) -> None:
        """Compare a loss with the one that was checked before the run, or its divisor with what it is a mean over.

        Raises:
            CheckError: it is another one.
        """
        if mean_over is not None:
            return self._check_divisor(loss, micro_batch, mean_over)
        _check_labels(wrapped_model, micro_batch)
        passes = [forward for forward in micro_batch.shard.passes if forward.noted is not None]
        noted = [forward.noted for forward in passes if forward.num_other_targets is None]
        if not noted:
            _check_labels_are_planned(passes, micro_batch)
        if any(note.is_loss(loss) for note in noted) or micro_batch.num_targets == 0:
            return  # or a mean over nothing
        place, signature = place_of(micro_batch, num_targets=micro_batch.num_targets), signature_of(loss)
        head = micro_batch.shard.dtype if wrapped_model.deferred_parameters else None
        is_known = len(noted) == len(passes) and any((signature, other) in self._known for other in place.stricter())
        if is_known and (values := [note.computed_value for note in noted if note.computed_value is not None]):
            if not any(isinstance(value, MissingTensor) for value in values):
                self._later.append((loss.detach().clone(), values, head))
            return
        if is_known and not self._is_next():
            return
        values = [note.value for note in noted if note.value is not None]
        with torch.no_grad():
            values += [wrapped_model.loss_of(note.output, micro_batch) for note in noted if note.output is not None]
        if any(isinstance(value, MissingTensor) for value in values):
            return  # the step comes again
        if not values and (is_known or (wrapped_model.has_own_loss and not self.needs_output(micro_batch))):
            self._is_missing = not is_known  # the next micro-batch's is looked at
            return
        if problem := _difference(loss.detach(), values, head, is_known=is_known):
            _check_labels_are_planned(passes, micro_batch)
            raise CheckError(problem)
        self._is_due = False
        if not is_known and torch.isfinite(loss.detach()):
            self._is_missing = False
            self._warn_of_16_bits(loss, values)
            if tells_apart(micro_batch, place):
                self._known.add((signature, place))

    def _check_divisor(self, loss: Any, micro_batch: Any, mean_over: MeanOver) -> None:
        if mean_over == "targets":
            self.divisors.check(loss, micro_batch, targets_of_loss(micro_batch, loss, is_checked=False), what="targets")
        elif mean_over == "tokens":
            self.divisors.check(loss, micro_batch, micro_batch.shard.num_unpadded, what="tokens")

    def _is_next(self) -> bool:
        """Whether a loss that is recognized is compared again: in steps that are due one, another place each time."""
        self._num_known += 1
        size = max(1, self._last_known)
        return self._is_due and (self._num_known - 1) % size == -self._num_due % size

    def _warn_of_16_bits(self, loss: Tensor, values: Sequence[Tensor]) -> None:
        """Warn once of a loss that is recognized by numbers in 16 bits, which others have too."""
        dtypes = [dtype for dtype in (loss.dtype, *(value.dtype for value in values)) if dtype in _16_BITS]
        if dtypes and self._warns:
            self._warns = False
            _log.warning(
                "step.backward got a loss of %.6g, made in the loop, that is taken for the checked one: the two are "
                "the same within %.1f %% (one is %s), as may another loss be, such as one across ends of sequences. "
                "Give the loss that the model returned, or make it, and that of the model or loss=, of logits.float() "
                "(not said again)", float(loss.detach()), 100 * TOLERANCE[dtypes[0]],
                str(dtypes[0]).removeprefix("torch."),
            )  # fmt: skip

    def problem(self) -> str:
        """Why a loss of the step was wrongly taken for the checked one; an empty string: none was."""
        later, self._later = self._later, []
        return next((problem for entry in later if (problem := _difference(*entry, is_known=True))), "")


def largest_difference(
    loss: Tensor, value: Tensor, *, head: torch.dtype | None = None, is_known: bool = False
) -> float:
    """The largest difference that two computations of one loss have.

    ``head``: the dtype in which a head may compute logits for each of them; None: they have the same logits.
    ``is_known``: they were the same before.
    """
    narrower = max(loss.dtype, value.dtype, key=lambda dtype: torch.finfo(dtype).eps)
    limit = TOLERANCE.get(narrower, TOLERANCE[torch.bfloat16])
    size = abs(float(value.detach()))
    if head in _16_BITS:
        limit = max(limit, HEAD_IN_16_BITS)
    if (head in _16_BITS or narrower in _16_BITS) and (is_known or size < FLOOR / 2):
        limit = max(limit, AGAIN_IN_16_BITS)
    return limit * max(FLOOR, size)


def _version_of(loss: Tensor | None) -> int | None:
    """How often a tensor was changed in place; None: it is not counted."""
    return None if loss is None or isinstance(loss, DeferredLoss) or loss.is_inference() else loss._version


def _difference(loss: Tensor, values: Sequence[Tensor], head: torch.dtype | None, *, is_known: bool) -> str:
    """Why a loss is not the checked one, which has one of ``values``; an empty string: it is, or is not finite."""
    actual, expected = float(loss), [float(value.detach()) for value in values]
    limits = [largest_difference(loss, value, head=head, is_known=is_known) for value in values]
    if not isfinite(actual) or any(abs(actual - value) <= limit for value, limit in zip(expected, limits)):
        return ""  # the update says what is wrong
    if not expected:
        return (
            f"step.backward got a loss of {actual:.6g} of a forward that made none, such as one without labels, so "
            "there is nothing to compare it with; say what it is a mean over, on this rank: step.backward(loss, "
            "mean_over='targets'); or give the labels to the model, or prepare(..., loss=) the loss"
        )
    checked = ", ".join(f"{value:.6g}" for value in expected)
    return (
        f"step.backward got a loss of {actual:.6g}, and the one that was checked before the run "
        f"(the model's own, or that of loss=) is {checked}; so its weight in the step is not known. Hand that loss "
        "over as it is, not divided, summed or shifted (the labels of a micro-batch are shifted already); give further "
        "terms as step.backward(loss, side=micro_batch.mean(values, over='tokens')); or say what another loss is a "
        "mean over, on this rank: step.backward(loss, mean_over='targets')"
    )


def _check_labels(wrapped_model: Any, micro_batch: Any) -> None:
    """Raise ``CheckError`` if a label counts as a target that the checked loss leaves out."""
    ignored = wrapped_model.ignored_labels
    if ignored and wrapped_model.by_sequence is not None and wrapped_model.is_mean is False:
        return  # the number of targets is the weight of a sequence's loss, whatever that is made of
    if ignored and (label := micro_batch.label_among(ignored)) is not None:
        raise CheckError(
            f"a token has the label {label}, which counts as a target of the step, and which the loss of "
            f"{type(wrapped_model.model).__name__} leaves out or weighs otherwise (ignore_index= or weight= of "
            f"cross_entropy), as no sequence showed that was compared; say prepare(..., ignore_index={label}) where it "
            "has no loss, or let the sequences of prepare have it, so that such a loss is computed one by one"
        )


def check_targets(loss: Tensor, micro_batch: Any, mean_over: MeanOver | None) -> None:
    """Raise ``CheckError`` if a loss is a mean over something else, or over other targets, than it is weighted by."""
    passes = [forward for forward in micro_batch.shard.passes if forward.noted is not None]
    if mean_over not in (None, "targets"):
        is_mean = any(forward.is_mean_of_pack and forward.num_made_targets is None for forward in passes)
        is_of_tokens = micro_batch.has_all_targets or micro_batch.shard.tree is not None
        if is_mean and (
            (mean_over == "units" and micro_batch.shard.part is None) or (mean_over == "tokens" and not is_of_tokens)
        ):
            _check_no_mean_over_targets(loss, passes, mean_over)
        return
    made_by = next((forward for forward in passes if forward.noted.is_loss(loss)), None)
    _check_labels_are_planned([forward for forward in passes if forward.noted.is_in(loss)], micro_batch)
    is_counted = mean_over is None and any(forward.num_made_targets is not None for forward in passes)
    if made_by is None and not is_counted and micro_batch.handed_out.has_other_targets:
        raise CheckError(
            "labels of the micro-batch were changed in place and have more or fewer targets now, so the weight in the "
            "step of a loss that the loop makes is not known; change copies where the loss has the targets of the "
            "micro-batch, and for other targets make it by micro_batch.sum(values), divided by a number of the whole "
            "step, and give it as step.backward(loss, mean_over='step')"
        )


def _check_labels_are_planned(passes: Sequence[Any], micro_batch: Any) -> None:
    """Raise ``CheckError`` if one of these forwards had labels whose number is not what its loss is weighted by."""
    forward = next((forward for forward in passes if forward.num_other_targets is not None), None)
    if forward is None:
        return
    number, has = forward.num_other_targets, f"{micro_batch.num_targets:,}"
    has = has if number != micro_batch.num_targets else f"as many in other sequences ({has})"
    of_units = "" if forward.is_mean_of_pack else (
        ". Where every sequence is to weigh the same, as of CTC, say step.backward(loss, mean_over='units'), and where "
        "its tokens weigh it, mean_over='tokens'"
    )  # fmt: skip
    raise CheckError(
        f"the model was called with labels that have {number:,} targets, and its micro-batch has {has}, by which its "
        "loss is weighted in the step; put such labels into the items, or make a loss of the logits by "
        "micro_batch.mean(values, over='tokens') or micro_batch.sum(values), and give it as step.backward(loss, "
        f"mean_over='step'){of_units}"
    )


def _check_no_mean_over_targets(loss: Tensor, passes: Sequence[Any], mean_over: MeanOver) -> None:
    """Raise ``CheckError`` if a loss that is to be a mean over tokens or units is made of one over targets of packs."""
    if any(forward.noted.is_in(loss) for forward in passes):
        raise CheckError(
            f"the loss with mean_over={mean_over!r} is made of the loss that the forward returned, which is the mean "
            "over the targets of a micro-batch, as it was compared before the run, whichever sequences that has. "
            "Make the loss of the outputs by token: of units by micro_batch.per_sequence(values), or give "
            "step.backward(micro_batch.mean(values, over='sequences'), mean_over='step')"
        )


def check_form(loss: Any, passes: int, name: str = "loss") -> None:
    """Raise ``InputError`` if ``loss`` is not a number that can be differentiated with respect to the model."""
    if isinstance(loss, MissingTensor):
        return
    if not isinstance(loss, Tensor):
        raise InputError(f"step.backward takes the {name} as a tensor; got {type(loss).__name__}")
    if loss.dim():
        raise InputError(f"the {name} has shape {list(loss.shape)}; step.backward takes one number, a mean")
    if not loss.is_floating_point():
        raise InputError(f"the {name} is {str(loss.dtype).removeprefix('torch.')}; step.backward takes a real number")
    check_has_gradient(loss, name)
    if not passes:
        raise InputError(
            "the prepared model was not called in this micro-batch, so the loss cannot be its; call "
            "model(**micro_batch.inputs) first"
        )


def check_has_gradient(loss: Tensor, name: str = "loss") -> None:
    """Raise ``InputError`` if nothing that a loss was made of gets a gradient."""
    if not loss.requires_grad:
        raise InputError(
            f"the {name} has no gradient: it was detached, made of .item(), computed under torch.no_grad(), or made "
            "without any trained parameter, as where an adapter is merged into its model or switched off "
            "(unmerge_adapter(), enable_adapter_layers())"
        )


def signature_of(loss: Tensor) -> Signature:
    """The last operations that made a loss, breadth first."""
    names: list[str] = []
    waiting: deque[tuple[Any, int]] = deque([(loss.grad_fn, 0)])
    while waiting:
        node, depth = waiting.popleft()
        names.append("" if node is None else node.name())
        if node is not None and depth < DEPTH:
            waiting += [(parent, depth + 1) for parent, _ in node.next_functions]
    return tuple(names)
