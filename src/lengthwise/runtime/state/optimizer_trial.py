"""A trial of an optimizer that a user's function makes: a few updates of small parameters before anything is trained.

It says what checkpoints have to keep of the optimizer, which learning rate counts, and whether the update of a
parameter depends on others. Then ranks, which update different parameters, would train other weights than one rank.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lengthwise.config.optimizer_settings import OptimizerSettings
from lengthwise.core.errors import InputError
from lengthwise.runtime.state.borrowed_parameters import as_they_were
from lengthwise.runtime.state.coupling_trial import coupling_of_kinds, coupling_of_pairs
from lengthwise.runtime.state.optimizer import (
    described_groups,
    is_of_torch,
    make_of_both_kinds,
    make_of_groups,
    step_once,
)
from lengthwise.runtime.state.optimizer_constants import check_weight_decay, with_base_lr
from lengthwise.runtime.state.optimizer_values import describe
from lengthwise.runtime.state.parameter_groups import ORIGIN, changed_values, is_plain
from lengthwise.runtime.state.trial_parameters import TrialParameters
from lengthwise.runtime.state.trial_updates import (
    Updates,
    made_of,
    num_steps_of,
    set_rate,
    step,
    updated,
    updated_together,
)


def after_trial(
    settings: OptimizerSettings, parameters: Sequence[nn.Parameter] = (), *, num_ranks: int = 1
) -> OptimizerSettings:
    """The settings with what a trial says of an optimizer of the user's.

    ``parameters``: those that it is to train, which are as before afterwards; none: the trial has some of its own. On
    several ranks neighbours among them are tried as well, for what two have to do with one another.

    Raises:
        InputError: it cannot be made or used, keeps what checkpoints cannot, or says another rate or weight decay than
            is asked for.
    """
    if settings.make is None:
        return settings
    trial = TrialParameters(parameters)
    with _same_noise(), as_they_were(trial.all):
        settings, groups = _as_made(settings, trial)
        with trial.lent():
            first = outcome = _updates_or_error(settings, trial)
        if isinstance(first, InputError):
            trial.keep_shapes()  # its step may have tensors of the model's shapes
            with trial.lent():
                outcome = _updates_or_error(settings, trial)
        if isinstance(outcome, InputError):
            assert isinstance(first, InputError)
            raise first
        if num_ranks > 1 and not outcome.coupling and trial.are_of_model and not is_of_torch(settings.make):
            outcome = _after_pairs(outcome, trial)
        return replace(outcome, groups=groups)


def check_coupling(settings: OptimizerSettings, num_ranks: int) -> None:
    """Raise ``InputError`` if ranks cannot update different parameters by the optimizer."""
    if settings.coupling and num_ranks > 1:
        raise InputError(
            f"optimizer={settings.name} {settings.coupling}, as with the norm of all gradients or a step size that all "
            f"share; each of the {num_ranks} ranks updates other parameters, and would train other weights than one "
            "rank does. Train on 1 rank, or use an optimizer that updates each parameter by itself; clip_norm= limits "
            "the norm of all gradients on any number of ranks"
        )


def lr_function(lr: float | Callable[[int], float], settings: OptimizerSettings) -> Callable[[int], float]:
    """The learning rate of each step: ``lr``, unless it was not asked for and the optimizer says one."""
    if callable(lr):
        return lr
    rate = lr if settings.asked_lr is not None or settings.base_lr is None else settings.base_lr
    return lambda step: rate


def _as_made(settings: OptimizerSettings, trial: TrialParameters) -> tuple[OptimizerSettings, tuple[str, ...]]:
    """The settings with what the optimizer says when it is made of all parameters, and what groups it has, if these may
    depend on parameters; chooses those to try.
    """
    are_alike = not trial.are_of_model or is_of_torch(settings.make)
    matrix, vector = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(3))
    if is_of_torch(settings.make):  # which treats all alike, and may have much state of them when it is made
        trial.choose_kinds()
        trial.all = trial.tried
    try:
        made = make_of_both_kinds(settings, trial.decaying, trial.others)
        groups = () if are_alike else described_groups(made)
        trial.choose(made)
    except InputError:
        if not _takes(settings, matrix) or _takes(settings, vector):
            raise
        settings, groups = replace(settings, takes_matrices_alone=True), ()
        made = make_of_groups(settings, ([matrix], settings.weight_decay))
        trial.choose_kinds()
    check_weight_decay(settings, made)
    parts = made.param_groups if groups else ()
    empty = tuple(position for position, group in enumerate(parts) if group[ORIGIN].is_empty)
    return replace(with_base_lr(settings, made), empty_groups=empty), groups


def _updates_or_error(settings: OptimizerSettings, trial: TrialParameters) -> OptimizerSettings | InputError:
    """The settings after updates, or why there are none; with empty groups, or without if that goes better."""
    outcomes: list[OptimizerSettings | InputError] = []
    for hides in (False, True):
        try:
            outcomes.append(_after_updates(replace(settings, hides_empty_groups=hides), trial))
        except InputError as error:
            outcomes.append(error)
        if isinstance(outcomes[-1], OptimizerSettings) and not outcomes[-1].coupling:
            return outcomes[-1]
    return next((outcome for outcome in outcomes if isinstance(outcome, OptimizerSettings)), outcomes[0])


def _after_pairs(settings: OptimizerSettings, trial: TrialParameters) -> OptimizerSettings:
    """The settings with what updates of neighbouring parameters of the model say of the optimizer."""
    neighbours = trial.of_layers()
    with neighbours.lent():
        coupling = coupling_of_pairs(settings, neighbours)
    if coupling is None and neighbours.keep_shapes_if_small():  # its step may have tensors of the model's shapes
        with neighbours.lent():
            coupling = coupling_of_pairs(settings, neighbours)
    return replace(settings, coupling=coupling or "")


def _after_updates(settings: OptimizerSettings, trial: TrialParameters) -> OptimizerSettings:
    """The settings with what updates of a matrix and a vector, and then of more, say of the optimizer."""
    num_steps = num_steps_of(trial)
    try:
        optimizer = _of_ones(settings, trial)
        _set_gradients(optimizer)
        step(settings, optimizer)
        together = updated_together(settings, trial, num_steps=num_steps)
    except Exception as error:
        raise InputError(
            f"optimizer={settings.name} cannot be stepped without arguments: {type(error).__name__}: {error}"
        ) from error
    settings = _with_state(settings, (optimizer, together.optimizer))
    _check_groups(settings, trial)
    _check_decays(settings, trial, together)
    return replace(settings, coupling=coupling_of_kinds(settings, trial, together, num_steps))


def _of_ones(settings: OptimizerSettings, trial: TrialParameters) -> torch.optim.Optimizer:
    """An optimizer of one parameter of each number of dimensions, whose values and gradients are 1."""
    firsts = {len(trial.shapes[index]): index for index in reversed(range(len(trial.tried)))}
    trial.set_values({index: torch.ones(trial.shapes[index]) for index in firsts.values()})
    return made_of(settings, trial, list(firsts.values()))


def _set_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Let the gradient of each parameter of an optimizer be 1."""
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        parameter.grad = torch.ones_like(parameter)


def _takes(settings: OptimizerSettings, parameter: nn.Parameter) -> bool:
    """Whether an optimizer of the user's can be made of one parameter."""
    try:
        make_of_groups(settings, ([parameter], settings.weight_decay))
    except InputError:
        return False
    return True


def _with_state(settings: OptimizerSettings, optimizers: Sequence[torch.optim.Optimizer]) -> OptimizerSettings:
    """The settings with the names of what optimizers keep that have stepped, as far as the trial sees it.

    Checkpoints have what there is when they are saved.
    """
    for stepped in optimizers:
        parameters = [parameter for group in stepped.param_groups for parameter in group["params"]]
        described = describe(stepped.state, {id(x): str(n) for n, x in enumerate(parameters)}, torch.device("cpu"))
        if described.problem:
            raise InputError(f"optimizer={settings.name} {described.problem}")
    states = [state for stepped in optimizers for state in stepped.state.values() if isinstance(state, dict)]
    values = [(str(name), value) for state in states for name, value in state.items() if value is not None]
    names = tuple(dict.fromkeys(name for name, _ in values))
    numbers = tuple(dict.fromkeys(name for name, value in values if not isinstance(value, Tensor)))
    changing = {name for stepped in optimizers for group in changed_values(stepped).values() for name in group}
    return replace(settings, tensors=names, numbers=numbers, group_values=tuple(sorted(changing)))


def _check_groups(settings: OptimizerSettings, trial: TrialParameters) -> None:
    """Raise ``InputError`` if a step changes the rate of a parameter group, or what checkpoints cannot keep of it."""
    optimizer = _of_ones(settings, trial)
    for _ in range(2):
        _set_gradients(optimizer)
        set_rate(settings, optimizer)
        before = [_contents_of(group) for group in optimizer.param_groups]
        step_once(optimizer, settings)
        for earlier, group in zip(before, optimizer.param_groups):
            later = _contents_of(group)
            for name in later:
                if not _is_equal(earlier.get(name), later[name]):
                    raise _changed(settings, name, group[name])


def _contents_of(group: dict[str, Any]) -> dict[str, Any]:
    """Contents of a parameter group that no step may change: its rate, and what is not plain."""
    contents = {name: value for name, value in group.items() if name not in ("params", ORIGIN)}
    return {
        name: value.detach().clone() if isinstance(value, Tensor) else _frozen(value)
        for name, value in contents.items()
        if name == "lr" or not is_plain(value)
    }


def _frozen(value: Any) -> Any:
    """A value that shows changes of what it holds; of objects that have no such text, their identity."""
    return repr(value) if isinstance(value, dict | list | set | tuple) else value


def _is_equal(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.equal(first, second)
    return first is second or bool(type(first) is type(second) and first == second)


def _changed(settings: OptimizerSettings, name: str, value: Any) -> InputError:
    """The error for a step that changes a value of a parameter group."""
    if name == "lr":
        return InputError(
            f"optimizer={settings.name} changes lr of its parameter groups when it steps, and each step begins with "
            "the rate that prepare gives it; give lr=, a function of the step, and let the optimizer leave it as it is"
        )
    return InputError(
        f"optimizer={settings.name} keeps {name} as a {type(value).__name__} in its parameter groups and changes it "
        "when it steps, and checkpoints keep plain numbers and texts of groups; use an optimizer that keeps such "
        "alone, or tensors in its state of each parameter"
    )


def _check_decays(settings: OptimizerSettings, trial: TrialParameters, together: Updates) -> None:
    """Raise ``InputError`` if weight decay is asked for, and the optimizer does not know it."""
    if not settings.asks_weight_decay or not settings.weight_decay:
        return
    everyone, dtype = range(len(trial.tried)), together.values[0].dtype
    without = updated(settings, trial, everyone, num_steps=num_steps_of(trial), decays=False, dtype=dtype)
    if all(torch.equal(*pair) for pair in zip(together.values, without.values)):
        raise InputError(
            f"weight_decay={settings.weight_decay:g} is asked for, and optimizer={settings.name} updates parameters as "
            "without; leave weight_decay out"
        )


@contextmanager
def _same_noise() -> Iterator[None]:
    """Within, the generator of random numbers of the CPU may be seeded; afterwards it is as it was."""
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)
