"""The rows that a rank of a stage holds where weights are sharded (:func:`lengthwise.core.layout.row_bounds`)."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lengthwise.core.layout import row_bounds
from lengthwise.core.specs import ModelSpec


def keep_own_rows(model: nn.Module, spec: ModelSpec, *, rank: int, degree: int) -> None:
    """Replace every sharded parameter of ``model`` by this rank's rows, in place; the rest is freed."""
    for name, parameter in model.named_parameters():
        bounds = row_bounds(name, spec, degree=degree)
        if bounds is not None and degree > 1:
            parameter.data = parameter.data[bounds[rank] : bounds[rank + 1]].clone()


class FlatShards:
    """Flattens the shards of one operator's weights into one buffer, which moves between ranks in one piece."""

    def __init__(self, shards: Mapping[str, Tensor], bounds: Mapping[str, Sequence[int]]) -> None:
        """``shards``: of any one rank; ``bounds``: of each, as :func:`~lengthwise.core.layout.row_bounds` says."""
        self.bounds = {name: bounds[name] for name in shards}
        self._trailing = {name: shard.shape[1:] for name, shard in shards.items()}
        num_ranks = len(next(iter(self.bounds.values()))) - 1
        self.sizes = [
            sum(self._num_rows(name, rank) * self._trailing[name].numel() for name in shards)
            for rank in range(num_ranks)
        ]
        """Numbers of each rank."""

    def join(self, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> Tensor:
        """Flatten one rank's tensors into one."""
        first = next(iter(tensors.values()))
        flat = first.new_empty(sum(tensors[name].numel() for name in self.bounds), dtype=dtype or first.dtype)
        for name, piece in zip(self.bounds, flat.split([tensors[name].numel() for name in self.bounds])):
            piece.view(tensors[name].shape).copy_(tensors[name].detach())  # casts without a copy of its own
        return flat

    def split(self, flat: Tensor, rank: int) -> dict[str, Tensor]:
        """Split a flat tensor of :meth:`join` into the tensors of ``rank``, views of ``flat``."""
        tensors, start = {}, 0
        for name, trailing in self._trailing.items():
            end = start + self._num_rows(name, rank) * trailing.numel()
            tensors[name] = flat[start:end].view(self._num_rows(name, rank), *trailing)
            start = end
        return tensors

    def whole(self, gathered: Tensor) -> dict[str, Tensor]:
        """Whole weights from the flat shards of all ranks, one after another."""
        shares = [self.split(flat, rank) for rank, flat in enumerate(gathered.split(self.sizes))]
        return {name: torch.cat([share[name] for share in shares]) for name in self.bounds}

    def apart(self, wholes: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Flatten whole weights shard by shard, in rank order: undoes :meth:`whole`."""
        flat = next(iter(wholes.values())).new_empty(sum(self.sizes), dtype=dtype)
        for rank, share in enumerate(flat.split(self.sizes)):
            for name, piece in self.split(share, rank).items():
                piece.copy_(wholes[name][self.bounds[name][rank] : self.bounds[name][rank + 1]])
        return flat

    def _num_rows(self, name: str, rank: int) -> int:
        return self.bounds[name][rank + 1] - self.bounds[name][rank]
