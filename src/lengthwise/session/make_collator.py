"""The collator of a run's packs: what a model's objective, its options and the corpus' columns make of them."""

from dataclasses import replace

import numpy as np
from torch import nn

from lengthwise.config.prepare_options import PrepareOptions
from lengthwise.core.batch import MASKED, NEXT_TOKEN
from lengthwise.core.errors import InputError
from lengthwise.runtime.models.targets import TokenMasking
from lengthwise.runtime.wrap.collator import PackCollator, with_shared_prefixes
from lengthwise.runtime.wrap.unit_members import Units
from lengthwise.runtime.wrap.wrapped_model import WrappedModel
from lengthwise.session.datasets import RunSequences

LONG = 2048
"""Most slots of the longest sequence that is compared where all that are compared have lengths of the corpus."""


def lengths_of_corpus(slots: np.ndarray) -> tuple[int, ...]:
    """Slots of three sequences of the corpus: the shortest with a target of next tokens, a middle and a long one.

    ``slots``: [S] those of each sequence. They are taken for models that fail with the usual lengths, such as those
    that compute multiples of a block alone.
    """
    slots = np.unique(slots)
    slots = slots[slots >= 2] if slots[-1] >= 2 else slots
    slots = slots[: max(1, int((slots <= LONG).sum()))]
    return int(slots[-1]), int(slots[0]), int(slots[len(slots) // 2])


def make_collator(
    wrapped_model: WrappedModel,
    options: PrepareOptions,
    sequences: RunSequences,
    *,
    has_lengths_of_corpus: bool = False,
) -> PackCollator:
    """The collator of the corpus' packs for the model; ``has_lengths_of_corpus``: of those that it is compared on."""
    slots = np.asarray(sequences.computed_lengths.lengths) // options.slot_tokens
    hides_tokens = wrapped_model.objective == MASKED and sequences.labels is None
    collator = PackCollator(
        source=sequences,
        objective=wrapped_model.objective,
        masking=_masking(wrapped_model.model, options) if hides_tokens else None,
        ignore_index=options.ignore_index,
        slot_tokens=options.slot_tokens,
        labels=sequences.labels,
        passed=sequences.passed,
        loss_columns=sequences.loss_columns,
        special=sequences.special,
        kinds=sequences.kinds(),
        windows=sequences.windows,
        borders=sequences.borders(),
        longest=sequences.computed_lengths.max_length // options.slot_tokens,
        compared_lengths=lengths_of_corpus(slots) if has_lengths_of_corpus else (),
        slots_of_corpus=slots if has_lengths_of_corpus else None,
        units=_units(sequences, are_split=splits_units(options)),
        item_numbers=sequences.item_numbers,
    )
    if not options.share_prefixes:
        return collator
    check_can_share(wrapped_model, collator, options)
    return with_shared_prefixes(collator)


def check_can_share(wrapped_model: WrappedModel, collator: PackCollator, options: PrepareOptions) -> None:
    """Raise ``InputError`` if the sequences of units cannot share what they begin with, as far as options tell.

    What a model's layers do is found by computing a unit both ways (:mod:`lengthwise.runtime.verify.prefix_check`).
    """
    name, reason = type(wrapped_model.model).__name__, ""
    if collator.units is None:
        reason = "items are single sequences; give each item as a tuple of the sequences that begin alike"
    elif collator.labels is None:
        reason = (
            "items have no labels, so that each token of a shared prefix is learned from; give them labels (or a "
            f"completion_mask), {collator.ignore_index} for the tokens of the prefix"
        )
    elif wrapped_model.objective != NEXT_TOKEN or not wrapped_model.labels.shifts:
        reason = f"{name} learns from each token's own label, and shared tokens would learn from several"
    elif wrapped_model.labels.is_in_module:
        reason = f"the forward of {name} shifts labels itself; have it take the token after each token instead"
    elif wrapped_model.by_sequence is not None:
        reason = f"{name} is computed sequence by sequence"
    elif options.workers:
        reason = f"workers={options.workers} processes read single sequences; leave workers out"
    if reason:
        raise InputError(f"share_prefixes=True: {reason}; or leave share_prefixes out")


def splits_units(options: PrepareOptions) -> bool:
    """Whether the members of units are planned as sequences of their own: where a loss of the step couples them."""
    return options.coupled_loss is not None and not options.share_prefixes


def _units(sequences: RunSequences, *, are_split: bool) -> Units | None:
    return sequences.units and replace(sequences.units, are_split=are_split)


def _masking(model: nn.Module, options: PrepareOptions) -> TokenMasking:
    vocab_size = getattr(getattr(model, "config", None), "vocab_size", None)
    if options.mask_token_id is None or vocab_size is None:
        raise InputError(
            f"{type(model).__name__} predicts hidden tokens: say which token hides them, mask_token_id=..., the id of "
            "[MASK] in its tokenizer, or give items with labels in which tokens are hidden already"
        )
    if not 0 <= options.mask_token_id < vocab_size:
        raise InputError(
            f"mask_token_id={options.mask_token_id}, and {type(model).__name__} has tokens 0 to {vocab_size - 1:,}; "
            "give the id of [MASK] in its tokenizer"
        )
    return TokenMasking(seed=options.seed, vocab_size=vocab_size, mask_token_id=options.mask_token_id)
