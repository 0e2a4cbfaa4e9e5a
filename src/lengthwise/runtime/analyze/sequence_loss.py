"""The mean loss of every sequence under a reference model: packs of sequences of like length, the longest first.

T tokens of a pack, D hidden size, V vocabulary, B sequences of the pack.
"""

from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from lengthwise.core.batch import Pack
from lengthwise.core.errors import InputError, LengthwiseError
from lengthwise.index.store import TokenStore
from lengthwise.runtime.analyze.blocks import Blocks, cut_blocks
from lengthwise.runtime.analyze.reference import find_reference
from lengthwise.runtime.analyze.request import AnalysisRequest
from lengthwise.runtime.models.base import Transformer
from lengthwise.runtime.models.chunked_loss import chunk_tokens
from lengthwise.runtime.models.targets import IGNORE
from lengthwise.runtime.train.micro_batch_tensors import MicroBatchTensors, feed, masking_of

_MASKING_SEED = 0
"""Which tokens a model of masked tokens has to tell: the same in every analysis."""


class LossScorer:
    """Loss per target of each sequence; 0 where a sequence has no target, as one of a single token."""

    def __init__(self, request: AnalysisRequest, store: TokenStore) -> None:
        if not store.has_tokens:
            raise InputError(f"{store.path} holds lengths alone; the loss of a model needs an index with tokens")
        self._request, self._store = request, store
        self._reference = find_reference(Path(request.target))
        self._spec = self._reference.spec
        self._masking = masking_of(self._spec, seed=_MASKING_SEED)
        self._model: Transformer | None = None
        if self._spec.vocab_size < store.vocab_size:
            raise InputError(
                f"{store.path} has {store.vocab_size:,} token ids, model {self._spec.name} embeds "
                f"{self._spec.vocab_size:,}; index with the model's own tokenizer.json"
            )
        self._check_lengths()

    def identity(self) -> dict[str, Any]:
        """The model's digest and all that changes a value, be it in the last digit."""
        return {
            "kind": "loss",
            "model_digest": self._reference.digest(),
            "objective": self._spec.objective,
            "dtype_computed": self._request.dtype,
            "max_length": self._request.max_length,
            "max_tokens": self._request.max_tokens,
        }

    def blocks(self) -> Blocks:
        """The longest sequences first, so that what does not fit into memory is known at once."""
        lengths = self._lengths(np.arange(len(self._store)))
        ids = np.argsort(-lengths, kind="stable")
        return cut_blocks(ids, lengths[ids], block_cost=self._request.max_tokens)

    def start(self, device: torch.device) -> None:
        """Load the model."""
        self._model = self._reference.load(getattr(torch, self._request.dtype), device)

    def score(self, ids: np.ndarray) -> np.ndarray:
        """Mean loss of each sequence: float64 if the model computes in it, else float32.

        Raises:
            InputError: a loss is not finite.
            LengthwiseError: a pack does not fit into memory.
        """
        losses = np.concatenate([self._score_pack(pack) for pack in self._packs(ids)])
        if not np.isfinite(losses).all():
            where = int(np.argmin(np.isfinite(losses)))
            raise InputError(
                f"the loss of sequence {ids[where]} under {self._request.target} is {losses[where]}; compute in a "
                "wider --dtype, or check the model's weights"
            )
        return losses.astype(np.float64 if self._request.dtype == "float64" else np.float32)

    def tokens(self, sequence: int, /) -> np.ndarray:
        """Tokens of a sequence that the model reads."""
        return self._store.tokens(sequence)[: self._request.max_length]

    def loss_mask(self, sequence: int, /) -> np.ndarray | None:
        """Which of them have a loss; None: all but the first."""
        mask = self._store.loss_mask(sequence)
        return None if mask is None else mask[: self._request.max_length]

    def _score_pack(self, pack: Pack) -> np.ndarray:
        assert self._model is not None, "start first"
        device = next(self._model.parameters()).device
        try:
            with torch.inference_mode():
                return mean_losses(self._model, feed(self, pack, device, masking=self._masking), pack)
        except (RuntimeError, MemoryError) as error:
            if not _is_out_of_memory(error):
                raise
            way_out = "--max-tokens" if len(pack.ids) > 1 else "--max-length with --truncate"
            raise LengthwiseError(
                f"a pack of {pack.num_tokens:,} tokens (sequence {pack.ids[0]} is its longest, {pack.lengths[0]:,} "
                f"tokens) does not fit into the memory of {device}; lower {way_out}, or set --dtype bfloat16"
            ) from error

    def _lengths(self, ids: np.ndarray) -> np.ndarray:
        lengths = self._store.lengths.lengths[ids].astype(np.int64)
        return lengths if self._request.max_length is None else np.minimum(lengths, self._request.max_length)

    def _packs(self, ids: np.ndarray) -> list[Pack]:
        """Neighbours in ``ids``, as many as stay within the token budget."""
        lengths = self._lengths(ids)
        ends, packs, start = np.cumsum(lengths), [], 0
        while start < len(ids):
            limit = ends[start] - lengths[start] + self._request.max_tokens
            end = max(start + 1, int(np.searchsorted(ends, limit, side="right")))
            packs.append(Pack(ids=tuple(ids[start:end].tolist()), lengths=tuple(lengths[start:end].tolist())))
            start = end
        return packs

    def _check_lengths(self) -> None:
        lengths, limit = self._store.lengths.lengths, self._request.max_length
        longest = int(np.argmax(lengths))
        positions = self._spec.max_positions
        if 0 < positions < min(int(lengths[longest]), limit or positions + 1):
            raise InputError(
                f"sequence {longest} has {int(lengths[longest]):,} tokens, model {self._spec.name} has positions for "
                f"{positions:,}; score the first tokens of what is longer with --max-length {positions} --truncate"
            )
        if limit is not None and lengths[longest] > limit and not self._request.truncate:
            num_over = int((lengths > limit).sum())
            raise InputError(
                f"sequence {longest} has {int(lengths[longest]):,} tokens, over --max-length {limit:,}; in all, "
                f"{num_over:,} of {len(lengths):,} sequences are longer. Raise it, or score their first "
                f"{limit:,} tokens with --truncate"
            )


def mean_losses(model: Transformer, fed: MicroBatchTensors, pack: Pack) -> np.ndarray:
    """[B] float64: the mean over each sequence's targets of their cross-entropy, 0 where there is no target."""
    hidden_TD = model.norm(model.hidden(fed.tokens_T, fed.cu_seqlens))
    has_target_T = fed.targets_T != IGNORE
    losses = token_losses(hidden_TD[has_target_T], *model.output, fed.targets_T[has_target_T])
    starts = np.array([*accumulate(pack.lengths)])
    sequence = np.searchsorted(starts, has_target_T.nonzero().squeeze(1).cpu().numpy(), side="right")
    sums = np.bincount(sequence, weights=losses.double().cpu().numpy(), minlength=len(pack.ids))
    counts = np.bincount(sequence, minlength=len(pack.ids))
    means: np.ndarray = sums / np.maximum(counts, 1)
    return means


def token_losses(hidden_TD: Tensor, head_VD: Tensor, bias_V: Tensor | None, targets_T: Tensor) -> Tensor:
    """[T] the cross-entropy of each token, in float32 or above; the logits of some tokens exist at a time."""
    size = chunk_tokens(len(head_VD), hidden_TD.device)
    wide = torch.promote_types(hidden_TD.dtype, torch.float32)
    losses = hidden_TD.new_empty(len(hidden_TD), dtype=wide)
    for start in range(0, len(hidden_TD), size):
        logits_CV = (hidden_TD[start : start + size] @ head_VD.T).to(wide)
        if bias_V is not None:
            logits_CV += bias_V
        losses[start : start + size] = F.cross_entropy(logits_CV, targets_T[start : start + size], reduction="none")
    return losses


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "allocate memory" in str(error)
