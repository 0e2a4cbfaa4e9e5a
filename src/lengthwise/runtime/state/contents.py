"""What a checkpoint keeps of a state: each rank's share of the master weights and of the optimizer's tensors, by name.

Names are ``master/<part>`` and, per tensor of the optimizer, ``<tensor>/<part>``. Where ranks own shares of units, a
part is a unit and its shares on all ranks follow one another; where they own whole parameters, a part is a parameter,
on one rank. Tensors of an optimizer that a user's function makes are ``optimizer/<tensor>/<part>``, and ``state.json``
says which a parameter has (:mod:`lengthwise.runtime.state.optimizer_values`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lengthwise.core.layout import fully_sharded
from lengthwise.runtime.state.optimizer import step_state
from lengthwise.runtime.state.optimizer_values import (
    DescribedState,
    describe,
    described_attributes,
    no_tensor,
    restore_attributes,
    restored,
    tensor_names,
)
from lengthwise.runtime.state.owned_segments import Segment
from lengthwise.runtime.state.sharded import ShardedState

MASTER, OPTIMIZER = "master", "optimizer"


@dataclass(frozen=True, kw_only=True)
class ShardContent:
    """This rank's share of a tensor, in host memory."""

    local: Tensor
    """Flat where it is a share, else of any shape."""
    num_elements: int | None
    """Of the tensor over all ranks; None: this rank has all of it."""

    def on(self, mesh: DeviceMesh) -> Tensor:
        """Wrap the share for torch.distributed.checkpoint: as a DTensor over ``mesh``, or a whole tensor as it is."""
        if self.num_elements is None:
            return self.local
        shape = torch.Size([self.num_elements])
        return DTensor.from_local(self.local, mesh, [Shard(0)], run_check=False, shape=shape, stride=(1,))


def contents(state: ShardedState) -> dict[str, ShardContent]:
    """Copy what this rank owns to host memory, by name. Before the first step the optimizer's tensors are zero."""
    is_whole = state.settings.needs_whole_parameters
    copies = {}
    for part, segments in _by_part(state).items():
        for kind in (MASTER, *_kinds(state)):
            pieces = [piece for segment in segments if (piece := _value(state, segment, kind)) is not None]
            if pieces or not is_whole:
                shape = pieces[0].shape if is_whole else torch.Size([sum(piece.numel() for piece in pieces)])
                dtype = pieces[0].dtype if is_whole and kind != MASTER else state.master_dtype
                local = _host_copy(pieces, shape, dtype)
                copies[f"{kind}/{part}"] = ShardContent(
                    local=local, num_elements=None if is_whole else _size(state, part)
                )
    for name, value in described_state(state).tensors.items():
        copies[f"{OPTIMIZER}/{name}"] = ShardContent(
            local=_host_copy([value], value.shape, value.dtype), num_elements=None
        )
    return copies


def described_state(state: ShardedState) -> DescribedState:
    """What an optimizer of the user's holds on this rank; nothing of others."""
    if state.settings.make is None or state.optimizer is None:
        return DescribedState()
    names = {id(segment.parameter): segment.name for segment in state.owned.all}
    described = describe(state.optimizer.state, names, state.master.device)
    return replace(described, attributes=described_attributes(state.optimizer))


def room_for(
    state: ShardedState,
    saved: Mapping[str, tuple[Sequence[int], torch.dtype]],
    described: Mapping[str, Any] | None = None,
) -> dict[str, ShardContent]:
    """Make empty tensors for this rank's share of a checkpoint.

    ``saved``: shape and dtype of each tensor, by name. ``described``: what the checkpoint says of the state of an
    optimizer of the user's; None: nothing, as older ones do, which have what the trial tells of.
    """
    is_whole = state.settings.needs_whole_parameters
    room = {}
    for part in _by_part(state):
        kinds = state.settings.state_names
        if described is not None:
            kinds = tuple(f"{OPTIMIZER}/{name}" for name in tensor_names(described["parameters"].get(part)))
        for kind in (MASTER, *kinds):
            name = f"{kind}/{part}"
            if not is_whole:
                size = fully_sharded(_size(state, part), state.world.size).num_held(state.world.rank)
                local = torch.empty(size, dtype=state.master_dtype)
                room[name] = ShardContent(local=local, num_elements=_size(state, part))
            elif name in saved:
                shape, dtype = saved[name]
                dtype = state.master_dtype if dtype == saved[f"{MASTER}/{part}"][1] else dtype
                room[name] = ShardContent(local=torch.empty(tuple(shape), dtype=dtype), num_elements=None)
    return room


def restore(
    state: ShardedState,
    saved: Mapping[str, ShardContent],
    num_steps: int,
    described: Mapping[str, Any] | None = None,
) -> None:
    """Restore the state from what :func:`contents` gave, as it was after ``num_steps`` updates of the optimizer.

    ``state.unused`` says which parameters had less; ``described``: as :func:`room_for` takes it.
    """
    if state.optimizer is not None:
        restore_attributes(state.optimizer, () if described is None else described.get("attributes", ()))
        state.optimizer.state.clear()
        for key, value in () if described is None else described["others"]:
            state.optimizer.state[restored(key, no_tensor)] = restored(value, no_tensor)
    state.owned.separate(state.unused.times_left_out)
    for part, segments in _by_part(state).items():
        position = 0
        for segment in segments:
            if described is not None:
                segment.master.copy_(saved[f"{MASTER}/{part}"].local)
                _restore_described(state, segment, saved, described["parameters"])
                continue
            master, optimizer_state = segment.master, dict[str, Any]()
            for kind in (MASTER, *state.settings.state_names):
                if (content := saved.get(f"{kind}/{part}")) is not None:
                    cut = content.num_elements is not None
                    piece = (
                        content.local[position : position + master.numel()].view_as(master) if cut else content.local
                    )
                    home = master.device if piece.dim() else "cpu"  # where torch keeps counts of steps
                    is_number = kind in state.settings.numbers
                    optimizer_state[kind] = piece.item() if is_number else piece.to(home, copy=True)
            position += master.numel()
            master.copy_(optimizer_state.pop(MASTER))
            num_updates = num_steps - state.unused.times_left_out[segment.only]
            if state.optimizer is not None and (num_updates or (state.settings.make and optimizer_state)):
                counted = step_state(state.settings, num_updates, state.optimizer)
                state.optimizer.state[segment.parameter] = {**counted, **optimizer_state}
    state.forget_weights()


def _restore_described(
    state: ShardedState, segment: Segment, saved: Mapping[str, ShardContent], described: Mapping[str, Any]
) -> None:
    """Give the optimizer of the user's what it had of a parameter, if it had anything."""
    if segment.name not in described:
        return

    def tensor_of(name: str, home: str | None) -> Tensor:
        local = saved[f"{OPTIMIZER}/{name}/{segment.name}"].local
        is_beside = bool(local.dim()) if home is None else home != "cpu"
        return local.to(segment.master.device if is_beside else "cpu", copy=True)

    assert state.optimizer is not None, "a rank with segments has an optimizer"
    state.optimizer.state[segment.parameter] = restored(described[segment.name], tensor_of)


def _kinds(state: ShardedState) -> tuple[str, ...]:
    """Names of tensors that each parameter has, of an optimizer that is not the user's."""
    return state.settings.state_names if state.settings.make is None else ()


def _by_part(state: ShardedState) -> dict[str, list[Segment]]:
    """Group this rank's segments by part; units of which it owns nothing are included, empty."""
    parts: dict[str, list[Segment]] = {}
    if not state.settings.needs_whole_parameters:
        parts = {str(unit): [] for unit in range(state.table.num_units)}
    for segment in state.owned.all:
        parts.setdefault(segment.name, []).append(segment)
    return parts


def _size(state: ShardedState, part: str) -> int:
    """Number of elements of a part."""
    return state.table.bounds[int(part) + 1] - state.table.bounds[int(part)]


def _value(state: ShardedState, segment: Segment, kind: str) -> Tensor | None:
    """One tensor of a segment; None if the optimizer keeps no such tensor of it."""
    if kind == MASTER:
        return segment.master
    assert state.optimizer is not None, "a rank with segments has an optimizer"
    optimizer_state: dict[str, Tensor | float] = state.optimizer.state.get(segment.parameter, {})
    if (value := optimizer_state.get(kind)) is not None:
        return torch.as_tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    return None if state.settings.needs_whole_parameters else torch.zeros_like(segment.master, device="cpu")


def _host_copy(pieces: Sequence[Tensor], shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Copy pieces end to end to host memory; one by one, so that the device needs no memory for it."""
    copy = torch.empty(shape, dtype=dtype)
    flat, position = copy.view(-1), 0
    for piece in pieces:
        flat[position : position + piece.numel()].copy_(piece.reshape(-1))
        position += piece.numel()
    return copy
