"""What a model is computed by that packs, or layers computed again, would change: what is exact, with a warning."""

import logging
import re
from functools import partial

from torch import nn

from lengthwise.config.prepare_options import PrepareOptions
from lengthwise.config.setting_names import as_option
from lengthwise.core.errors import CheckError, InputError, Setting
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.verify.learn_made_labels import numbers_in_loss
from lengthwise.session.layer_choice import ComparedCalls, Learn, learn_with_layers
from lengthwise.session.objectives import labels_sequences

_log = logging.getLogger("lengthwise")


FOLLOWED = re.compile(r",? or (have|let|compute) [^;]*packing='never'[^;]*$")
"""What errors advise that is done without being asked for."""
_HOW_EXACT = {
    True: "exact",
    False: "as it computes each alone",
    None: "as it computes each alone, weighted by its targets (whether a batch has that loss could not be seen)",
}
"""What is said of the losses of sequences, by whether the loss of a batch is the mean of theirs."""
ADVISED = re.compile(r"; (?:say|change) ")
"""Where the advice of an error of a call begins."""
_OF_CALLS = (" fails ", " slots alone, called as before", "cannot be put together for a micro-batch")
"""What errors say of a call that may be right with the lengths that the corpus has."""
OF_SHARED = re.compile(r"\bdegree (?!1\b)\d")
"""What errors say of a pack whose sequences ranks share."""


def learn_exactly(model: nn.Module, chosen: PrepareOptions, learn: Learn) -> tuple[PreparedModel, PrepareOptions]:
    """The model, traced and compared with itself: in packs where that is exact, shared by ranks or not, else sequence
    by sequence.

    Also returns the options that are left it.

    Raises:
        InputError: packs cannot be exact and nothing else may be done, or the model is refused then as well.
        CheckError: the same, where it was found by comparing.
    """
    learn = partial(learn_with_layers, model, learn)
    of_sequences = labels_sequences(model, chosen)
    if of_sequences and chosen.packing == "always":
        raise InputError(
            f"packing='always': {type(model).__name__} has one label for each sequence, so its forward is called once "
            "for each; leave packing out"
        )
    if of_sequences or chosen.packing == "never":
        return _learned_by_sequence(model, chosen, learn)
    try:
        return _learned(chosen, learn, ComparedCalls.IN_PACKS)
    except (InputError, CheckError) as error:
        if chosen.packing == "always":
            raise
        first = error.with_traceback(None)  # whose frames would hold what was learned of the model, with its state
    if OF_SHARED.search(first.marked) and (learned := _learned_unshared(chosen, learn, first)) is not None:
        return learned
    asks_for_packs = {
        "weights='by-layer'": chosen.weights == "by-layer", "share_prefixes": chosen.share_prefixes,
        "compile": chosen.compile, "feed_forward_tile": chosen.feed_forward_tile is not None,
    }  # fmt: skip
    if asked := [option for option, is_asked in asks_for_packs.items() if is_asked]:
        raise type(first)(
            f"{first.marked}. That is of packs, for which {' and '.join(asked)} asks: left out, such a model may be "
            "computed sequence by sequence"
        )
    prepared, chosen = _learned_by_sequence(model, chosen, learn)
    if prepared.world.is_first:
        _log.warning(
            "%s is computed sequence by sequence: %s, but no two ranks share a sequence, so each must hold the "
            "longest; packing='always' of prepare refuses instead. In packs it would not be exact: %s",
            type(model).__name__, _HOW_EXACT[prepared.wrapped_model.is_mean],
            reason_of(first, is_of_length=bool(prepared.collator.compared_lengths)),
        )  # fmt: skip
    return prepared, chosen


def _learned_unshared(
    chosen: PrepareOptions, learn: Learn, first: InputError | CheckError
) -> tuple[PreparedModel, PrepareOptions] | None:
    """The model in packs that no two ranks share; None where these are not exact either."""
    try:
        prepared, chosen = _learned(chosen.model_copy(update={"max_degree": 1}), learn, ComparedCalls.IN_PACKS)
    except (InputError, CheckError):
        return None
    if prepared.world.is_first:
        _log.warning(
            "no two ranks share a sequence of %s, as by max_degree=1: exact, but each must hold the longest; "
            "packing='always' of prepare refuses instead. Shared it would not be exact: %s",
            type(prepared.model).__name__, reason_of(first),
        )  # fmt: skip
    return prepared, chosen


def _learned_by_sequence(
    model: nn.Module, chosen: PrepareOptions, learn: Learn
) -> tuple[PreparedModel, PrepareOptions]:
    """The model, compared at lengths that the corpus has where its own code fails at the usual ones.

    A model may compute multiples of a block alone, say, or nothing below its stride.
    """
    try:
        return _learned(chosen, learn, ComparedCalls.BY_SEQUENCE)
    except (InputError, CheckError) as error:
        if f"{type(model).__name__} " not in error.marked or not _is_of_call(error):
            raise
        return _learned(chosen, learn, ComparedCalls.AT_LENGTHS_OF_CORPUS)


def warn_of_other_mean(prepared: PreparedModel) -> None:
    """Say what steps train where the loss of a batch is another one than the mean of its sequences' losses."""
    if prepared.world.is_first and prepared.wrapped_model.is_mean is False:
        _log.warning(
            "the loss of %s for several sequences at once is not the mean of theirs by their targets, as where it has "
            "a divisor of its own, weighs classes, is a mean over rows or has a term across tokens or sequences (a "
            "router's, negatives from the batch, a norm of the batch): steps train that mean, on any ranks and under "
            "any plan. Make another loss in the loop, with step.backward(loss, mean_over='step'); a mean over rows is "
            "mean_over='units', and what is meant to couple sequences is coupled_loss= of prepare",
            type(prepared.model).__name__,
        )  # fmt: skip


def warn_of_numbers(prepared: PreparedModel) -> None:
    """Say of losses of one number for each sequence, as in regression, that tokens weigh them, and what else may."""
    wrapped_model = prepared.wrapped_model
    if wrapped_model.by_sequence is None or wrapped_model.labels.made is not None or wrapped_model.labels_sequences:
        return
    if (names := numbers_in_loss(prepared)) and prepared.world.is_first:
        _log.warning(
            "the loss of %s depends on %s, of which a sequence has one and not each token, as of a target of "
            "regression: step.backward(loss) weighs each sequence by its tokens with a target. If sequences are to "
            "weigh the same, say step.backward(loss, mean_over='units')",
            type(prepared.model).__name__, " and ".join(names),
        )  # fmt: skip


def _learned(chosen: PrepareOptions, learn: Learn, compared: ComparedCalls) -> tuple[PreparedModel, PrepareOptions]:
    """The model, whose layers plans may recompute unless that alone would not be exact."""
    try:
        return learn(chosen, compared), chosen
    except (InputError, CheckError) as error:
        if Setting.RECOMPUTE not in error.remedies or chosen.recompute != "auto":
            raise
        first = error
    chosen = chosen.model_copy(update={"recompute": "none"})
    try:
        prepared = learn(chosen, compared)
    except (InputError, CheckError):
        raise first from None
    if prepared.world.is_first:
        _log.warning(
            "no layer of %s is recomputed, as by recompute='none': exact, but what all layers save must fit; "
            "recompute='all' of prepare refuses instead. Recomputed it would not be exact: %s",
            type(prepared.model).__name__, reason_of(first),
        )  # fmt: skip
    return prepared, chosen


def _is_of_call(error: InputError | CheckError) -> bool:
    """Whether a call of the model's own code failed, as it may with other lengths only."""
    return any(part in error.marked for part in _OF_CALLS)


def reason_of(error: InputError | CheckError, *, is_of_length: bool = False) -> str:
    """An error in words, without advice that is followed, or that a call which works otherwise does not need.

    ``is_of_length``: the call works with the lengths that the corpus has.
    """
    reason = FOLLOWED.sub("", error.spelt(as_option).replace(". check=False trains it all the same", ""))
    if not _is_of_call(error):
        return reason
    return ADVISED.split(reason, maxsplit=1)[0] + (", a length that the corpus need not have" if is_of_length else "")
