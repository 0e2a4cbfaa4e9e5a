"""Check that what a model computes of a sequence does not depend on how many others are in its pack.

Small packs do not show it: experts that take so many tokens and no more, a table or an assertion that ends at the
longest sequence, a loss that is made in chunks. So two sequences in a pack by themselves are compared with every copy
of them in a pack that is large, in float64 where memory allows and with zeros among the weights filled: what the layer
that is called last returns, what the model returns, the loss, and where weights are at hand the loss's gradient for
that layer's output, or for all parameters where no layer returns something by slot. Layers are computed without
gradients otherwise.
"""

from collections.abc import Iterator
from dataclasses import astuple, dataclass
from functools import partial
from math import isfinite

import torch
from torch import Tensor

from lengthwise.core.errors import CheckError, InfeasibleError, LengthwiseError
from lengthwise.runtime.comm.collectives import gather_rows
from lengthwise.runtime.comm.host_blocks import host_memory_bytes
from lengthwise.runtime.comm.out_of_memory import is_out_of_memory
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.loop.synthetic_batches import traced_lengths, varied
from lengthwise.runtime.verify.layer_outputs import LayerOutputs, tensors_in
from lengthwise.runtime.verify.precision import TOLERANCES, Tolerance, compare_precisely
from lengthwise.runtime.verify.stock_call import (
    GradientResult,
    gradients_of_loss,
    is_summed_over_ranks,
    pack_of,
    shard_for,
)
from lengthwise.runtime.verify.verdict import NotInThisDtype, NotWithTheseWeights, on_every_rank
from lengthwise.runtime.verify.worst_difference import worst_difference
from lengthwise.runtime.verify.zero_weights import Fill
from lengthwise.runtime.wrap.context import active
from lengthwise.runtime.wrap.made_labels import targets_of_loss

MOST_SLOTS = 8192
"""Slots of the largest pack that is compared."""
OFTEN = 0.2
"""The share of slots that may differ in half precision, in which a router may choose another expert by rounding."""
HALF = 1e-2
"""The relative tolerance of half precision is larger."""
FLOOR, HIDDEN_FLOOR = 0.1, 1e-3
"""The share of the usual norm of a slot's gradient or output of which rounding is a part, where its own is smaller; and
of what a layer returns."""
COPIES = 4
"""Of what a model returns, that its loss and the gradient hold at once."""
AT_ONCE = 1 << 22
"""Numbers that are compared at once."""


@dataclass(frozen=True, kw_only=True)
class _Computed:
    """What a model made of a pack."""

    hidden: dict[int, Tensor]
    """[slots, features] what the layer called last returned, by its place."""
    outputs: dict[int, Tensor]
    """[slots, features] what the model returned, by its place; empty where it was compared at once."""
    output_share: float
    """The share of the slots whose outputs differ from those that were given."""
    loss: float | None
    """Its mean over the targets; None without any."""
    gradients: dict[int, Tensor]
    """Those of the loss summed over its targets, for ``hidden``; none where they are not made."""
    of_parameters: list[Tensor]
    """The same for all parameters, where the graph has all layers."""
    num_calls: int
    """Calls of layers that returned something by slot."""


@dataclass(frozen=True)
class _Differences:
    """How a large pack differs from a small one."""

    hidden: float
    """The share of slots whose hidden states or outputs do; 2 if memory does not suffice."""
    loss: float = 0.0
    """The loss's, relative."""
    gradients: float = 0.0
    """The share of slots whose gradients do; 1 if those of parameters do."""


def crowding_problem(run: PreparedModel, num_slots: int) -> str:
    """Why packs of ``num_slots`` slots, or a few less, cannot be used, or an empty string; every rank calls this.

    A pack that does not fit into memory is halved until one does.
    """
    lengths = traced_lengths(run.collator)[::-1]
    copies = num_slots // sum(lengths)
    while copies > 1:
        try:
            compare_precisely(run, partial(_compare, run, lengths, copies))
        except InfeasibleError:
            copies //= 2
            continue
        except CheckError as error:
            return error.marked
        return ""
    return ""


def _compare(run: PreparedModel, lengths: tuple[int, ...], copies: int, tolerance: Tolerance, fill: Fill) -> None:
    """Compare a pack of ``copies`` of each sequence with one of each.

    Raises:
        CheckError: they differ by more than rounding.
        NotInThisDtype: there is no memory for it, or the model cannot be computed.
    """
    what = "a pack of many sequences"
    differences = on_every_rank(run, partial(_differences, run, lengths, copies, tolerance, fill), what)
    row = torch.tensor(astuple(differences), dtype=torch.float64, device=run.world.device)
    worst = _Differences(*gather_rows(row).amax(0).tolist())
    if worst.hidden > 1.0:
        raise NotInThisDtype(InfeasibleError(f"{what} of {copies * sum(lengths):,} slots does not fit into memory"))
    if problem := _problem(run, worst, copies * sum(lengths), sum(lengths), tolerance):
        raise CheckError(problem)


def _problem(run: PreparedModel, worst: _Differences, num_slots: int, num_few: int, tolerance: Tolerance) -> str:
    limit = OFTEN if tolerance.relative > HALF else 0.0
    name, sizes = type(run.model).__name__, f"in a pack of {num_slots:,} slots than in one of {num_few}"
    if worst.hidden > limit:
        return (
            f"{name} computes something else of two sequences {sizes}, as experts do that take a fixed number of "
            f"tokens ({worst.hidden:.0%} of the slots differ)"
        )
    if worst.gradients > limit or worst.loss > tolerance.relative:
        how = f"the loss differs by {worst.loss:.1e} (limit {tolerance.relative:.0e})"
        how += f", and its gradient at {worst.gradients:.0%} of the slots" if worst.gradients else ""
        return f"{name} makes another loss of two sequences {sizes}, as the mean of the means of chunks is ({how})"
    return ""


def _differences(
    run: PreparedModel, lengths: tuple[int, ...], copies: int, tolerance: Tolerance, fill: Fill
) -> _Differences:
    """How a pack of ``copies`` of each sequence differs from one of each, by more than rounding."""
    for with_gradients in (False,) if is_summed_over_ranks(run) else (True, False):
        try:
            few = _few(run, lengths, fill, with_gradients=with_gradients)
            if not _fits_host(run, few, copies, tolerance):
                break
            graph_from = None if not with_gradients else 0 if few.of_parameters else few.num_calls
            many = _computed(run, lengths, copies, graph_from, few=few, relative=tolerance.relative)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            continue
        loss = 0.0
        if few.loss is not None and isfinite(few.loss):
            loss = abs((many.loss or 0.0) - few.loss) / max(abs(few.loss), 1e-6)
        differ = partial(_share_that_differs, lengths=lengths, copies=copies, relative=tolerance.relative)
        places = list(few.gradients) or list(few.hidden)[:1]  # what the loss does not use may be of no sequence
        hidden = [differ(few.hidden[place], many.hidden.get(place), floor=HIDDEN_FLOOR) for place in places]
        gradients = [differ(few.gradients[place], many.gradients.get(place), floor=FLOOR) for place in few.gradients]
        return _Differences(
            hidden=max([*hidden, many.output_share]),
            loss=loss if isfinite(loss) else 1.0,
            gradients=max([*gradients, _of_parameters(run, few, many, copies, tolerance)]),
        )
    return _Differences(hidden=2.0)


def _fits_host(run: PreparedModel, few: _Computed, copies: int, tolerance: Tolerance) -> bool:
    """Whether logits of a large pack fit into the host's memory, in a finer dtype than the model's own; a CPU runs out
    of memory without an error.
    """
    is_own = run.state.coarsest_dtype is torch.float64 or tolerance.relative > TOLERANCES[torch.float64].relative
    if is_own or run.world.device.type != "cpu":
        return True
    free, _ = host_memory_bytes()
    num_bytes = COPIES * 8 * copies * sum(value.numel() for value in few.outputs.values())
    return num_bytes < free / (2 * (run.world.ranks_per_node or run.world.size))


def _few(run: PreparedModel, lengths: tuple[int, ...], fill: Fill, *, with_gradients: bool) -> _Computed:
    """What the model makes of a pack of one of each sequence.

    Raises:
        NotWithTheseWeights: it is not finite, or an error of the model's own, where weights were filled.
    """
    try:
        few = _computed(run, lengths, 1, None)
        if with_gradients and few.num_calls:
            few = _computed(run, lengths, 1, few.num_calls)
        if with_gradients and not few.gradients:
            few = _computed(run, lengths, 1, 0)
    except (LengthwiseError, NotInThisDtype):
        raise
    except (ValueError, AssertionError) as error:
        if fill is Fill.NOTHING:
            raise
        raise NotWithTheseWeights(f"its forward raises {type(error).__name__}") from error
    are_finite = [bool(part.isfinite().all()) for part in (*few.gradients.values(), *few.of_parameters)]
    if fill is not Fill.NOTHING and not (all(are_finite) and isfinite(few.loss or 0.0)):
        raise NotWithTheseWeights("its loss or gradients are not finite")
    return few


def _of_parameters(run: PreparedModel, few: _Computed, many: _Computed, copies: int, tolerance: Tolerance) -> float:
    """1 if the gradients of parameters differ by more than rounding, which is not judged in half precision."""
    if not few.of_parameters or not many.of_parameters or tolerance.relative > HALF:
        return 0.0
    expected = GradientResult(loss=None, gradients=few.of_parameters)
    got = GradientResult(loss=None, gradients=[gradient / copies for gradient in many.of_parameters])
    return float(worst_difference(run, got, expected, tolerance).ratio > 1.0)


def _share_that_differs(
    few: Tensor,
    many: Tensor | None,
    *,
    lengths: tuple[int, ...],
    copies: int,
    relative: float,
    floor: float,
) -> float:
    """The share of slots whose values differ by more than ``relative`` of their norm."""
    if many is None or many.shape[1] != few.shape[1]:
        return 0.0
    few = few.double()
    norms = few.nan_to_num(0.0, 0.0, 0.0).norm(dim=1)
    limits = relative * norms.clamp(min=floor * float(norms.square().mean().sqrt()))
    num_different = torch.zeros((), dtype=torch.int64, device=many.device)
    parts = zip(few.split(lengths), limits.split(lengths), many.split([length * copies for length in lengths]))
    for expected, limit, rows in parts:
        for got in rows.unflatten(0, (copies, -1)).split(max(1, AT_ONCE // max(1, expected.numel()))):
            errors = torch.where((got == expected) | (got.isnan() & expected.isnan()), 0.0, got.double() - expected)
            num_different += (~(errors.norm(dim=2) <= limit)).sum()
    return float(num_different) / len(many)


def _computed(
    run: PreparedModel,
    lengths: tuple[int, ...],
    copies: int,
    graph_from: int | None,
    *,
    few: _Computed | None = None,
    relative: float = 0.0,
) -> _Computed:
    """What the model makes of ``copies`` of each sequence in a pack, with a graph from a call of a layer on.

    Copies have the number of their sequence, by which it draws, is masked, or looks something up. ``few``: with which
    outputs are compared at once, by ``relative`` of their norm.
    """
    numbers = tuple(number for number in range(len(lengths)) for _ in range(copies))
    pack = pack_of(run, lengths, numbers)
    with varied(run, lengths), torch.no_grad(), run.gathered():
        shard = shard_for(run, pack, run.alone)
        layers = LayerOutputs(shard.num_slots, graph_from=graph_from)
        with active(shard), layers.watched(run), torch.set_grad_enabled(graph_from == 0):
            micro_batch = run.make(shard, pack)
            output = run.model(**micro_batch.inputs)
            outputs, share = dict(_outputs(layers, output, has_graph=graph_from is not None)), 0.0
            if few is not None:
                differ = partial(_share_that_differs, lengths=lengths, copies=copies, relative=relative, floor=FLOOR)
                shares = [differ(value, outputs.get(place)) for place, value in few.outputs.items()]
                outputs, share = {}, max(shares, default=0.0)
            loss = run.wrapped_model.loss_of(output, micro_batch)
            del output
            num_targets = targets_of_loss(micro_batch)
            of_parameters = []
            if graph_from == 0:
                of_parameters = gradients_of_loss(run, loss, num_targets, shard)
        shard.passes.clear()  # a circle, which would keep the graph
        return _Computed(
            hidden={place: layers.rows(value).double() for place, value in layers.tensors.items()},
            outputs={place: value.double() for place, value in outputs.items()},
            output_share=share,
            loss=float(loss.detach().double()) if num_targets else None,
            gradients=_gradients(layers, loss, num_targets) if graph_from else {},
            of_parameters=of_parameters,
            num_calls=layers.num_calls,
        )


def _outputs(layers: LayerOutputs, output: object, *, has_graph: bool) -> Iterator[tuple[int, Tensor]]:
    """[slots, features] of what a model returned by slot, and where there is a graph, of what may have gradients."""
    for place, value in enumerate(tensors_in(output)):
        if layers.is_of_slots(value) and (value.requires_grad or not has_graph):
            yield place, layers.rows(value)


def _gradients(layers: LayerOutputs, loss: Tensor, num_targets: int) -> dict[int, Tensor]:
    """The gradients of the mean ``loss`` times its targets, for what a layer returned; none where it uses none."""
    if not loss.requires_grad or not num_targets or not layers.tensors:
        return {}
    gradients = torch.autograd.grad(loss, list(layers.tensors.values()), allow_unused=True)
    return {
        place: layers.rows(gradient).double() * num_targets
        for place, gradient in zip(layers.tensors, gradients)
        if gradient is not None
    }
