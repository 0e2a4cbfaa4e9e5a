"""The optimizers of torch on what a rank owns, and which of their state a checkpoint keeps."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lengthwise.config.optimizer_settings import OptimizerSettings
from lengthwise.core.errors import InputError


def make_optimizer(
    settings: OptimizerSettings,
    *,
    decaying: Sequence[nn.Parameter],
    others: Sequence[nn.Parameter],
    outer: Sequence[nn.Parameter] = (),
    on_host: bool = False,
) -> torch.optim.Optimizer | None:
    """The optimizer of these parameters; None if there are none.

    ``outer``: those of ``decaying`` that are outside of all layers. ``on_host``: whether a CPU updates what a GPU
    computes with. Then, and on a GPU, AdamW is torch's fused one, which reads and writes every number once and needs no
    memory of its own (the default one allocates as many numbers as it updates on a GPU), unless they are float64: there
    the update is to be the same to the last bit.
    """
    if settings.takes_matrices_alone:
        return _made_of_two(settings, decaying, others, {id(parameter) for parameter in outer})
    groups = _groups((decaying, settings.weight_decay), (others, 0.0))
    if not groups:
        return None
    if settings.make is not None:
        return _made(settings, groups)
    if settings.name == "sgd":
        return torch.optim.SGD(groups, lr=0.0, momentum=settings.momentum)
    if settings.name == "adafactor":
        return torch.optim.Adafactor(groups, lr=0.0, eps=(settings.eps, 1e-3))
    parameters = (*decaying, *others)
    is_fused = (on_host or all(x.is_cuda for x in parameters)) and all(x.dtype != torch.float64 for x in parameters)
    return torch.optim.AdamW(groups, lr=0.0, betas=settings.betas, eps=settings.eps, fused=is_fused or None)


def step_state(settings: OptimizerSettings, num_steps: int, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What an optimizer keeps beside tensors of ``settings.state_names`` after ``num_steps`` updates."""
    if settings.make is not None or settings.name == "sgd":
        return {}
    group = optimizer.param_groups[0]
    home = group["params"][0].device if group.get("fused") else "cpu"  # a fused kernel counts where it updates
    return {"step": torch.tensor(float(num_steps), device=home)}


def _groups(*parts: tuple[Sequence[nn.Parameter], float]) -> list[dict[str, Any]]:
    """Parameter groups from parameters and their decay; none is empty."""
    return [{"params": list(parameters), "weight_decay": decay} for parameters, decay in parts if parameters]


class TwoOptimizers(torch.optim.Optimizer):
    """Two optimizers of different parameters as one, with the state of both."""

    def __init__(self, first: torch.optim.Optimizer, second: torch.optim.Optimizer) -> None:
        super().__init__([*first.param_groups, *second.param_groups], {})  # the same dictionaries
        self._parts = (first, second)
        for part in self._parts:
            part.state = self.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Let each of the two update its parameters."""
        assert closure is None, "gradients are there"
        for part in self._parts:
            part.step()


def _made_of_two(
    settings: OptimizerSettings, decaying: Sequence[nn.Parameter], others: Sequence[nn.Parameter], outer: set[int]
) -> torch.optim.Optimizer | None:
    """The user's optimizer of the matrices of layers, and AdamW of all else."""
    matrices = [x for x in decaying if x.dim() == 2 and id(x) not in outer]
    rest = [x for x in decaying if x.dim() != 2 or id(x) in outer]
    groups = _groups((rest, settings.weight_decay), (others, 0.0))
    adamw = torch.optim.AdamW(groups, lr=0.0, betas=settings.betas, eps=settings.eps) if groups else None
    made = _made(settings, _groups((matrices, settings.weight_decay))) if matrices else None
    return TwoOptimizers(made, adamw) if made is not None and adamw is not None else made or adamw


def _made(settings: OptimizerSettings, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    assert settings.make is not None
    try:
        made = settings.make(groups)
    except Exception as error:
        raise InputError(
            f"optimizer={settings.name} cannot be made of parameter groups, one of matrices and one of vectors: "
            f"{type(error).__name__}: {error}; give what takes [{{'params': [...], 'weight_decay': 0.1}}, ...] alone, "
            "such as functools.partial(torch.optim.SGD, lr=0.1)"
        ) from error
    if not isinstance(made, torch.optim.Optimizer):
        raise InputError(f"optimizer={settings.name} makes a {type(made).__name__}, which is no torch.optim.Optimizer")
    expected = {id(parameter) for group in groups for parameter in group["params"]}
    taken = {id(parameter) for group in made.param_groups for parameter in group["params"]}
    if taken != expected:
        raise InputError(
            f"optimizer={settings.name} leaves out {len(expected - taken)} of the {len(expected)} parameters that "
            f"it is given, and takes {len(taken - expected)} others: ranks update shares of parameters, which it is "
            "made of. Let it take exactly the parameters of its argument, and freeze what is not trained before prepare"
        )
    return made


def with_tensor_names(settings: OptimizerSettings) -> OptimizerSettings:
    """The settings with the names of the tensors that an optimizer of the user's keeps, after an update of two numbers.

    Raises:
        InputError: it cannot be made or used, or keeps what checkpoints cannot.
    """
    if settings.make is None:
        return settings
    matrix, vector = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(3))
    try:
        optimizer = make_optimizer(settings, decaying=[matrix], others=[vector])
    except InputError:
        if not _takes(settings, matrix) or _takes(settings, vector):
            raise
        settings = replace(settings, takes_matrices_alone=True)
        optimizer = make_optimizer(settings, decaying=[matrix], others=[vector])
    assert optimizer is not None
    matrix.grad, vector.grad = torch.ones(2, 3), torch.ones(3)
    try:
        optimizer.step()
    except Exception as error:
        raise InputError(
            f"optimizer={settings.name} cannot be stepped without arguments: {type(error).__name__}: {error}"
        ) from error
    kept_values = [item for state in optimizer.state.values() for item in state.items() if item[1] is not None]
    for name, value in kept_values:
        if isinstance(value, (int, float)) or (type(value) in (Tensor, nn.Parameter) and not value.is_complex()):
            continue
        raise InputError(
            f"optimizer={settings.name} keeps {name} as a {type(value).__name__}, and checkpoints keep tensors and "
            "numbers; use an optimizer that keeps such alone"
        )
    numbers = dict.fromkeys(name for name, value in kept_values if not isinstance(value, Tensor))
    return replace(settings, tensors=tuple(dict.fromkeys(name for name, _ in kept_values)), numbers=tuple(numbers))


def _takes(settings: OptimizerSettings, parameter: nn.Parameter) -> bool:
    """Whether an optimizer of the user's can be made of one parameter."""
    try:
        _made(settings, _groups(([parameter], settings.weight_decay)))
    except InputError:
        return False
    return True
