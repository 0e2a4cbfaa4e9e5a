"""Selective recompute: what attention gave in the first forward of a layer is kept, and given again in the second.

Attention is most of what a long sequence would compute again, and its output and log-sum-exps are little beside all
that a layer saves (Korthikanti et al. 2023, section 5). The second forward makes queries, keys and values again, for
its backward, but launches no kernel of attention; where keys and values go round in a ring, they do not either.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

KERNELS = frozenset({
    "aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention", "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_attention_math", "torch_attn::_varlen_attn", "aten::_flash_attention_forward",
    "flash_attn::_flash_attn_forward", "flash_attn::_flash_attn_varlen_forward",
})  # fmt: skip
"""Kernels of attention, the dearest thing to compute again in a long sequence and one of the smallest to keep."""

Result = TypeVar("Result")


def is_attention(op: Any) -> bool:
    """Whether an operation of torch is a kernel of attention, whose result a selective recompute keeps."""
    return getattr(getattr(op, "_schema", None), "name", "") in KERNELS


class KeptAttention:
    """What the attention of one recomputed layer of one micro-batch gave, in the order of its calls."""

    def __init__(self) -> None:
        self._results: deque[tuple[list[Any], pytree.TreeSpec]] = deque()
        self._is_second = False

    def give(self, attend: Callable[[], Result]) -> Result:
        """``attend()`` in the first forward; in the second what it gave then."""
        if self._is_second:
            return pytree.tree_unflatten(*self._results.popleft())
        result = attend()
        self._results.append(pytree.tree_flatten(result))
        return result

    def take(self) -> list[Tensor]:
        """End the first forward: the tensors of all results, which the caller keeps until the second."""
        taken = [leaf for leaves, _ in self._results for leaf in leaves if isinstance(leaf, Tensor)]
        self._results = deque(
            ([None if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec) for leaves, spec in self._results
        )
        return taken

    @contextmanager
    def given(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Within is the second forward, which gets ``tensors``, those that :meth:`take` returned."""
        left = iter(tensors)
        self._results = deque(
            ([next(left) if leaf is None else leaf for leaf in leaves], spec) for leaves, spec in self._results
        )
        self._is_second = True
        try:
            yield
        finally:
            self._is_second = False
            self._results.clear()


def kernels_of(results: KeptAttention | None) -> AbstractContextManager[Any]:
    """Within, the results of kernels of attention are kept, or come from ``results``; of None, they are computed."""
    return nullcontext() if results is None else _KeptKernels(results)


class _KeptKernels(TorchDispatchMode):
    """Beneath autograd, so that the backward of attention finds what the kernel gave."""

    def __init__(self, results: KeptAttention) -> None:
        super().__init__()
        self._results = results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_attention(func):
            return self._results.give(lambda: func(*args, **kwargs or {}))
        return func(*args, **kwargs or {})
