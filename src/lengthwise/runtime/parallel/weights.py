"""The weights that an operator multiplies with: held whole, or sharded and gathered when they are needed (ZeRO-3,
Rajbhandari et al. 2020).

An operator brings its tokens in (:meth:`enter`), multiplies (:meth:`linear`, :meth:`matmul`), and takes them out
(:meth:`leave`). Gathered weights live between entering and leaving, forward, and again, gathered anew, between leaving
and entering, backward; the gather of the operator that comes next is then already under way.

t tokens of this rank, O outputs, I inputs of a product.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from lengthwise.runtime.comm.group import AsyncResult, Group
from lengthwise.runtime.models.first_derivative import first_derivative_only
from lengthwise.runtime.models.products import WHOLE_BACKWARDS, Products
from lengthwise.runtime.parallel.shards import FlatShards


class OperatorWeights(Protocol):
    """The weights of one operator, by name."""

    def enter(self, x: Tensor) -> Tensor:
        """Return ``x``; from here on products may be taken."""
        ...

    def linear(self, x_tI: Tensor, weight: str, bias: str | None = None) -> Tensor:
        """``x @ weight^T + bias``, with ``weight`` [O, I]."""
        ...

    def matmul(self, x_tI: Tensor, weight: str) -> Tensor:
        """``x @ weight``, with ``weight`` [I, O]."""
        ...

    def leave(self, x: Tensor) -> Tensor:
        """Return ``x``; no more products may be taken."""
        ...

    def tensor(self, name: str) -> Tensor:
        """A whole weight, for a function with a backward of its own; between entering and leaving."""
        ...

    def differentiable(self) -> Sequence[Tensor]:
        """The weights whose gradients such a function returns, in the order of :meth:`take_gradients`."""
        ...

    def take_gradients(self, gradients: Mapping[str, Tensor]) -> list[Tensor]:
        """Take the gradients of whole weights; what the function returns of them."""
        ...


@dataclass(frozen=True)
class WholeWeights:
    """Weights that this rank holds whole."""

    tensors: Mapping[str, Tensor]
    products: Products = WHOLE_BACKWARDS

    def enter(self, x: Tensor) -> Tensor:
        """Return ``x``: there is nothing to gather or to free."""
        return x

    def linear(self, x_tI: Tensor, weight: str, bias: str | None = None) -> Tensor:
        """``x @ weight^T + bias``"""
        return self.products.linear(x_tI, self.tensors[weight], self.tensors[bias] if bias else None)

    def matmul(self, x_tI: Tensor, weight: str) -> Tensor:
        """``x @ weight``"""
        return self.products.matmul(x_tI, self.tensors[weight])

    def leave(self, x: Tensor) -> Tensor:
        """Return ``x``: there is nothing to gather or to free."""
        return x

    def tensor(self, name: str) -> Tensor:
        """The weight, held whole here."""
        return self.tensors[name]

    def differentiable(self) -> Sequence[Tensor]:
        """All of them."""
        return tuple(self.tensors.values())

    def take_gradients(self, gradients: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the gradients in the order of the weights."""
        return [gradients[name] for name in self.tensors]


@dataclass(eq=False)
class Prefetch:
    """Order in which one micro-batch gathers the weights of its operators, to prefetch the next ones."""

    queue: list["GatheredWeights"] = field(default_factory=list)

    def after(self, gathered: "GatheredWeights", *, again: bool) -> "GatheredWeights | None":
        """The weights needed next when ``gathered`` runs forward, for the first time or ``again``."""
        following = gathered.place + 1
        if following == len(self.queue) or (again and self.queue[following].layer != gathered.layer):
            return None
        return self.queue[following]

    def before(self, gathered: "GatheredWeights") -> "GatheredWeights | None":
        """The weights needed next when ``gathered`` runs backward; a recomputed layer begins at its front."""
        if gathered.place == 0:
            return None
        last = self.queue[gathered.place - 1]
        if last.is_recomputed and last.layer != gathered.layer:
            return next(queued for queued in self.queue if queued.layer == last.layer)
        return last


class GatheredWeights:
    """Weights of which every rank of a group holds some rows; whole ones exist only while they are used."""

    def __init__(
        self,
        shards: Mapping[str, Tensor],
        bounds: Mapping[str, Sequence[int]],
        group: Group,
        prefetch: Prefetch,
        *,
        layer: int,
        is_recomputed: bool,
        need: Callable[[], None],
    ) -> None:
        """``bounds``: rank r holds rows ``bounds[name][r]`` to ``bounds[name][r + 1]`` of each weight; ``need`` waits
        until this rank's are there.
        """
        self._need = need
        self.shards, self.group, self.prefetch = shards, group, prefetch
        self.layer, self.is_recomputed = layer, is_recomputed
        self.place = len(prefetch.queue)
        prefetch.queue.append(self)
        self._flat = FlatShards(shards, bounds)
        self._coming: AsyncResult | None = None
        self._whole: dict[str, Tensor] = {}
        self._grads: dict[str, Tensor] = {}
        self._ran_forward = False

    def enter(self, x: Tensor) -> Tensor:
        """Return ``x``; gathers the weights, and in the backward reduces their gradients."""
        out: Tensor = _Enter.apply(x, self, *self.shards.values())
        return out

    def linear(self, x_tI: Tensor, weight: str, bias: str | None = None) -> Tensor:
        """``x @ weight^T + bias``"""
        out: Tensor = _Product.apply(x_tI, self, weight, bias, True)
        return out

    def matmul(self, x_tI: Tensor, weight: str) -> Tensor:
        """``x @ weight``"""
        out: Tensor = _Product.apply(x_tI, self, weight, None, False)
        return out

    def leave(self, x: Tensor) -> Tensor:
        """Return ``x``; frees the gathered weights, and in the backward gathers them again."""
        out: Tensor = _Leave.apply(x, self)
        return out

    def start(self) -> None:
        """Start the all-gather, unless it has started or the weights are there."""
        if self._coming is None and not self._whole:
            self._need()
            self._coming = self.group.gather(self._flat.join(self.shards), self._flat.sizes)

    def fill(self, following: "GatheredWeights | None") -> None:
        """Wait for the weights, and start the all-gather of those needed next."""
        self.start()
        if self._coming is not None:
            self._whole = self._flat.whole(self._coming.wait())
            self._coming = None
        if following is not None:
            following.start()

    def forward_order(self) -> "GatheredWeights | None":
        """The weights to gather while this operator runs forward; called once per forward."""
        again, self._ran_forward = self._ran_forward, True
        return self.prefetch.after(self, again=again)

    def tensor(self, name: str) -> Tensor:
        """The whole weight, while it is there."""
        return self._whole[name]

    def differentiable(self) -> Sequence[Tensor]:
        """None: gradients are summed here and reduced when tokens have left."""
        return ()

    def take_gradients(self, gradients: Mapping[str, Tensor]) -> list[Tensor]:
        """Add to the gradients of whole weights; nothing is returned."""
        for name, gradient in gradients.items():
            self.add_gradient(name, gradient)
        return []

    def add_gradient(self, name: str, grad: Tensor) -> None:
        """Add to the gradient of a whole weight; sums of several, as tiles give them, are float32 at least."""
        if name not in self._grads:
            self._grads[name] = grad
            return
        wide = torch.promote_types(grad.dtype, torch.float32)
        self._grads[name] = self._grads[name].to(wide).add_(grad)

    def drop(self) -> None:
        """Free the whole weights."""
        self._whole = {}

    def reduce_gradients(self) -> list[Tensor]:
        """This rank's rows of the gradients summed over ranks, in float32 at least. One reduce-scatter."""
        master = torch.promote_types(next(iter(self.shards.values())).dtype, torch.float32)
        apart, self._grads = self._flat.apart(self._grads, master), {}
        own_gradients = self._flat.split(self.group.reduce_scatter(apart, self._flat.sizes).wait(), self.group.rank)
        return [own_gradients[name].to(shard.dtype) for name, shard in self.shards.items()]


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gathered, *shards):  # type: ignore[no-untyped-def]
        gathered.fill(gathered.forward_order())
        ctx.gathered = gathered
        return x.view_as(x)

    @staticmethod
    @first_derivative_only("layers whose weights are gathered")
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        ctx.gathered.drop()
        return grad, None, *ctx.gathered.reduce_gradients()


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gathered):  # type: ignore[no-untyped-def]
        gathered.drop()
        ctx.gathered = gathered
        return x.view_as(x)

    @staticmethod
    @first_derivative_only("layers whose weights are gathered")
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        ctx.gathered.fill(ctx.gathered.prefetch.before(ctx.gathered))
        return grad, None


class _Product(torch.autograd.Function):
    """A product that keeps its input, not the weight."""

    @staticmethod
    def forward(ctx, x_tI, gathered, weight, bias, transposed):  # type: ignore[no-untyped-def]
        ctx.gathered, ctx.weight, ctx.bias, ctx.transposed = gathered, weight, bias, transposed
        ctx.save_for_backward(x_tI)
        weight_OI = gathered.tensor(weight)
        return F.linear(x_tI, weight_OI, gathered.tensor(bias) if bias else None) if transposed else x_tI @ weight_OI

    @staticmethod
    @first_derivative_only("layers whose weights are gathered")
    def backward(ctx, grad_tO):  # type: ignore[no-untyped-def]
        (x_tI,), weight_OI = ctx.saved_tensors, ctx.gathered.tensor(ctx.weight)
        ctx.gathered.add_gradient(ctx.weight, grad_tO.T @ x_tI if ctx.transposed else x_tI.T @ grad_tO)
        if ctx.bias:
            ctx.gathered.add_gradient(ctx.bias, grad_tO.sum(0))
        return grad_tO @ weight_OI if ctx.transposed else grad_tO @ weight_OI.T, None, None, None, None
