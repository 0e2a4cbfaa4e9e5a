"""Every backward of the runtime is right when it is differentiated again, or says that it cannot be."""

from importlib import import_module
from pkgutil import walk_packages

import pytest
import torch

from lengthwise import runtime
from lengthwise.core.errors import InputError
from lengthwise.runtime.models.first_derivative import SHARED, first_derivative_only

LINEAR = {"_ShareOfRank"}
"""Backwards of torch's operations alone, which torch differentiates."""
REFUSED = {"_ElsewhereComputed"}
"""Backwards that refuse in any case."""


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    @first_derivative_only("what is doubled", SHARED)
    def backward(ctx, gradient):
        return 2 * gradient


def test_a_backward_without_a_derivative_says_so_where_its_graph_would_be_made():
    x = torch.ones(3, requires_grad=True)
    (gradient,) = torch.autograd.grad(Doubled.apply(x).sum(), x)
    assert gradient.tolist() == [2.0, 2.0, 2.0]
    said = "create_graph=True asks for second derivatives of what is doubled, .* max_degree=1"
    with pytest.raises(InputError, match=said):
        torch.autograd.grad(Doubled.apply(x).sum(), x, create_graph=True)
    with pytest.raises(InputError, match=said):
        Doubled.apply(x).sum().backward(create_graph=True)


def test_no_backward_of_the_runtime_gives_other_second_derivatives_in_silence():
    for module in walk_packages(runtime.__path__, "lengthwise.runtime."):
        import_module(module.name)
    functions = [f for f in torch.autograd.Function.__subclasses__() if f.__module__.startswith("lengthwise.")]
    silent = {f.__name__ for f in functions if not getattr(f.backward, "refuses_create_graph", False)}
    assert silent == LINEAR | REFUSED and len(functions) > 20
