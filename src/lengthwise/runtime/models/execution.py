"""Execution of a model on one rank: which tokens and weights it has. A model asks; one device or a stage answers.

t tokens of this rank, D hidden size, V vocabulary.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from lengthwise.runtime.models.attention_view import AttentionView
from lengthwise.runtime.models.chunked_loss import HeadShare, chunk_tokens, chunked_cross_entropy
from lengthwise.runtime.models.host_copies import to_device
from lengthwise.runtime.models.kept_attention import KeptAttention
from lengthwise.runtime.models.operators import Dense, Operators, Tables
from lengthwise.runtime.models.products import WHOLE_BACKWARDS, Products, WeightGradients
from lengthwise.runtime.models.targets import rows_with_target
from lengthwise.runtime.models.tiles import Tiles

SliceAttention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of a slice of a pack: queries [t, N, H], keys and values [t, K, H] to outputs [t, N, H]."""
MakeTables = Callable[[np.ndarray], Tables | None]
"""A model's rotary tables for tokens at some offsets of their sequences; None where it has none."""


class ExecutionWatch:
    """Hooks called before the weights of a unit are used and when their gradients are complete; these do nothing.

    Units are those of :meth:`~lengthwise.runtime.models.base.Transformer.unit_of`.
    """

    def need(self, unit: int) -> None:
        """The forward is about to use the weights of ``unit``."""

    def complete(self, unit: int) -> None:
        """The backward of this micro-batch has added all it adds to the gradients of ``unit``."""

    def enter(self, unit: int, x_tD: Tensor) -> Tensor:
        """Return ``x_tD``, the input of ``unit``; its gradient comes once those of the unit's weights are complete.

        Completion of a stage's first unit is not reported: nothing comes after it in the backward.
        """
        self.need(unit)
        if x_tD.grad_fn is not None:
            x_tD.register_hook(partial(self._on_gradient, unit))
        return x_tD

    def _on_gradient(self, unit: int, _: Tensor) -> None:
        self.complete(unit)


class Offload(Protocol):
    """Moves what layers of one micro-batch save to host memory until their backwards."""

    def layer(self, keep: Callable[[Tensor], bool] | None) -> AbstractContextManager[Any]:
        """Around the forward of a layer; ``keep``: which saved tensors stay on the device, None: all."""
        ...


class PackPart(Protocol):
    """A slice of a pack, of whose sequences other slices have tokens, too."""

    @property
    def cu_seqlens(self) -> tuple[int, ...]:
        """Offsets of the sequence boundaries within the slice."""
        ...

    def views(self, views: Sequence[AttentionView]) -> tuple[AttentionView, ...]:
        """The views of layers within the slice, made from those of the pack."""
        ...

    @property
    def head_share(self) -> HeadShare:
        """Where the gradients of the head are summed over the slices."""
        ...

    def attention(self, layer: int, kept_attention: KeptAttention | None) -> SliceAttention:
        """Attention of ``layer``, over the slices before, too."""
        ...


@dataclass(frozen=True, kw_only=True)
class ActivationPlan:
    """What becomes of the activations of one micro-batch between forward and backward, by layer of the model."""

    recompute: Sequence[bool] = ()
    """Layers that keep their input alone and are computed again in the backward; empty: none."""
    offload: Sequence[bool] = ()
    """Layers whose saved tensors are in host memory meanwhile; empty: none."""
    tile_tokens: int = 0
    """Tokens that feed-forwards compute at a time; 0: all."""
    keep_attention: bool = False
    """Whether recomputed layers keep what attention gave, and do not run it again."""
    head_groups: int = 1
    """Groups of heads that are attended with in turn, where ranks trade tokens for heads."""
    host: Offload | None = None
    """Moves them; needed where layers are offloaded."""
    weight_gradients: WeightGradients | None = None
    """Takes the gradients of weights that the backward leaves for later; None: it leaves none."""
    part: PackPart | None = None
    """The slice of the pack that is computed; None: all of it."""

    def is_recomputed(self, layer: int) -> bool:
        """Whether ``layer`` keeps its input alone and is recomputed in the backward."""
        return bool(self.recompute) and self.recompute[layer]

    def tiles(self, layer: int) -> Tiles:
        """How ``layer`` cuts the tokens of its feed-forward."""
        return Tiles(self.tile_tokens, self.is_recomputed(layer))

    def products(self, layer: int) -> Products:
        """How ``layer`` multiplies tokens by weights; the backward of a recomputed layer leaves nothing for later."""
        if self.weight_gradients is None or self.is_recomputed(layer):
            return WHOLE_BACKWARDS
        return self.weight_gradients.of_unit(layer + 1)

    def kept_attention(self, layer: int) -> KeptAttention | None:
        """What the attention of ``layer`` keeps for its second forward; None: it has none, or runs again in it."""
        return KeptAttention() if self.keep_attention and self.is_recomputed(layer) else None

    def views(self, views: Sequence[AttentionView]) -> Sequence[AttentionView]:
        """``views`` of the pack, or of its slice."""
        return views if self.part is None else self.part.views(views)

    @property
    def head_share(self) -> HeadShare | None:
        """Where the gradients of the head are summed, in a slice; None: all of the pack is computed."""
        return None if self.part is None else self.part.head_share

    def slice_attention(self, layer: int, kept_attention: KeptAttention | None) -> SliceAttention | None:
        """Attention of ``layer`` in a slice; None: all of the pack is computed."""
        return None if self.part is None else self.part.attention(layer, kept_attention)

    def saving(self, layer: int, lasting: Callable[[], Iterable[Tensor]]) -> AbstractContextManager[None]:
        """Around the forward of ``layer``: what it saves stays or is offloaded, but for ``lasting`` tensors."""
        is_offloaded = bool(self.offload) and self.offload[layer]
        if self.host is None:
            return nullcontext()
        return self.host.layer(partial(_shares_storage, lasting) if is_offloaded else None)


KEEP_ALL = ActivationPlan()
"""Everything stays on the device."""


def _shares_storage(lasting: Callable[[], Iterable[Tensor]], tensor: Tensor) -> bool:
    """Whether a tensor shares its storage with any of ``lasting``, as views of weights do."""
    storage = tensor.untyped_storage()._cdata
    return any(other.untyped_storage()._cdata == storage for other in lasting())


class Execution(Protocol):
    """One micro-batch on one rank: its tokens, its operators and its loss."""

    layers: range
    """Those that this rank computes."""
    watch: ExecutionWatch

    def offsets(self) -> Tensor:
        """Positions of this rank's tokens in their sequences, [t] int64."""
        ...

    def lookup(self, table_VD: Tensor) -> Tensor:
        """Rows of ``table_VD`` of this rank's tokens, ``[t, D]``."""
        ...

    def operators(self, layer: int) -> Operators:
        """Operators of ``layer``, counted from 0."""
        ...

    def is_recomputed(self, layer: int) -> bool:
        """Whether a layer keeps its input alone and is computed again in the backward."""
        ...

    def saving(self, layer: int, weights: Iterable[Tensor]) -> AbstractContextManager[None]:
        """Around the forward of ``layer``, which has these weights: what it saves goes where the plan has it."""
        ...

    def cross_entropy(self, hidden_tD: Tensor, head_VD: Tensor, bias_V: Tensor | None = None) -> Tensor:
        """Sum over this rank's targets of the loss of ``hidden @ head^T + bias``: a scalar."""
        ...


class OneDevice:
    """Execution on one device: the whole pack with whole weights."""

    def __init__(
        self,
        tokens_T: Tensor,
        targets_T: Tensor | None,
        *,
        views: Sequence[AttentionView],
        tables: MakeTables,
        layers: range,
        activations: ActivationPlan = KEEP_ALL,
        watch: ExecutionWatch | None = None,
        device: torch.device | None = None,
    ) -> None:
        """``views``: of the layers over the whole pack, in turn; ``device``: where the model is, if tokens and targets
        are on the host.
        """
        self.layers, self.watch = layers, watch or ExecutionWatch()
        self.views, self._activations = activations.views(views), activations
        device = device or tokens_T.device
        self.tokens_T = to_device(tokens_T, device)
        self.targets_T = None if targets_T is None else to_device(targets_T, device)
        on_host = targets_T is not None and targets_T.is_cpu
        self._target_rows_R = (
            to_device(rows_with_target(targets_T), device) if on_host and targets_T is not None else None
        )
        self._tables = [tables(view.offsets) for view in self.views]

    def offsets(self) -> Tensor:
        """Positions of all tokens in their sequences, [T]."""
        return to_device(self.views[0].offsets, self.tokens_T.device)

    def lookup(self, table_VD: Tensor) -> Tensor:
        """Embeddings of all tokens, [T, D]."""
        return F.embedding(self.tokens_T, table_VD)

    def operators(self, layer: int) -> Dense:
        """One-device operators in the layer's view."""
        number = layer % len(self.views)
        tiles, products = self._activations.tiles(layer), self._activations.products(layer)
        results = self._activations.kept_attention(layer)
        in_slice = self._activations.slice_attention(layer, results)
        return Dense(self.views[number], self._tables[number], tiles, products, results, in_slice)

    def is_recomputed(self, layer: int) -> bool:
        """Whether ``layer`` keeps its input alone and is recomputed in the backward."""
        return self._activations.is_recomputed(layer)

    def saving(self, layer: int, weights: Iterable[Tensor]) -> AbstractContextManager[None]:
        """Around the forward of ``layer``: what it saves goes where the plan has it, weights and tables stay."""
        lasting = (*weights, *(self.operators(layer).tables or ()))
        return self._activations.saving(layer, lambda: lasting)

    def cross_entropy(self, hidden_TD: Tensor, head_VD: Tensor, bias_V: Tensor | None = None) -> Tensor:
        """Sum of the cross-entropy over the targets of the whole pack: a scalar."""
        assert self.targets_T is not None, "a loss needs targets"
        size = chunk_tokens(len(head_VD), hidden_TD.device)
        return chunked_cross_entropy(
            hidden_TD, head_VD, self.targets_T, bias_V=bias_V, chunk_tokens=size, rows_R=self._target_rows_R,
            share=self._activations.head_share,
        )  # fmt: skip
