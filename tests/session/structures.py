"""Models of users whose layers are shared, repeated, left out or joined in odd ways; all take tokens and targets."""

import itertools

import torch
from torch import nn
from torch.nn import functional as F

from tests.session.models import VOCAB, Adapter, Block

WIDTH, LAYERS, MOST = 16, 3, 64


class Plain(nn.Module):
    """A GPT with learned positions; what subclasses change is how it runs through its layers."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(MOST, WIDTH)
        self.blocks = self.layers()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def layers(self):
        return nn.ModuleList(self.layer() for _ in range(LAYERS))

    def layer(self):
        return Block(WIDTH, 2)

    def embed(self, idx):
        return self.tokens(idx) + self.places(torch.arange(idx.shape[1], device=idx.device))

    def run(self, x, idx):
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, idx, targets=None):
        return self.end(self.run(self.embed(idx), idx), targets)

    def end(self, x, targets):
        logits = self.head(self.norm(x))
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        return logits, loss


# Layers that are called more than once


class Looped(Plain):
    """A Universal Transformer: all layers, and all of them again."""

    def run(self, x, idx):
        return super().run(super().run(x, idx), idx)


class EachTwice(Plain):
    def run(self, x, idx):
        for block in self.blocks:
            x = block(block(x))
        return x


class LookAhead(Plain):
    """Its first layer is called without gradients before, as for targets of one's own making."""

    def run(self, x, idx):
        with torch.no_grad():
            seen = self.blocks[0](x)
        return super().run(x + 0.5 * seen, idx)


class SelfConditioned(Plain):
    """All layers without gradients, then with them on what came out."""

    def run(self, x, idx):
        with torch.no_grad():
            before = super().run(x, idx)
        return super().run(x + 0.5 * before, idx)


class LastTwice(Plain):
    def run(self, x, idx):
        return self.blocks[-1](super().run(x, idx))


class OneInAll(Plain):
    """ALBERT: the list has one module again and again."""

    def layers(self):
        return nn.ModuleList([self.layer()] * LAYERS)


class FirstIsLast(Plain):
    def layers(self):
        first, second = self.layer(), self.layer()
        return nn.ModuleList([first, second, first])


class Cycled(Plain):
    """Fewer layers than calls: the list is gone through in a cycle."""

    def run(self, x, idx):
        for block in itertools.islice(itertools.cycle(self.blocks), LAYERS + 1):
            x = block(x)
        return x


# Parameters that are shared


class SharedMlp(Plain):
    def layers(self):
        blocks = super().layers()
        for block in blocks:
            block.mlp = blocks[0].mlp
        return blocks


class SharedQkv(Plain):
    """One weight in all attentions, each with a bias of its own."""

    def layers(self):
        blocks = super().layers()
        for block in blocks:
            block.attention.qkv.weight = blocks[0].attention.qkv.weight
        return blocks


class NeighboursShare(Plain):
    def layers(self):
        blocks = super().layers()
        blocks[2].mlp = blocks[1].mlp
        return blocks


class TiedWithin(Plain):
    """Of one layer, two parameters are the same, as in MobileLLM's blocks or a tied autoencoder."""

    def layers(self):
        blocks = super().layers()
        for block in blocks:
            block.norm2.weight = block.norm1.weight
        return blocks


class TiedHead(Plain):
    def __init__(self):
        super().__init__()
        self.head.weight = self.tokens.weight


class HeadInLayers(Plain):
    """The weights of a layer are used after the layers too."""

    def end(self, x, targets):
        return super().end(x + self.blocks[0].mlp(x), targets)


# Parameters between layers


class ScaledBetween(Plain):
    def __init__(self):
        super().__init__()
        self.scales = nn.Parameter(1 + 0.1 * torch.randn(LAYERS, WIDTH))

    def run(self, x, idx):
        for number, block in enumerate(self.blocks):
            x = block(x) * self.scales[number]
        return x


class ScaleOfEach(Plain):
    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(1 + 0.1 * torch.randn(WIDTH)) for _ in range(LAYERS))

    def run(self, x, idx):
        for scale, block in zip(self.scales, self.blocks):
            x = x + scale * block(x)
        return x


class EmbeddingOfLayers(Plain):
    """Tokens are embedded again before each layer, as per-layer embeddings of Gemma 3n."""

    def __init__(self):
        super().__init__()
        self.further = nn.ModuleList(nn.Embedding(VOCAB, WIDTH) for _ in range(LAYERS))

    def run(self, x, idx):
        for embedding, block in zip(self.further, self.blocks):
            x = block(x + embedding(idx))
        return x


class EmbeddingAgain(Plain):
    """The first embedding goes into every layer again, weighted by what is learned: modded-nanogpt."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Parameter(0.3 * torch.randn(LAYERS))

    def run(self, x, idx):
        first = x
        for number, block in enumerate(self.blocks):
            x = block(x + self.mix[number] * first)
        return x


class TokensAgain(Plain):
    def run(self, x, idx):
        for block in self.blocks:
            x = block(x + self.tokens(idx))
        return x


class NormBetween(Plain):
    """One norm outside of all layers, applied after each."""

    def run(self, x, idx):
        for block in self.blocks:
            x = self.norm(block(x))
        return x


class RotaryInAll(Plain):
    """One module with weights, which all layers have as their own."""

    def layers(self):
        shared = nn.Linear(WIDTH, WIDTH)
        blocks = super().layers()
        for block in blocks:
            block.mlp = nn.Sequential(block.mlp, shared)
        return blocks


# Values that pass by layers


class UNet(Plain):
    def run(self, x, idx):
        first = self.blocks[0](x)
        return self.blocks[2](self.blocks[1](first)) + first


class LossOfEach(Plain):
    """Deep supervision: every layer's output predicts."""

    def forward(self, idx, targets=None):
        x, losses = self.embed(idx), []
        for block in self.blocks:
            x = block(x)
            logits, loss = self.end(x, targets)
            losses.append(loss)
        return logits, None if targets is None else sum(losses)


class Backwards(Plain):
    def run(self, x, idx):
        for block in reversed(self.blocks):
            x = block(x)
        return x


# Layers that are left out


class EveryOther(Plain):
    def run(self, x, idx):
        for block in self.blocks[::2]:
            x = block(x)
        return x


class EarlyExit(Plain):
    """Stops after two layers, as self-speculative models do where they are told to."""

    def run(self, x, idx):
        for block in self.blocks[:2]:
            x = block(x)
        return x


class ByLength(Plain):
    """Long sequences take one layer more."""

    def run(self, x, idx):
        for block in self.blocks[: 3 if idx.shape[1] > 10 else 2]:
            x = block(x)
        return x


class InTraining(Plain):
    def run(self, x, idx):
        for block in self.blocks[: 2 if self.training else 3]:
            x = block(x)
        return x


class LayerDrop(Plain):
    def run(self, x, idx):
        for block in self.blocks:
            if not self.training or torch.rand([]) > 0.3:
                x = block(x)
        return x


class ExitWhereSure(Plain):
    """Stops where the hidden states say so."""

    def run(self, x, idx):
        for block in self.blocks:
            x = block(x)
            if float(x.detach().square().mean()) > 2.2:
                break
        return x


def adapted(model):
    """Frozen, but for adapters of low rank in every attention and what is no module of a layer."""
    model.requires_grad_(False)
    seen = {}
    for module in list(model.modules()):
        if hasattr(module, "qkv") and isinstance(module.qkv, nn.Linear):
            seen.setdefault(id(module.qkv), Adapter(module.qkv).to(module.qkv.weight.dtype))
            module.qkv = seen[id(module.qkv)]
    return model
