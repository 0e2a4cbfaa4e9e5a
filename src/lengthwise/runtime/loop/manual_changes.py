"""Detect changes that a user's loop made by hand to a prepared model and its weights."""

from lengthwise.runtime.loop.fsdp2 import Fsdp2State
from lengthwise.runtime.loop.watched_parameters import WatchedParameters
from lengthwise.runtime.state.sharded import ShardedState


def inspect_weights(
    state: ShardedState | Fsdp2State, parameters: WatchedParameters, *, is_whole: bool
) -> tuple[str, int, bool]:
    """Return a problem with the model or "", the fingerprint of this rank's weights, and whether they were changed.

    ``is_whole``: whether this rank holds all weights, and not a share of them that nobody else sees.
    """
    problem = parameters.problem()
    if problem or not is_whole or isinstance(state, Fsdp2State):
        return problem, 0, False
    local = state.local_weights()
    problem = local.bring_back()
    return problem, 0 if state.world.size == 1 else local.fingerprint(), local.is_changed
