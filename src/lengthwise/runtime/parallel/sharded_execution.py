"""Execution of a model on one rank of a pipeline stage: its tokens, its layers' operators by method, the vocabulary.

t tokens of this rank, D hidden size, V vocabulary or this rank's rows of it.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from lengthwise.core.layout import row_bounds
from lengthwise.core.pipeline_config import Method, WeightPlacement
from lengthwise.core.token_placement import Placement
from lengthwise.runtime.comm.group import Group
from lengthwise.runtime.models.base import Transformer
from lengthwise.runtime.models.chunked_loss import chunk_tokens, chunked_cross_entropy
from lengthwise.runtime.models.execution import KEEP_ALL, ActivationPlan, ExecutionWatch
from lengthwise.runtime.models.host_copies import to_device
from lengthwise.runtime.models.operators import Operators
from lengthwise.runtime.models.targets import rows_with_target
from lengthwise.runtime.parallel.embedding import sharded_cross_entropy, sharded_lookup
from lengthwise.runtime.parallel.method_operators import make_operators
from lengthwise.runtime.parallel.stage_shard import LayerStage, StageView
from lengthwise.runtime.parallel.tokens import shard_tokens
from lengthwise.runtime.parallel.weights import Prefetch


class StageExecution:
    """Execution of one micro-batch on the ranks of ``group``: takes the whole pack, computes this rank's share."""

    def __init__(
        self,
        model: Transformer,
        group: Group,
        *,
        tokens_T: Tensor,
        targets_T: Tensor,
        cu_seqlens: tuple[int, ...],
        methods: Sequence[Method],
        weights: WeightPlacement,
        activations: ActivationPlan = KEEP_ALL,
        layers: range | None = None,
        watch: ExecutionWatch | None = None,
        placement: Placement = (),
    ) -> None:
        """Tokens and targets, of a slice of the pack or all of it, are best on the host, as ranks look at them there.

        ``methods``: one per layer; ``layers``: of this stage, or all of them; ``placement``: of the pack's sequences.

        The model's weights are whole, or this rank's rows of :func:`~lengthwise.core.layout.row_bounds`.

        Raises:
            InputError: a method cannot share this model's layers among so many ranks.
        """
        self._group, self._activations = group, activations
        self.layers = range(len(model.layers)) if layers is None else layers
        self.watch = watch or ExecutionWatch()
        self._is_sharded = weights is WeightPlacement.SHARDED
        self._vocabulary = row_bounds("embedding", model.spec, degree=group.size)
        views = activations.views(model.views(cu_seqlens))
        cu_seqlens = cu_seqlens if activations.part is None else activations.part.cu_seqlens
        shards = shard_tokens(cu_seqlens, degree=group.size, causal=model.spec.causal, placement=placement)
        self._places, self._offsets = shards.places, views[0].offsets
        self._tokens_T, self._targets_T, self._device = tokens_T.cpu(), targets_T.cpu(), _device_of(model)
        self._views = [
            StageView(view=view, shards=shards, group=group, device=self._device, make_tables=model.tables)
            for view in views
        ]
        bounds = _bounds(model, group.size)
        prefetch = Prefetch()
        self._operators: dict[int, Operators] = {}
        for number in self.layers:
            layer: Any = model.layers[number]
            kept_attention = activations.kept_attention(number)
            stage = LayerStage(
                view=self._views[number % len(views)],
                bounds=bounds,
                prefetch=prefetch,
                layer=number,
                tiles=activations.tiles(number),
                head_groups=activations.head_groups,
                products=activations.products(number),
                kept_attention=kept_attention,
                slice_attention=activations.slice_attention(number, kept_attention),
                watch=self.watch,
            )
            attention, ffn = layer.attention_weights, layer.ffn_weights
            self._operators[number] = make_operators(methods[number])(stage, attention, ffn)

    def offsets(self) -> Tensor:
        """Positions of this rank's tokens in their sequences, ``[t]``."""
        return to_device(self._offsets[self._places[self._group.rank]], self._device)

    def lookup(self, table_VD: Tensor) -> Tensor:
        """Embeddings of this rank's tokens, ``[t, D]``."""
        if not self._is_sharded or self._group.size == 1:
            return F.embedding(to_device(self._own(self._tokens_T), self._device), table_VD)
        assert self._vocabulary is not None
        return sharded_lookup(table_VD, self._of_ranks(self._tokens_T), self._vocabulary, self._group)

    def operators(self, layer: int) -> Operators:
        """Operators of ``layer``, as its parallel method makes them."""
        return self._operators[layer]

    def is_recomputed(self, layer: int) -> bool:
        """Whether ``layer`` keeps its input alone and is recomputed in the backward."""
        return self._activations.is_recomputed(layer)

    def saving(self, layer: int, weights: Iterable[Tensor]) -> AbstractContextManager[None]:
        """Around the forward of ``layer``: what it saves goes where the plan has it, weights and tables stay."""
        lasting, view = tuple(weights), self._views[layer % len(self._views)]
        return self._activations.saving(layer, lambda: (*lasting, *view.made_tables))

    def cross_entropy(self, hidden_tD: Tensor, head_VD: Tensor, bias_V: Tensor | None = None) -> Tensor:
        """Sum of the cross-entropy over this rank's targets: a scalar."""
        if not self._is_sharded or self._group.size == 1:
            size = chunk_tokens(len(head_VD), hidden_tD.device)
            targets_t = self._own(self._targets_T)
            return chunked_cross_entropy(
                hidden_tD, head_VD, to_device(targets_t, self._device), bias_V=bias_V, chunk_tokens=size,
                rows_R=to_device(rows_with_target(targets_t), self._device), share=self._activations.head_share,
            )  # fmt: skip
        assert self._vocabulary is not None
        targets = self._of_ranks(self._targets_T)
        return sharded_cross_entropy(hidden_tD, head_VD, bias_V, targets, self._vocabulary, self._group)

    def _own(self, x_T: Tensor) -> Tensor:
        return x_T[torch.from_numpy(self._places[self._group.rank])]

    def _of_ranks(self, x_T: Tensor) -> list[np.ndarray]:
        values = x_T.numpy()
        return [values[places] for places in self._places]


def _device_of(model: Transformer) -> torch.device:
    return next(model.parameters()).device


def _bounds(model: Transformer, degree: int) -> Mapping[str, Sequence[int]]:
    """Row boundaries by rank of every layer weight that is sharded."""
    names = {name.rpartition(".")[2] for name, _ in model.layers.named_parameters()}
    bounds_by_name = {name: row_bounds(name, model.spec, degree=degree) for name in names}
    return {name: bounds for name, bounds in bounds_by_name.items() if bounds is not None}
