"""Where outputs of a pack begin to differ is named: the layer, the module, and what it calls in which slots meet."""

from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lengthwise.core.errors import InputError
from lengthwise.runtime.verify import first_difference
from lengthwise.runtime.verify.first_difference import DIFFERS, locate_difference
from lengthwise.runtime.wrap.collator import PackCollator
from lengthwise.runtime.wrap.wrapped_model import WrappedModel
from tests.runtime.loop.memory_runs import run_of
from tests.runtime.loop.modules import HEADS, VOCAB, WIDTH
from tests.runtime.loop.runs import DENSE, Case, Source, Stream
from tests.runtime.loop.test_plain_modules import LOGITS, built
from tests.runtime.train.runs import local_world


class Mixer(nn.Module):
    """Adds ``scale`` times the number of slots so far to 1."""

    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        return 1.0 + self.scale * torch.full_like(x, 1.0).cumsum(1)


class Counted(nn.Module):
    def forward(self, tokens):
        return tokens.cumsum(1).double()


class Layer(nn.Module):
    def __init__(self, place, number):
        super().__init__()
        self.qkv, self.norm, self.place = nn.Linear(WIDTH, 3 * WIDTH), nn.LayerNorm(WIDTH), place
        self.last_norm, self.end = nn.LayerNorm(WIDTH), f"the end of layer {number}"
        self.mixer = Mixer(1.0) if place == f"a module of layer {number}" else nn.Identity()

    def forward(self, x):
        q, k, v = (z.unflatten(-1, (HEADS, -1)).transpose(1, 2) for z in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        if self.place == "layers themselves":
            x = x + x.flip(1) + x.cumsum(1) + x.roll(1, 1)
        x = x + self.mixer(self.last_norm(x))
        if self.place == self.end:
            x = x + x.flip(1)
        counts = torch.tensor([x.shape[1]] * x.shape[1])  # what is no hidden state is not compared
        return counts, 0.5, x.sum(), x


class Model(nn.Module):
    """Whose slots meet in one place."""

    def __init__(self, place="", scale=0.0):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.aside, self.extra = Mixer(scale), nn.Identity()
        self.counted = Counted() if place == "counted tokens" else nn.Identity()
        self.stem = nn.Conv1d(WIDTH, WIDTH, 3, padding=1) if place == "the stem" else nn.Identity()
        self.layers, self.place = nn.ModuleList(Layer(place, number) for number in range(2)), place

    def forward(self, tokens):
        x = self.embedding(tokens) + 0 * self.counted(tokens)[..., None]
        x = self.stem(x.transpose(1, 2)).transpose(1, 2) + 0 * self.aside(x)
        for layer in self.layers:
            *_, x = layer(x)
        if x.shape[1] in (4, 8):  # of the pack, or of half of it
            x = self.extra(x)
        if self.place == "before the head":
            x = x + x.roll(1, 1)
        if self.place == "a spectrum":
            x = x + torch.fft.fft(x, dim=1).real
        if self.place == "nan":
            x = x * (torch.nan if x.shape[1] in (4, 8) else 1.0)  # of the pack, or of half of it
        logits = self.head(x)
        return logits + (logits.flip(1) if self.place == "the end" else 0)


class Twice(Model):
    """Calls its modules again on the tokens in reverse order, as models of both strands of DNA do."""

    def forward(self, tokens):
        return super().forward(tokens) + super().forward(tokens.flip(1)).flip(1)


class Broadcast(Model):
    """Adds a vector for each sequence to hidden states [1, slots, width]: in a pack to as many copies of them."""

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = self.extra(x + torch.ones(3 if x.shape[1] == 10 else 1, 1, WIDTH, dtype=x.dtype))
        for layer in self.layers:
            *_, x = layer(x)
        return self.head(x)[:1]


def traced(model, lengths):
    case = Case(build=lambda: model, **LOGITS)
    return run_of(
        WrappedModel(model, loss=case.loss), local_world(), stream=Stream(case=case), planner=lambda batch: None,
        collator=PackCollator(source=Source(lengths), objective=case.objective), optimizer=DENSE, lr=lambda step: 1.0,
        num_steps=1,
    )  # fmt: skip


def located(build, lengths=(3, 5), alone=False):
    """What every rank is told, if all share the pack, or the first one has it alone."""
    run = traced(build(), lengths)
    world = run.world
    group = run.alone if world.size == 1 else world.groups.of(tuple(range(world.size)))
    if alone:
        group = run.alone if world.is_first else None
    try:
        return locate_difference(run, lengths, group, (False, True))
    finally:
        run.close()


AGREE = "The outputs of all its modules agree, so the difference is in its loss, or in its backward"
PLACES = {
    "": AGREE,
    "the stem": "It begins in stem (Conv1d, which calls conv1d), whose output differs by ",
    "a module of layer 0": "It begins in layer 0 (Layer), in mixer (Mixer, which calls cumsum), whose output",
    "a module of layer 1": "It begins in layer 1 (Layer), in mixer (Mixer, which calls cumsum), whose output",
    "layers themselves": "It begins in layer 0 (Layer) itself, which calls roll, cumsum, before its last_norm, ",
    "counted tokens": "It begins in counted (Counted, which calls cumsum), whose output differs by ",
    "the end of layer 1": "It begins in layer 1 (Layer) itself, which calls flip, sum, whose output differs by ",
    "before the head": "It begins in the forward of Model itself, which calls roll, before its head, whose output",
    "a spectrum": "It begins in the forward of Model itself, which calls fft, before its head, whose output",
    "the end": "It begins in the forward of Model itself, which calls flip, whose output differs by ",
    "nan": "It begins in the forward of Model itself, before its head, whose output differs by inf",
}


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.deep), 2])
@pytest.mark.parametrize("place", PLACES)
def test_the_first_place_where_slots_meet_is_named_alike_on_every_rank(ranks, place, num_ranks):
    for told in ranks(num_ranks).run(located, partial(built, Model, place)):
        assert told.startswith(PLACES[place]), told
        assert told.endswith(". check=False trains it all the same")


def test_a_module_that_is_called_again_is_compared_in_each_of_its_calls(ranks):
    (told,) = ranks(1).run(located, partial(built, Twice))
    place = "the forward of Twice itself, which calls flip, before its embedding (call 2), whose output differs by "
    assert told.startswith(f"It begins in {place}"), told


def test_an_output_with_a_row_for_each_sequence_is_named_by_its_shape(ranks):
    (told,) = ranks(1).run(located, partial(built, Broadcast), lengths=(5, 3, 2))
    place = "the forward of Broadcast itself, before its extra, whose output has the shape (3, 10, 32)"
    assert told.startswith(f"It begins in {place} in the place of (1, 10, 32): a tensor with a row for each seq"), told


def test_a_difference_is_relative_to_the_largest_output_and_more_than_rounding(ranks):
    """The second sequence counts three more than alone, up to 1 + 5 ``scale``."""
    for scale, told in ((1.0, "It begins in aside (Mixer, which calls cumsum), whose output differs by 5.0e-01"),
                        (1.01 * DIFFERS / 3, "It begins in aside (Mixer"), (0.99 * DIFFERS / 3, AGREE)):  # fmt: skip
        for text in ranks(1).run(located, partial(built, Model, "", scale)):
            assert text.startswith(told), text


def test_ranks_without_the_pack_are_told_the_same_and_padding_is_not_compared(ranks):
    texts = ranks(2).run(located, partial(built, Model, "the stem"), alone=True)
    assert texts[0] == texts[1] and "begins in stem" in texts[0]
    for text in ranks(2).run(located, partial(built, Model), lengths=(1,)):
        assert text.startswith(AGREE)


def test_what_cannot_be_compared_is_refused_all_the_same_and_no_hook_stays(ranks):
    assert ranks(1).run(compared_in_vain) == [None]


def compared_in_vain():
    run = traced(built(Model), (3, 5))
    hooks = [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in run.model.modules()]
    assert locate_difference(run, (3, 5), run.alone, ()).startswith(AGREE)
    assert hooks == [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in run.model.modules()]
    for kind in (InputError, RuntimeError, IndexError, KeyError):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(first_difference, "_compare", mock.Mock(side_effect=kind("no")))
            assert locate_difference(run, (3, 5), run.alone, ()).startswith(AGREE)
    run.close()
