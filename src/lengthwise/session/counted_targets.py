"""Whether the targets of a step have to be counted before its first backward, and which labels are none."""

import logging

from lengthwise.runtime.comm.objects import gather_json
from lengthwise.runtime.loop.prepared_model import PreparedModel

_log = logging.getLogger("lengthwise")


def must_count_targets(prepared: PreparedModel) -> bool:
    """Whether labels may leave out targets, and something in the backward of the model may not be linear.

    Every rank calls this, and has the same answer.
    """
    if not prepared.collator.may_leave_out:
        return False
    of_ranks = gather_json(prepared.world, sorted(prepared.wrapped_model.gradient_changes))
    changes = [change for of_rank in of_ranks for change in of_rank]
    if changes and prepared.world.is_first:
        _log.info(
            "the labels of each step are counted when it begins: %s may need gradients at the scale of the step",
            changes[0],
        )
    return bool(changes)


def share_ignored_labels(prepared: PreparedModel) -> None:
    """Let every rank know what any has seen a loss leave out; every rank calls this."""
    of_ranks = gather_json(prepared.world, sorted(prepared.wrapped_model.ignored_labels))
    prepared.wrapped_model.ignored_labels = frozenset(label for of_rank in of_ranks for label in of_rank)
