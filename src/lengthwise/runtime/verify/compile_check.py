"""Check before training that compiled modules compute what they compute uncompiled; so they are compiled by then."""

from functools import partial

from torch._dynamo.exc import TorchDynamoException

from lengthwise.core.errors import CheckError, InputError
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.loop.synthetic_batches import synthetic
from lengthwise.runtime.verify.compute_settings import short_lengths
from lengthwise.runtime.verify.precision import tolerance_of
from lengthwise.runtime.verify.scratch_copy import scratch_state
from lengthwise.runtime.verify.stock_call import GradientResult, gradients_of_pack
from lengthwise.runtime.verify.verdict import on_every_rank
from lengthwise.runtime.verify.worst_difference import worst_difference
from lengthwise.runtime.verify.zero_weights import Fill, finite, with_zeros_filled, zeros_filled


def check_compiled(run: PreparedModel) -> None:
    """Compare the loss and gradients of a pack with and without compiled code; every rank calls this.

    The pack is computed in the model's own dtype, by each rank alone, with and without layers that recompute and have
    what they save in host memory.

    Raises:
        InputError: torch.compile fails.
        CheckError: results differ by more than rounding.
    """
    compiled, num_layers = run.wrapped_model.compiled, run.wrapped_model.structure.num_layers
    if compiled is None:
        return
    constants, lengths = list(run.wrapped_model.structure.constants()), short_lengths(run.collator)
    if run.gather is not None:
        gathered = set(map(id, run.gather.parameters))
        constants = [tensor for tensor in constants if id(tensor) not in gathered]

    def compare(fill: Fill) -> None:
        with scratch_state(run.model, constants, dtype=None), zeros_filled(run, fill), synthetic(run, lengths):
            run.model.train()
            with compiled.off():
                expected = on_every_rank(run, partial(finite, partial(_gradients, run), fill))
            for flags in ((), (True,) * num_layers):
                on_every_rank(run, partial(_compare, run, expected, flags))

    with_zeros_filled(run, compare)
    compiled.recompiles()


def _gradients(run: PreparedModel, flags: tuple[bool, ...] = ()) -> GradientResult:
    try:
        return gradients_of_pack(run, short_lengths(run.collator), recompute=flags, offload=bool(flags))
    except TorchDynamoException as error:
        reason = " ".join(str(error).split())[:300]
        raise InputError(
            f"compile=True: torch.compile fails for a layer of {type(run.model).__name__} ({type(error).__name__}: "
            f"{reason}); leave compile out"
        ) from error


def _compare(run: PreparedModel, expected: GradientResult, flags: tuple[bool, ...]) -> None:
    worst = worst_difference(run, _gradients(run, flags), expected, tolerance_of(None, run.state.coarsest_dtype))
    if worst.ratio > 1.0:
        raise CheckError(
            f"compile=True: compiled layers of {type(run.model).__name__} do not compute what they compute uncompiled"
            f"{', recomputed in the backward' if flags else ''}: {worst.name} differs by {worst.relative:.1e}; leave "
            "compile out"
        )
