"""Comparisons of a prepared model with its stock forward: before the run, and where its settings or items change."""

from functools import partial

import numpy as np

from lengthwise.config.prepare_options import PrepareOptions
from lengthwise.config.setting_names import as_option
from lengthwise.core.errors import CheckError, errors_spelt
from lengthwise.core.lengths import LengthIndex
from lengthwise.plan.space.candidate import degrees_of
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.loop.synthetic_batches import traced_lengths
from lengthwise.runtime.verify.compile_check import check_compiled
from lengthwise.runtime.verify.compute_settings import RECOMPUTE
from lengthwise.runtime.verify.crowded_packs import crowding_problem
from lengthwise.runtime.verify.decision_packs import PackWays
from lengthwise.runtime.verify.gradient_check import check_exact
from lengthwise.runtime.verify.long_tables import make_long_tables
from lengthwise.runtime.verify.longest_check import check_longest
from lengthwise.runtime.verify.prefix_check import check_shared_prefixes
from lengthwise.runtime.wrap.preserved_state import preserve_state
from lengthwise.session.calibration import progress_bar
from lengthwise.session.fallbacks import warn_of_numbers, warn_of_other_mean
from lengthwise.session.meant_labels import warn_of_unread_labels
from lengthwise.session.new_kinds import NewKinds
from lengthwise.session.new_sizes import NewSizes
from lengthwise.session.pack_limit import check_packs, largest_pack


def compare_with_stock(prepared: PreparedModel, options: PrepareOptions, lengths: LengthIndex) -> None:
    """Compare packs, compiled layers and shared prefixes with the stock model; every rank calls this.

    Raises:
        CheckError: packs change what the model learns.
        InputError: the model cannot be computed in packs at all.
    """
    check = partial(_check, prepared, options, lengths.max_length)
    ways = PackWays(prepared, np.asarray(lengths.lengths) // options.slot_tokens)
    check_packs(prepared, options, lengths, check, partial(_check_ways, prepared, options, ways))
    prepared.decides_anew = ways.is_new
    warn_of_unread_labels(prepared, options)
    warn_of_numbers(prepared)
    check_compiled(prepared)
    if options.share_prefixes:
        check_shared_prefixes(prepared)


def compare_again(prepared: PreparedModel, options: PrepareOptions, kinds: NewKinds, sizes: NewSizes) -> None:
    """Compare short packs with the stock model, whose weights and settings may have changed since, or the items; and
    packs of those sizes at which it decides otherwise now, or that are larger than any before.
    """
    was_mean, prepared.wrapped_model.is_mean = prepared.wrapped_model.is_mean, None
    with errors_spelt(as_option), preserve_state(prepared.model), kinds.shown() as has_new, sizes.shown() as has_grown:
        short = traced_lengths(prepared.collator)[0] * options.slot_tokens
        _check(prepared, options, longest=short if has_new else None)
        ways, largest = PackWays(prepared, sizes.lengths), largest_pack(prepared, options, sizes.num_slots)
        _check_ways(prepared, options, ways, largest)
        if has_grown:
            make_long_tables(prepared, num_slots=largest, longest=int(sizes.lengths.max()))
            if problem := crowding_problem(prepared, largest):
                raise CheckError(problem)
        prepared.decides_anew = ways.is_new
    if was_mean is not False:
        warn_of_other_mean(prepared)


def _check(prepared: PreparedModel, options: PrepareOptions, longest: int | None) -> None:
    """Compare what plans may compute with the stock model; ``longest``: None compares short sequences alone."""
    shown = options.verbose and prepared.world.is_first
    degrees, num_slots = _degrees(prepared, options), None if longest is None else longest // options.slot_tokens
    with progress_bar("comparing with the stock model", shown=shown) as advance:
        check_exact(
            prepared,
            degrees=degrees,
            methods=options.sharing_methods,
            recompute=_recompute(options),
            longest=num_slots,
            on_progress=advance,
        )
    check_longest(prepared, degrees=degrees, methods=options.sharing_methods, longest=num_slots)


def _check_ways(
    prepared: PreparedModel, options: PrepareOptions, ways: PackWays, largest: int, is_crowded: bool = False
) -> None:
    """Compare packs of at most ``largest`` slots in which the forward decides otherwise by its length.

    ``is_crowded``: whether a pack of that size with many short sequences was compared before.
    """
    degrees, methods, recompute = _degrees(prepared, options), options.sharing_methods, _recompute(options)
    ways.compare(degrees=degrees, methods=methods, recompute=recompute, largest=largest, is_crowded=is_crowded)


def _degrees(prepared: PreparedModel, options: PrepareOptions) -> list[int]:
    size, per_node = prepared.world.size, prepared.world.ranks_per_node
    return [degree for degree in degrees_of(size, per_node or size) if degree <= (options.max_degree or size)]


def _recompute(options: PrepareOptions) -> tuple[str, ...]:
    return (options.recompute,) if options.recompute in ("none", "all") else RECOMPUTE
