"""Frozen models beside the one that is trained: teachers and reference models, exact on shards of packs, without state.

They are intercepted as the trained model is, compute without gradients, and are whole on every rank.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lengthwise.core.batch import Pack
from lengthwise.core.errors import CheckError, InputError
from lengthwise.runtime.loop.run_state import MicroBatchMaker
from lengthwise.runtime.loop.shared_parts import check_shared_parts
from lengthwise.runtime.loop.synthetic_batches import synthetic, traced_lengths, varied
from lengthwise.runtime.loop.synthetic_branches import branches_alone, branches_shared
from lengthwise.runtime.wrap.context import PackShard, active
from lengthwise.runtime.wrap.exchange_script import Event, ExchangeScript
from lengthwise.runtime.wrap.forward_patch import check_not_scripted
from lengthwise.runtime.wrap.frozen_arguments import FrozenArguments, check_takes_tokens, frozen_arguments
from lengthwise.runtime.wrap.micro_batch import MicroBatch
from lengthwise.runtime.wrap.sequence_labels import classifies_sequences
from lengthwise.runtime.wrap.state_between_calls import StateBetweenCalls
from lengthwise.runtime.wrap.wrapped_model import WrappedModel

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Largest relative difference of outputs that rounding explains; ``LOW_PRECISION`` for other dtypes."""
LOW_PRECISION = 5e-2


def wrap_frozen(run: MicroBatchMaker, model: nn.Module, *, layers: str | None, check: bool) -> WrappedModel:
    """Wrap a frozen ``model`` for micro-batches of ``run``, and compare its outputs of a pack with single sequences.

    Raises:
        InputError: it shares what computes for another model alone, takes other arguments than micro-batches have, or
            attends in a way that cannot be sharded.
        CheckError: its outputs on a pack are not those on single sequences.
    """
    check_shared_parts(model, run.models, by_layer=run.wrapped_model.layers.gather is not None)
    check_not_scripted(model)
    model.to(run.world.device)
    first: InputError | CheckError | None = None
    for by_sequence, arguments in _ways_to_call(run, model):
        try:
            return _wrapped(run, model, arguments, layers=layers, by_sequence=by_sequence, check=check)
        except (InputError, CheckError) as error:
            first = first or error.with_traceback(None)
    assert first is not None, "something was tried"
    raise first


def _ways_to_call(run: MicroBatchMaker, model: nn.Module) -> Iterator[tuple[bool, FrozenArguments | None]]:
    """Whether to call the model once for each sequence, and its arguments beside tokens; the likeliest first.

    Micro-batches of a model that is computed sequence by sequence are whole on one rank, so it may be called likewise.
    """
    arguments, made = list[FrozenArguments | None](), dict[str, Any]()
    if run.wrapped_model.make_inputs is not None:
        with synthetic(run, traced_lengths(run.collator)):
            made = _micro_batch(run, _pack(run, 0)).given.values
            arguments += frozen_arguments(model, made)
    if not arguments:
        check_takes_tokens(model, made)
    ways = (False, True) if run.wrapped_model.by_sequence is not None else (False,)
    for by_sequence in ways[-1:] if classifies_sequences(model) else ways:
        yield from ((by_sequence, some) for some in (*arguments, None))


def _wrapped(
    run: MicroBatchMaker,
    model: nn.Module,
    arguments: FrozenArguments | None,
    *,
    layers: str | None,
    by_sequence: bool,
    check: bool,
) -> WrappedModel:
    """The model, traced with ``arguments`` and compared; None: with tokens.

    Raises:
        InputError: its forward takes other arguments, fails with these, or attends in a way that cannot be sharded.
        CheckError: its outputs on a pack are not those on single sequences.
    """
    wrapped_model = WrappedModel(
        model, objective=run.wrapped_model.objective, layers=layers, inputs=arguments, by_sequence=by_sequence,
        labels_sequences=classifies_sequences(model), is_frozen=True,
    )  # fmt: skip
    lengths = traced_lengths(run.collator)
    try:
        with synthetic(run, lengths):
            outputs: list[Callable[[], Any]] = [
                partial(_output, run, wrapped_model, _pack(run, number)) for number in (0, 1)
            ]
            wrapped_model.learn(outputs, lengths, is_compared=check and run.world.size == 1)
            wrapped_model.script = _script(run, wrapped_model)
        if check:
            with varied(run, lengths):
                _check(run, wrapped_model)
                if arguments is not None and arguments.optional:
                    arguments.needs_all = not _is_exact_without(run, wrapped_model, arguments.optional)
        if check and run.collator.shared is not None:
            _check_shared(run, wrapped_model)
    except BaseException:
        wrapped_model.release()
        raise
    return wrapped_model


def _pack(run: MicroBatchMaker, *sequences: int) -> Pack:
    slots = traced_lengths(run.collator)
    return Pack(ids=sequences, lengths=tuple(slots[number] * run.collator.slot_tokens for number in sequences))


def _micro_batch(run: MicroBatchMaker, pack: Pack, events: list[Event] | None = None) -> MicroBatch:
    shard = PackShard(
        step=0, seed=run.seed, ids=pack.ids, cu_seqlens=run.collator.cu_seqlens(pack), group=run.alone,
        tree=run.collator.tree(pack), device=run.world.device, events=events,
    )  # fmt: skip
    return run.make(shard, pack)


def _output(run: MicroBatchMaker, wrapped_model: WrappedModel, pack: Pack, without: Collection[str] = ()) -> Any:
    return _output_of(wrapped_model, _micro_batch(run, pack), without)


def _output_of(wrapped_model: WrappedModel, micro_batch: MicroBatch, without: Collection[str] = ()) -> Any:
    if wrapped_model.labels_sequences:
        without = {*without, "labels"}  # its classes may be others, of which a loop uses the logits alone
    with active(micro_batch.shard):
        inputs = wrapped_model.inputs_of(micro_batch)
        return wrapped_model.model(**{name: value for name, value in inputs.items() if name not in without})


def _script(run: MicroBatchMaker, wrapped_model: WrappedModel) -> ExchangeScript:
    """Trace the attention calls of a frozen model's forward; it has no backward."""
    events: list[Event] = []
    micro_batch = _micro_batch(run, _pack(run, 0), events)
    _output_of(wrapped_model, micro_batch)
    calls = micro_batch.shard.attended
    return ExchangeScript(calls={number: call for (_, number), call in zip(events, calls, strict=True)})


def _check(run: MicroBatchMaker, wrapped_model: WrappedModel, without: Collection[str] = ()) -> None:
    """Raise ``CheckError`` unless the outputs of a pack are those of its sequences by themselves.

    ``without``: names of arguments that are left out.
    """
    lengths = traced_lengths(run.collator)
    with _evaluated(wrapped_model.model) as model:
        has_rows = wrapped_model.by_sequence is not None
        packed = _values(model, _output(run, wrapped_model, _pack(run, 1, 0), without), sum(lengths), has_rows * 2)
        alone = []
        for number in (1, 0):
            with wrapped_model.plain():
                output = _output(run, wrapped_model, _pack(run, number), without)
            alone.append(_values(model, output, lengths[number], has_rows))
        parts = {key: [part[key] for part in alone] for key in packed if all(key in part for part in alone)}
        if all(_are_close(packed[key], _together(of_key, packed[key])) for key, of_key in parts.items()):
            return
        state = StateBetweenCalls(model)
        with wrapped_model.plain():
            again = _values(model, _output(run, wrapped_model, _pack(run, 0), without), lengths[0], has_rows)
    if not all(_are_close(now.nan_to_num(), alone[1][key].nan_to_num()) for key, now in again.items()):
        raise state.error()
    raise CheckError(
        f"{type(model).__name__} computes other outputs for two sequences in one pack than for each alone; its "
        "tokens meet elsewhere than in attention. Call it on whole sequences before the run, and keep what it "
        "says as a column of the corpus"
    )


def _together(parts: list[Tensor], of_pack: Tensor) -> Tensor:
    """Values of sequences by themselves, in the form of those of their pack."""
    return torch.cat([part.reshape(-1, *of_pack.shape[1:]) for part in parts])


def _is_exact_without(run: MicroBatchMaker, wrapped_model: WrappedModel, optional: Collection[str]) -> bool:
    """Whether packs are exact where a call leaves out its ``optional`` arguments, as far as it can."""
    try:
        _check(run, wrapped_model, optional)
    except Exception:  # of the model's own code as well, which may need what it has a default for
        return False
    return True


def _check_shared(run: MicroBatchMaker, wrapped_model: WrappedModel) -> None:
    """Raise ``CheckError`` unless outputs of sequences that begin alike are the same with what they share once."""
    with _evaluated(wrapped_model.model) as model:
        with branches_alone(run) as pack:
            alone = _values(model, _output(run, wrapped_model, pack), pack.num_tokens)
        with branches_shared(run) as pack:
            shared = _values(model, _output(run, wrapped_model, pack), pack.num_tokens)
            tree = run.collator.tree(pack)
    assert tree is not None, "sequences share what they begin with"
    slots = torch.from_numpy(np.concatenate([tree.slots_of(member) for member in range(len(tree.leaves))]))
    pairs = zip(shared.values(), alone.values())
    if not all(_are_close(together[slots.to(together.device)], apart) for together, apart in pairs):
        raise CheckError(
            f"{type(model).__name__} computes other outputs for sequences that begin alike where what they share is "
            "computed once; leave share_prefixes out"
        )


@contextmanager
def _evaluated(model: nn.Module) -> Iterator[nn.Module]:
    training = model.training
    model.eval()
    try:
        yield model
    finally:
        model.train(training)


def _are_close(together: Tensor, apart: Tensor) -> bool:
    together, apart = together.detach(), apart.detach()
    limit = TOLERANCE.get(together.dtype, LOW_PRECISION)
    return float((together - apart).abs().max()) <= limit * max(1e-6, float(apart.abs().max()))


def _values(model: nn.Module, output: Any, num_slots: int, num_sequences: int = 0) -> dict[str, Tensor]:
    """The tensors of an output, by their paths, that have one row for each slot, [slots, ...], or for each sequence.

    ``num_sequences``: those that have a row each; 0: outputs are by slot alone.

    Raises:
        CheckError: it has others alone.
    """
    flat = pytree.tree_flatten_with_path(output)[0]
    leaves = {pytree.keystr(path): leaf for path, leaf in flat if isinstance(leaf, Tensor) and leaf.is_floating_point()}
    values: dict[str, Tensor] = {}
    for path, leaf in leaves.items():
        if leaf.dim() >= 2 and tuple(leaf.shape[:2]) == (1, num_slots):
            values[path] = leaf[0]
        elif leaf.dim() and len(leaf) in {num_slots if num_slots > 1 else 0, num_sequences} - {0}:
            values[path] = leaf
    if leaves and not values:
        shapes = ", ".join(str(tuple(leaf.shape)) for leaf in list(leaves.values())[:3])
        raise CheckError(
            f"{type(model).__name__} returns the shape {shapes} for {num_slots:,} slots, and nothing for each, so a "
            "pack of several sequences would have what one has; " + _WAYS_OUT[classifies_sequences(model)]
        )
    return values


_ELSEWHERE = "call it on whole sequences before the run, and keep what it says as a column of the corpus"
_WAYS_OUT = {
    False: f"let it return what it says of each slot, or {_ELSEWHERE}",
    True: (
        "put it into a module whose forward returns its head of the hidden states of each slot, as in "
        "self.of.score(self.of.model(input_ids, position_ids=position_ids).last_hidden_state), and use those of the "
        f"slot that it reads, such as micro_batch.is_last; or {_ELSEWHERE}"
    ),
}
"""What to do with one that says nothing of each slot, by whether it classifies sequences."""
