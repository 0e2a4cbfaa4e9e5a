"""Placeholders for values that a forward would give and that are not there: every use says why."""

from typing import Any

from torch.utils import _pytree as pytree

from lengthwise.core.errors import InputError


class Unusable:
    """A placeholder that may be handed on and kept; every other use raises ``InputError``."""

    def __init__(self, name: str, reason: str) -> None:
        """``reason``: why it is not there and what else to do, after its ``name``."""
        self._name, self._reason = name, reason

    def _refuse(self) -> InputError:
        return InputError(f"{self._name} {self._reason}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._refuse()

    def __repr__(self) -> str:
        return f"<{self._name}, not there>"

    def _used(self, *args: Any, **kwargs: Any) -> Any:
        raise self._refuse()

    __call__ = __getitem__ = __iter__ = __len__ = __bool__ = __float__ = __int__ = _used
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __matmul__ = _used

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        """Refuse every torch function."""
        raise next(value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, cls))._refuse()


def attention_weights() -> Unusable:
    """What ``nn.MultiheadAttention`` gives in place of its weights."""
    return Unusable(
        "the attention weights that nn.MultiheadAttention returns (need_weights=True)",
        "are not there in packs, where a query's keys are on several ranks, and the model reads them: give its call "
        "need_weights=False and leave them out, or let packing='never' compute it sequence by sequence",
    )
