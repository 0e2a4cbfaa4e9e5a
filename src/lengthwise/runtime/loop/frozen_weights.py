"""Frozen weights of a run: which of them its loop has changed, so that checkpoints have those too.

A checkpoint has what is trained. Frozen weights are where their user has them, and are not stored again; it has their
checksums of when the run began. One that has changed since, as where adapters are merged into the weights below them,
is stored with it. A run goes on from a checkpoint with the weights that it has, and with those alone.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lengthwise.core.errors import InputError
from lengthwise.core.pipeline_config import WeightShard
from lengthwise.core.wording import counted
from lengthwise.runtime.comm.consensus import require_equal
from lengthwise.runtime.comm.world import DistContext
from lengthwise.runtime.models.checksum import checksum
from lengthwise.runtime.state import checkpoint
from lengthwise.runtime.state.absent_parameter import AbsentParameter
from lengthwise.runtime.state.contents import ShardContent
from lengthwise.runtime.state.layer_gather import LayerGather

FROZEN = "frozen"
"""What begins the name of a frozen weight's tensor in a checkpoint, and the name of the entry about all of them."""
Visit = Callable[[str, nn.Parameter], None]


class FrozenWeights:
    """Knows the frozen weights of a model by their checksums, from when it was made and the weights were whole."""

    def __init__(self, model: nn.Module, world: DistContext) -> None:
        self._model, self._world = model, world
        self._now = {name: _checksum(parameter) for name, parameter in self._parameters()}
        self._start, self._prepared = dict(self._now), dict(self._now)
        self._may_have_changed = False

    def note_access(self) -> None:
        """Note that a loop is given weights that are gathered by layer, and may change them; every rank calls this."""
        self._may_have_changed = True

    def to_save(self, gather: LayerGather | None) -> tuple[dict[str, Any], dict[str, ShardContent]]:
        """What a checkpoint keeps of them, and this rank's part of the changed ones; every rank calls this.

        Raises:
            InputError: they differ between ranks.
        """
        self._look(gather)
        require_equal(self._world, {"frozen weights": self._now})
        changed = [name for name, now in self._now.items() if now != self._start[name]]
        owners = {name: number % self._world.size for number, name in enumerate(changed)}
        kinds: dict[str, str] = {}
        contents: dict[str, ShardContent] = {}

        def copy(name: str, parameter: nn.Parameter) -> None:
            if name in owners:
                kinds[name] = _kind(parameter)
            if owners.get(name) == self._world.rank:
                for key, piece in _pieces(parameter).items():
                    contents[f"{FROZEN}/{name}{key}"] = ShardContent(local=_bytes_of(piece), num_elements=None)

        if changed:
            self._visit(gather, copy)
        entry = {name: {"checksum": self._now[name], "kind": kinds[name]} for name in changed}
        return ({"start": self._start, "changed": entry} if self._start else {}), contents

    def restore(
        self, saved: Mapping[str, Any], path: Path, files: Mapping[str, Any], gather: LayerGather | None
    ) -> None:
        """Set them to what they were when :meth:`to_save` gave ``saved``; every rank calls this.

        Raises:
            InputError: one is not what that run began with, and the checkpoint does not have it.
        """
        if not saved:  # older checkpoints have none
            return
        start, changed = saved["start"], saved["changed"]
        self._may_have_changed = True
        self._look(gather)
        wanted = {**start, **{name: entry["checksum"] for name, entry in changed.items()}}
        different = [name for name in {**wanted, **self._now} if wanted.get(name) != self._now.get(name)]
        if lost := [name for name in different if name not in changed or name not in self._now]:
            raise self._refusal(lost, wanted, path)
        restored: list[str] = []

        def read(name: str, parameter: nn.Parameter) -> None:
            if name in different:
                _read(name, parameter, changed[name], path, files)
                restored.append(name)

        def keep() -> None:
            if gather is not None:
                gather.adopt_frozen(restored)
            restored.clear()

        if different:
            self._visit(gather, read, then=keep)
        self._start, self._now = dict(start), wanted

    def _refusal(self, lost: list[str], wanted: Mapping[str, str], path: Path) -> InputError:
        name, more = lost[0], f" (nor are {counted(len(lost) - 1, 'other')})" if len(lost) > 1 else ""
        if name not in self._now or name not in wanted:
            state = "is missing here" if name in wanted else "is none of that run"
            problem = f"the frozen weight {name} of {type(self._model).__name__} {state}"
        else:
            problem = (
                f"the frozen weight {name} of {type(self._model).__name__} is not what the run that saved {path} began "
                f"with{more}, and the checkpoint has only frozen weights that the run changed"
            )
        if all(self._prepared.get(weight) == wanted.get(weight) for weight in lost):
            way_out = "a loop has changed it since prepare: load the model anew, prepare it, and resume before that"
        else:
            way_out = (
                "resume with the same base model (files, dtype, quantization), or start a new run from weights that "
                "you keep yourself"
            )
        return InputError(f"{problem}; {way_out}")

    def _look(self, gather: LayerGather | None) -> None:
        """Compute checksums anew, unless nobody could have changed anything."""
        if gather is not None and not self._may_have_changed:
            return
        now: dict[str, str] = {}

        def look(name: str, parameter: nn.Parameter) -> None:
            now[name] = _checksum(parameter)

        self._visit(gather, look)
        self._now, self._may_have_changed = {name: now[name] for name, _ in self._parameters()}, False

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, value) for name, value in self._model.named_parameters() if not value.requires_grad)

    @torch.no_grad()
    def _visit(self, gather: LayerGather | None, visit: Visit, then: Callable[[], None] = lambda: None) -> None:
        """Call ``visit`` with each weight once; of gathered ones those of a layer are there at a time, until ``then``.

        Every rank calls this where weights are gathered by layer.
        """
        seen = set[str]()

        def visit_present() -> None:
            for name, parameter in self._parameters():
                if name not in seen and not isinstance(parameter, AbsentParameter):
                    seen.add(name)
                    visit(name, parameter)

        if gather is None:
            visit_present()
            return
        for layer in range(gather.num_layers):
            with gather.pinned(WeightShard(first=layer, end=layer + 1, num_layers=gather.num_layers)):
                visit_present()
                then()


def _pieces(parameter: nn.Parameter) -> dict[str, Tensor]:
    """The values of a parameter, and what quantized ones in 4 bits (bitsandbytes) have beside: scales and tables."""
    pieces, state, path = {"": parameter.detach()}, getattr(parameter, "quant_state", None), "/quant_state"
    while state is not None:
        values = getattr(state, "__dict__", {}).items()
        pieces |= {f"{path}.{key}": value for key, value in values if isinstance(value, Tensor)}
        state, path = getattr(state, "state2", None), f"{path}.state2"
    return pieces


def _checksum(parameter: nn.Parameter) -> str:
    return "+".join(checksum(piece) for piece in _pieces(parameter).values())


def _kind(parameter: nn.Parameter) -> str:
    return " + ".join(f"{piece.dtype} {list(piece.shape)}" for piece in _pieces(parameter).values())


def _bytes_of(piece: Tensor) -> Tensor:
    """A copy in host memory, as bytes."""
    copy = torch.empty(piece.shape, dtype=piece.dtype).copy_(piece)
    return copy.view(-1).view(torch.uint8)


def _read(name: str, parameter: nn.Parameter, saved: Mapping[str, Any], path: Path, files: Mapping[str, Any]) -> None:
    """Set a weight to what a checkpoint has."""
    if (kind := _kind(parameter)) != saved["kind"]:
        raise InputError(
            f"{path} has the frozen weight {name} as {saved['kind']}, the model as {kind}; resume with the base model "
            "that was saved, in its dtype"
        )
    pieces = _pieces(parameter)
    room = {f"{FROZEN}/{name}{key}": _bytes_of(piece) for key, piece in pieces.items()}
    checkpoint.load_tensors(path, files, room)
    for key, piece in pieces.items():
        piece.copy_(room[f"{FROZEN}/{name}{key}"].view(piece.dtype).view(piece.shape))
