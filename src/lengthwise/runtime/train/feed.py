"""From a pack of sequence ids to the tensors of one forward."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from lengthwise.core.batch import NEXT_TOKEN, Pack
from lengthwise.core.errors import InputError
from lengthwise.core.specs import ModelSpec
from lengthwise.runtime.model.targets import Masking, masked_targets, next_token_targets


class TokenSource(Protocol):
    """Where token values come from; :class:`lengthwise.data.corpus.Corpus` is one."""

    def tokens(self, sequence: int, /) -> np.ndarray:
        """Token ids of one sequence."""
        ...


@dataclass(frozen=True, kw_only=True)
class Feed:
    """The tensors of one micro-batch, on the device that computes it. T tokens, padding included."""

    tokens_T: Tensor
    targets_T: Tensor
    cu_seqlens: tuple[int, ...]


def masking_of(spec: ModelSpec, *, seed: int) -> Masking | None:
    """How a model's tokens are hidden; None if its objective is the next token.

    Raises:
        InputError: the model is to predict masked tokens and has no mask token.
    """
    if spec.objective == NEXT_TOKEN:
        return None
    if spec.mask_token_id is None:
        raise InputError(f"model {spec.name} predicts masked tokens and has no mask_token_id")
    return Masking(seed=seed, vocab_size=spec.vocab_size, mask_token_id=spec.mask_token_id)


def feed(source: TokenSource, pack: Pack, device: torch.device, *, masking: Masking | None = None) -> Feed:
    """Lay the sequences of ``pack`` end to end, each padded to its computed length with token 0.

    With ``masking``, targets are the hidden tokens instead of the next ones. Such models look both ways, so that each
    sequence's padding is a sequence of its own there.
    """
    tokens = np.zeros(pack.num_tokens, dtype=np.int64)
    for sequence, start, length in zip(pack.ids, pack.cu_seqlens, pack.lengths):
        tokens[start : start + length] = source.tokens(sequence)
    tokens_T = torch.from_numpy(tokens)
    if masking is None:
        cu_seqlens, targets_T = pack.cu_seqlens, next_token_targets(tokens_T, pack)
    else:
        starts = zip(pack.cu_seqlens, pack.lengths)
        cu_seqlens = tuple(sorted({*pack.cu_seqlens, *(start + length for start, length in starts)}))
        tokens_T, targets_T = masked_targets(tokens_T, pack, masking)
    return Feed(
        tokens_T=tokens_T.to(device, non_blocking=True),
        targets_T=targets_T.to(device, non_blocking=True),
        cu_seqlens=cu_seqlens,
    )
