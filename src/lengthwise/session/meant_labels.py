"""What the labels of items say of the objective that they are meant for.

By default a module of a user's own learns the label after each token, as items for models of transformers have each
token's own. Pairs ``(row[:-1], row[1:])`` are shifted already, and tags or hidden tokens are not to be shifted at all:
their values tell it.
"""

import logging

from lengthwise.config.prepare_options import PrepareOptions
from lengthwise.core.batch import NEXT_TOKEN
from lengthwise.core.errors import InputError
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.session.datasets import RunSequences
from lengthwise.session.label_counts import LabelCounts

_log = logging.getLogger("lengthwise")

FEWEST_LABELS = 8
"""Labels by which items can be judged."""
MOSTLY = 0.5
"""The share of labels that are other than their tokens from which they are taken for something else."""


def check_labels_are_meant(
    prepared: PreparedModel, options: PrepareOptions, sequences: RunSequences, ways_out: tuple[str, ...]
) -> None:
    """Raise ``InputError`` if rows without labels may mean next tokens or copies: the model's loss shifts no labels."""
    if not prepared.wrapped_model.labels.shifts and sequences.has_loss_mask:
        raise InputError(
            f"the loss of {type(prepared.model).__name__} compares the output of each token with the label at the same "
            "place, and the index says of each token whether the one before it learns to predict it; " + ways_out[-1]
        )
    if prepared.wrapped_model.labels.shifts or sequences.labels is not None or options.objective is not None:
        return
    raise InputError(
        f"the loss of {type(prepared.model).__name__} compares the output of each token with the label at the same "
        f"place, and the corpus has no labels; {', or '.join(ways_out)}"
    )


def warn_of_unread_labels(prepared: PreparedModel, options: PrepareOptions) -> None:
    """Say so if the loss of a model that is taken to learn next tokens uses none, after it was compared."""
    convention, wrapped_model = prepared.wrapped_model.labels, prepared.wrapped_model
    if wrapped_model.objective != NEXT_TOKEN or options.objective is not None:
        return
    if convention.are_read or convention.made is not None or wrapped_model.structure.is_hugging_face:
        return
    if prepared.world.is_first:
        _log.warning(
            "the loss of %s uses no targets, and a sequence weighs as many as have a next token, one less than it has; "
            "say objective='every-token' if it is a mean over all of its tokens", type(prepared.model).__name__,
        )  # fmt: skip


def check_labels_of_next(name: str, counts: LabelCounts, *, warns: bool) -> None:
    """Raise ``InputError`` if labels of items are the next tokens already, of a model ``name`` that learns those after.

    ``warns``: say so where they are neither tokens nor next tokens.
    """
    if counts.num_labels < FEWEST_LABELS or counts.num_own >= (1 - MOSTLY) * counts.num_labels:
        return
    if counts.num_next == counts.num_labels:
        raise InputError(
            f"the labels of items are their next tokens already, and {name} would learn the label after each token, "
            "two tokens ahead: say objective='every-token', which uses labels as they are, or give each token's own"
        )
    if warns:
        _log.warning(
            "labels of items are other than their tokens at %.0f %% of the places that have one, as tags or hidden "
            "tokens are, and %s learns the label after each token; say objective='every-token' if each token is to "
            "learn its own, or objective='next-token' if it is meant so",
            100 * (1 - counts.num_own / counts.num_labels), name,
        )  # fmt: skip
