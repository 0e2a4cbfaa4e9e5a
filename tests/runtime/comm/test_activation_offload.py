"""Saved tensors in host memory have the numbers that they were saved with, each storage once where it can be."""

import pytest
import torch
from torch import nn

from lengthwise.runtime.comm.activation_offload import HostOffload


def gradients(module, *, is_offloaded):
    """Those of a recurrence on one sequence, whose saved tensors are in host memory, but for its weights."""
    x = torch.linspace(-1, 1, 56, dtype=torch.float64).view(1, 7, 8).requires_grad_()
    weights = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
    with (
        HostOffload("cpu")
        .micro_batch()
        .layer((lambda tensor: tensor.untyped_storage()._cdata in weights) if is_offloaded else None)
    ):
        loss = module(x)[0].square().sum()
    return torch.autograd.grad(loss, [x, *module.parameters()])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_gates_that_are_parts_of_one_storage_and_are_written_one_after_the_other_are_copied_each(kind):
    torch.manual_seed(0)
    module = kind(8, 4, batch_first=True).double()
    for gradient, expected in zip(gradients(module, is_offloaded=True), gradients(module, is_offloaded=False)):
        assert torch.equal(gradient, expected)


def test_views_of_one_tensor_and_an_output_that_is_saved_again_are_copied_once():
    host, x = HostOffload("cpu"), torch.ones(5, 12, requires_grad=True)
    with host.micro_batch().layer(lambda tensor: False):
        query, key, value = (x * 1.0).split(4, dim=-1)
        (query * key * value).exp().square()
    part, num_bytes = 5 * 4, 4
    # the three views, the product of two of them, and what exp returned, which square saves again
    assert host.num_copied_bytes == num_bytes * (3 * part + part + part)
