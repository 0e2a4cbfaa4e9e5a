"""Small random values in place of trained weights that are zero, while a model is compared with itself.

What lies behind a gate that begins at zero, as with adaLN-Zero, LayerScale, the second matrix of LoRA or an output
layer of zeros, has no gradient yet: a difference there would show only once the gate has learned. The values depend on
the place of a weight alone, so that they are the same on every rank and in whatever way weights are held. Frozen
weights and buffers stay: zeros of masks and tables mean something.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from enum import Enum
from math import isnan, prod
from typing import Any

import torch
from torch import Tensor, nn

from lengthwise.core.errors import CheckError, LengthwiseError
from lengthwise.runtime.loop.fsdp2 import Fsdp2State, local_shard
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.state.sharded_weights import ShardedWeights
from lengthwise.runtime.verify.stock_call import GradientResult
from lengthwise.runtime.verify.verdict import NotInThisDtype, NotWithTheseWeights
from lengthwise.runtime.wrap.counter_rng import mix, uniform

_log = logging.getLogger("lengthwise")

SCALE, HALF_SCALE = 0.1, 0.5
"""Mean size of the values, times the square root of a weight's number of inputs; where the model is computed in 16
bits, whose rounding would hide what is behind small ones, the second."""
AT_ONCE = 1 << 22
"""Numbers that are filled at once."""


class Fill(Enum):
    """What weights of zero are replaced by."""

    SIGNED = "small random values"
    POSITIVE = "small positive values"
    NOTHING = "nothing: they stay zero"


def with_zeros_filled(run: PreparedModel, compare: Callable[[Fill], None]) -> str:
    """Call ``compare`` with the first fill that the model can be computed with; every rank calls this.

    ``compare`` raises :class:`NotWithTheseWeights` on every rank where it cannot. Returns why zeros were left as they
    are; an empty string: they were filled.
    """
    for fill in (Fill.SIGNED, Fill.POSITIVE):
        try:
            compare(fill)
            return ""
        except NotWithTheseWeights as error:
            reason = error.reason
    compare(Fill.NOTHING)
    return reason


def warn_of_zeros(run: PreparedModel, reason: str) -> None:
    """Say why zeros were left as they are; no word with an empty ``reason``."""
    if reason and run.world.is_first:
        _log.warning(
            "%s was compared with its weights as they are, since with small random values in place of zeros %s; what "
            "begins to matter when weights of zero have learned was not seen", type(run.model).__name__, reason,
        )  # fmt: skip


def finite(compute: Callable[[], GradientResult], fill: Fill) -> GradientResult:
    """What ``compute`` returns: loss and gradients.

    Raises:
        NotWithTheseWeights: it is not finite, or an error of the model's own, where weights were filled.
    """
    if fill is Fill.NOTHING:
        return compute()
    try:
        result = compute()
    except (LengthwiseError, NotInThisDtype):
        raise
    except (ValueError, AssertionError) as error:
        raise NotWithTheseWeights(f"its forward raises {type(error).__name__}") from error
    are_finite = [gradient.isfinite().all() for gradient in result.gradients]
    if (result.loss is None or abs(result.loss) < float("inf")) and all(map(bool, are_finite)):
        return result
    raise NotWithTheseWeights("its loss or gradients are not finite")


def of_stock(run: PreparedModel, compute: Callable[[], GradientResult], fill: Fill) -> GradientResult:
    """What ``compute`` returns: loss and gradients of the stock model, of single sequences.

    Raises:
        NotWithTheseWeights: it is not finite, or an error of the model's own, where weights were filled.
        CheckError: the loss of a sequence is not finite with the model's own weights.
    """
    result = finite(compute, fill)
    if not result.without_number:
        return result
    lengths = ", ".join(f"{length:,}" for length in dict.fromkeys(result.without_number))
    is_users = run.wrapped_model.make_inputs is not None or run.wrapped_model.has_own_loss
    makes = "inputs= or loss= make" if is_users else "it is given"
    is_nan = isnan(result.loss or 0.0)
    of_none = " (a mean over none of them is 0 / 0: divide by their number, 1 at least)" if is_nan else ""
    raise CheckError(
        f"the loss of {type(run.model).__name__} is {result.loss} for sequences of {lengths} slots alone, called as "
        f"before it was prepared, with the corpus's own tokens{of_none}. What {makes} must suit sequences of every "
        "length, such as places and labels within them: prepare compares it on some that it makes, whose numbers are "
        "0, 1, ..."
    )


@contextmanager
def zeros_filled(run: PreparedModel, fill: Fill, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Within, trained weights that are exactly zero have values of ``fill``; afterwards all bits are as before.

    So have all numbers of the parameters in ``run.hidden_weights``, whose gradients are too small to be compared.

    ``dtype``: what is computed in; None: the model's own.
    Where weights are gathered by layer, or FSDP2 has them, this rank's share of them. Every rank enters it.
    """
    if fill is Fill.NOTHING:
        yield
        return
    state = run.state
    scale = HALF_SCALE if (dtype or state.coarsest_dtype) in (torch.float16, torch.bfloat16) else SCALE
    if isinstance(state, Fsdp2State):
        with _filled_shards(state, fill, scale):
            yield
        return
    with ExitStack() as restored, torch.no_grad():
        if run.gather is not None:
            parts = _owned_parts(state, run.hidden_weights)
        else:
            parameters = run.wrapped_model.structure.parameters
            starts = {name: slot.start for name, slot in state.table.slots.items()}
            parts = (
                (parameter.data, starts[name], tuple(parameter.shape), name in run.hidden_weights)
                for name, parameter in parameters.items()
                if type(parameter) is nn.Parameter and parameter.layout == torch.strided
            )
        for values, first, shape, is_whole in parts:
            _fill(values, first, _size(shape, scale), fill, restored, is_whole=is_whole)
        with torch.enable_grad():
            yield


def _size(shape: tuple[int, ...], scale: float) -> float:
    return scale / max(1, prod(shape[1:])) ** 0.5


def _owned_parts(state: ShardedWeights, whole: frozenset[str]) -> Iterator[tuple[Tensor, int, tuple[int, ...], bool]]:
    """What this rank's share has of each parameter, where in the buffer of all it begins, its shape, and whether it is
    among those that are filled as a ``whole``.
    """
    offset = 0
    for start, end in state.owned_layout.intervals[state.world.rank]:
        for name, slot in state.table.slots.items():
            first, last = max(start, slot.interval[0]), min(end, slot.interval[1])
            if first < last:
                yield state.master[offset : offset + last - first], first, slot.shape, name in whole
                offset += last - first


@contextmanager
def _filled_shards(state: Fsdp2State, fill: Fill, scale: float) -> Iterator[None]:
    """Fill the shards of FSDP2, from which weights are gathered again."""
    with ExitStack() as restored:
        state.release_params()
        first = 0
        with torch.no_grad():
            for parameter in state.parameters:
                _fill(
                    local_shard(parameter),
                    first + _shard_number(parameter),
                    _size(tuple(parameter.shape), scale),
                    fill,
                    restored,
                )
                first += parameter.numel()
        state.materialize_all()
        try:
            yield
        except BaseException as error:
            state.release_params()
            restored.close()
            if isinstance(error, LengthwiseError | NotInThisDtype | NotWithTheseWeights):  # of all ranks
                state.materialize_all()
            raise
        state.release_params()
    state.materialize_all()


def _shard_number(parameter: Any) -> int:
    """A number of which each shard of a parameter has another, and each of its replicas the same; far apart."""
    number, mesh = 0, parameter.device_mesh
    for dim, (coordinate, placement) in enumerate(zip(mesh.get_coordinate(), parameter.placements)):
        if not placement.is_replicate():
            number = number * mesh.size(dim) + coordinate
    return number << 40


def _fill(values: Tensor, first: int, size: float, fill: Fill, restored: ExitStack, *, is_whole: bool = False) -> None:
    """Fill the zeros of ``values``, or all numbers, the first of which is number ``first`` of all; ``restored`` is to
    undo it.
    """
    if not values.numel() or not values.is_floating_point():
        return
    rows = values.view(1) if not values.dim() else values
    width = rows[0].numel()
    for part in rows.split(max(1, AT_ONCE // width)):
        is_zero = torch.ones_like(part, dtype=torch.bool) if is_whole else part == 0
        places = is_zero.flatten().nonzero().flatten()
        if len(places):
            restored.callback(_put_back, part, is_zero, part[is_zero])  # zeros have a sign
            bits = mix(places + first)
            sizes = size * (0.5 + uniform(bits))
            signs = 1.0 if fill is Fill.POSITIVE else 2.0 * (bits & 1) - 1.0
            part[is_zero] = (sizes * signs).to(part.dtype)
        first += part.numel()


@torch.no_grad()
def _put_back(part: Tensor, is_zero: Tensor, zeros: Tensor) -> None:
    part[is_zero] = zeros
