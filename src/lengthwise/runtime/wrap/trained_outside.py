"""Trained tensors beside a model that its loss reads, such as a learned temperature.

Nobody sums their gradients over ranks, weighs them by the targets of a step, or clears them after a comparison.
"""

from collections import Counter

from torch import Tensor, nn

from lengthwise.core.errors import InputError
from lengthwise.runtime.wrap.gradient_changes import leaves_of
from lengthwise.runtime.wrap.loss_check import Signature, signature_of
from lengthwise.runtime.wrap.missing_tensor import MissingTensor

LOOKED_AT = 2
"""Losses made by the same operations whose graphs are looked at."""


class TrainedOutside:
    """Refuses losses of a model that read a tensor which requires a gradient and is none of the model's parameters.

    A parameter is known as one. Any other tensor may be made within a forward, unless it was there in an earlier one.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._looked_at = model, Counter[Signature]()
        self._before: list[Tensor] = []
        """Tensors that losses have read, and that may have been made in their forwards."""

    def check_new(self, loss: Tensor, side: Tensor | None) -> None:
        """Check those that were made by other operations than losses before, for walking a graph takes time."""
        new = []
        for term in (loss, side):
            if isinstance(term, MissingTensor) or term is None:
                continue
            if self._looked_at[signature := signature_of(term)] < LOOKED_AT:
                self._looked_at[signature] += 1
                new.append(term)
        if new:
            self.check(*new)

    def check(self, *losses: Tensor) -> None:
        """Raise ``InputError`` if losses of one forward read such a tensor."""
        inside = {id(parameter) for parameter in self._model.parameters()}
        outside = [leaf for loss in losses for leaf in leaves_of(loss) if id(leaf) not in inside]
        for leaf in outside:
            if isinstance(leaf, nn.Parameter) or any(leaf is before for before in self._before):
                raise InputError(
                    f"the loss of {type(self._model).__name__} reads a tensor {list(leaf.shape)} that requires a "
                    "gradient and is no parameter of the model, so that ranks would not train it alike, or not at "
                    "all; make it an nn.Parameter of one of the model's modules before prepare, or detach it"
                )
        self._before = outside
