"""Locate where a pack's outputs begin to differ from those of single sequences: layer, module, and torch functions."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils import _pytree as pytree

from lengthwise.core.batch import EVERY_TOKEN
from lengthwise.core.errors import LengthwiseError, Setting
from lengthwise.core.pipeline_config import Method
from lengthwise.runtime.comm.collectives import gather_rows
from lengthwise.runtime.comm.group import Group
from lengthwise.runtime.comm.objects import broadcast_json
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.verify.stock_call import pack_of, shard_for, stock_output
from lengthwise.runtime.wrap.collator import pad_to_degree
from lengthwise.runtime.wrap.context import active
from lengthwise.runtime.wrap.gradient_changes import hooks_on_gradients

DIFFERS = 1e-6
"""Relative difference of outputs that is more than rounding."""
NOWHERE = 1 << 30
"""A number after those of all modules."""
_MIXING = (
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "batch_norm", "instance_norm", "group_norm", "roll", "cumsum",
    "cumprod", "flip", "fft", "rfft", "gru", "lstm", "rnn_tanh", "pad", "unfold", "avg_pool1d", "max_pool1d", "mean",
    "sum", "amax", "max", "std", "var", "logcumsumexp", "softmax", "matmul", "bmm", "baddbmm", "einsum",
    "scaled_dot_product_attention", "cat", "gather", "sort", "topk",
)  # fmt: skip
"""Functions in which slots may meet, the likeliest first."""


class _Call(NamedTuple):
    """One of the calls of a module in a forward."""

    module: str
    number: int


@dataclass
class _Recording:
    """Outputs of the calls of modules in the order in which they ended, and the torch functions that each calls."""

    outputs: dict[_Call, Tensor] = field(default_factory=dict)
    inputs: dict[_Call, Tensor] = field(default_factory=dict)
    callers: dict[_Call, tuple[_Call, int]] = field(default_factory=dict)
    """The call in which each began, and how many functions that had called until then."""
    functions: dict[_Call, list[str]] = field(default_factory=dict)
    stack: list[_Call] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    """Calls of each module."""


class _Names(TorchFunctionMode):
    """Records which functions of torch are called by which module."""

    def __init__(self, recording: _Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if self._recording.stack:
            name = (resolve_name(func) or getattr(func, "__name__", "")).rpartition(".")[2]
            self._recording.functions.setdefault(self._recording.stack[-1], []).append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def _recorded(model: nn.Module) -> Iterator[_Recording]:
    recording, handles = _Recording(), []

    def begin(name: str) -> Any:
        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            recording.counts[name] += 1
            call = _Call(name, recording.counts[name])
            if tensors := _floating((args, kwargs)) or _ids((args, kwargs)):
                recording.inputs[call] = tensors[0].detach()
            if recording.stack:
                caller = recording.stack[-1]
                recording.callers[call] = caller, len(recording.functions.get(caller, []))
            recording.stack.append(call)

        return note

    def end(name: str) -> Any:
        def note(module: nn.Module, args: Any, output: Any) -> None:
            call = next(call for call in reversed(recording.stack) if call.module == name)
            recording.stack.remove(call)
            if tensors := _floating(output):
                recording.outputs[call] = tensors[0].detach()

        return note

    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(begin(name), with_kwargs=True))
        handles.append(module.register_forward_hook(end(name)))
    try:
        with _Names(recording):
            yield recording
    finally:
        for handle in handles:
            handle.remove()


def _floating(values: Any) -> list[Tensor]:
    """The floating-point tensors in a tree, which may be hidden states."""
    leaves = pytree.tree_leaves(values)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() and leaf.is_floating_point()]


def _ids(values: Any) -> list[Tensor]:
    """The tensors of integers in a tree, as floating-point numbers."""
    leaves = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor) and leaf.dim()]
    return [leaf.to(torch.float64) for leaf in leaves if not leaf.is_floating_point() and not leaf.is_complex()]


def locate_difference(
    run: PreparedModel,
    lengths: tuple[int, ...],
    group: Group | None,
    recompute: tuple[bool, ...],
    methods: tuple[Method, ...] = (),
    *,
    is_of_recompute: bool = False,
) -> str:
    """Describe where outputs begin to differ, with the same text on every rank. Every rank calls this.

    ``is_of_recompute``: nothing differs where no layer is recomputed.
    """
    first, size, words = NOWHERE, 0.0, ""
    try:
        if group is not None or run.gather is not None:
            first, size, words = _compare(run, lengths, group, recompute=recompute, methods=methods)
    except (LengthwiseError, RuntimeError, IndexError, KeyError):  # what it explains is refused all the same
        words = ""
    rows = gather_rows(torch.tensor([first, size], dtype=torch.float64, device=run.world.device)).tolist()
    earliest = min(range(len(rows)), key=lambda rank: rows[rank][0])
    if rows[earliest][0] >= NOWHERE:
        words = "The outputs of all its modules agree, so the difference is in its loss, or in its backward"
        if is_of_recompute:
            words += (
                ": layers that share state beside their arguments cannot be recomputed; set "
                f"{Setting.RECOMPUTE}=none for them"
            )
        elif hooks := sorted(hooks_on_gradients(run.model)):
            words += (
                f": there is {hooks[0]}, and one that clips, or changes a gradient in any way that is not linear, "
                "changes the sum of several sequences otherwise than each of them; do it once a step, in the "
                "optimizer, or clip their norm by clip_norm"
            )
        elif run.wrapped_model.has_own_loss:
            words += _of_own_loss(run)
        return words + _OUT
    return f"It begins in {broadcast_json(run.world, words, source=earliest)}{_OUT}"


def _of_own_loss(run: PreparedModel) -> str:
    """What the user's ``loss=`` has to be, after a colon."""
    objective, mean = run.wrapped_model.objective, "a mean over the targets of a micro-batch"
    if objective == EVERY_TOKEN:
        mean = "a mean over all tokens of a micro-batch"
    words = f": what loss= makes has to be {mean}"
    if objective != EVERY_TOKEN and not run.wrapped_model.labels.are_read:
        return f"{words}, and it uses none: say objective='every-token' if it is a mean over all tokens"
    return (
        f"{words}. A sum that is divided by a number of its own, such as (losses * mask).sum() / mask.sum(), is made "
        "in the loop instead, of a column that loss_columns= names: step.backward(micro_batch.sum(losses_t * mask_t) "
        "/ step.total('mask'), mean_over='step')"
    )


_OUT = ". check=False trains it all the same"


def _compare(
    run: PreparedModel, lengths: tuple[int, ...], group: Group | None, **options: Any
) -> tuple[int, float, str]:
    """Return the number of the first module whose output differs, by how much, and a description of it."""
    alone = []
    with torch.no_grad():
        for sequence in range(len(lengths)):
            with run.gathered(), _recorded(run.model) as recording:
                stock_output(run, lengths, sequence)
            alone.append(recording)
        with run.gathered(is_active=group is not None):
            if group is None:
                return NOWHERE, 0.0, ""
            pack = pad_to_degree(pack_of(run, lengths), group.size, run.collator)
            with active(shard_for(run, pack, group, **options)) as shard:
                inputs = run.make(shard, pack).inputs
                with _recorded(run.model) as packed:
                    run.model(**inputs)
    places = torch.from_numpy(shard.places).to(shard.device)

    def difference(output: Tensor | None, outputs: list[Tensor | None]) -> float:
        expected = _laid_end_to_end(outputs, lengths)
        return 0.0 if output is None or expected is None else _difference(output, *expected, places)

    for number, (call, output) in enumerate(packed.outputs.items()):
        outputs = [recording.outputs.get(call) for recording in alone]
        size = difference(output, outputs)
        if size <= DIFFERS:
            continue
        differs = f", whose output {_said_of_shapes(output, outputs, lengths) or f'differs by {size:.1e}'}"
        which = "" if packed.counts[call.module] == 1 else f" (call {call.number})"
        caller, begun = packed.callers.get(call, (call, 0))
        if difference(packed.inputs.get(call), [recording.inputs.get(call) for recording in alone]) > DIFFERS:
            before = packed.functions.get(caller, [])[:begun]
            place = call.module.removeprefix(f"{caller.module}.")
            return number, size, f"{_described(run, caller.module, before)}, before its {place}{which}{differs}"
        return number, size, _described(run, call.module, packed.functions.get(call, [])) + which + differs
    return NOWHERE, 0.0, ""


def _said_of_shapes(output: Tensor, outputs: list[Tensor | None], lengths: tuple[int, ...]) -> str:
    """What is said of an output whose shape alone differs from the one that is expected; empty: its numbers do."""
    if (expected := _laid_end_to_end(outputs, lengths)) is None or not _has_other_shape(output, *expected):
        return ""
    words = f"has the shape {tuple(output.shape)} in the place of {tuple(expected[0].shape)}"
    if output.shape[0] == len(lengths):
        words += (
            ": a tensor with a row for each sequence is not one for each slot; give the model what belongs to a "
            "sequence for each of its slots, as micro_batch.column(name)[None]"
        )
    return words


def _has_other_shape(output: Tensor, expected: Tensor, axis: int) -> bool:
    """Whether an output of as many axes has other sizes than that of slots."""
    sizes = [[size for number, size in enumerate(tensor.shape) if number != axis] for tensor in (output, expected)]
    return output.dim() == expected.dim() and sizes[0] != sizes[1]


def _difference(output: Tensor, expected: Tensor, axis: int, places: Tensor) -> float:
    """The largest difference of this rank's slots from the stock model's, relative to those; 0 if not known."""
    if output.dim() != expected.dim() or output.shape[axis] != len(places):
        return 0.0
    if _has_other_shape(output, expected, axis):
        return float("inf")
    inside = places < expected.shape[axis]
    mine, theirs = output.movedim(axis, 0)[inside], expected.movedim(axis, 0)[places[inside]]
    if mine.shape != theirs.shape or not len(mine):
        return 0.0
    size = float((mine - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30))
    return size if size == size else float("inf")


def _laid_end_to_end(outputs: list[Tensor | None], lengths: tuple[int, ...]) -> tuple[Tensor, int] | None:
    """Concatenate outputs of sequences as a pack has them; returns the axis of slots too, None if there is none."""
    tensors = [output for output in outputs if output is not None]
    if len(tensors) != len(lengths) or len({tensor.dim() for tensor in tensors}) != 1:
        return None
    shapes = [tensor.shape for tensor in tensors]
    axes = [axis for axis in range(tensors[0].dim()) if tuple(shape[axis] for shape in shapes) == lengths]
    return (torch.cat(tensors, dim=axes[0]), axes[0]) if axes else None


def _described(run: PreparedModel, name: str, calls: list[str]) -> str:
    """Describe a module by its layer, its name and the functions in which its slots may mix."""
    structure, module = run.wrapped_model.structure, run.model.get_submodule(name)
    kind, number = type(module).__name__, structure.layer_of(name)
    made = [call for call in _MIXING if call in calls]
    what = f", which calls {', '.join(made[:2])}" if made else ""
    if not name:
        return f"the forward of {kind} itself{what}"
    if number is None:
        return f"{name} ({kind}{what})"
    path, module_of_layer = structure.layers_by_path[number]
    layer, rest = f"layer {number} ({type(module_of_layer).__name__})", name.removeprefix(path).lstrip(".")
    return f"{layer}, in {rest} ({kind}{what})" if rest else f"{layer} itself{what}"
