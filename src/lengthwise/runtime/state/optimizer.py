"""The optimizers of torch on what a rank owns, and which of their state a checkpoint keeps."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from lengthwise.config.optimizer_settings import OptimizerSettings
from lengthwise.core.errors import InputError
from lengthwise.runtime.state.borrowed_parameters import num_hooks
from lengthwise.runtime.state.parameter_groups import note_origins, plain_values

HANDED_LR = float("1e-3")
"""The rate in the groups that a user's function gets where a function of the step gives the learning rate."""

_MOST_CONSTANTS = 4
"""Numbers of one constant, such as betas; a longer list in a group has one of each of as many parameters."""


def make_optimizer(
    settings: OptimizerSettings,
    *,
    decaying: Sequence[nn.Parameter],
    others: Sequence[nn.Parameter],
    outer: Sequence[nn.Parameter] = (),
    leave_out: Collection[int] = (),
    on_host: bool = False,
) -> torch.optim.Optimizer | None:
    """The optimizer of these parameters; None if there are none.

    ``outer``: those of ``decaying`` that are outside of all layers. ``leave_out``: identities of parameters that a
    user's optimizer forgets when it is made: other ranks update them. ``on_host``: whether a CPU updates what a GPU
    computes with. Then, and on a GPU, AdamW is torch's fused one, which reads and writes every number once and needs no
    memory of its own (the default one allocates as many numbers as it updates on a GPU), unless they are float64: there
    the update is to be the same to the last bit.
    """
    if is_of_torch(settings.make):  # which tells no parameters apart
        decaying, others = ([x for x in kind if id(x) not in leave_out] for kind in (decaying, others))
    if settings.takes_matrices_alone:
        return _made_of_two(settings, decaying, others, {id(parameter) for parameter in outer}, leave_out)
    groups = _groups((decaying, settings.weight_decay), (others, 0.0))
    if not groups:
        return None
    if settings.make is not None:
        made = make_of_both_kinds(settings, decaying, others, leave_out=leave_out)
        return made if has_parameters(made) else None
    if settings.name == "sgd":
        return torch.optim.SGD(groups, lr=0.0, momentum=settings.momentum)
    if settings.name == "adafactor":
        return torch.optim.Adafactor(groups, lr=0.0, eps=(settings.eps, 1e-3))
    parameters = (*decaying, *others)
    is_fused = (on_host or all(x.is_cuda for x in parameters)) and all(x.dtype != torch.float64 for x in parameters)
    return torch.optim.AdamW(groups, lr=0.0, betas=settings.betas, eps=settings.eps, fused=is_fused or None)


def is_of_torch(make: Any) -> bool:
    """Whether what makes an optimizer is a class of torch, with or without constants."""
    while isinstance(make, partial):
        make = make.func
    return isinstance(make, type) and make.__module__.startswith("torch.optim.")


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
        self.parts = (first, second)
        for part in self.parts:
            part.state = self.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Let each of the two update its parameters, if it has any."""
        assert closure is None, "gradients are there"
        for part in self.parts:
            if has_parameters(part):
                part.step()


def _made_of_two(
    settings: OptimizerSettings,
    decaying: Sequence[nn.Parameter],
    others: Sequence[nn.Parameter],
    outer: set[int],
    leave_out: Collection[int],
) -> torch.optim.Optimizer | None:
    """The user's optimizer of the matrices of layers, and AdamW of all else."""
    matrices = [x for x in decaying if x.dim() == 2 and id(x) not in outer]
    rest = [x for x in decaying if x.dim() != 2 or id(x) in outer]
    groups = _groups((rest, settings.weight_decay), (others, 0.0))
    both: torch.optim.Optimizer | None = None
    if groups:
        both = torch.optim.AdamW(groups, lr=0.0, betas=settings.betas, eps=settings.eps)
        _forget(both, leave_out)
    if matrices:
        made = make_of_groups(settings, (matrices, settings.weight_decay), leave_out=leave_out)
        both = made if both is None else TwoOptimizers(made, both)
    return both if both is not None and has_parameters(both) else None


def has_parameters(optimizer: torch.optim.Optimizer) -> bool:
    """Whether any group has a parameter."""
    return any(group["params"] for group in optimizer.param_groups)


@contextmanager
def without_empty_groups(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Within, an optimizer does not see its groups without parameters."""
    parts = optimizer.parts if isinstance(optimizer, TwoOptimizers) else (optimizer,)
    before = [list(part.param_groups) for part in parts]
    for part in parts:
        part.param_groups[:] = [group for group in part.param_groups if group["params"]]
    try:
        yield
    finally:
        for part, groups in zip(parts, before):
            part.param_groups[:] = groups


def step_once(optimizer: torch.optim.Optimizer, settings: OptimizerSettings) -> None:
    """Let a user's optimizer step, with its empty groups if it can."""
    with without_empty_groups(optimizer) if settings.hides_empty_groups else nullcontext():
        optimizer.step()


def make_of_both_kinds(
    settings: OptimizerSettings,
    decaying: Sequence[nn.Parameter],
    others: Sequence[nn.Parameter],
    *,
    leave_out: Collection[int] = (),
) -> torch.optim.Optimizer:
    """The user's optimizer of a group of matrices and a group of vectors.

    Without parameters of one kind it is made with a stand-in, which it then leaves out as those of ``leave_out``, so
    that the groups are the same on every rank.
    """
    example = (*decaying, *others)[0]
    shapes = ((2, 3),) * (not decaying) + ((3,),) * (not others)
    stand_ins = [nn.Parameter(torch.zeros(shape, dtype=example.dtype, device=example.device)) for shape in shapes]
    parts = (decaying or stand_ins, settings.weight_decay), (others or stand_ins, 0.0)
    return make_of_groups(settings, *parts, leave_out={*(id(parameter) for parameter in stand_ins), *leave_out})


def make_of_groups(
    settings: OptimizerSettings, *parts: tuple[Sequence[nn.Parameter], float], leave_out: Collection[int] = ()
) -> torch.optim.Optimizer:
    """The user's optimizer of one group for each part, with its weight decay and rate where they were asked for.

    ``leave_out``: identities of parameters that it forgets when it is made.

    Raises:
        InputError: it cannot be made, or takes other parameters.
    """
    assert settings.make is not None
    groups = _groups(*parts)
    for group in groups:
        if not settings.asks_weight_decay:
            del group["weight_decay"]
        if settings.asked_lr is not None or settings.has_lr_function:
            group["lr"] = HANDED_LR if settings.asked_lr is None else settings.asked_lr
    parameters = [parameter for group in groups for parameter in group["params"]]
    expected, hooks = {id(parameter) for parameter in parameters} - set(leave_out), num_hooks(parameters)
    try:
        made = settings.make(groups)
    except Exception as error:
        raise InputError(
            f"optimizer={settings.name} cannot be made of parameter groups, one of matrices and one of vectors: "
            f"{type(error).__name__}: {error}; give what takes [{{'params': [...]}}, {{'params': [...]}}] alone, "
            "such as functools.partial(torch.optim.SGD, lr=0.1)"
        ) from error
    if not isinstance(made, torch.optim.Optimizer):
        raise InputError(f"optimizer={settings.name} makes a {type(made).__name__}, which is no torch.optim.Optimizer")
    if num_hooks(parameters) > hooks:
        raise InputError(
            f"optimizer={settings.name} registers hooks on the gradients of parameters when it is made, and gradients "
            "are summed over ranks and micro-batches after such hooks; let its step() do what they do, with p.grad, or "
            "register them before prepare, which compares what they make of gradients"
        )
    leave_out = {*leave_out, *_frozen_of_torch(made)}
    taken = {id(parameter) for group in made.param_groups for parameter in group["params"]} - set(leave_out)
    if taken != expected:
        raise _other_parameters(settings, made, expected, taken)
    if settings.groups and (now := described_groups(made)) != settings.groups:
        raise _other_groups(settings, now)
    empty = {position for position, group in enumerate(made.param_groups) if not group["params"]}
    _forget(made, leave_out)
    note_origins(made, settings.base_lr, empty)
    return made


def _frozen_of_torch(made: torch.optim.Optimizer) -> set[int]:
    """Identities of frozen parameters that an optimizer of torch has, which it never updates."""
    if not type(made).__module__.startswith("torch.optim."):
        return set()  # it may read them
    return {id(x) for group in made.param_groups for x in group["params"] if not x.requires_grad}


def _other_parameters(
    settings: OptimizerSettings, made: torch.optim.Optimizer, expected: Collection[int], taken: Collection[int]
) -> InputError:
    """The error for an optimizer that does not take what it is given; both are identities of parameters."""
    others = {id(x): x for group in made.param_groups for x in group["params"] if id(x) in set(taken) - set(expected)}
    frozen = sum(not x.requires_grad for x in others.values())
    way_out = (
        f"{type(made).__name__} may read frozen parameters in its step, which are not shared out over ranks as those "
        "that are trained; give it those of its argument alone, or use an optimizer of each parameter by itself"
        if frozen and frozen == len(others) and not set(expected) - set(taken)
        else "Let it take exactly the parameters of its argument, and freeze what is not trained before prepare"
    )
    return InputError(
        f"optimizer={settings.name} leaves out {len(set(expected) - set(taken))} of the {len(expected)} parameters "
        f"that it is given, and takes {len(others)} others{f', {frozen} of them frozen' if frozen else ''}: it is made "
        f"of the parameters that are trained. {way_out}"
    )


def described_groups(made: torch.optim.Optimizer) -> tuple[str, ...]:
    """The constants of each parameter group of a new optimizer, in words."""
    return tuple(f"lr={group.get('lr')}, {plain_values(group)}" for group in made.param_groups)


def _other_groups(settings: OptimizerSettings, now: Sequence[str]) -> InputError:
    """The error for groups that are not those of the trial."""
    before, other = next(pair for pair in zip_longest(settings.groups, now, fillvalue="none") if pair[0] != pair[1])
    return InputError(
        f"optimizer={settings.name} makes other parameter groups each time that it is called ({before}; then {other}): "
        "it is called several times, on every rank, and parameters that another rank updates have zeros as their "
        "values meanwhile. Let groups and their constants depend on names, attributes and shapes, and not on calls, "
        "random numbers or values of all parameters"
    )


def _forget(optimizer: torch.optim.Optimizer, identities: Collection[int]) -> None:
    """Remove parameters from an optimizer. Groups stay, so that each has the same position on every rank."""
    beside = _lists_beside_parameters(optimizer)
    for group in optimizer.param_groups:
        for parameter in [parameter for parameter in group["params"] if id(parameter) in identities]:
            optimizer.state.pop(parameter, None)
        stay = [id(parameter) not in identities for parameter in group["params"]]
        for name in beside:
            group[name] = [value for value, stays in zip(group[name], stay) if stays]
        group["params"][:] = [parameter for parameter in group["params"] if id(parameter) not in identities]


def _lists_beside_parameters(optimizer: torch.optim.Optimizer) -> list[str]:
    """Names of lists in all groups that have a value for each parameter, such as its name."""
    groups = optimizer.param_groups
    are_many = any(len(group["params"]) > _MOST_CONSTANTS for group in groups)
    names = []
    for name in groups[0].keys() - {"params"}:
        values: list[Any] = [group.get(name) for group in groups]
        if all(isinstance(x, list) and len(x) == len(group["params"]) for x, group in zip(values, groups)):
            are_texts = all(isinstance(item, str) for x in values for item in x)
            names += [name] * (are_many or are_texts)
    return names
