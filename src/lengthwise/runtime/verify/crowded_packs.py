"""Check that what a model computes of a sequence does not depend on how many others are in its pack.

Small packs do not show it: experts that take so many tokens and no more, a table or an assertion that ends at the
longest sequence, a loss that is made in chunks. So two sequences in a pack by themselves are compared with every copy
of them in a pack that is large, in the model's own dtype: the hidden states that the last layer returns, the loss, and
where weights are at hand the loss's gradient for those hidden states. Layers are computed without gradients.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from functools import partial
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from lengthwise.core.errors import CheckError
from lengthwise.runtime.comm.collectives import gather_rows
from lengthwise.runtime.comm.out_of_memory import is_out_of_memory
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.loop.synthetic_batches import traced_lengths, varied
from lengthwise.runtime.verify.float64_mode import noise_free
from lengthwise.runtime.verify.precision import tolerance_of
from lengthwise.runtime.verify.stock_call import is_summed_over_ranks, pack_of, shard_for
from lengthwise.runtime.verify.verdict import NotInThisDtype, on_every_rank
from lengthwise.runtime.wrap.context import active
from lengthwise.runtime.wrap.made_labels import targets_of_loss

MOST_SLOTS = 8192
"""Slots of the largest pack that is compared."""
OFTEN = 0.2
"""The share of slots that may differ in half precision, in which a router may choose another expert by rounding."""


@dataclass(frozen=True, kw_only=True)
class _Computed:
    """What a model made of a pack."""

    hidden: dict[int, Tensor]
    """[slots, features] what the last layer returned, by its place."""
    loss: float
    """Its mean over the targets."""
    gradients: dict[int, Tensor]
    """Those of the loss summed over its targets, for ``hidden``; none where they are not made."""


@dataclass(frozen=True)
class _Differences:
    """How a large pack differs from a small one."""

    hidden: float
    """The share of slots whose hidden states do; 2 if memory does not suffice."""
    loss: float = 0.0
    """The loss's, relative."""
    gradients: float = 0.0
    """The share of slots whose gradients do."""


def crowding_problem(run: PreparedModel, num_slots: int) -> str:
    """Why packs of ``num_slots`` slots, or a few less, cannot be used, or an empty string; every rank calls this.

    A pack that does not fit into memory is halved until one does.
    """
    lengths = traced_lengths(run.collator)
    copies, worst = num_slots // sum(lengths), _Differences(0.0)
    with noise_free(run):
        while copies > 1:
            try:
                differences = on_every_rank(
                    run, partial(_differences, run, lengths, copies), "a pack of many sequences"
                )
            except (CheckError, NotInThisDtype) as error:
                return str(error if isinstance(error, CheckError) else error.reason)
            row = torch.tensor(astuple(differences), dtype=torch.float64, device=run.world.device)
            worst = _Differences(*gather_rows(row).amax(0).tolist())
            if worst.hidden <= 1.0:
                break
            copies //= 2
    return _problem(run, worst, copies * sum(lengths), sum(lengths)) if copies > 1 else ""


def _problem(run: PreparedModel, worst: _Differences, num_slots: int, num_few: int) -> str:
    limit = OFTEN if run.state.compute_dtype in (torch.bfloat16, torch.float16) else 0.0
    name, sizes = type(run.model).__name__, f"in a pack of {num_slots:,} slots than in one of {num_few}"
    if worst.hidden > limit:
        return (
            f"{name} computes something else of two sequences {sizes}, as experts do that take a fixed number of "
            f"tokens ({worst.hidden:.0%} of the slots differ)"
        )
    if worst.gradients > limit or worst.loss > tolerance_of(None, run.state.compute_dtype).relative:
        how = f"the loss differs by {worst.loss:.1e}"
        how += f", and its gradient at {worst.gradients:.0%} of the slots" if worst.gradients else ""
        return f"{name} makes another loss of two sequences {sizes}, as the mean of the means of chunks is ({how})"
    return ""


def _differences(run: PreparedModel, lengths: tuple[int, ...], copies: int) -> _Differences:
    """How a pack of ``copies`` of each sequence differs from one of each, by more than rounding."""
    has_gradients = not is_summed_over_ranks(run)
    for with_gradients in (True, False) if has_gradients else (False,):
        try:
            few, many = (_computed(run, lengths, number, with_gradients) for number in (1, copies))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            continue
        relative = tolerance_of(None, run.state.compute_dtype).relative
        differ = partial(_share_that_differs, lengths=lengths, copies=copies, relative=relative)
        loss = abs(many.loss - few.loss) / max(abs(few.loss), 1e-6) if isfinite(few.loss) else 0.0
        return _Differences(
            hidden=differ(few.hidden, many.hidden),
            loss=loss if isfinite(loss) else 1.0,
            gradients=differ(few.gradients, many.gradients, floor=FLOOR),
        )
    return _Differences(hidden=2.0)


FLOOR = 0.1
"""The share of the usual norm of a slot's gradient of which rounding is a part, where its own is smaller."""


def _share_that_differs(
    few: dict[int, Tensor],
    many: dict[int, Tensor],
    *,
    lengths: tuple[int, ...],
    copies: int,
    relative: float,
    floor: float = 0.0,
) -> float:
    """The share of slots whose values differ by more than ``relative`` of their norm."""
    name = next((name for name in few if name in many and few[name].shape[1] == many[name].shape[1]), None)
    if name is None:
        return 0.0
    expected = torch.cat([part.repeat(copies, 1) for part in few[name].split(lengths)])
    norms = expected.norm(dim=1)
    limits = relative * norms.clamp(min=floor * float(norms.square().mean().sqrt()))
    return float((~((many[name] - expected).norm(dim=1) <= limits)).double().mean())


def _computed(run: PreparedModel, lengths: tuple[int, ...], copies: int, with_gradients: bool) -> _Computed:
    """What the model makes of ``copies`` of each sequence in a pack.

    Copies have the number of their sequence, by which it draws, is masked, or looks something up.
    """
    numbers = tuple(number for number in range(len(lengths)) for _ in range(copies))
    pack = pack_of(run, lengths, numbers)
    with varied(run, lengths), torch.no_grad(), run.gathered():
        shard = shard_for(run, pack, run.alone)
        last = _LastLayer(shard.num_slots, with_gradients=with_gradients)
        with active(shard), last.watched(run):
            micro_batch = run.make(shard, pack)
            loss = run.wrapped_model.loss_of(run.model(**micro_batch.inputs), micro_batch)
            num_targets = targets_of_loss(micro_batch)
        shard.passes.clear()  # a circle, which would keep the graph
        return _Computed(
            hidden={place: last.rows(value.detach()) for place, value in last.outputs.items()},
            loss=float(loss.detach().double()) if num_targets else float("nan"),
            gradients=last.gradients(loss, num_targets),
        )


class _LastLayer:
    """Notes what the last layer of a model returns for a number of slots; what follows may have gradients."""

    def __init__(self, num_slots: int, *, with_gradients: bool) -> None:
        self._num_slots, self._with_gradients = num_slots, with_gradients
        self.outputs: dict[int, Tensor] = {}
        """By their place."""

    @contextmanager
    def watched(self, run: PreparedModel) -> Iterator[None]:
        """Within, what the layer returned last is in :attr:`outputs`."""
        hook = list(run.wrapped_model.structure.layers)[-1].register_forward_hook(self._note)
        try:
            yield
        finally:
            hook.remove()

    def _note(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        parts = output if isinstance(output, tuple) else (output,)
        self.outputs = {place: value for place, value in enumerate(parts) if self._is_of_slots(value)}
        if not self._with_gradients or not self.outputs:
            return output
        torch.set_grad_enabled(True)
        self.outputs = {place: value.detach().requires_grad_() for place, value in self.outputs.items()}
        copies = {place: value.clone() for place, value in self.outputs.items()}  # which may change in place
        parts = tuple(copies.get(place, value) for place, value in enumerate(parts))
        return type(output)(*parts) if hasattr(output, "_fields") else parts if isinstance(output, tuple) else parts[0]

    def _is_of_slots(self, value: Any) -> bool:
        is_floating = isinstance(value, Tensor) and value.is_floating_point()
        return is_floating and value.ndim > 1 and list(value.shape).count(self._num_slots) == 1

    def rows(self, value: Tensor) -> Tensor:
        """[slots, features] of something of the outputs' shape."""
        return value.movedim(value.shape.index(self._num_slots), 0).flatten(1).double()

    def gradients(self, loss: Tensor, num_targets: int) -> dict[int, Tensor]:
        """The gradients of the mean ``loss`` times its targets, for the outputs; none if it does not depend on them."""
        if not loss.requires_grad or not num_targets or not self.outputs:
            return {}
        gradients = torch.autograd.grad(loss, list(self.outputs.values()), allow_unused=True)
        return {
            place: self.rows(gradient) * num_targets
            for place, gradient in zip(self.outputs, gradients)
            if gradient is not None
        }
