"""The length of every sequence as a metric: the same files as any other, for whoever reads those."""

from typing import Any

import numpy as np
import torch

from lengthwise.index.store import TokenStore
from lengthwise.runtime.analyze.blocks import Blocks, cut_blocks

_BLOCK_TOKENS = 1 << 30


class LengthScorer:
    """Looks lengths up in the index."""

    def __init__(self, store: TokenStore) -> None:
        self._lengths = store.lengths.lengths

    def identity(self) -> dict[str, Any]:
        """Identity of the metric: its kind."""
        return {"kind": "length"}

    def blocks(self) -> Blocks:
        """Blocks in corpus order."""
        return cut_blocks(np.arange(len(self._lengths)), self._lengths, block_cost=_BLOCK_TOKENS)

    def start(self, device: torch.device) -> None:
        """Do nothing: lengths need no device."""

    def score(self, ids: np.ndarray) -> np.ndarray:
        """Lengths of these sequences, int64."""
        lengths: np.ndarray = self._lengths[ids].astype(np.int64)
        return lengths
