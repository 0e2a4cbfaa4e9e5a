"""Check that what a model computes of a sequence does not depend on how many others are in its pack.

Small packs do not show it: experts that take so many tokens and no more, a table or an assertion that ends at the
longest sequence. So the hidden states of two sequences in a pack by themselves are compared with those of every copy of
them in a pack that is large, in the model's own dtype and without gradients.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lengthwise.core.errors import CheckError
from lengthwise.runtime.comm.collectives import gather_rows
from lengthwise.runtime.comm.out_of_memory import is_out_of_memory
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.loop.synthetic_batches import traced_lengths, varied
from lengthwise.runtime.verify.float64_mode import noise_free
from lengthwise.runtime.verify.precision import tolerance_of
from lengthwise.runtime.verify.stock_call import pack_of, shard_for
from lengthwise.runtime.verify.verdict import NotInThisDtype, on_every_rank
from lengthwise.runtime.wrap.context import active

MOST_SLOTS = 8192
"""Slots of the largest pack that is compared."""
OFTEN = 0.2
"""The share of slots that may differ in half precision, in which a router may choose another expert by rounding."""


def crowding_problem(run: PreparedModel, num_slots: int) -> str:
    """Why packs of ``num_slots`` slots, or a few less, cannot be used, or an empty string; every rank calls this.

    A pack that does not fit into memory is halved until one does.
    """
    lengths = traced_lengths(run.collator)
    copies = num_slots // sum(lengths)
    with noise_free(run):
        while copies > 1:
            try:
                share = on_every_rank(
                    run, partial(_share_that_differs, run, lengths, copies), "a pack of many sequences"
                )
            except (CheckError, NotInThisDtype) as error:
                return str(error if isinstance(error, CheckError) else error.reason)
            largest = float(gather_rows(torch.tensor([share], dtype=torch.float64, device=run.world.device)).max())
            if largest <= 1.0:
                break
            copies //= 2
    limit = OFTEN if run.state.compute_dtype in (torch.bfloat16, torch.float16) else 0.0
    if copies < 2 or largest <= limit:
        return ""
    return (
        f"{type(run.model).__name__} computes something else of two sequences in a pack of "
        f"{copies * sum(lengths):,} slots than in one of {sum(lengths)}, as experts do that take a fixed number of "
        f"tokens ({largest:.0%} of the slots differ)"
    )


def _share_that_differs(run: PreparedModel, lengths: tuple[int, int], copies: int) -> float:
    """The share of slots whose hidden states differ by more than rounding; 2 if memory does not suffice."""
    try:
        few, many = (_hidden_states(run, lengths, number) for number in (1, copies))
    except Exception as error:
        if is_out_of_memory(error):
            return 2.0
        raise
    name = next((name for name in few if name in many and few[name].shape[1] == many[name].shape[1]), None)
    if name is None:
        return 0.0
    expected = torch.cat([part.repeat(copies, 1) for part in few[name].split(lengths)])
    relative = tolerance_of(None, run.state.compute_dtype).relative
    return float(((many[name] - expected).norm(dim=1) > relative * expected.norm(dim=1)).double().mean())


def _hidden_states(run: PreparedModel, lengths: tuple[int, int], copies: int) -> dict[int, Tensor]:
    """[slots, features] what the last layer returns of ``copies`` of each sequence in a pack, by its place.

    Copies have the number of their sequence, by which it draws, is masked, or looks something up.
    """
    outputs: list[Any] = []
    numbers = tuple(number for number in range(len(lengths)) for _ in range(copies))
    pack = pack_of(run, lengths, numbers)
    with varied(run, lengths), torch.no_grad(), run.gathered(), _returned_by(_last_layer(run), outputs):
        shard = shard_for(run, pack, run.alone)
        with active(shard):
            run.model(**run.make(shard, pack).inputs)
    size = shard.num_slots
    return {
        place: value.movedim(value.shape.index(size), 0).flatten(1).double()
        for place, value in enumerate(outputs[0] if outputs else ())
        if isinstance(value, Tensor) and value.is_floating_point()
        and value.ndim > 1 and list(value.shape).count(size) == 1
    }  # fmt: skip


def _last_layer(run: PreparedModel) -> nn.Module:
    return list(run.wrapped_model.structure.layers)[-1]


@contextmanager
def _returned_by(layer: nn.Module, outputs: list[Any]) -> Iterator[None]:
    """Within, what a layer returns goes to ``outputs``, as a tuple."""

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        outputs[:] = [output if isinstance(output, tuple) else (output,)]

    hook = layer.register_forward_hook(note)
    try:
        yield
    finally:
        hook.remove()
