"""Which methods of transformers' Trainer a subclass of ours may override: those that are called in training here, too.

What a training calls is read from the source of both trainers: the methods that each names as ``self.method``, from
``train`` on. One that transformers' training calls and ours does not would be ignored, and is refused by name; this
holds for methods of later versions, too. Methods that no training calls, such as those of evaluation, are free.
"""

import ast
import inspect
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import transformers

_START = "train"
_AFTER_STEPS = frozenset(["_evaluate", "evaluate", "predict"])
"""Methods that begin an evaluation, which has its own calls."""
_FOR_CALLBACKS = frozenset(["get_train_dataloader"])
"""Methods that are called here for what callbacks get, and train nothing."""
_ASKED_ELSEWHERE = frozenset(["_get_train_sampler", "create_scheduler", "get_decay_parameter_names"])
"""Methods that functions outside of the trainer call with it."""

_OPTIMIZER = "the optimizer is sharded; choose it with optim or lengthwise={'optimizer': ...}"
_BATCHES = "batches are formed by length; say in which order items come with _get_train_sampler"
_CLIPPING = "gradients are summed, clipped and used in one go; set max_grad_norm"
_INPUTS = "micro-batches are made of items; change items in the dataset or in the data_collator"
_REASONS = {
    "compute_loss": "make the loss with lengthwise={'loss': lambda output, micro_batch: ...}",
    "training_step": "micro-batches are planned and computed by the run; what it does to the loss goes into "
    "lengthwise={'loss': lambda output, micro_batch: ...}, all else into a callback",
    "get_train_dataloader": _BATCHES,
    "get_batch_samples": _BATCHES,
    "_get_dataloader": _BATCHES + ", and override get_eval_dataloader for evaluation",
    "create_optimizer": _OPTIMIZER,
    "create_optimizer_and_scheduler": "the optimizer is sharded; override create_scheduler alone",
    "get_optimizer_cls_and_kwargs": _OPTIMIZER,
    "_inner_training_loop": "the loop is this class's",
    "_get_learning_rate": "rates are those of the scheduler; override create_scheduler",
    "_clip_grad_norm": _CLIPPING,
    "_get_grad_norm": _CLIPPING,
    "_get_num_items_in_batch": "a step's loss is the mean over its targets; make another with lengthwise={'loss': ...}",
    "_prepare_inputs": _INPUTS,
    "_prepare_input": _INPUTS,
    "_remove_unused_columns": _INPUTS + ", and set remove_unused_columns=False",
    "_wrap_model": "the model is prepared by lengthwise.prepare; wrap its modules before the trainer gets it",
}
_REASON = (
    "the training here does not call it: steps are planned and computed by lengthwise.prepare; do what it is for in "
    "the dataset, the data_collator, a callback, or a loop of your own over lengthwise.prepare"
)
_ALWAYS_REFUSED = frozenset(
    [
        "_get_learning_rate",
        "_inner_training_loop",
        "compute_loss",
        "create_optimizer",
        "create_optimizer_and_scheduler",
        "get_train_dataloader",
    ]
)
"""Methods that evaluation, users or the loop here may call, and that do not do in training what they are for."""


def override_problems(trainer: Any, ours: type) -> Iterator[str]:
    """Why methods that a trainer of a subclass of ``ours`` overrides would be ignored, with the way out."""
    for name in sorted(_ignored_methods(ours)):
        if is_overridden(trainer, ours, name):
            yield f"{type(trainer).__name__}.{name}: {_REASONS.get(name, _REASON)}"


def is_overridden(trainer: Any, ours: type, name: str) -> bool:
    """Whether a trainer has a method of another class than ``ours`` and its bases, or as an attribute of the object."""
    others = (kind for kind in type(trainer).__mro__ if kind not in ours.__mro__)
    return name in vars(trainer) or any(name in vars(kind) for kind in others)


@cache
def _ignored_methods(ours: type) -> frozenset[str]:
    """Methods that transformers' training calls and that of ``ours`` does not."""
    only_theirs = _called_in_training(transformers.Trainer) - _called_in_training(ours, unfollowed=_FOR_CALLBACKS)
    return frozenset(name for name in only_theirs - _ASKED_ELSEWHERE | _ALWAYS_REFUSED if hasattr(ours, name))


def _called_in_training(trainer_class: type, unfollowed: frozenset[str] = frozenset()) -> frozenset[str]:
    """Names of all methods that the training of a class calls on itself; what those ``unfollowed`` call is left out."""
    called, waiting = set[str](), [(trainer_class, _START)]
    while waiting:
        start, name = waiting.pop()
        owner = next((kind for kind in start.__mro__ if name in vars(kind)), object)
        for is_of_base, callee in _names_read(owner, name):
            if is_of_base:
                waiting.append((owner.__mro__[1], callee))
            elif callee not in called:
                called.add(callee)
                if callee not in _AFTER_STEPS | unfollowed:
                    waiting.append((trainer_class, callee))
    return frozenset(name for name in called if _is_method(inspect.getattr_static(trainer_class, name, None)))


def _is_method(member: Any) -> bool:
    return inspect.isfunction(getattr(member, "__func__", getattr(member, "fget", member)))


def _names_read(owner: type, name: str) -> Iterator[tuple[bool, str]]:
    """Names that a method reads of ``self`` or of ``super()``: whether it is the latter, and the name."""
    method = _methods_by_name(owner).get(name)
    for node in ast.walk(method) if method is not None else ():
        if not isinstance(node, ast.Attribute):
            continue
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            yield False, node.attr
        elif isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "super":
            yield True, node.attr


@cache
def _methods_by_name(owner: type) -> Mapping[str, ast.AST]:
    """The methods of a class as its source has them; none where there is no source."""
    try:
        module = ast.parse(inspect.getsource(sys.modules[owner.__module__]))
    except (KeyError, OSError, TypeError):
        return {}
    classes = [node for node in module.body if isinstance(node, ast.ClassDef) and node.name == owner.__name__]
    return {node.name: node for kind in classes for node in kind.body if isinstance(node, ast.FunctionDef)}
