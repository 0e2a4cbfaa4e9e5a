"""The collator of a run's packs: what a model's objective, its options and the corpus' columns make of them."""

from torch import nn

from lengthwise.config.prepare_options import PrepareOptions
from lengthwise.core.batch import MASKED
from lengthwise.core.errors import InputError
from lengthwise.runtime.models.targets import TokenMasking
from lengthwise.runtime.wrap.collator import PackCollator
from lengthwise.runtime.wrap.unit_members import Units
from lengthwise.runtime.wrap.wrapped_model import WrappedModel
from lengthwise.session.datasets import RunSequences


def make_collator(wrapped_model: WrappedModel, options: PrepareOptions, sequences: RunSequences) -> PackCollator:
    """The collator of the corpus' packs for the model."""
    hides_tokens = wrapped_model.objective == MASKED and sequences.labels is None
    return PackCollator(
        source=sequences,
        objective=wrapped_model.objective,
        masking=_masking(wrapped_model.model, options) if hides_tokens else None,
        ignore_index=options.ignore_index,
        slot_tokens=options.slot_tokens,
        labels=sequences.labels,
        passed=sequences.passed,
        loss_columns=sequences.loss_columns,
        special=sequences.special,
        kinds=sequences.kinds() if options.slot_tokens == 1 else {},
        units=_units(sequences),
    )


def _units(sequences: RunSequences) -> Units | None:
    num_members = sequences.num_members
    return None if num_members is None else Units(num_members=num_members, lengths=sequences.computed_lengths.lengths)


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
