"""What a frozen model may share with models that are prepared: modules that compute as their class says, and weights.

A teacher may embed by the embedding that is trained, say, and then computes with the weights of the step. What a
prepared model replaces of its own, such as the forwards of its layers, computes for that model alone.
"""

from collections.abc import Iterable

from torch import nn

from lengthwise.core.errors import InputError
from lengthwise.runtime.loop.fsdp2 import fsdp_modules
from lengthwise.runtime.state.absent_parameter import AbsentParameter
from lengthwise.runtime.wrap.forward_patch import PreparedForward
from lengthwise.runtime.wrap.wrapped_model import WrappedModel

OF_ANOTHER_RUN = (
    "a model of one run computes micro-batches of that alone; give what it says as columns of the items "
    "(loss_columns=), from run.score(items, ...) of its run between steps, or prepare copy.deepcopy(model) as frozen "
    "here, which keeps the weights of now"
)
"""The way out where a model of one run is to compute in another's micro-batches."""
_IN_ONE_MODULE = (
    "prepare one module that has both models, whose forward computes what they share once and returns what each says, "
    "with requires_grad_(False) for weights that are not trained"
)
_WITH_ITS_WEIGHTS = (
    "; or give the frozen one a module of its own with the same weights: teacher.head.weight = student.head.weight"
)
"""The ways out where modules are shared; the second for those that have no modules in them."""


def is_prepared(module: nn.Module) -> bool:
    """Whether a run has replaced the forward of a module."""
    return isinstance(vars(module).get("forward"), PreparedForward)


def check_shared_parts(model: nn.Module, prepared: list[nn.Module], *, by_layer: bool) -> None:
    """Raise ``InputError`` if ``model`` cannot be frozen beside the models ``prepared`` by a run, for what it shares.

    ``by_layer``: whether ranks have shares of the weights of the trained one, the first of them.
    """
    name, trained = type(model).__name__, prepared[0]
    if model is trained or any(model is part for part in trained.modules()):
        of = "" if model is trained else f"a part of {type(trained).__name__}, "
        raise InputError(
            f"{name} is {of}the trained model, so it is no frozen one: call the trained model under torch.no_grad(), "
            f"{'with model.disable_adapter(), ' if hasattr(trained, 'disable_adapter') else ''}or give "
            "copy.deepcopy(model), which keeps the weights of now"
        )
    if any(model is other for other in prepared):
        raise InputError(f"{name} is frozen beside this run already; give it once")
    owners = {id(part): (type(other).__name__, key) for other in prepared for key, part in other.named_modules()}
    for key, part in model.named_modules():
        if not is_prepared(part) and not (id(part) in owners and hasattr(part, "config")):
            continue
        if id(part) not in owners:
            raise InputError(f"{name}{_part(key)} is prepared for another run: {OF_ANOTHER_RUN}")
        other, other_key = owners[id(part)]
        raise InputError(
            f"{name}{_part(key)} is {other_key or 'all'} of {other}, which is prepared and computes it in its own way; "
            + _IN_ONE_MODULE
            + ("" if next(part.children(), None) is not None else _WITH_ITS_WEIGHTS)
        )
    _check_weights(model, trained, by_layer=by_layer)


def _check_weights(model: nn.Module, trained: nn.Module, *, by_layer: bool) -> None:
    """Raise ``InputError`` if weights that ``model`` shares are not whole on every rank."""
    names = {id(parameter): key for key, parameter in trained.named_parameters()}
    is_sharded = by_layer or bool(fsdp_modules(trained))
    for key, parameter in model.named_parameters():
        if isinstance(parameter, AbsentParameter) or (is_sharded and id(parameter) in names):
            how = "weights='whole'" if by_layer or isinstance(parameter, AbsentParameter) else "no fully_shard"
            raise InputError(
                f"{key} of {type(model).__name__}, which is frozen, is {names.get(id(parameter), 'a weight')} of a "
                f"trained model, of which each rank has a share; prepare that with {how}, so that it is whole here"
            )


def with_same_weights(trained: WrappedModel, frozen: Iterable[WrappedModel]) -> list[WrappedModel]:
    """The trained model, and those of the frozen ones that share any of its weights, which steps change."""
    identities = {id(parameter) for parameter in trained.model.parameters()}
    sharing = [other for other in frozen if any(id(parameter) in identities for parameter in other.model.parameters())]
    return [trained, *sharing]


def _part(key: str) -> str:
    return f", its part {key}," if key else ""
