"""The arguments that a frozen model is called with beside the trained one: those of ``inputs=`` that it takes."""

from collections.abc import Iterator, Mapping
from inspect import Parameter, Signature, signature
from typing import Any

from torch import Tensor, nn

from lengthwise.core.errors import InputError
from lengthwise.runtime.wrap.forward_arguments import TOKENS
from lengthwise.runtime.wrap.micro_batch import MicroBatch


class FrozenArguments:
    """Makes the arguments of a frozen model of those that ``inputs=`` makes for a micro-batch."""

    needs_all = False
    """Whether a pack is exact with all of the arguments only, and not with those alone that have no default."""

    def __init__(self, model: nn.Module, sources: Mapping[str, str]) -> None:
        """``sources``: by the name of each argument, the name that ``inputs=`` has for it."""
        self._name, self._sources, self._signature = type(model).__name__, dict(sources), signature(model.forward)

    def __call__(self, micro_batch: MicroBatch) -> dict[str, Any]:
        """The arguments for a micro-batch."""
        made = micro_batch.given.values
        return {name: made[source] for name, source in self._sources.items() if source in made}

    @property
    def optional(self) -> frozenset[str]:
        """The names of arguments that a call may leave out."""
        return frozenset(
            name
            for name in self._sources
            if name not in self._signature.parameters or self._signature.parameters[name].default is not Parameter.empty
        )

    def check(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise ``InputError`` if a loop's call leaves out what packs are exact with alone."""
        if not self.needs_all:
            return
        names = {*list(self._signature.parameters)[: len(args)], *kwargs}
        if missing := [name for name in self._sources if name not in names]:
            raise InputError(
                f"{self._name}, which is frozen, was called without {missing[0]}=, which inputs= makes, and without it "
                "its outputs of a pack are not those of single sequences; give it micro_batch.inputs"
                f"[{self._sources[missing[0]]!r}]"
            )


def frozen_arguments(model: nn.Module, made: Mapping[str, Any]) -> Iterator[FrozenArguments]:
    """What a frozen model may be called with of the arguments ``made`` by ``inputs=``, the likeliest first.

    Arguments go by their names. One that alone has no default, and another name, may be any tensor.
    """
    form = signature(model.forward)
    if _takes(form, {name: name for name in made if _is_taken(form, name)}):
        yield FrozenArguments(model, {name: name for name in made if _is_taken(form, name)})
        return
    positional = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    needed = [p.name for p in form.parameters.values() if p.kind in positional and p.default is Parameter.empty]
    if len(needed) == 1 and needed[0] not in made:
        for name, value in made.items():
            if isinstance(value, Tensor) and value.dim() >= 2:
                yield FrozenArguments(model, {needed[0]: name})


def check_takes_tokens(model: nn.Module, made: Mapping[str, Any]) -> None:
    """Raise ``InputError`` unless the forward of a frozen model has a name of tokens; it takes none ``made``."""
    form = signature(model.forward)
    if any(_is_taken(form, name) for name in TOKENS):
        return
    raise InputError(
        f"the forward of {type(model).__name__}, which is frozen, takes {', '.join(form.parameters)}, and "
        + (f"inputs= makes {', '.join(made)}" if made else "without inputs= of prepare there are tokens alone (idx)")
        + "; give it in a module whose forward takes arguments of these names, and calls it with them"
    )


def _is_taken(form: Signature, name: str) -> bool:
    kinds = {parameter.kind for parameter in form.parameters.values()}
    return name in form.parameters or Parameter.VAR_KEYWORD in kinds


def _takes(form: Signature, arguments: Mapping[str, Any]) -> bool:
    """Whether a forward can be called with ``arguments`` by their names."""
    if not arguments:
        return False
    try:
        form.bind(**arguments)
    except TypeError:
        return False
    return True
