"""What each token of a pack should predict. T tokens."""

from itertools import pairwise

import torch
from torch import Tensor

from lengthwise.core.batch import Pack

IGNORE = -100
"""The target of a token that has no loss."""


def next_token_targets(tokens_T: Tensor, pack: Pack) -> Tensor:
    """The token that follows each token of its sequence; ``IGNORE`` at the end of a sequence and on padding."""
    ends = zip(pairwise(pack.cu_seqlens), pack.lengths)
    without = [token for (start, end), length in ends for token in range(start + length - 1, end)]
    targets_T = tokens_T.roll(-1)
    targets_T[torch.tensor(without, device=tokens_T.device)] = IGNORE
    return targets_T
