"""Check that what a loop hands to ``step.backward`` is a loss that the step can weight.

A micro-batch's loss gets the weight of its targets in the step, so it must be a mean over them. The loss that was
checked before the run is: the model's own, or that of ``loss=``. So a loss is compared with that one; once it was
equal, others that were computed by the same operations are taken for it without another look. A loss that is not equal
needs its user's word for what it is a mean over.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any, Literal
from weakref import ref

import torch
from torch import Tensor

from lengthwise.core.errors import CheckError, InputError
from lengthwise.runtime.wrap.deferred_loss import DeferredLoss
from lengthwise.runtime.wrap.missing_tensor import MissingTensor

MeanOver = Literal["targets", "tokens", "units", "step"]
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
"""Relative difference of two computations of one loss; ``LOW_PRECISION`` for other dtypes and under autocast."""
LOW_PRECISION = 2e-2
DEPTH = 6
"""Operations of a loss, from the last one back, by which it is known."""

Signature = tuple[str, ...]


class NotedLoss:
    """The loss of a forward of a prepared model, or the output to compute it from."""

    def __init__(self, loss: Tensor | None, output: Any) -> None:
        """``loss``: that the forward returned; ``output``: that one is to be made of, if it was kept."""
        self._loss = None if loss is None else ref(loss)
        self._value = loss if loss is None or isinstance(loss, DeferredLoss) else loss.detach()
        self.output = output

    @property
    def value(self) -> Tensor | None:
        """The loss, computed now if it was not; None: the forward returned none."""
        return None if self._value is None else self._value.detach()

    def is_loss(self, loss: Tensor) -> bool:
        """Whether this is the very tensor that the forward returned."""
        returned = None if self._loss is None else self._loss()
        return returned is loss or (isinstance(returned, DeferredLoss) and returned.is_made_of(loss))


class LossCheck:
    """Recognizes the losses of a run's loop, by value or by the operations that made them."""

    def __init__(self) -> None:
        self._known: set[Signature] = set()
        self.needs_output = True
        """Whether forwards have to keep what a loss is made of: it costs memory, and is given up when it was seen."""

    def check(self, loss: Any, wrapped_model: Any, micro_batch: Any) -> None:
        """Compare a loss with the one that was checked before the run.

        Raises:
            CheckError: it is another one.
        """
        _check_labels(wrapped_model, micro_batch)
        signature = signature_of(loss)
        passes = [forward for forward in micro_batch.shard.passes if forward.noted is not None]
        _check_targets(loss, micro_batch, passes)
        noted = [forward.noted for forward in passes if forward.num_other_targets is None]
        is_known = signature in self._known and len(noted) == len(passes)
        if is_known or any(note.is_loss(loss) for note in noted):
            return
        values = [note.value for note in noted if note.value is not None]
        with torch.no_grad():
            values += [wrapped_model.loss_of(note.output, micro_batch) for note in noted if note.output is not None]
        if any(isinstance(value, MissingTensor) for value in values):
            return  # the step comes again
        if not values and wrapped_model.has_own_loss and not self.needs_output:
            self.needs_output = True  # the next micro-batch's is looked at
            return
        limit = LOW_PRECISION if micro_batch.shard.dtype is not None else TOLERANCE.get(loss.dtype, LOW_PRECISION)
        actual = float(loss.detach())
        expected = [float(value.detach()) for value in values]
        if any(abs(actual - value) <= limit * max(1e-12, abs(value)) for value in expected):
            self._known.add(signature)
            self.needs_output = False
            return
        if micro_batch.num_targets == 0 or not torch.isfinite(loss.detach()):
            return  # a mean over nothing; or the update says what is wrong
        if not expected:
            raise CheckError(
                f"step.backward got a loss of {actual:.6g} of a forward that made none, such as one without labels, so "
                "there is nothing to compare it with; say what it is a mean over, on this rank: step.backward(loss, "
                "mean_over='targets'); or give the labels to the model, or prepare(..., loss=) the loss"
            )
        checked = ", ".join(f"{value:.6g}" for value in expected)
        raise CheckError(
            f"step.backward got a loss of {actual:.6g}, and the one that was checked before the run "
            f"(the model's own, or that of loss=) is {checked}; so its weight in the step is not known. Hand that loss "
            "over as it is, not divided or summed; give further terms as step.backward(loss, side=micro_batch.mean("
            "values, over='tokens')); or say what another loss is a mean over, on this rank: "
            "step.backward(loss, mean_over='targets')"
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


def _check_targets(loss: Tensor, micro_batch: Any, passes: Sequence[Any]) -> None:
    """Raise ``CheckError`` if one of the forwards made the loss of labels with another number of targets."""
    number = next((forward.num_other_targets for forward in passes if forward.noted.is_loss(loss)), None)
    if number is not None:
        raise CheckError(
            f"the model was called with labels that have {number:,} targets, and its micro-batch has "
            f"{micro_batch.num_targets:,}, by which its loss is weighted in the step; put such labels into the items, "
            "or make a loss of the logits by micro_batch.mean(values, over='tokens') or micro_batch.sum(values), and "
            "give it as step.backward(loss, mean_over='step')"
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
            f"the {name} has no gradient: it was detached, made of .item(), or computed under torch.no_grad()"
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
