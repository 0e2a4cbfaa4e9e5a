"""Say what a model keeps whose forward gives something else when it is called again, such as a counter in Python."""

from typing import Any

from torch import Tensor, nn

FEW_NUMBERS = 1 << 12
"""A larger tensor is no counter and no running mean."""


class StateBetweenCalls:
    """Numbers in the attributes of a model's modules, before it is called again with the same inputs."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._before = model, _numbers(model)

    def described(self) -> str:
        """Why results of the same inputs differ, in words, with the first number that has changed since."""
        now = _numbers(self._model)
        changed = [name for name, value in now.items() if name not in self._before or value != self._before[name]]
        first = f", such as its attribute {changed[0]}" if changed else ""
        return (
            f"The forward of {type(self._model).__name__} gives something else when it is called again with the same "
            f"inputs: it keeps state between calls{first}, which would differ between ranks and depend on how "
            "sequences are packed; set it in the loop, once for each step, and leave it as it is in the forward"
        )


def _numbers(model: nn.Module) -> dict[str, Any]:
    """Numbers by name, those of Python before tensors."""
    values = {
        f"{prefix}.{name}" if prefix else name: value
        for prefix, module in model.named_modules()
        for name, value in vars(module).items()
        if name != "training"
    }
    numbers = {name: value for name, value in values.items() if isinstance(value, bool | int | float)}
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)} | dict(model.named_buffers())
    return numbers | {
        name: tensor.detach().tolist() for name, tensor in tensors.items() if tensor.numel() <= FEW_NUMBERS
    }
