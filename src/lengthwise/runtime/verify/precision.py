"""In which dtypes a model is compared with itself, and which differences rounding explains."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch

from lengthwise.runtime.loop.fsdp2 import Fsdp2State
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.verify.float64_mode import noise_free
from lengthwise.runtime.verify.verdict import NotInThisDtype
from lengthwise.runtime.verify.zero_weights import Fill, with_zeros_filled

FEW_NUMBERS = 1 << 26
"""A model with fewer numbers is always compared in float64; of others, memory is looked at first."""


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Differences that rounding explains: ``relative`` of a gradient's norm, or of ``floor`` of the norm of all.

    The floor is for parameters whose true gradient is zero, such as the bias of keys under a softmax.
    """

    relative: float
    floor: float


TOLERANCES = {
    torch.float64: Tolerance(relative=1e-8, floor=1e-3),  # sums in another order; 1e-13 is usual
    None: Tolerance(relative=1e-5, floor=1e-2),  # float64 with norms and softmax in float32
    torch.float32: Tolerance(relative=1e-3, floor=3e-2),
    torch.bfloat16: Tolerance(relative=5e-2, floor=0.3),  # products of 8 bits
    torch.float16: Tolerance(relative=5e-2, floor=0.3),
}


def tolerance_of(dtype: torch.dtype | None, own_dtype: torch.dtype) -> Tolerance:
    """Return the tolerance of a comparison in ``dtype``, or if that is None in the model's own."""
    if dtype is None:
        dtype = None if own_dtype is torch.float64 else own_dtype
    return TOLERANCES.get(dtype, TOLERANCES[torch.bfloat16])


def compare_precisely(run: PreparedModel, compare: Callable[[Tolerance, Fill], None]) -> str:
    """Call ``compare`` without noise, in the most precise dtype that the model can be computed in, and where zeros
    among its weights hide nothing; every rank calls this. It gets the tolerance and what zeros became. Returns why they
    stayed zero, if they did."""

    def compare_filled(dtype: torch.dtype | None, fill: Fill) -> None:
        with noise_free(run, dtype, fill):
            compare(tolerance_of(dtype, run.state.coarsest_dtype), fill)

    *finer, coarsest = dtypes_of(run)
    for dtype in finer:
        with suppress(NotInThisDtype):
            return with_zeros_filled(run, partial(compare_filled, dtype))
    try:
        return with_zeros_filled(run, partial(compare_filled, coarsest))
    except NotInThisDtype as error:
        raise error.reason from None


def dtypes_of(run: PreparedModel) -> list[torch.dtype | None]:
    """Return the dtypes to compare in, the most precise first; None: the model's own."""
    own_dtype = run.state.coarsest_dtype
    if isinstance(run.state, Fsdp2State):
        return [None]
    numbers = sum(tensor.numel() for tensor in run.wrapped_model.structure.constants())
    numbers //= 1 if run.gather is None else run.world.size  # a rank has its share
    free = torch.cuda.mem_get_info(run.world.device)[0] if run.world.device.type == "cuda" else 0
    dtypes: list[torch.dtype | None] = [None]
    if own_dtype in (torch.float16, torch.bfloat16) and (numbers <= FEW_NUMBERS or numbers * 16 < free):
        dtypes.insert(0, torch.float32)
    if numbers <= FEW_NUMBERS or numbers * 32 < free:
        dtypes.insert(0, torch.float64)
    return dtypes
