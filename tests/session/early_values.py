"""Models whose loops may read what layers before the last one made, and some that only look so."""

import types
from collections import deque
from functools import cache, partial

import torch
from torch import nn
from torch.nn import functional as F

from tests.session.models import Block
from tests.session.structures import WIDTH, Plain

KEPT = deque(maxlen=8)
"""What layers leave beside the model."""


class Gated(Block):
    """A layer with a term of its own."""

    def __init__(self):
        super().__init__(WIDTH, 2)
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        scores = self.gate(self.norm2(x))
        self.leave(scores.logsumexp(-1).square()[0])
        return x + self.mlp(x) * scores.sigmoid()

    def leave(self, term):
        self.term = term


class Returned(Plain):
    """Returns what every layer returned."""

    def forward(self, idx, targets=None):
        x, states = self.embed(idx), []
        for block in self.blocks:
            x = block(x)
            states.append(x)
        return *self.end(x, targets), {"states": states}


class ReturnedDetached(Returned):
    def forward(self, idx, targets=None):
        logits, loss, states = super().forward(idx, targets)
        return logits, loss, states["states"][0].detach()


class Summed(Plain):
    """Returns a sum of terms that layers add to a list, and keeps none of them."""

    class Layer(Block):
        def forward(self, x, terms):
            terms.append(x.square().mean(-1))
            return super().forward(x)

    def layer(self):
        return self.Layer(WIDTH, 2)

    def forward(self, idx, targets=None):
        x, terms = self.embed(idx), []
        for block in self.blocks:
            x = block(x, terms)
        return *self.end(x, targets), sum(terms)


class Kept(Plain):
    def layer(self):
        return Gated()


class KeptInBag(Plain):
    """Terms in an object that the model holds."""

    class Bag:
        def __init__(self):
            self.terms = {}

    class Layer(Gated):
        def leave(self, term):
            self.bag.terms[id(self)] = term

    def layers(self):
        blocks, bag = nn.ModuleList([self.Layer(), self.Layer(), self.Layer()]), self.Bag()
        for block in blocks:
            block.bag = bag
        return blocks


class KeptBeside(Plain):
    """Terms in a list beside the classes."""

    class Layer(Gated):
        def leave(self, term):
            KEPT.append(term)

    def layer(self):
        return self.Layer()


class KeptByHook(Plain):
    def __init__(self):
        super().__init__()
        seen = {}
        for number, block in enumerate(self.blocks):
            block.mlp.register_forward_hook(lambda module, inputs, output, key=number: seen.update({key: output}))


SCRIPT = types.ModuleType("script")
exec("terms = []\ndef keep(module, inputs, output):\n    terms.append(output)\n", vars(SCRIPT))
"""A script with a list of its own, and a hook that adds to it."""


class KeptByScript(Plain):
    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.mlp.register_forward_hook(SCRIPT.keep)


class KeptByPatch(Plain):
    """Terms in a list that a replaced forward of the last layers closes over."""

    def __init__(self):
        super().__init__()
        terms = []

        def forward(block, x):
            terms.append(x)
            return type(block).forward(block, x)

        for block in self.blocks:
            block.forward = partial(forward, block)


class KeptInClosure(Plain):
    """Terms in a list that a class within a function closes over."""

    def layer(self):
        return layer_in_closure()


@cache
def kind_in_closure():
    terms = []

    class Layer(Gated):
        def leave(self, term):
            terms.append(term)

    return Layer


def layer_in_closure():
    return kind_in_closure()()


class LastKept(Plain):
    """Returns and keeps what comes after the layers and before them, and detached what comes between."""

    class Layer(Gated):
        def leave(self, term):
            self.term = term.detach()

    def layers(self):
        blocks = nn.ModuleList([self.Layer(), self.Layer(), self.Layer()])
        for block in blocks:
            torch.nn.utils.weight_norm(block.gate)
        return blocks

    def forward(self, idx, targets=None):
        self.first = self.embed(idx)
        self.last = self.norm(self.run(self.first, idx))
        logits = self.head(self.last)
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        return logits, loss, [self.first, self.last]
