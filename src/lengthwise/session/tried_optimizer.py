"""An optimizer of the user's is tried on the parameters of the model before it trains them."""

import logging

from lengthwise.config.optimizer_settings import OptimizerSettings
from lengthwise.core.wording import counted
from lengthwise.runtime.loop.fsdp2 import fsdp_modules
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.state.optimizer_trial import after_trial
from lengthwise.runtime.wrap.wrapped_model import WrappedModel

_log = logging.getLogger("lengthwise")


def tried_optimizer(settings: OptimizerSettings, wrapped_model: WrappedModel, num_ranks: int) -> OptimizerSettings:
    """The settings with what a trial says of an optimizer of the user's; raises ``InputError`` if it cannot be used.

    Parameters that FSDP2 shards can have no other values for a while; small ones are tried in their place.
    """
    is_sharded = bool(fsdp_modules(wrapped_model.model))
    parameters = () if is_sharded else tuple(wrapped_model.structure.parameters.values())
    return after_trial(settings, parameters, num_ranks=num_ranks)


def warn_of_empty_groups(prepared: PreparedModel) -> None:
    """Say which parameter groups of a user's optimizer have no parameter of the model."""
    settings = prepared.state.settings
    if settings.empty_groups and prepared.world.is_first:
        positions = ", ".join(map(str, settings.empty_groups))
        _log.warning(
            "optimizer=%s makes %s without any parameter (position %s): what is said there, such as a rate, holds for "
            "nothing. It is given the %s that %s trains, the objects that model.parameters() has when the model is "
            "prepared; look at how it tells them apart, or leave such groups out",
            settings.name, counted(len(settings.empty_groups), "group"), positions,
            counted(len(prepared.wrapped_model.structure.parameters), "parameter"), type(prepared.model).__name__,
        )  # fmt: skip
