"""Detect changes that a user's loop made by hand to a prepared model, its weights or its gradients."""

from lengthwise.runtime.loop.fsdp2 import Fsdp2State
from lengthwise.runtime.loop.watched_parameters import WatchedParameters
from lengthwise.runtime.state.sharded import ShardedState


def gradient_problem(state: ShardedState | Fsdp2State, version: int) -> str:
    """Describe how gradients were changed by hand since ``version``; an empty string if they were not."""
    if (name := state.detached_gradient()) is not None:
        return (
            f"the gradient of {name} was taken away, by optimizer.zero_grad(), model.zero_grad() or "
            f"{name}.grad = ...; leave that out, step.update() begins anew"
        )
    if version != state.gradient_version:
        return (
            "gradients were changed between step.backward(loss) calls, by loss.backward(), clip_grad_norm_, "
            "scaler.unscale_, zero_grad() or by hand; leave that out: step.backward(loss) is the backward, and "
            "step.update() sums over ranks, clips by clip_norm= of prepare, and begins anew"
        )
    return ""


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
