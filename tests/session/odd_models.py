"""Models of users that hold layers in other ways, or have hooks, parametrizations, buffers and dtypes of their own."""

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from tests.session.models import Block
from tests.session.structures import LAYERS, WIDTH, Plain


class Called(Plain):
    """The container itself is called."""

    def layers(self):
        return nn.Sequential(*(self.layer() for _ in range(LAYERS)))

    def run(self, x, idx):
        return self.blocks(x)


class SequentialIterated(Called):
    def run(self, x, idx):
        for block in self.blocks:
            x = block(x)
        return x


class SequentialWithMore(Plain):
    """Embedding, layers and norm in one Sequential."""

    def layers(self):
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(self.layer() for _ in range(LAYERS)), nn.LayerNorm(WIDTH))

    def run(self, x, idx):
        return self.blocks(x)


class ByName(Plain):
    def layers(self):
        return nn.ModuleDict({f"h{number}": self.layer() for number in range(LAYERS)})

    def run(self, x, idx):
        for block in self.blocks.values():
            x = block(x)
        return x


class Attributes(Plain):
    def layers(self):
        self.layer1, self.layer2, self.layer3 = (self.layer() for _ in range(LAYERS))

    def run(self, x, idx):
        return self.layer3(self.layer2(self.layer1(x)))


class InAList(Plain):
    """A list of Python, whose modules torch does not see, beside attributes that it does see."""

    def layers(self):
        self.held = [self.layer() for _ in range(LAYERS)]
        for number, block in enumerate(self.held):
            self.add_module(f"block_{number}", block)
        return None

    def run(self, x, idx):
        for block in self.held:
            x = block(x)
        return x


class Unseen(Plain):
    """A dictionary of Python holds the layers: no parameter of them is one of the model."""

    def layers(self):
        self.held = {"layers": [self.layer() for _ in range(LAYERS)]}

    def run(self, x, idx):
        for block in self.held["layers"]:
            x = block.to(x.dtype)(x)
        return x


class TwoStacks(Plain):
    """A coarse and a fine stack of layers of one class."""

    def __init__(self):
        super().__init__()
        self.fine = nn.ModuleList(Block(WIDTH, 2) for _ in range(LAYERS))

    def run(self, x, idx):
        for block in [*self.blocks, *self.fine]:
            x = block(x)
        return x


class LongerAndShorter(TwoStacks):
    """The second stack has fewer layers, so the first one is taken for the layers."""

    def __init__(self):
        super().__init__()
        del self.fine[2]


class Mixed(Plain):
    """Layers of two classes in one list."""

    def layers(self):
        class Other(Block):
            pass

        return nn.ModuleList([Block(WIDTH, 2), Other(WIDTH, 2), Block(WIDTH, 2)])


class Normed(Plain):
    """Of each layer one weight is made of others, in one of torch's ways."""

    way = staticmethod(parametrizations.weight_norm)

    def layer(self):
        block = super().layer()
        self.way(block.mlp[0])
        self.way(block.attention.out)
        return block


class WeightNorm(Normed):
    pass


class OldWeightNorm(Normed):
    way = staticmethod(nn.utils.weight_norm)


class SpectralNorm(Normed):
    """Changes its buffers in training mode."""

    way = staticmethod(parametrizations.spectral_norm)


class FrozenSpectralNorm(SpectralNorm):
    def train(self, mode=True):
        super().train(mode)
        for module in self.modules():
            if isinstance(module, parametrize.ParametrizationList):
                module.eval()
        return self


class Orthogonal(Normed):
    way = staticmethod(parametrizations.orthogonal)


class Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).transpose(-1, -2)


class OwnParametrization(Plain):
    def layer(self):
        block = super().layer()
        parametrize.register_parametrization(block.attention.out, "weight", Symmetric())
        return block


class BatchNormed(Plain):
    def layer(self):
        block = super().layer()
        block.norm2 = Transposed(nn.BatchNorm1d(WIDTH))
        return block


class FrozenBatchNormed(BatchNormed):
    def train(self, mode=True):
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.eval()
        return self


class Transposed(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


class Counting(Plain):
    """A buffer says how often the model was called in training, which scales nothing."""

    def __init__(self):
        super().__init__()
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))

    def run(self, x, idx):
        if self.training:
            self.num_calls += 1
        return super().run(x, idx)


class CountingUnsaved(Plain):
    """A plain attribute counts calls, and what is computed depends on it."""

    num_calls = 0

    def run(self, x, idx):
        self.num_calls += 1
        return super().run(x * (1 + 0.01 * self.num_calls), idx)


class Hooked(Plain):
    """Hooks change inputs and outputs of layers."""

    def __init__(self):
        super().__init__()
        self.blocks[0].register_forward_pre_hook(lambda module, args: (args[0] * 1.1,))
        self.blocks[1].register_forward_hook(lambda module, args, output: output + 0.1 * args[0])
        self.blocks[2].mlp.register_forward_hook(lambda module, args, output: 0.9 * output)
        self.register_forward_hook(lambda module, args, output: (output[0], output[1]))


class BackwardHooked(Plain):
    def __init__(self):
        super().__init__()
        self.blocks[1].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))
        self.head.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 2.0,))


class ScaledGradient(Plain):
    """Hooks of parameters that scale, which it does not matter how often they do."""

    def __init__(self):
        super().__init__()
        self.blocks[1].mlp[0].weight.register_hook(lambda gradient: 0.5 * gradient)
        self.head.weight.register_hook(lambda gradient: 2.0 * gradient)


class ClippedGradient(Plain):
    """Hooks of parameters that clip, which depends on what is clipped."""

    def __init__(self):
        super().__init__()
        self.blocks[1].mlp[0].weight.register_hook(lambda gradient: gradient.clamp(-1e-4, 1e-4))


class StateDictHooked(Plain):
    def __init__(self):
        super().__init__()
        self.register_state_dict_post_hook(lambda module, state, prefix, metadata: state)


class TwoDtypes(Plain):
    def double(self):
        super().double()
        self.head.float()
        return self

    def end(self, x, targets):
        return super().end(x, targets)


class PartlyMeta(Plain):
    def double(self):
        super().double()
        self.blocks[1].to("meta")
        return self


class OneLayer(Plain):
    def layers(self):
        return nn.ModuleList([self.layer()])


class UnusedParameters(Plain):
    """A module that no forward calls, before the layers and in one of them."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(WIDTH, 3)
        self.blocks[1].unused = nn.Linear(WIDTH, 3)
