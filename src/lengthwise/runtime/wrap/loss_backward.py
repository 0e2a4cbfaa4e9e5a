"""Start the backward of weighted losses, and of forwards without a loss, so that their collectives are issued."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from lengthwise.runtime.wrap.context import PackShard
from lengthwise.runtime.wrap.recompute_layers import naming_recomputed

Ignoring = Callable[[frozenset[int] | None], AbstractContextManager[Any]]
"""What a backward runs within, given the identities of parameters whose gradients in it do not count; None: of all."""


def no_difference(ignored: frozenset[int] | None) -> AbstractContextManager[Any]:
    """A context in which all gradients count."""
    return nullcontext()


Roots = tuple[tuple[GradientEdge, Tensor], ...]
"""Graph edges at which a backward may begin, and zero gradients for them."""


@dataclass(frozen=True, kw_only=True)
class LossTerm:
    """A number to differentiate, computed, and its weight in the step."""

    value: Tensor
    weight: float


def roots_of(output: Any, last_layer: Any) -> Roots:
    """Where the backward of a forward without a loss begins: at its outputs, or at those of its last layer.

    A single number among the outputs is a loss, which may be 0 / 0 where this rank's tokens have no target; its
    gradient would be that too, whatever it is multiplied with.
    """
    for made in (output, last_layer):
        roots = tuple(
            (get_gradient_edge(leaf), torch.zeros((), dtype=leaf.dtype, device=leaf.device).expand(leaf.shape))
            for leaf in pytree.tree_leaves(made)
            if isinstance(leaf, Tensor) and leaf.dim() and leaf.requires_grad and leaf.grad_fn is not None
        )
        if roots:
            return roots
    return ()


def copies_of(terms: Sequence[LossTerm]) -> list[LossTerm]:
    """The terms, with their graphs whatever a loop does to its tensors before the backward, such as ``detach_``."""
    return [replace(term, value=term.value.clone()) for term in terms]


def backward(
    terms: Sequence[LossTerm], shard: PackShard | None = None, *, scale: float = 1.0, ignoring: Ignoring = no_difference
) -> None:
    """Add ``scale`` times the gradients of weighted ``terms``, and zero for the forwards of ``shard``, in one backward.

    With ``shard``, the exchanges of its forwards are issued even if no term depends on them. Within ``ignoring`` come
    the gradients of parameters that no term reaches, by their identities; None: of all.
    """
    begins, weights = _begins(terms, shard, scale)
    if begins:
        reached = frozenset() if shard is None else _reached_by_zeros_alone(terms, shard)
        with ignoring(reached), naming_recomputed():
            torch.autograd.backward(begins, weights)


def _reached_by_zeros_alone(terms: Sequence[LossTerm], shard: PackShard) -> frozenset[int] | None:
    """The identities of the tensors to which a backward comes from forwards of ``shard`` alone, and from no term.

    None: there is no term. Nothing is looked through beyond the outputs that terms depend on if these are all.
    """
    begins = [get_gradient_edge(term.value).node for term in terms if term.value.requires_grad]
    if not begins:
        return None
    left = {edge.node for forward in shard.passes for edge, _ in forward.roots} - set(begins)
    reached = _walked(begins, until=left)
    left -= reached
    return frozenset(id(node.variable) for node in _walked(left, beside=reached) if hasattr(node, "variable"))


def _walked(begins: Iterable[Any], *, until: Set[Any] = frozenset(), beside: Set[Any] = frozenset()) -> set[Any]:
    """The operations that a backward from ``begins`` comes to, but for those ``beside``, the nearest first; ``until``
    all of these are among them, if there are any.
    """
    waiting, seen, left = deque(begins), set(begins), set(until)
    while waiting and (left or not until):
        for before, _ in waiting.popleft().next_functions:
            if before is not None and before not in seen and before not in beside:
                seen.add(before)
                left.discard(before)
                waiting.append(before)
    return seen


def gradients(
    parameters: Sequence[Tensor], terms: Sequence[LossTerm], shard: PackShard | None = None
) -> list[Tensor | None]:
    """Compute the gradients that :func:`backward` would add to ``parameters``; None where no term depends on one."""
    begins, weights = _begins(terms, shard)
    if not begins:
        return [None] * len(parameters)
    return list(torch.autograd.grad(begins, parameters, weights, allow_unused=True))


def _begins(terms: Sequence[LossTerm], shard: PackShard | None, scale: float = 1.0) -> tuple[list[Any], list[Tensor]]:
    """The tensors or edges at which a backward begins, and their weights."""
    begins: list[Any] = [term.value for term in terms if term.value.requires_grad]
    weights = [torch.full_like(term.value, term.weight * scale) for term in terms if term.value.requires_grad]
    for forward in shard.passes if shard is not None else ():
        begins += [edge for edge, _ in forward.roots]
        weights += [zeros for _, zeros in forward.roots]
    return begins, weights
