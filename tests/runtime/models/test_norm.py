import pytest
import torch
from torch.nn import functional as F

from lengthwise.runtime.models.norm import rms_norm
from tests.runtime.models.cases import assert_same

# Both round outputs and gradients of order one to bfloat16 (2^-8) once; sums of ten such terms differ by a few.
BFLOAT16_TOLERANCE = 3e-2


def case(dtype):
    generator = torch.Generator().manual_seed(0)
    x, grad, weight = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((10, 8), (10, 8), (8,)))
    return x.requires_grad_(), weight.requires_grad_(), grad


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.bfloat16, BFLOAT16_TOLERANCE)])
def test_rms_norm_is_torchs_with_its_gradients(dtype, tolerance):
    x, weight, grad = case(dtype)
    ours, theirs = rms_norm(x, weight, 1e-5), F.rms_norm(x, (8,), weight, 1e-5)
    assert_same(ours, theirs, tolerance=tolerance)
    gradients = zip(torch.autograd.grad(ours, (x, weight), grad), torch.autograd.grad(theirs, (x, weight), grad))
    for actual, expected in gradients:
        assert actual.dtype is dtype
        assert_same(actual, expected, tolerance=tolerance)


def test_rms_norm_passes_gradcheck():
    x, weight, _ = case(torch.float64)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-2), (x, weight))
