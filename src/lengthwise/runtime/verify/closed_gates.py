"""Find trained weights that as good as nothing depends on, such as those behind a gate that is all but closed.

What a sigmoid of -25, a softmax, a tanh in saturation or a dead ReLU hides has a gradient below what a comparison of
packs can see, and begins to matter when training opens it. So packs are compared once more with other values of these
weights, the gate's own among them.
"""

import torch

from lengthwise.runtime.comm.collectives import sum_over_ranks
from lengthwise.runtime.comm.objects import broadcast_json
from lengthwise.runtime.loop.fsdp2 import Fsdp2State
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.verify.precision import Tolerance
from lengthwise.runtime.verify.stock_call import GradientResult, parameter_names

MARGIN = 100.0
"""How many times the least difference that is seen the gradient of a parameter may have to count as hidden."""
PRECISE = 1e-5
"""The tolerance of comparisons that are looked at; coarser ones see rounding of what other values make."""


class ClosedGates:
    """The parameters of a model whose gradients are too small to be compared, in all that was computed of it."""

    def __init__(self, run: PreparedModel) -> None:
        """``run``: whose weights are its own still; parameters of zeros are filled without being noted."""
        self._run = run
        parameters = run.wrapped_model.structure.parameters
        self._zeros = {name for name, value in parameters.items() if run.gather is None and not value.any()}
        self._hidden: frozenset[str] | None = None

    @property
    def names(self) -> frozenset[str]:
        """The parameters by name."""
        return self._hidden or frozenset()

    def note(self, alone: GradientResult, tolerance: Tolerance) -> None:
        """Look at the gradients of the stock model, of single sequences; every rank calls this."""
        run = self._run
        if not alone.gradients or tolerance.relative > PRECISE or isinstance(run.state, Fsdp2State):
            return
        norms = torch.stack([gradient.double().norm() for gradient in alone.gradients])
        if run.gather is not None:
            norms = sum_over_ranks(norms.square()).sqrt()
        limit = MARGIN * tolerance.relative * tolerance.floor * float(norms.norm())
        hidden = [name for name, norm in zip(parameter_names(run), norms.tolist()) if norm <= limit]
        hidden = broadcast_json(run.world, hidden, source=0)
        seen = frozenset(hidden) - self._zeros
        self._hidden = seen if self._hidden is None else self._hidden & seen
