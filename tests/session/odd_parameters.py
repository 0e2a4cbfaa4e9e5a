"""Models of users whose parameters, tables and hooks are of rarer kinds."""

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from tests.session.structures import LAYERS, WIDTH, Plain


class BackwardPreHooked(Plain):
    def __init__(self):
        super().__init__()
        self.blocks[1].register_full_backward_pre_hook(lambda module, gradients: (0.5 * gradients[0],))
        self.blocks[2].mlp.register_full_backward_pre_hook(lambda module, gradients: (2.0 * gradients[0],))


class HookedWithKeywords(Plain):
    def __init__(self):
        super().__init__()
        self.blocks[0].register_forward_pre_hook(
            lambda module, args, kwargs: ((1.1 * args[0],), kwargs), with_kwargs=True
        )
        self.blocks[1].register_forward_hook(lambda module, args, kwargs, output: 0.9 * output, with_kwargs=True)
        self.blocks[2].register_forward_hook(lambda module, args, output: None, always_call=True)


class CalledFunctionally(Plain):
    """Parts are called with parameters that are made of theirs."""

    def layer(self):
        block = super().layer()
        inner = block.mlp[0]
        weights = lambda: {"weight": 0.5 * inner.weight, "bias": inner.bias}  # noqa: E731
        block.mlp[0] = Called(inner, weights)
        return block


class Called(nn.Module):
    def __init__(self, inner, weights):
        super().__init__()
        self.inner, self.weights = inner, weights

    def forward(self, x):
        return functional_call(self.inner, self.weights(), (x,))


class Complex(Plain):
    """A trained filter over channels, in complex numbers."""

    def __init__(self):
        super().__init__()
        self.filter = nn.Parameter(torch.ones(WIDTH // 2 + 1, dtype=torch.complex128))

    def run(self, x, idx):
        return super().run(x + torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=WIDTH), idx)


class FrozenComplex(Complex):
    def __init__(self):
        super().__init__()
        self.filter.requires_grad_(False)


class Empty(Plain):
    """Trained and frozen parameters of no element, in layers and outside."""

    def __init__(self):
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0, WIDTH))
        self.blocks[1].nothing = nn.Parameter(torch.zeros(3, 0))
        self.blocks[2].nothing = nn.Parameter(torch.zeros(0), requires_grad=False)

        own = self.blocks[1].mlp.forward
        self.blocks[1].mlp.forward = lambda x: own(x) + self.blocks[1].nothing.view(3, 0).sum()

    def run(self, x, idx):
        return super().run(x + self.nothing.sum(), idx)


class UsedInTwoLayers(Plain):
    """A weight outside of all layers that the first and the last layer compute with."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Parameter(torch.ones(WIDTH))
        self.blocks[0].outer, self.blocks[2].outer = [self], [self]
        for block in (self.blocks[0], self.blocks[2]):
            block.register_forward_hook(lambda module, args, output: output * module.outer[0].shared)


class Quantised(nn.Module):
    """A frozen linear layer in 8 bits with a scale of each row."""

    def __init__(self, linear, *, as_parameter):
        super().__init__()
        scales = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        codes = (linear.weight.detach() / scales).round().to(torch.int8)
        if as_parameter:
            self.codes = nn.Parameter(codes, requires_grad=False)
        else:
            self.register_buffer("codes", codes)
        self.scales = nn.Parameter(scales, requires_grad=False)

    def forward(self, x):
        return F.linear(x, self.codes.to(x.dtype) * self.scales)


class QuantisedBuffers(Plain):
    as_parameter = False

    def layer(self):
        block = super().layer()
        block.attention.out = Quantised(block.attention.out, as_parameter=self.as_parameter)
        return block


class QuantisedParameters(QuantisedBuffers):
    as_parameter = True


class FrozenNormsInFloat32(Plain):
    def double(self):
        super().double()
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                module.float().requires_grad_(False)
                module.forward = _in_float32(module.forward)
        return self


def _in_float32(forward):
    return lambda x: forward(x.float()).to(x.dtype)


class NormsInFloat32(FrozenNormsInFloat32):
    def double(self):
        super().double()
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                module.requires_grad_(True)
        return self


class ScaledByFrequency(Plain):
    """Gradients of a token are divided by how often it is in the forward."""

    def __init__(self):
        super().__init__()
        self.tokens.scale_grad_by_freq = True


class SparseTable(Plain):
    def __init__(self):
        super().__init__()
        self.tokens.sparse = True


class BoundedTable(Plain):
    """A table whose rows are shortened when they are looked up."""

    def __init__(self):
        super().__init__()
        self.tokens.max_norm = 1.0


class Clamping(Plain):
    """A layer that changes its weights in its forward."""

    def layer(self):
        block = super().layer()
        block.mlp[0].register_forward_pre_hook(lambda module, args: module.weight.data.clamp_(-0.1, 0.1) and None)
        return block


class Kind(nn.Parameter):
    """A parameter of a class of the user's."""


class OfAKind(Plain):
    def layer(self):
        block = super().layer()
        block.mlp[0].weight = Kind(block.mlp[0].weight.detach())
        return block


class ListOfParameters(Plain):
    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in range(LAYERS))

    def run(self, x, idx):
        for block, scale in zip(self.blocks, self.scales):
            x = block(x) * scale
        return x


class Stacked(Plain):
    """The weights of all layers are one parameter, of which each takes its own."""

    def __init__(self):
        super().__init__()
        self.stack = nn.Parameter(0.1 * torch.randn(LAYERS, WIDTH, WIDTH))

    def run(self, x, idx):
        for number, block in enumerate(self.blocks):
            x = block(x) + F.linear(x, self.stack[number])
        return x


class Detached(Plain):
    """A layer that no gradient comes through."""

    def run(self, x, idx):
        x = self.blocks[0](x).detach()
        for block in self.blocks[1:]:
            x = block(x)
        return x
