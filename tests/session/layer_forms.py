"""Models of users whose layers take and return other things than one tensor."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.session.models import Attention, Block
from tests.session.structures import MOST, WIDTH, Plain


class LayerOf(nn.Module):
    """A layer that gives and takes other things than one tensor."""

    def __init__(self, form):
        super().__init__()
        self.block, self.form = Block(WIDTH, 2), form

    def forward(self, *args, **kwargs):
        if self.form == "rotary":
            x, factors = args
            return self.block(x) * factors.cos()
        if self.form == "factors first":
            factors, x = args
            return self.block(x) * factors.cos()
        if self.form == "by keyword":
            return self.block(kwargs["x"]) * kwargs["factors"].cos()
        if self.form == "state":
            (state,) = args
            return State(x=self.block(state.x), depth=state.depth + 1)
        if self.form == "changed state":
            (state,) = args
            state.x = self.block(state.x)
            return None
        if self.form == "dictionary in and out":
            (state,) = args
            return {**state, "x": self.block(state["x"])}
        x = self.block(args[0])
        if self.form == "tuple":
            return x, None, x.detach().mean()
        if self.form == "list":
            return [x]
        return State(x=x, depth=1) if self.form == "dataclass" else {"x": x}


@dataclass
class State:
    x: torch.Tensor
    depth: int


class Formed(Plain):
    form = ""

    def layer(self):
        return LayerOf(self.form)


class TrainedRotary(Formed):
    """A module with weights of its own makes what every layer is given."""

    form = "rotary"

    def __init__(self):
        super().__init__()
        self.rotary = nn.Embedding(MOST, WIDTH)

    def run(self, x, idx):
        factors = self.rotary(torch.arange(idx.shape[1]))
        for block in self.blocks:
            x = self.call(block, x, factors)
        return x

    def call(self, block, x, factors):
        return block(x, factors)


class FactorsFirst(TrainedRotary):
    form = "factors first"

    def call(self, block, x, factors):
        return block(factors, x)


class ByKeyword(TrainedRotary):
    form = "by keyword"

    def call(self, block, x, factors):
        return block(factors=factors, x=x)


class Tuples(Formed):
    form = "tuple"

    def run(self, x, idx):
        for block in self.blocks:
            x, *_ = block(x)
        return x


class Lists(Formed):
    form = "list"

    def run(self, x, idx):
        for block in self.blocks:
            (x,) = block(x)
        return x


class Dictionaries(Formed):
    form = "dictionary"

    def run(self, x, idx):
        for block in self.blocks:
            x = block(x)["x"]
        return x


class DictionaryThrough(Formed):
    form = "dictionary in and out"

    def run(self, x, idx):
        state = {"x": x, "depth": 0}
        for block in self.blocks:
            state = block(state)
        return state["x"]


class StateThrough(Formed):
    form = "state"

    def run(self, x, idx):
        state = State(x=x, depth=0)
        for block in self.blocks:
            state = block(state)
        return state.x


class StateChanged(Formed):
    form = "changed state"

    def run(self, x, idx):
        state = State(x=x, depth=0)
        for block in self.blocks:
            block(state)
        return state.x


class Dataclasses(Formed):
    form = "dataclass"

    def run(self, x, idx):
        for block in self.blocks:
            x = block(x).x
        return x


class InPairs(Plain):
    """Each entry of the list is a list of two modules, which are called by themselves."""

    def layers(self):
        return nn.ModuleList(nn.ModuleList([Block(WIDTH, 2), nn.Linear(WIDTH, WIDTH)]) for _ in range(3))

    def run(self, x, idx):
        for block, linear in self.blocks:
            x = linear(block(x)) + x
        return x


class InGroups(Plain):
    """Lists of layers in a list."""

    def layers(self):
        return nn.ModuleList(nn.ModuleList([Block(WIDTH, 2), Block(WIDTH, 2)]) for _ in range(2))

    def run(self, x, idx):
        for group in self.blocks:
            for block in group:
                x = block(x)
        return x


class Attending(nn.Module):
    """Norm and attention, whose residual its user adds."""

    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention(WIDTH, 2, causal=True)

    def forward(self, x):
        return self.attention(self.norm(x))


def feed_forward():
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


class TwoLists(Plain):
    """Attention in one list, feed-forward in another, beside a third of norms."""

    def layers(self):
        self.attending = nn.ModuleList(Attending() for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        return nn.ModuleList(feed_forward() for _ in range(2))

    def run(self, x, idx):
        for attending, norm, feed in zip(self.attending, self.norms, self.blocks):
            x = norm(x + attending(x))
            x = x + feed(x)
        return x


class MoreHeads(Plain):
    """A list of heads that is longer than that of the layers."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(feed_forward() for _ in range(4))

    def end(self, x, targets):
        return super().end(sum(head(x) for head in self.heads), targets)


class OneAfterTheOther(Plain):
    """Two lists of layers of two classes, one after the other, and one that is never called."""

    def layers(self):
        self.first = nn.ModuleList(Attending() for _ in range(3))
        self.unused = nn.ModuleList(feed_forward() for _ in range(3))
        return super().layers()

    def run(self, x, idx):
        for attending in self.first:
            x = x + attending(x)
        return super().run(x, idx)


class OneIsUnused(OneAfterTheOther):
    """Tokens meet before its layers, and the last list is not called."""

    def layers(self):
        blocks = super().layers()
        del self.unused
        self.unused = nn.ModuleList(feed_forward() for _ in range(3))
        return blocks

    def run(self, x, idx):
        return super().run(x + nn.functional.pad(x, (0, 0, 1, 0))[:, :-1], idx)


class InTuples(Attending):
    def forward(self, x):
        return super().forward(x), None


class OneInTuples(TwoLists):
    """Attention returns its weights as well, as in transformers, feed-forward one tensor."""

    def layers(self):
        blocks = super().layers()
        self.attending = nn.ModuleList(InTuples() for _ in range(2))
        return blocks

    def run(self, x, idx):
        for attending, norm, feed in zip(self.attending, self.norms, self.blocks):
            x = norm(x + attending(x)[0])
            x = x + feed(x)
        return x


class ByTurns(Plain):
    """Attention and feed-forward by turns in one list."""

    def layers(self):
        return nn.ModuleList(make() for _ in range(2) for make in (Attending, feed_forward))

    def run(self, x, idx):
        for block in self.blocks:
            x = x + block(x)
        return x


class SomeWithoutAttention(Plain):
    """One of its layers has no attention."""

    def layers(self):
        blocks = nn.ModuleList(self.layer() for _ in range(3))
        blocks[1].attention = None
        for block in blocks:
            block.forward = partial(self.of_block, block)
        return blocks

    @staticmethod
    def of_block(block, x):
        x = x if block.attention is None else x + block.attention(block.norm1(x))
        return x + block.mlp(block.norm2(x))


class SomeConvolve(ByTurns):
    """Tokens meet in its feed-forward modules."""

    def layers(self):
        blocks = super().layers()
        blocks[1] = OverSlots()
        return blocks


class OverSlots(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3)

    def forward(self, x):
        return self.convolution(nn.functional.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2)


class TakenApart(Plain):
    """Its layers have no forward: the model calls their parts, in another order than that in which they have them."""

    def layers(self):
        return nn.ModuleList(nn.ModuleDict({"feed": feed_forward(), "attention": Attending()}) for _ in range(2))

    def run(self, x, idx):
        for block in self.blocks:
            x = x + block["attention"](x)
            x = x + block["feed"](x)
        return x


class Weights(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)


class ByWeights(Plain):
    """Its layers are weights alone, and the model computes with them."""

    def layer(self):
        return Weights()

    def run(self, x, idx):
        for block in self.blocks:
            y = (x @ block.w)[:, None]
            x = x + nn.functional.scaled_dot_product_attention(y, y, y, is_causal=True)[:, 0]
        return x


class OnlyLayer(Plain):
    """One layer, which is an attribute."""

    def layers(self):
        return self.layer()

    def run(self, x, idx):
        return self.blocks(x)


class ByMethods(Plain):
    """Parts of layers are called, the layers are not."""

    def run(self, x, idx):
        for block in self.blocks:
            x = x + block.attention(block.norm1(x))
            x = x + block.mlp(block.norm2(x))
        return x


class OneAgainAndAgain(Plain):
    """A list of one layer, called three times."""

    def layers(self):
        return nn.ModuleList([self.layer()])

    def run(self, x, idx):
        for _ in range(3):
            x = self.blocks[0](x)
        return x


class CheckpointsItself(Plain):
    """Its forward recomputes layers by torch's own function."""

    use_reentrant = False

    def run(self, x, idx):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


class CheckpointsReentrantly(CheckpointsItself):
    """Where all before the layers is frozen, its user makes their input require a gradient, as torch needs it here."""

    use_reentrant = True

    def run(self, x, idx):
        return super().run(x if x.requires_grad else x.requires_grad_(), idx)


class CheckpointsAttention(Plain):
    """Each layer recomputes its attention itself; every other by the reentrant kind, which has no ``.grad()``."""

    use_reentrant = True

    def layer(self):
        block = super().layer()
        inner, use_reentrant = block.attention.forward, self.use_reentrant
        self.use_reentrant = not use_reentrant
        block.attention.forward = lambda x: checkpoint(inner, x, use_reentrant=use_reentrant)
        return block


class CheckpointsInside(Plain):
    def layer(self):
        block = super().layer()
        inner = block.mlp.forward
        block.mlp.forward = lambda x: checkpoint(inner, x, use_reentrant=False)
        return block
