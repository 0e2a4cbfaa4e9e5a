"""Refuse other models that a loop calls on a micro-batch: they would not know whose tokens they have.

A teacher or a reference model that came as it is would let the sequences of a pack see each other, and see only this
rank's slots of them.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from lengthwise.core.errors import InputError
from lengthwise.runtime.loop.shared_parts import OF_ANOTHER_RUN, is_prepared
from lengthwise.runtime.wrap.compiled_modules import is_compiled
from lengthwise.runtime.wrap.wrapped_model import WrappedModel

_MIXING = (
    nn.MultiheadAttention, nn.RNNBase, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.Conv1d, nn.Conv2d,
    nn.Conv3d,
)  # fmt: skip


_open: list["UnpreparedModels"] = []
"""Those of runs whose micro-batches are open, the last one innermost."""


class UnpreparedModels:
    """Refuses calls of unprepared models while a micro-batch is computed."""

    def __init__(self, prepared: Callable[[], Iterable[nn.Module]], wrapped_model: WrappedModel) -> None:
        """``prepared``: models whose parts may be called; while ``wrapped_model`` is plain, anything may be."""
        self._prepared, self._wrapped_model = prepared, wrapped_model
        if wrapped_model.compiled is not None:
            wrapped_model.compiled.around = self.paused
        self._allowed: WeakKeyDictionary[nn.Module, None] = WeakKeyDictionary()
        self._handle: RemovableHandle | None = None

    @contextmanager
    def refused(self) -> Iterator[None]:
        """Within, a micro-batch is open, and calls of modules that are not prepared and may mix tokens raise
        ``InputError``; another run's micro-batch that is open does so here.
        """
        if _open and _open[-1] is not self:
            raise InputError(
                f"a micro-batch of the run of {self._name} begins while one of the run of {_open[-1]._name} is open, "
                "and ranks, which have other micro-batches of each, would wait for one another: go through all "
                "micro-batches of one run's step before those of the other's, and give what one model says to the "
                "other's loss as columns of the items (loss_columns=), from run.score(items, ...) between steps"
            )
        before, self._handle = self._handle, register_module_forward_pre_hook(self._called)
        _open.append(self)
        try:
            yield
        finally:
            _open.remove(self)
            self._handle.remove()
            self._handle = before

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within, nothing is refused, as where a part of the prepared model computes by compiled code."""
        if self._handle is None:
            yield
            return
        self._handle.remove()
        try:
            yield
        finally:
            self._handle = register_module_forward_pre_hook(self._called)

    @property
    def _name(self) -> str:
        return type(self._wrapped_model.model).__name__

    def _called(self, module: nn.Module, args: Any) -> None:
        if module in self._allowed or self._wrapped_model.is_plain:
            return
        if not any(module is part for model in self._prepared() for part in model.modules()) and may_mix_tokens(module):
            if is_compiled(module) and module._orig_mod is self._wrapped_model.model:
                raise InputError(
                    "what torch.compile made of the prepared model was called in a micro-batch; leave torch.compile "
                    "out, call the model, and let prepare(..., compile=True) compile its layers"
                )
            if is_prepared(module):
                raise InputError(
                    f"{type(module).__name__}, which is prepared for another run, was called in a micro-batch of the "
                    f"run of {self._name}: {OF_ANOTHER_RUN}"
                )
            raise InputError(
                f"{type(module).__name__} was called in a micro-batch, whose tokens are a share of several sequences, "
                "but is not prepared: give a frozen teacher or reference model as prepare(..., frozen=[model]) or "
                "run.frozen(model); call a model that gets other tokens in `with run.plain():`"
            )
        self._allowed[module] = None


def may_mix_tokens(module: nn.Module) -> bool:
    """Whether a module may mix tokens: it attends, convolves, recurs, or is a stack of layers."""
    for part in module.modules():
        if isinstance(part, _MIXING) or (hasattr(part, "set_attn_implementation") and hasattr(part, "config")):
            return True
        if isinstance(part, nn.ModuleList) and len(part) > 1:
            kinds = {type(layer) for layer in part}
            if len(kinds) == 1 and not next(iter(kinds)).__module__.startswith("torch.nn"):
                return True
    return False
