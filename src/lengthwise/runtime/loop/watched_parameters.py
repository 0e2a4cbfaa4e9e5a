"""Detect parameters that were added, removed, frozen or unfrozen after the model was prepared; they would not train."""

from collections.abc import Iterable

from torch import nn

from lengthwise.runtime.loop.fsdp2 import fsdp_modules

_WAY_OUT = "change a model before lengthwise.prepare; or run.save(), run.close(), change it and prepare it again"


class WatchedParameters:
    """A snapshot of a model's parameters, to detect later changes of them."""

    def __init__(self, model: nn.Module, trained: Iterable[str] | None = None) -> None:
        """``trained``: the parameters that are trained; None: those of the moment that require a gradient."""
        self._model = model
        self._is_wrapped = bool(fsdp_modules(model))
        self._parameters = dict(model.named_parameters())
        now = (name for name, parameter in self._parameters.items() if parameter.requires_grad)
        self._trained = set(now if trained is None else trained)

    def problem(self) -> str:
        """Describe the first parameter that changed since the snapshot; an empty string if none did."""
        parameters = dict(self._model.named_parameters())
        for name in [*self._parameters, *parameters]:
            here, before = parameters.get(name), self._parameters.get(name)
            if here is None:
                return f"the parameter {name} is gone since the model was prepared; {_WAY_OUT}"
            if before is None:
                return f"the parameter {name} was added since the model was prepared; {_WAY_OUT}"
            if here is not before and not self._is_wrapped:  # FSDP2 itself puts whole ones in the place of shares
                return (
                    f"the parameter {name} was replaced by another since the model was prepared; set its values "
                    f"instead, as load_state_dict without assign=True does, or {_WAY_OUT}"
                )
            if here.requires_grad != (name in self._trained):
                done = "unfrozen" if here.requires_grad else "frozen"
                return f"the parameter {name} was {done} since the model was prepared; {_WAY_OUT}"
        return ""
