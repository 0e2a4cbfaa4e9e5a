"""What a rank owns as the optimizer sees it: segments of parameters that are treated alike, and their update."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lengthwise.core.layout import Interval
from lengthwise.runtime.state.table import ParameterTable


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Contiguous elements of this rank's share that the optimizer treats alike."""

    name: str
    """Of the unit, or of the parameter where parameters are not cut."""
    unit: int
    parameter: nn.Parameter
    """A view of ``master``; its gradient is ``pushed``, where that has the same dtype."""
    pushed: Tensor
    """A view of the state's."""
    decays: bool
    is_outer: bool
    """Whether it is of a parameter outside of all layers, where parameters are not cut."""


def segments_of(
    table: ParameterTable, owned: Sequence[Interval], *, master: Tensor, pushed: Tensor, by_parameter: bool
) -> list[Segment]:
    """Whole parameters, or runs within each unit that decay alike. Matrices decay, vectors do not.

    ``owned``: the intervals that ``master`` and ``pushed`` are laid out as.
    """
    runs: list[tuple[str, int, int, int, bool, tuple[int, ...]]] = []
    position = 0
    for start, end in owned:
        for slot in table.slots.values():
            size = min(end, slot.interval[1]) - max(start, slot.interval[0])
            if size <= 0:
                continue
            name, decays = str(slot.unit), len(slot.shape) > 1
            if by_parameter:
                runs.append((slot.name, slot.unit, position, position + size, decays, slot.shape))
            elif runs and (runs[-1][0], runs[-1][4]) == (name, decays):
                first = runs[-1][2]
                runs[-1] = (name, slot.unit, first, position + size, decays, (position + size - first,))
            else:
                runs.append((name, slot.unit, position, position + size, decays, (size,)))
            position += size
    segments = []
    for name, unit, first, last, decays, shape in runs:
        parameter = nn.Parameter(master[first:last].view(shape))
        pushed_part = pushed[first:last].view(shape)
        if pushed.dtype == master.dtype:
            parameter.grad = pushed_part
        is_outer = by_parameter and unit in (0, table.num_units - 1)
        segments.append(
            Segment(
                name=name, unit=unit, parameter=parameter, pushed=pushed_part, decays=decays, is_outer=is_outer
            )
        )  # fmt: skip
    return segments


NORM_CHUNK = 1 << 24
"""Numbers whose norm is taken at a time."""


def square_sum(values: Tensor) -> Tensor:
    """The sum of the squares of ``values`` in float64, on their device.

    By pieces: of a whole buffer torch 2.11 makes a float64 copy on a GPU, 8 bytes a number.
    """
    norms = torch._foreach_norm(list(values.split(NORM_CHUNK)), 2, dtype=torch.float64)
    return torch.stack(norms).square().sum()


def update_at_once(optimizer: torch.optim.Optimizer, segments: Sequence[Segment], clip: float) -> None:
    """Scale the pushed gradient by ``clip``, and update all segments.

    Of a gradient that is narrower than the weights, one segment at a time has it as precise as these.
    """
    if all(segment.parameter.grad is not None for segment in segments):
        _scale(segments, clip)
        optimizer.step()
        return
    for segment in segments:  # the optimizer leaves out parameters without a gradient
        segment.parameter.grad = segment.pushed.to(segment.parameter.dtype).mul_(clip)
        optimizer.step()
        segment.parameter.grad = None


def update_by_unit(
    optimizer: torch.optim.Optimizer | None, segments: Sequence[Segment], clip: float, num_units: int
) -> Iterator[int]:
    """Scale the pushed gradient by ``clip``, and update one unit after another; gives the number of each."""
    gradients = [segment.parameter.grad for segment in segments]
    for segment in segments:
        segment.parameter.grad = None
    for unit in range(num_units):
        mine = [segment for segment in segments if segment.unit == unit]
        if optimizer is not None and mine:
            for segment, gradient in zip(segments, gradients):
                if segment.unit == unit:
                    segment.parameter.grad = gradient
            update_at_once(optimizer, mine, clip)
            for segment in mine:
                segment.parameter.grad = None
        yield unit
    for segment, gradient in zip(segments, gradients):
        segment.parameter.grad = gradient


def _scale(segments: Sequence[Segment], clip: float) -> None:
    if clip != 1.0:
        for segment in segments:
            segment.pushed.mul_(clip)
