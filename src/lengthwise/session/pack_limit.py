"""How many tokens the packs of a prepared model may have, where large ones are not computed as small ones are."""

import logging
from collections.abc import Callable

from lengthwise.config.prepare_options import PrepareOptions
from lengthwise.core.errors import CheckError
from lengthwise.core.lengths import LengthIndex
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.verify.crowded_packs import MOST_SLOTS, crowding_problem
from lengthwise.runtime.verify.long_tables import make_long_tables
from lengthwise.runtime.verify.verdict import NotComputedError

_log = logging.getLogger("lengthwise")

FEWEST_SLOTS = 40
"""Slots of the longest sequence at least, so that packs of that size with several sequences are compared."""


def check_packs(
    prepared: PreparedModel,
    options: PrepareOptions,
    lengths: LengthIndex,
    check: Callable[[], None],
    check_ways: Callable[[int, bool], None],
) -> None:
    """Call ``check``, which compares small packs, and compare a pack of many sequences; every rank calls this.

    ``check_ways``: compares packs of up to so many slots in which the forward decides otherwise by its length, where
    one of that size with many short sequences was compared before, or was not.

    Where packs as large as the longest sequence can be used, and larger ones not, the model has that limit from now on.

    Raises:
        CheckError: packs change what the model learns.
    """
    size, longest = options.slot_tokens, lengths.max_length // options.slot_tokens
    largest = largest_pack(prepared, options, int(lengths.num_tokens) // size)

    def limit_packs(problem: str) -> None:
        if not FEWEST_SLOTS <= longest < largest or crowding_problem(prepared, longest):
            raise CheckError(problem)
        prepared.wrapped_model.most_slots = longest
        if prepared.world.is_first:
            text = problem.replace(". check=False trains it all the same", "")
            _log.warning("packs have at most %s tokens, as the longest sequence has: %s", f"{longest * size:,}", text)

    if prepared.wrapped_model.by_sequence is not None:
        return check()
    make_long_tables(prepared, num_slots=largest, longest=longest)
    if options.max_tokens is not None:
        prepared.wrapped_model.most_slots = options.max_tokens // size
    try:
        check()
    except NotComputedError as error:
        limit_packs(error.marked)
        check()
        return check_ways(longest, False)
    check_ways(min(longest, largest), False)
    if problem := crowding_problem(prepared, largest):
        return limit_packs(problem)
    try:
        check_ways(largest, True)
    except CheckError as error:
        limit_packs(error.marked)


def largest_pack(prepared: PreparedModel, options: PrepareOptions, num_slots: int) -> int:
    """Slots of the largest pack that is compared: of what plans may make of ``num_slots``, and a model may be given."""
    size, most_slots = options.slot_tokens, prepared.wrapped_model.most_slots or MOST_SLOTS
    return min(MOST_SLOTS, most_slots, num_slots, (options.max_tokens or MOST_SLOTS * size) // size)


def with_pack_limit(prepared: PreparedModel, options: PrepareOptions) -> PrepareOptions:
    """The options, with packs of at most as many tokens as the model can be given."""
    most_slots = prepared.wrapped_model.most_slots
    if most_slots is None:
        return options
    most_tokens = most_slots * options.slot_tokens
    return options.model_copy(update={"max_tokens": min(most_tokens, options.max_tokens or most_tokens)})
