"""Products of a layer of any model that a split backward takes in two: tokens with a weight that is trained as it is.

``linear``, ``addmm`` as in GPT-2's Conv1D, and ``matmul``. All else has whole backwards: weights made of others, such
as LoRA's sums, slices of experts or parametrizations, products of several weights at once, frozen weights, and those
with hooks of their own, which are to see one gradient. So has what the layer itself computes again in its backward, in
tiles or under ``checkpoint``, and what ``torch.func`` transforms.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from lengthwise.runtime.wrap.context import PackShard

_MATMULS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)
_PLAIN = (Tensor, nn.Parameter, FakeTensor)
"""Tensors of torch itself, and those of dry runs; other classes of tensors have products of their own."""
WEIGHT_PRODUCTS = frozenset({F.linear, torch.addmm, *_MATMULS})
"""Functions of torch that may be products with weights."""


def splitting(shard: PackShard) -> AbstractContextManager[Any]:
    """Within, products of a micro-batch leave the gradients of weights for later, if the plan has it so."""
    return nullcontext() if shard.weight_gradients is None else SplitProductsMode(shard)


class SplitProductsMode(TorchFunctionMode):
    """A mode in which products of the layers of a micro-batch leave the gradients of weights for later."""

    def __init__(self, shard: PackShard) -> None:
        super().__init__()
        self._shard = shard

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs, layer, gradients = kwargs or {}, self._shard.layer, self._shard.weight_gradients
        if func not in WEIGHT_PRODUCTS or layer is None or gradients is None or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        is_whole = self._shard.is_recomputed(layer) or _is_checkpointed() or _is_transformed()
        product = None if is_whole else weight_product(func, args, kwargs)
        if product is None:
            return func(*args, **kwargs)
        products = gradients.of_unit(layer)
        multiply = products.linear if product.is_transposed else products.matmul
        return multiply(product.tokens, product.weight, product.bias)


def _is_checkpointed() -> bool:
    """Whether ``torch.utils.checkpoint`` keeps what is saved here, and compares it with that of the second forward."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", "") == checkpoint.__name__


def _is_transformed() -> bool:
    """Whether ``torch.func`` maps or differentiates what is computed here."""
    return torch._C._functorch.peek_interpreter_stack() is not None


class WeightProduct(NamedTuple):
    """The factors of a call that multiplies tokens by a weight."""

    tokens: Tensor
    weight: nn.Parameter
    bias: Tensor | None
    is_transposed: bool
    """Whether the weight is ``[outputs, inputs]``."""


def weight_product(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> WeightProduct | None:
    """The product of a call of torch whose gradient of the weight can wait; None: it is none."""
    weight: Any
    bias: Any = None
    if func is F.linear:
        values = dict(zip(("input", "weight", "bias"), args)) | kwargs
        tokens, weight, bias = values["input"], values["weight"], values.get("bias")
    elif kwargs or len(args) != 2 + (func is torch.addmm):
        return None
    else:
        *added, tokens, weight = args
        bias = added[0] if added else None
    is_plain = type(weight) in _PLAIN and type(tokens) in _PLAIN and isinstance(weight, nn.Parameter)
    if not is_plain or not weight.requires_grad or weight._backward_hooks or tokens.dim() < 2 or weight.dim() != 2:
        return None
    if bias is not None and (not isinstance(bias, Tensor) or bias.dim() != 1):
        return None
    return WeightProduct(tokens, weight, bias, is_transposed=func is F.linear)
