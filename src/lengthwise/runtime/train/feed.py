"""From a pack of sequence ids to the tensors of one forward."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from lengthwise.core.batch import Pack
from lengthwise.runtime.model.targets import next_token_targets


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


def feed(source: TokenSource, pack: Pack, device: torch.device) -> Feed:
    """Lay the sequences of ``pack`` end to end, each padded to its computed length with token 0."""
    tokens = np.zeros(pack.num_tokens, dtype=np.int64)
    for sequence, start, length in zip(pack.ids, pack.cu_seqlens, pack.lengths):
        tokens[start : start + length] = source.tokens(sequence)
    tokens_T = torch.from_numpy(tokens)
    targets_T = next_token_targets(tokens_T, pack)
    return Feed(
        tokens_T=tokens_T.to(device, non_blocking=True),
        targets_T=targets_T.to(device, non_blocking=True),
        cu_seqlens=pack.cu_seqlens,
    )
