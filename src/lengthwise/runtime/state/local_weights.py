"""Weights that a training loop changed by hand between updates: noticed, and taken over into the master weights.

Every rank computes with a copy of the whole model, and the next pull from the owners' master weights would undo what a
loop does to that copy: ``load_state_dict``, clamping, pruning. What each rank has of the copy is therefore compared
with its master weights, bit for bit, and the copies of all ranks with one another. Version counters of tensors would
not do: changes through ``parameter.data`` do not move them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from lengthwise.core.layout import Interval
from lengthwise.runtime.state.narrow_parameters import NarrowParameters
from lengthwise.runtime.state.propagation import Routes

ROW = 1024
"""Words of 64 bits that are summed up at once for a fingerprint."""
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)


@dataclass(frozen=True, kw_only=True)
class LocalWeights:
    """One rank's copy of the whole model, and the master weights that it owns."""

    parameters: Mapping[str, nn.Parameter]
    views: Mapping[str, Tensor]
    """Where in ``weights`` each parameter belongs."""
    weights: Tensor
    master: Tensor
    places: Sequence[slice]
    """Where in ``weights`` the master weights are, in their order."""
    narrow: NarrowParameters
    """Those among ``views`` that are casts."""

    @staticmethod
    def places_of(owned: Sequence[Interval], bounds: Sequence[int], routes: Routes) -> list[slice]:
        """Where in the flat weights of ``routes`` the ``owned`` intervals are; units are cut at ``bounds``."""
        return [
            routes.place((max(start, first), min(end, last)))
            for start, end in owned
            for first, last in pairwise(bounds)
            if max(start, first) < min(end, last)
        ]

    def bring_back(self) -> str:
        """Put parameters whose data were replaced back where they belong, with their new values.

        Returns what is wrong with one that cannot be: it has another shape, dtype or device.
        """
        for name, parameter in self.parameters.items():
            view, data = self.views[name], parameter.data
            if data.data_ptr() == view.data_ptr() and data.dtype == view.dtype and data.shape == view.shape:
                continue
            if (data.dtype, data.shape, data.device) != (view.dtype, view.shape, view.device):
                return (
                    f"{name} was {_described(view)} when the model was prepared and is {_described(data)} now; cast, "
                    "move or resize a model before lengthwise.prepare, or after run.close()"
                )
            view.copy_(data)
            parameter.data = view
        self.narrow.write_back()
        return ""

    @property
    def is_changed(self) -> bool:
        """Whether this rank's copy differs from the master weights that this rank owns."""
        if self.weights is self.master:
            return False
        position, is_changed = 0, torch.zeros((), dtype=torch.bool, device=self.weights.device)
        for place in self.places:
            size, copy = place.stop - place.start, self.weights[place]
            master = self.master[position : position + size].to(copy.dtype).to(copy.device)
            is_changed |= (copy != master).any()
            position += size
        return bool(is_changed)

    def adopt(self) -> None:
        """Set the master weights that differ from this rank's copy to what the copy has."""
        self.narrow.write_back()
        position = 0
        for place in self.places:
            master = self.master[position : position + place.stop - place.start]
            copy = self.weights[place].to(master.device)
            master.copy_(torch.where(copy != master.to(copy.dtype), copy.to(master.dtype), master))
            position += len(copy)

    def fingerprint(self) -> int:
        """An int64 that differs where the copies of two ranks differ, but for chance. Reads every byte twice."""
        octets = self.weights.view(torch.uint8)
        num_whole_bytes = len(octets) // (8 * ROW) * 8 * ROW
        rows, rest = octets[:num_whole_bytes].view(torch.int64).view(-1, ROW), octets[num_whole_bytes:].to(torch.int64)
        sums = [rows.sum(1), rows.sum(0), rest]
        mixed = [(part * (torch.arange(len(part), device=part.device) * 2 + 1) * _ODD).sum() for part in sums]
        first, second, third = torch.stack(mixed).tolist()
        return _signed(first ^ (second * 3) ^ (third * 5))


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _described(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)} on {x.device}"
