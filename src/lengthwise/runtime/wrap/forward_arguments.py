"""What a loop gives to a prepared model in a micro-batch."""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lengthwise.core.errors import InputError, LengthwiseError

TOKENS = ("input_ids", "idx", "tokens", "ids", "x", "input")
TARGETS = ("labels", "targets", "target", "y")
POSITIONS = ("position_ids", "positions", "input_pos", "pos")
"""Names that a forward may give to the arguments that have the tokens, what they predict and where they are."""


def check_arguments(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], num_slots: int) -> None:
    """Raise ``InputError`` if a call of the model ``name`` has other tokens than its micro-batch, or hides some.

    ``num_slots``: those of this rank's share; 0: its arguments are made by a function of the user's.
    """
    _check_hides_nothing(kwargs.get("attention_mask"))
    _check_keeps_logits(name, kwargs)
    if kwargs.get("output_attentions"):
        raise InputError(
            f"{name} was called with output_attentions=True, and there are no attention weights of a micro-batch, "
            "where a query's keys may be on several ranks; read them of single sequences in `with run.plain():`"
        )
    tokens = next((kwargs[key] for key in TOKENS if key in kwargs), args[0] if args else None)
    if num_slots and isinstance(tokens, Tensor) and not tokens.is_floating_point() and tokens.numel() % num_slots:
        raise InputError(
            f"{name} was called with {tokens.numel():,} tokens in a micro-batch of which this rank has {num_slots:,}: "
            "there it computes micro_batch.inputs; call it with other tokens in `with run.plain():`"
        )


def check_constant(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise ``InputError`` if a frozen model is to pass a gradient on to what it is called with."""
    if torch.is_grad_enabled() and any(
        isinstance(value, Tensor) and value.requires_grad for value in pytree.tree_leaves((args, kwargs))
    ):
        raise InputError(
            f"{name} is frozen and was called with a tensor that has a gradient, and it would pass none on: frozen "
            "models compute without gradients. Call it with detached tensors, or make it a part of the trained model, "
            "with weights that need no gradient (requires_grad_(False)), called in its forward"
        )


def check_frozen(error: Exception, name: str, num_slots: int, num_sequences: int) -> None:
    """Raise ``InputError`` for an error of a frozen model ``name`` on a micro-batch; an empty string: it is none.

    ``num_sequences``: those that it computed at once; 0: it was called for each by itself.
    """
    if not name or isinstance(error, LengthwiseError):
        return
    way_out = (
        "call it with what its forward takes, for the slots of the micro-batch; it is compared with the arguments that "
        "inputs= of prepare makes, where its forward has such names, else with tokens"
    )
    is_of_kind = isinstance(error, TypeError) or "dtype" in str(error)
    if num_sequences and not is_of_kind and (num_sequences > 1 or not isinstance(error, RuntimeError)):
        way_out = "if it takes no more than its longest sequence, say so: max_tokens="
    what = "a pack" if num_sequences else "a sequence of a micro-batch"
    raise InputError(
        f"{name}, which is frozen, fails on {what} of {num_slots:,} slots ({type(error).__name__}: {error}); {way_out}"
    ) from error


def _check_keeps_logits(name: str, kwargs: dict[str, Any]) -> None:
    """Raise ``InputError`` if the last logits of a row are asked for, which is a pack, or labels have no logits."""
    count = kwargs.get("logits_to_keep")
    is_number = isinstance(count, int) and count > 0
    if is_number or (isinstance(count, Tensor) and kwargs.get("labels") is not None):
        raise InputError(
            f"{name} was called with logits_to_keep={count if is_number else 'a tensor'}, and a micro-batch is one row "
            "of several sequences, whose last logits are not those of each, nor as many as there are labels; leave it "
            "out (logits are computed where they are used), and select from them: output.logits[0][micro_batch.is_last]"
        )


def _check_hides_nothing(mask: Any) -> None:
    if isinstance(mask, Tensor) and not bool((mask == 1).all()):
        raise InputError(
            "attention_mask hides tokens; a pack has no padding to hide and its sequences do not see each other: leave "
            "attention_mask out (micro_batch.inputs has none)"
        )
