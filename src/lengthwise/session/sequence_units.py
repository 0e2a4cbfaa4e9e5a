"""Items of several sequences that belong together, such as the two answers of a preference pair: units.

A unit is a tuple of dictionaries, its members. Sampler and planner take it for one sequence as long as all of its
members; what is computed are the members, each a sequence of its own, in one micro-batch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch

from lengthwise.core.errors import InfeasibleError, InputError
from lengthwise.core.prefix_tree import PrefixTree
from lengthwise.runtime.wrap.shared_prefixes import tree_of
from lengthwise.runtime.wrap.unit_members import Units
from lengthwise.session.item_values import ExpectedColumns, ItemRow, is_mapping

_LOOKED_AT = 8
"""Members by which a unit is told from a row of token ids."""


def members_of(where: str, item: Any, *, slot_tokens: int) -> list[Any] | None:
    """The members of an item that is a unit; None: it is one sequence.

    Raises:
        InputError: some of its members are no dictionaries.
    """
    if not isinstance(item, tuple | list):
        return None
    kind, first = type(item).__name__, item[:_LOOKED_AT]
    if any(is_mapping(member) for member in first):
        for number, member in enumerate(item):
            if not is_mapping(member):
                raise InputError(
                    f"member {number} of {where} is {type(member).__name__}, and others are dictionaries; a unit is a "
                    "tuple of dictionaries with input_ids"
                )
        return list(item)
    if any(isinstance(member, tuple | list) and any(map(is_mapping, member[:_LOOKED_AT])) for member in first):
        raise InputError(
            f"{where} is a {kind} of units; a unit is a tuple of dictionaries with input_ids: give all of its members "
            "in one tuple"
        )
    if slot_tokens == 1 and len(item) > 1 and any(_is_row(member) for member in first):
        of_two = (
            " (inputs and targets that follow them: all tokens in one row; tokens and a label of each: {'input_ids': "
            "[...], 'labels': [...]})"
        )
        raise InputError(
            f"{where} is a {kind} of {len(item)} rows; a sequence is one row of token ids"
            f"{of_two if len(item) == 2 else ''}, and sequences that share a micro-batch are a tuple of dictionaries: "
            "({'input_ids': [...]}, {'input_ids': [...]})"
        )
    return None


def joined(where: str, members: list[ItemRow]) -> ItemRow:
    """One row of all members, end to end; its bounds are theirs.

    Raises:
        InputError: members have different columns, or are no single sequences.
    """
    for number, member in enumerate(members):
        if len(member.bounds) > 2:
            raise InputError(
                f"member {number} of {where} holds {len(member.bounds) - 1} sequences packed into one row; give each "
                "as a member of its own"
            )
        _check_alike(where, number, members[0], member)
    first = members[0]
    return ItemRow(
        tokens=np.concatenate([member.tokens for member in members]),
        labels=None if first.labels is None else np.concatenate([_given(member.labels) for member in members]),
        special=None if first.special is None else np.concatenate([_given(member.special) for member in members]),
        passed={name: np.concatenate([member.passed[name] for member in members]) for name in first.passed},
        bounds=(0, *accumulate(len(member.tokens) for member in members)),
        is_unit=True,
    )


def shared_tree(row: ItemRow, expected: ExpectedColumns) -> PrefixTree:
    """The prefix tree of a unit that has labels, whose sequences share what they begin with."""
    columns = {name: values for name, values in row.passed.items() if name not in expected.loss_columns}
    columns[""], spans = row.tokens, list(pairwise(row.bounds))
    members = [{name: values[start:end] for name, values in columns.items()} for start, end in spans]
    labels = _given(row.labels)
    return tree_of(members, [labels[start:end] for start, end in spans], expected.ignore_index)


@contextmanager
def units_named(units: Units | None) -> Iterator[None]:
    """Errors of planning say that what does not fit is a unit, and is not cut.

    Raises:
        InfeasibleError: as planning raised it, of units.
    """
    try:
        yield
    except InfeasibleError as error:
        if units is None or units.are_split:
            raise
        problem = str(error).replace("over_length=split", "over_length=drop")
        raise error.with_message(
            f"{problem} Items are units of {units.sizes_text} sequences that share a micro-batch, and are planned as "
            "one sequence of their summed length; where coupled_loss= couples them they need not share one, nor where "
            "share_prefixes=True, cut_units=True cuts units"
        ) from None


def check_all_units(number: int, is_unit: bool, is_first_unit: bool) -> None:
    """Raise ``InputError`` unless an item is a unit where the first one is."""
    if is_unit != is_first_unit:
        raise InputError(
            f"item {number} is {in_words(is_unit)}, and item 0 is {in_words(is_first_unit)}; where some items are "
            "units, give a single sequence as a unit of one, a tuple (item,)"
        )


def in_words(is_unit: bool) -> str:
    """What an item is, in error messages."""
    return "a unit" if is_unit else "a single sequence"


def _check_alike(where: str, number: int, first: ItemRow, member: ItemRow) -> None:
    """Raise ``InputError`` if a member has other columns with a meaning than the first one, or other slots."""
    has, had = member.used, first.used
    if has != had:
        name = min(has ^ had)
        words = {"labels": "labels (or a mask of tokens that have a loss)", "special": "special_tokens_mask"}
        with_it, without = (0, number) if name in had else (number, 0)
        raise InputError(
            f"member {with_it} of {where} has {words.get(name, name)} and member {without} has none; give every member "
            "its own, or leave the column out of all"
        )
    this, that = (row.tokens.shape[1:] for row in (member, first))
    if this != that:
        raise InputError(
            f"member {number} of {where} has slots of shape {this}, and member 0 has slots of shape {that}; all slots "
            "of a corpus have one shape"
        )


def _given(values: np.ndarray | None) -> np.ndarray:
    assert values is not None, "every member has what the first has"
    return values


def _is_row(member: Any) -> bool:
    return isinstance(member, tuple | list) or (isinstance(member, np.ndarray | torch.Tensor) and member.ndim > 0)
