"""Which columns beside tokens are refused because nobody knows how to use them: one rule for indexes and for items."""

import numpy as np

SPECIAL, TOKEN_TYPES = "special_tokens_mask", "token_type_ids"
HARMLESS = ("offset_mapping", "word_ids", "overflow_to_sample_mapping", "num_truncated_tokens", "length", "lengths")
"""Columns that tokenizers add, and that say nothing of what is learned."""
_WEIGHTS = ("weight", "reward", "advantage")
MEANINGFUL = ("mask", "label", "target", *_WEIGHTS)
"""Parts of names of columns that say what is learned; a single number of a row does so if it is a weight."""
_BOUNDS = "cu_seq"
"""Part of names of columns that say where packed sequences begin."""


def says_loss(name: str, array: np.ndarray) -> bool:
    """Whether a column may say, by its name, what is learned of the tokens."""
    is_plain = name in (SPECIAL, TOKEN_TYPES, *HARMLESS)
    return not is_plain and any(part in name.lower() for part in (MEANINGFUL if array.ndim else _WEIGHTS))


def reason_refused(name: str, array: np.ndarray) -> str:
    """Why a column that is not used would change what is learned, in words; empty: it is harmless.

    ``array`` is what a row has in it: [length], one number, or of any other shape.
    """
    if name == TOKEN_TYPES:
        return "is not 0 everywhere, and nothing takes it" if array.any() else ""
    if name in (SPECIAL, *HARMLESS):
        return ""
    if says_loss(name, array):
        return "may say what is learned, and it is not known how"
    if array.ndim and _BOUNDS in name.lower():
        return "may say where packed sequences begin, and it is not known how: give seq_lengths"
    if array.ndim and (array.dtype.kind in "fc" or array.ndim > 1):
        what = "lists in lists" if array.dtype.kind == "O" else f"{array.dtype} of shape {array.shape}"
        return f"is {what}, which packs of tokens have not"
    return ""
