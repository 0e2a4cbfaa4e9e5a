"""Weights that lie in the same memory without being one parameter, as by ``head.weight.data = embedding.weight.data``.

An optimizer of torch writes where they lie, so that one follows the other. Here weights are moved into sharded state,
one parameter after the other, and would come apart.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lengthwise.core.errors import InputError


@dataclass(frozen=True, kw_only=True)
class _Memory:
    """Where the numbers of a tensor lie; NumPy reads none of them."""

    name: str
    is_trained: bool
    begin: int
    end: int
    __array_interface__: dict[str, Any]

    @staticmethod
    def of(name: str, tensor: Tensor) -> "_Memory":
        """The memory of a dense tensor with numbers."""
        begin, size = tensor.data_ptr(), tensor.element_size()
        strides = tuple(stride * size for stride in tensor.stride())
        last = sum((length - 1) * stride for length, stride in zip(tensor.shape, strides))
        interface = {"shape": tuple(tensor.shape), "strides": strides, "typestr": f"|V{size}", "version": 3}
        return _Memory(
            name=name, is_trained=tensor.requires_grad, begin=begin, end=begin + last + size,
            __array_interface__={**interface, "data": (begin, True)},
        )  # fmt: skip


def check_no_weights_overlap(model: nn.Module) -> None:
    """Raise ``InputError`` if a trained parameter shares memory with another parameter, or with a buffer."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    memories = [_Memory.of(name, tensor) for name, tensor in tensors if _has_memory(tensor)]
    begun = list[_Memory]()
    for memory in sorted(memories, key=lambda memory: memory.begin):
        begun = [before for before in begun if before.end > memory.begin]
        for before in begun:
            if (before.is_trained or memory.is_trained) and np.shares_memory(np.asarray(before), np.asarray(memory)):
                raise InputError(
                    f"{before.name} and {memory.name} of {type(model).__name__} lie in the same memory and are not one "
                    "parameter, so they would be trained apart: make them one before prepare, as in head.weight = "
                    "embedding.weight without .data, compute one from the other in the forward, or clone() one"
                )
        begun.append(memory)


def _has_memory(tensor: Tensor) -> bool:
    """Whether a tensor has numbers of its own here, which FSDP2's have not."""
    return not (tensor.is_meta or tensor.is_sparse or isinstance(tensor, DTensor)) and tensor.numel() > 0
