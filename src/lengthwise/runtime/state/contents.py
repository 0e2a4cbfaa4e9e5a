"""What a checkpoint keeps of a state: each rank's share of the master weights and of the optimizer's tensors, by name.

Names are ``master/<part>`` and, per tensor of the optimizer, ``<tensor>/<part>``. Where ranks own shares of units, a
part is a unit and its shares on all ranks follow one another; where they own whole parameters, a part is a parameter,
on one rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lengthwise.core.layout import fully_sharded
from lengthwise.runtime.state.optimizer import step_state
from lengthwise.runtime.state.sharded import Segment, ShardedState

MASTER = "master"


@dataclass(frozen=True, kw_only=True)
class ShardContent:
    """This rank's share of a tensor, in host memory."""

    local: Tensor
    """Flat where it is a share, else of any shape."""
    num_elements: int | None
    """Of the tensor over all ranks; None: this rank has all of it."""

    def on(self, mesh: DeviceMesh) -> Tensor:
        """As torch.distributed.checkpoint takes it: shares over the ranks of ``mesh``, whole ones as they are."""
        if self.num_elements is None:
            return self.local
        shape = torch.Size([self.num_elements])
        return DTensor.from_local(self.local, mesh, [Shard(0)], run_check=False, shape=shape, stride=(1,))


def contents(state: ShardedState) -> dict[str, ShardContent]:
    """Copies by name: what this rank owns and no more. Before the first step the optimizer's tensors are zero."""
    whole = state.settings.needs_whole_parameters
    found = {}
    for part, segments in _by_part(state).items():
        for kind in (MASTER, *state.settings.state_names):
            pieces = [piece for segment in segments if (piece := _value(state, segment, kind)) is not None]
            if pieces or not whole:
                shape = pieces[0].shape if whole else torch.Size([sum(piece.numel() for piece in pieces)])
                local = _host_copy(pieces, shape, state.master_dtype)
                found[f"{kind}/{part}"] = ShardContent(local=local, num_elements=None if whole else _size(state, part))
    return found


def room_for(state: ShardedState, saved: Mapping[str, Sequence[int]]) -> dict[str, ShardContent]:
    """Empty tensors for this rank's share of a checkpoint; ``saved``: the shape of every tensor in it, by name."""
    whole = state.settings.needs_whole_parameters
    room = {}
    for part in _by_part(state):
        for kind in (MASTER, *state.settings.state_names):
            name = f"{kind}/{part}"
            if not whole:
                size = fully_sharded(_size(state, part), state.world.size).num_held(state.world.rank)
                local = torch.empty(size, dtype=state.master_dtype)
                room[name] = ShardContent(local=local, num_elements=_size(state, part))
            elif name in saved:
                room[name] = ShardContent(
                    local=torch.empty(tuple(saved[name]), dtype=state.master_dtype), num_elements=None
                )
    return room


def restore(state: ShardedState, found: Mapping[str, ShardContent], num_steps: int) -> None:
    """Take back what :func:`contents` gave, as it was after ``num_steps`` optimizer steps."""
    if state.optimizer is not None:
        state.optimizer.state.clear()
    for part, segments in _by_part(state).items():
        at = 0
        for segment in segments:
            parameter, held = segment.parameter, {}
            for kind in (MASTER, *state.settings.state_names):
                if (content := found.get(f"{kind}/{part}")) is not None:
                    cut = content.num_elements is not None
                    piece = content.local[at : at + parameter.numel()].view_as(parameter) if cut else content.local
                    held[kind] = piece.to(parameter.device, copy=True)
            at += parameter.numel()
            with torch.no_grad():
                parameter.copy_(held.pop(MASTER))
            if state.optimizer is not None and num_steps:
                state.optimizer.state[parameter] = {**step_state(state.settings, num_steps), **held}
    state.forget_weights()


def _by_part(state: ShardedState) -> dict[str, list[Segment]]:
    """This rank's segments; of units also those that it owns nothing of."""
    parts: dict[str, list[Segment]] = {}
    if not state.settings.needs_whole_parameters:
        parts = {str(unit): [] for unit in range(state.table.num_units)}
    for segment in state.segments:
        parts.setdefault(segment.name, []).append(segment)
    return parts


def _size(state: ShardedState, part: str) -> int:
    """Elements of a unit."""
    return state.table.bounds[int(part) + 1] - state.table.bounds[int(part)]


def _value(state: ShardedState, segment: Segment, kind: str) -> Tensor | None:
    """None: the optimizer keeps no such tensor of it."""
    if kind == MASTER:
        return segment.parameter.detach()
    assert state.optimizer is not None, "a rank with segments has an optimizer"
    held: dict[str, Tensor] = state.optimizer.state.get(segment.parameter, {})
    if kind in held:
        return held[kind]
    return None if state.settings.needs_whole_parameters else torch.zeros_like(segment.parameter, device="cpu")


def _host_copy(pieces: Sequence[Tensor], shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """The pieces end to end; piece by piece, so that the device needs no memory for it."""
    copy = torch.empty(shape, dtype=dtype)
    flat, at = copy.view(-1), 0
    for piece in pieces:
        flat[at : at + piece.numel()].copy_(piece.reshape(-1))
        at += piece.numel()
    return copy
