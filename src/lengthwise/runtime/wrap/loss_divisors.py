"""What a cross-entropy that a loop made is divided by, read from its graph: the weight in the step is of targets alone.

A mean over the targets of a micro-batch is weighted by their number. ``F.cross_entropy(..., weight=w)`` divides by the
sum of the weights instead, and others by the number of slots, or of the targets of a second head: such means of
micro-batches do not add up to that of the step, whichever weights they get.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lengthwise.core.errors import CheckError
from lengthwise.runtime.wrap.missing_tensor import MissingTensor

COMPARED_ON_DEVICE = 3
"""Micro-batches of a run whose divisors are compared where the host has to wait for the device to see them."""
_MEAN, _SUM = 1, 2
"""Reductions, as the graph has them."""
_LINEAR = ("Add", "Sub", "Mul", "Div", "Neg", "ToCopy", "Clone", "Alias", "View", "UnsafeView", "Reshape", "Squeeze")
_ROUNDING = 1e-4
"""Relative difference at most of a divisor and a number of targets: rounding, or a small number added to it."""
_WAY_OUT = (
    "Give such a loss as a sum, step.backward(micro_batch.sum(values) / divisor, mean_over='step') with the loss of "
    "each slot (reduction='none'), and a divisor of the whole step, the same on every rank"
)


@dataclass(frozen=True)
class MeanDivisor:
    """A mean of cross-entropies in the graph of a loss."""

    divisor: Tensor | float
    factors: tuple[Tensor | float, ...] = ()
    """What it is multiplied with on its way to the loss; what it is divided by, as 1 / x."""
    weight: Tensor | None = None
    """[V] the weights of classes; None: there are none."""

    @property
    def is_on_host(self) -> bool:
        """Whether the numbers can be read without waiting for a device."""
        return all(not isinstance(x, Tensor) or x.device.type == "cpu" for x in (self.divisor, *self.factors))

    def is_of(self, count: int) -> bool:
        """Whether the divisor is a multiple of ``count``, as of several heads, or ``count`` with the factors."""
        divisor = effective = float(self.divisor)
        for factor in self.factors:
            effective /= float(factor) or 1.0
        is_corrected = bool(self.factors) and abs(effective / count - 1) <= _ROUNDING
        return is_corrected or (self.weight is None and _is_multiple(divisor, count))


class DivisorCheck:
    """Compares the divisors of a run's losses with numbers of targets: on a device, of the first few micro-batches."""

    def __init__(self) -> None:
        self._num_waits = 0
        self._uniform: tuple[Tensor, int] | None = None
        """Weights that are all the same, and how often they were changed: the host does not wait for them again."""

    def check(self, loss: Any, micro_batch: Any, count: int, *, what: str) -> None:
        """Raise ``CheckError`` if ``loss`` is made of a mean that is divided by another number than ``count``.

        ``what``: what is counted, in words. What forwards returned is not looked into; it was compared before the run.
        """
        if isinstance(loss, MissingTensor) or not count:
            return
        returned = {forward.noted.made_by for forward in micro_batch.shard.passes if forward.noted is not None}
        means = list(_means_in(loss.grad_fn, returned - {None}))
        for mean in means:
            if (
                mean.weight is not None
                and not self._is_uniform(mean.weight)
                and not (mean.factors and mean.is_of(count))
            ):
                raise CheckError(
                    "step.backward got a mean cross-entropy with class weights (weight=), which is divided by the sum "
                    f"of the weights of its {what}, and in the step it is weighted by their number, so what it trains "
                    f"would depend on the plan. {_WAY_OUT}: the sum of weight[labels] over all targets"
                )
        means = [mean for mean in means if mean.weight is None]
        is_waiting = not all(mean.is_on_host for mean in means)
        if is_waiting and self._num_waits >= COMPARED_ON_DEVICE:
            return
        self._num_waits += is_waiting
        if all(mean.is_of(count) for mean in means):
            return
        if not _is_multiple(sum(float(mean.divisor) for mean in means), count):
            other = next(float(mean.divisor) for mean in means if not mean.is_of(count))
            raise CheckError(
                f"step.backward got a cross-entropy that is divided by {other:,.6g}, and in the step it is weighted by "
                f"the {count:,} {what} of this rank, so what it trains would depend on the plan. {_WAY_OUT}; or let "
                "its mean be over the targets of the micro-batch"
            )

    def _is_uniform(self, weight: Tensor) -> bool:
        """Whether weights are all the same, so that a mean by them is the mean without."""
        if self._uniform is not None and self._uniform[0] is weight and self._uniform[1] == weight._version:
            return True
        is_uniform = bool((weight == weight.flatten()[:1]).all())
        self._uniform = (weight, weight._version) if is_uniform else None
        return is_uniform


def _means_in(begin: Any, returned: set[Any]) -> Iterator[MeanDivisor]:
    """The means of cross-entropies that a loss adds up, multiplied with numbers; but for those in ``returned``."""
    waiting: list[tuple[Any, tuple[Tensor | float, ...]]] = [(begin, ())]
    seen = set[Any]()
    while waiting:
        node, factors = waiting.pop()
        if node is None or node in seen or node in returned:
            continue
        seen.add(node)
        kind = _kind(node)
        if (mean := _mean_at(node, kind, factors)) is not None:
            yield mean
        elif kind in _LINEAR:
            factors = (*factors, *_factors_at(node, kind))
            waiting += [(before, factors) for before, _ in node.next_functions]


def _mean_at(node: Any, kind: str, factors: tuple[Tensor | float, ...]) -> MeanDivisor | None:
    """The mean of cross-entropies that an operation makes; None: it makes none, or what it saved is out of reach."""
    if kind in ("NllLoss", "NllLoss2D") and node._saved_reduction == _MEAN:
        divisor, weight = _saved(node, "total_weight"), _saved(node, "weight")
        return None if divisor is None else MeanDivisor(divisor, factors, weight)
    if kind == "Mean" and _is_by_token(node.next_functions[0][0]):
        return MeanDivisor(float(node._saved_self_sym_numel), factors)
    if kind == "Div" and _is_sum(node.next_functions[0][0]) and (divisor := _saved(node, "other")) is not None:
        return MeanDivisor(divisor, factors)
    return None


def _is_sum(node: Any) -> bool:
    """Whether an operation gives a sum of cross-entropies."""
    kind = _kind(node)
    is_sum = kind in ("NllLoss", "NllLoss2D") and node._saved_reduction == _SUM
    return is_sum or (kind == "Sum" and _is_by_token(node.next_functions[0][0]))


def _is_by_token(node: Any) -> bool:
    """Whether an operation gives a cross-entropy for each token, in whatever shape."""
    while _kind(node) in ("View", "UnsafeView", "Reshape", "Squeeze", "ToCopy", "Clone"):
        node = node.next_functions[0][0]
    return _kind(node) in ("NllLoss", "NllLoss2D") and not node._saved_reduction


def _factors_at(node: Any, kind: str) -> list[Tensor | float]:
    """The number by which a multiplication or division changes what gets a gradient; none of other operations."""
    first, *others = [before is not None for before, _ in node.next_functions]
    if kind not in ("Mul", "Div") or (first and any(others)):
        return []
    value = _saved(node, "other" if first else "self")
    if value is None or (isinstance(value, Tensor) and value.numel() != 1):
        return []
    return [value if kind == "Mul" else 1 / value]


def _saved(node: Any, name: str) -> Any:
    """What an operation saved, or a number that it has; None: nothing, or what a hook would have to compute again."""
    raw = getattr(node, f"_raw_saved_{name}", None)
    if raw is None:
        return getattr(node, f"_saved_{name}", None)
    try:
        return None if raw.unpack_hook is not None else raw.data
    except RuntimeError:  # a backward let go of it
        return None


def _kind(node: Any) -> str:
    return "" if node is None else node.name().rstrip("0123456789").removesuffix("Backward")


def _is_multiple(value: float, count: int) -> bool:
    times = round(value / count)
    return times >= 1 and abs(value / count - times) <= _ROUNDING * times
