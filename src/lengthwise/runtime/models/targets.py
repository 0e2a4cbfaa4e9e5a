"""Training targets of a pack's tokens, next or masked ones. T tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from lengthwise.core.batch import Pack, num_masked

IGNORE = -100
"""The target of a token that has no loss."""

# The stream's second half of counters, so that masks share no random number with the order of an epoch.
_COUNTER = 1 << 128


def rows_with_target(targets_T: Tensor) -> Tensor:
    """Places of the tokens that have a target; of targets on a GPU the host would wait for it."""
    return (targets_T != IGNORE).nonzero().squeeze(1)


def next_token_targets(tokens_T: Tensor, pack: Pack) -> Tensor:
    """The token that follows each token of its sequence; ``IGNORE`` at the end of a sequence and on padding."""
    ends = zip(pairwise(pack.cu_seqlens), pack.lengths)
    without = [token for (start, end), length in ends for token in range(start + length - 1, end)]
    targets_T = tokens_T.roll(-1)
    targets_T[torch.tensor(without, device=tokens_T.device)] = IGNORE
    targets_T[pack.cu_seqlens[len(pack.lengths)] :] = IGNORE  # rows of padding alone
    return targets_T


@dataclass(frozen=True, kw_only=True)
class TokenMasking:
    """Token masking of masked language models (Devlin et al. 2019, section 3.1).

    In each sequence :func:`~lengthwise.core.batch.num_masked` tokens are drawn. Of the drawn ones, 80 % are replaced by
    the mask token, 10 % by any other token and 10 % stay. The draw depends on the seed and the sequence's id alone:
    neither on the pack, nor on the epoch.
    """

    seed: int
    vocab_size: int
    mask_token_id: int

    def __post_init__(self) -> None:
        assert 0 <= self.mask_token_id < self.vocab_size, f"mask token {self.mask_token_id} of {self.vocab_size}"

    def draw(self, sequence: int, length: int, special: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The tokens to predict, in order, and what stands in the place of each: a token id, or -1 for itself.

        Tokens that are ``special``, [length] booleans, are never drawn.
        """
        stream = np.random.Philox(key=np.array([self.seed, sequence], dtype=np.uint64), counter=_COUNTER)
        order = np.argsort(stream.random_raw(length), kind="stable")
        candidates = order if special is None else order[~special[order]]
        chosen = np.sort(candidates[: num_masked(len(candidates)) if len(candidates) else 0])
        dice = stream.random_raw(len(chosen)) % 10
        others = (stream.random_raw(len(chosen)) % max(1, self.vocab_size - 1)).astype(np.int64)
        others += others >= self.mask_token_id  # any id but the mask token's
        put = np.where(dice < 8, self.mask_token_id, np.where(dice == 8, others % self.vocab_size, -1))
        return chosen, put


def masked_targets(
    tokens_T: Tensor, pack: Pack, masking: TokenMasking, *, special: Callable[[int], np.ndarray] | None = None
) -> tuple[Tensor, Tensor]:
    """Inputs with chosen tokens hidden, and those tokens as targets; ``IGNORE`` elsewhere and on padding.

    ``special``: which tokens of a sequence are never hidden.
    """
    inputs_T, targets_T = tokens_T.clone(), torch.full_like(tokens_T, IGNORE)
    for sequence, start, length in zip(pack.ids, pack.cu_seqlens, pack.lengths):
        chosen, put = masking.draw(sequence, length, None if special is None else special(sequence))
        places = torch.from_numpy(start + chosen).to(tokens_T.device)
        values = torch.from_numpy(put).to(tokens_T.device)
        targets_T[places] = tokens_T[places]
        inputs_T[places] = torch.where(values < 0, tokens_T[places], values)
    return inputs_T, targets_T
