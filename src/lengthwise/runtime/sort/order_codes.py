"""Numbers of any dtype as int64 codes: one number comes before another exactly if its code is smaller.

NaN of either sign comes last, as in NumPy, and -0.0 equals 0.0.
"""

import torch
from torch import Tensor

DTYPES = (
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
)  # fmt: skip
"""What can be sorted."""
_SAME_SIZE = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_SIGN = torch.iinfo(torch.int64).min


def to_codes(x: Tensor) -> Tensor:
    """Convert numbers to as many int64 codes."""
    if x.dtype == torch.uint64:
        return x.contiguous().view(torch.int64) ^ _SIGN
    if not x.dtype.is_floating_point:
        return x.to(torch.int64)
    bits = x.contiguous().view(_SAME_SIZE[x.element_size()])
    largest = torch.iinfo(bits.dtype).max
    codes = bits ^ ((bits >> (8 * x.element_size() - 1)) & largest)  # of negative numbers: all bits but the sign
    codes = torch.where(codes == -1, 0, codes)
    return torch.where(x.isnan(), largest, codes).to(torch.int64)


def from_codes(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert codes back to numbers; 0.0 for -0.0, and one NaN for all."""
    if dtype == torch.uint64:
        return (codes ^ _SIGN).view(torch.uint64)
    if not dtype.is_floating_point:
        return codes.to(dtype)
    size = torch.empty(0, dtype=dtype).element_size()
    bits = codes.to(_SAME_SIZE[size])
    return (bits ^ ((bits >> (8 * size - 1)) & torch.iinfo(bits.dtype).max)).view(dtype)


def shares_a_code(x: Tensor) -> Tensor:
    """Whether some number is one of several with its code: -0.0 or NaN. A tensor of no dimension."""
    if not x.dtype.is_floating_point:
        return torch.zeros((), dtype=torch.bool, device=x.device)
    return (x.isnan() | ((x == 0) & x.signbit())).any()
