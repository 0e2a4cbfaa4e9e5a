import torch
from torch.nn import functional as F

from lengthwise.runtime.models.activation import silu_mul
from tests.runtime.models.cases import assert_same


def test_silu_mul_is_silu_times_up_with_its_gradients():
    gate, up, grad = (3 * torch.randn(5, 7, dtype=torch.float64) for _ in range(3))
    gate.requires_grad_()
    up.requires_grad_()
    assert_same(silu_mul(gate, up), F.silu(gate) * up)
    expected = torch.autograd.grad(F.silu(gate) * up, [gate, up], grad)
    for ours, theirs in zip(torch.autograd.grad(silu_mul(gate, up), [gate, up], grad), expected):
        assert_same(ours, theirs)
    assert torch.autograd.gradcheck(silu_mul, (gate, up))
