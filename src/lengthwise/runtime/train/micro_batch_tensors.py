"""Make the tensors of one forward from a pack of sequence ids."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from lengthwise.core.batch import NEXT_TOKEN, Pack
from lengthwise.core.errors import InputError, LengthwiseError
from lengthwise.core.specs import ModelSpec
from lengthwise.runtime.models.host_copies import to_device
from lengthwise.runtime.models.targets import IGNORE, TokenMasking, masked_targets, next_token_targets

CPU = torch.device("cpu")


class SourceError(LengthwiseError):
    """A sequence cannot be read, or is another than the one that was planned."""


class TokenSource(Protocol):
    """Source of token values; :class:`lengthwise.data.corpus.Corpus` is one."""

    def tokens(self, sequence: int, /) -> np.ndarray:
        """Token ids of one sequence."""
        ...


@runtime_checkable
class LossMaskSource(Protocol):
    """Source that knows which tokens have a loss; without it all have one but the first of each sequence."""

    def loss_mask(self, sequence: int, /) -> np.ndarray | None:
        """[length] booleans, true for tokens that are predicted by the token before them; None: all of them."""
        ...


@dataclass(frozen=True, kw_only=True)
class MicroBatchTensors:
    """The tensors of one micro-batch, on the host until they are needed elsewhere. T tokens, padding included, or those
    of one slice.
    """

    tokens_T: Tensor
    targets_T: Tensor
    cu_seqlens: tuple[int, ...]
    """Of the whole pack."""

    def of(self, tokens: range) -> "MicroBatchTensors":
        """The tensors of some neighbouring tokens."""
        tokens_t, targets_t = (x_T[tokens.start : tokens.stop] for x_T in (self.tokens_T, self.targets_T))
        return MicroBatchTensors(tokens_T=tokens_t, targets_T=targets_t, cu_seqlens=self.cu_seqlens)

    def to(self, device: torch.device) -> "MicroBatchTensors":
        """Copy the tensors to ``device``, while it computes."""
        tokens_T, targets_T = (to_device(tensor, device) for tensor in (self.tokens_T, self.targets_T))
        return MicroBatchTensors(tokens_T=tokens_T, targets_T=targets_T, cu_seqlens=self.cu_seqlens)

    def pinned(self) -> "MicroBatchTensors":
        """Copy the tensors to pinned memory, from which a GPU copies asynchronously."""
        return MicroBatchTensors(
            tokens_T=self.tokens_T.pin_memory(), targets_T=self.targets_T.pin_memory(), cu_seqlens=self.cu_seqlens
        )


def masking_of(spec: ModelSpec, *, seed: int) -> TokenMasking | None:
    """Token masking that a model is trained with; None if its objective is the next token.

    Raises:
        InputError: the model is to predict masked tokens and has no mask token.
    """
    if spec.objective == NEXT_TOKEN:
        return None
    if spec.mask_token_id is None:
        raise InputError(f"model {spec.name} predicts masked tokens and has no mask_token_id")
    return TokenMasking(seed=seed, vocab_size=spec.vocab_size, mask_token_id=spec.mask_token_id)


def feed(
    source: TokenSource,
    pack: Pack,
    device: torch.device = CPU,
    *,
    masking: TokenMasking | None = None,
    name: Callable[[int], str] = "sequence {}".format,
) -> MicroBatchTensors:
    """Lay the sequences of ``pack`` end to end, each padded to its computed length with token 0.

    With ``masking``, targets are the hidden tokens instead of the next ones. Such models look both ways, so that each
    sequence's padding is a sequence of its own there. ``name``: what an error calls a sequence.

    Raises:
        LengthwiseError: a sequence could not be read, or has another length than planned.
    """
    tokens = np.zeros(pack.num_tokens, dtype=np.int64)
    for sequence, start, length in zip(pack.ids, pack.cu_seqlens, pack.lengths):
        tokens[start : start + length] = _read(source, sequence, length, name)
    tokens_T = torch.from_numpy(tokens)
    if masking is None:
        cu_seqlens, targets_T = pack.cu_seqlens, next_token_targets(tokens_T, pack)
        if isinstance(source, LossMaskSource):
            targets_T[~_predicts(source, pack)] = IGNORE
    else:
        starts = zip(pack.cu_seqlens, pack.lengths)
        cu_seqlens = tuple(sorted({*pack.cu_seqlens, *(start + length for start, length in starts)}))
        tokens_T, targets_T = masked_targets(tokens_T, pack, masking)
    return MicroBatchTensors(tokens_T=tokens_T, targets_T=targets_T, cu_seqlens=cu_seqlens).to(device)


def _predicts(source: LossMaskSource, pack: Pack) -> Tensor:
    """[T] whether each token's next one has a loss, as far as ``source`` knows."""
    predicts_T = torch.ones(pack.num_tokens, dtype=torch.bool)
    for sequence, start, length in zip(pack.ids, pack.cu_seqlens, pack.lengths):
        if (mask := source.loss_mask(sequence)) is not None:
            predicts_T[start : start + length - 1] = torch.from_numpy(mask[1:])
    return predicts_T


def _read(source: TokenSource, sequence: int, length: int, name: Callable[[int], str]) -> np.ndarray:
    try:
        tokens = source.tokens(sequence)
    except LengthwiseError as error:
        raise SourceError(f"{name(sequence)} ({length:,} tokens) could not be read: {error}") from None
    except Exception as error:
        raise SourceError(
            f"{name(sequence)} ({length:,} tokens) could not be read: {type(error).__name__}: {error}; mend its "
            "source before going on"
        ) from error
    if len(tokens) != length:
        raise SourceError(
            f"{name(sequence)} has {len(tokens):,} tokens, its plan says {length:,}; the data has changed since it "
            "was indexed: index it again"
        )
    return tokens


def with_padding(values: Tensor, pack: Pack, *, num_slots: int, slot_tokens: int) -> Tensor:
    """[num_slots, ...] values of the sequences of a pack, given end to end, with zeros where the pack is padded."""
    starts = zip(pack.cu_seqlens, pack.lengths)
    spans = [(start // slot_tokens, (start + length) // slot_tokens) for start, length in starts]
    places = torch.tensor([place for span in spans for place in range(*span)], device=values.device)
    return values.new_zeros(num_slots, *values.shape[1:]).index_copy(0, places, values)
