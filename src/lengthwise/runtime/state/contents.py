"""What a checkpoint keeps of a state: each rank's share of the master weights and of the optimizer's tensors, by name.

Names are ``master/<part>`` and, per tensor of the optimizer, ``<tensor>/<part>``. Where ranks own shares of units, a part
is a unit and its shares on all ranks follow one another; where they own whole parameters, a part is a parameter, on one
rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lengthwise.runtime.state.sharded import Segment, ShardedState

MASTER = "master"


@dataclass(frozen=True, kw_only=True)
class Content:
    """This rank's share of a tensor."""

    local: Tensor
    """Flat where it is a share, else of any shape."""
    num_elements: int | None
    """Of the tensor over all ranks; None: this rank has all of it."""


def contents(state: ShardedState) -> dict[str, Content]:
    """By name; before the first step the optimizer's tensors are zero. Master weights are views."""
    found = {}
    for part, segments in _by_part(state).items():
        for kind in (MASTER, *state.settings.state_names):
            pieces = [_values(state, segment, kind) for segment in segments]
            if state.settings.needs_whole_parameters:
                if (piece := pieces[0]) is not None:
                    found[f"{kind}/{part}"] = Content(local=piece, num_elements=None)
                continue
            flat = [state.master[:0], *(piece.flatten() for piece in pieces if piece is not None)]
            found[f"{kind}/{part}"] = Content(local=torch.cat(flat), num_elements=_num_elements(state, part))
    return found


def restore(state: ShardedState, tensors: Mapping[str, Tensor], num_steps: int) -> None:
    """Take back what :func:`contents` gave, as it was after ``num_steps`` optimizer steps."""
    for part, segments in _by_part(state).items():
        at = 0
        for segment in segments:
            size, held = segment.parameter.numel(), {}
            for kind in (MASTER, *state.settings.state_names):
                if (whole := tensors.get(f"{kind}/{part}")) is None:
                    continue
                piece = whole if state.settings.needs_whole_parameters else whole[at : at + size]
                held[kind] = piece.to(segment.parameter.device)
            at += size
            with torch.no_grad():
                segment.parameter.copy_(held.pop(MASTER).view_as(segment.parameter))
            if state.optimizer is not None and num_steps:
                kept = {name: _shaped(value, segment.parameter, state) for name, value in held.items()}
                state.optimizer.state[segment.parameter] = {**state.settings.step_state(num_steps), **kept}
    state.forget_weights()


def _by_part(state: ShardedState) -> dict[str, list[Segment]]:
    """This rank's segments; of units also those that it owns nothing of."""
    parts: dict[str, list[Segment]] = {}
    if not state.settings.needs_whole_parameters:
        parts = {str(unit): [] for unit in range(state.table.num_units)}
    for segment in state.segments:
        parts.setdefault(segment.name, []).append(segment)
    return parts


def _num_elements(state: ShardedState, part: str) -> int:
    return state.table.bounds[int(part) + 1] - state.table.bounds[int(part)]


def _values(state: ShardedState, segment: Segment, kind: str) -> Tensor | None:
    """None: the optimizer keeps no such tensor of it."""
    if kind == MASTER:
        return segment.parameter.detach()
    assert state.optimizer is not None
    held = state.optimizer.state.get(segment.parameter, {})
    if kind in held:
        value: Tensor = held[kind]
        return value
    return None if state.settings.needs_whole_parameters else torch.zeros_like(segment.parameter)


def _shaped(value: Tensor, parameter: nn.Parameter, state: ShardedState) -> Tensor:
    return value.clone() if state.settings.needs_whole_parameters else value.clone().view_as(parameter)
