"""A torch function mode without noise, in float64, in which a prepared model is compared with its stock forward.

Dropout becomes the identity on both sides, whatever function draws it, so that training mode can be compared.
Transformers computes norms, rotations and softmax in float32 even where the weights are float64, and models for speed
cast to 16 bits by themselves; a difference of 1e-16 that crosses a rounding of float32 becomes one of 1e-8, which would
hide small mistakes or be taken for one. So casts to less precise dtypes go to float64 instead.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lengthwise.core.errors import InputError
from lengthwise.runtime.loop.fsdp2 import Fsdp2State
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.verify.scratch_copy import scratch_state
from lengthwise.runtime.verify.zero_weights import Fill, zeros_filled
from lengthwise.runtime.wrap.context import ALMOST_ONE
from lengthwise.runtime.wrap.counter_rng import ONE_NUMBER, one_number

_IDENTITIES = (
    F.dropout, F.alpha_dropout, F.feature_alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d, torch.dropout,
    torch.dropout_, torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout,
)  # fmt: skip
_LESS_PRECISE = frozenset({torch.float32, torch.bfloat16, torch.float16})
_DROPOUT_OF_MULTI_HEAD = 10
"""Position of ``dropout_p`` among the arguments of ``F.multi_head_attention_forward``."""


class NoiseFreeMode(TorchFunctionMode):
    """A mode in which noise is the identity and, with ``double``, casts to less precise dtypes go to float64."""

    def __init__(self, *, double: bool, by_sequence: bool = False) -> None:
        """``by_sequence``: the model draws by torch's own functions when it trains."""
        super().__init__()
        self._double, self._by_sequence = double, by_sequence
        self._answers: dict[Any, Callable[..., Any]] = {
            **dict.fromkeys(_IDENTITIES, _first),
            F.scaled_dot_product_attention: _without_dropout,
            F.multi_head_attention_forward: _multi_head_without_dropout,
            torch.randn_like: lambda func, input, **options: torch.zeros_like(input, **options),
            torch.rand_like: lambda func, input, **options: torch.full_like(input, 0.5, **options),
            torch.rand: self._rand,
            **dict.fromkeys((F.rrelu, torch.rrelu, torch.rrelu_), self._rrelu),
        }
        if double:
            to_double = lambda func, input, **options: Tensor.double(input)  # noqa: E731
            self._answers |= dict.fromkeys((Tensor.float, Tensor.bfloat16, Tensor.half), to_double)

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        if self._double:
            if torch.dtype in map(type, args):  # of the few calls that name one
                args = tuple(map(_at_least_double, args))
            if kwargs:
                kwargs = {name: _at_least_double(value) for name, value in kwargs.items()}
        answer = self._answers.get(func)
        return func(*args, **kwargs) if answer is None else answer(func, *args, **kwargs)

    def _rrelu(
        self,
        func: Any,
        input: Tensor,
        lower: float = 1 / 8,
        upper: float = 1 / 3,
        training: bool = False,
        *inplace: bool,
        **options: Any,
    ) -> Any:
        """The mean slope; torch's own draws are written after they were saved for the backward."""
        if training and lower != upper and self._by_sequence:
            raise InputError(
                "RReLU draws slopes in a way that activations which are offloaded or computed again lose, and this "
                "model is computed sequence by sequence; use nn.LeakyReLU or nn.PReLU instead, or torch.rand_like"
            )
        return func(input, lower, upper, False, *inplace, **options)

    def _rand(self, func: Any, *args: Any, **kwargs: Any) -> Tensor:
        if args in ONE_NUMBER:
            return one_number(ALMOST_ONE, *args, **kwargs)
        drawn: Tensor = func(*args, **kwargs)
        return drawn


def _at_least_double(value: Any) -> Any:
    """An argument of a call: a dtype that is less precise than float64 becomes that."""
    return torch.float64 if type(value) is torch.dtype and value in _LESS_PRECISE else value


def _first(func: Any, *args: Any, **kwargs: Any) -> Tensor:
    result: Tensor = args[0] if args else kwargs["input"]
    return result


def _without_dropout(func: Any, *args: Any, **kwargs: Any) -> Tensor:
    args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
    result: Tensor = func(*args, **{name: value for name, value in kwargs.items() if name != "dropout_p"})
    return result


def _multi_head_without_dropout(func: Any, *args: Any, **kwargs: Any) -> Any:
    if len(args) > _DROPOUT_OF_MULTI_HEAD:
        args = (*args[:_DROPOUT_OF_MULTI_HEAD], 0.0, *args[_DROPOUT_OF_MULTI_HEAD + 1 :])
    else:
        kwargs["dropout_p"] = 0.0
    return func(*args, **kwargs)


@contextmanager
def noise_free(run: PreparedModel, dtype: torch.dtype | None = None, fill: Fill = Fill.NOTHING) -> Iterator[None]:
    """Put the model in training mode without noise, on copies of its tensors in ``dtype``; restore it afterwards.

    ``fill``: what trained weights that are zero are replaced by.
    """
    model, default = run.model, torch.get_default_dtype()
    is_wrapped = isinstance(run.state, Fsdp2State)
    constants = [] if is_wrapped else list(run.wrapped_model.structure.constants())
    with ExitStack() as stack:
        if run.gather is not None:
            gathered = set(map(id, run.gather.parameters))
            constants = [tensor for tensor in constants if id(tensor) not in gathered]
            if dtype is not None:
                stack.enter_context(run.gather.computing_in(dtype))
        stack.enter_context(scratch_state(model, constants, dtype=dtype, attributes=not is_wrapped))
        stack.enter_context(zeros_filled(run, fill, dtype))
        if not model.training:
            model.train()
        if dtype is torch.float64:
            stack.callback(torch.set_default_dtype, default)
            torch.set_default_dtype(dtype)
        stack.enter_context(torch.autocast(run.world.device.type, enabled=False))
        layers = run.wrapped_model.layers
        stack.callback(setattr, layers, "mode", layers.mode)
        by_sequence = run.wrapped_model.by_sequence is not None
        mode = NoiseFreeMode(double=dtype is torch.float64, by_sequence=by_sequence)
        layers.mode = stack.enter_context(mode)
        yield
