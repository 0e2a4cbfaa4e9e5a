"""What forwards leave behind in a model is harmless, or refused by its name; a loss that is nan is named as such."""

import random
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from torch import nn

import lengthwise as lw
from lengthwise.core.errors import CheckError
from lengthwise.runtime.wrap.state_between_calls import StateBetweenCalls
from tests.session.structure_runs import OPTIONS, rows
from tests.session.structures import Plain

SHORT = 6


class Adding(Plain):
    """Adds more or less of a row to its hidden states."""

    def with_more(self, x, idx, share):
        return Plain.run(self, x, idx) + share * self.places.weight[0]


class Switching(Adding):
    """Computes otherwise from its first short sequence on, as a word says."""

    def __init__(self):
        super().__init__()
        self.kind = "sparse"

    def run(self, x, idx):
        if idx.shape[1] < SHORT:
            self.kind = "full"
        return self.with_more(x, idx, self.kind == "full")


class SwitchingConfig(Adding):
    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(kind="sparse")

    def run(self, x, idx):
        if idx.shape[1] < SHORT:
            self.config.kind = "full"
        return self.with_more(x, idx, self.config.kind == "full")


class SwitchingPair(Adding):
    """The word is within a tuple, which is None at first."""

    def __init__(self):
        super().__init__()
        self.kinds = None

    def run(self, x, idx):
        if idx.shape[1] < SHORT:
            self.kinds = ("full", 1)
        return self.with_more(x, idx, self.kinds is not None)


class Exchanging(Plain):
    """Has another module from its first short sequence on."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Tanh()

    def run(self, x, idx):
        if idx.shape[1] < SHORT:
            self.gate = nn.Identity()
        return self.gate(super().run(x, idx))


class LongestSeen(Adding):
    def __init__(self):
        super().__init__()
        self.longest = 1

    def run(self, x, idx):
        self.longest = max(self.longest, idx.shape[1])
        return self.with_more(x, idx, 1e-2 * self.longest)


KEEPING = {
    Switching: "kind, which became 'full'", SwitchingConfig: "config.kind, which became 'full'",
    SwitchingPair: r"kinds\[0\], which became 'full'", Exchanging: r"gate \(the module\)", LongestSeen: "longest",
}  # fmt: skip


@pytest.mark.first_cells(2)
@pytest.mark.parametrize(("kind", "attribute"), KEEPING.items(), ids=[kind.__name__ for kind in KEEPING])
def test_what_a_forward_sets_and_later_ones_depend_on_is_refused_by_name(kind, attribute):
    model = kind().double()
    with pytest.raises(CheckError, match=rf"keeps state between calls, such as its attribute {attribute}"):
        lw.prepare(model, rows(), steps=1, packing="never", **OPTIONS)
    assert getattr(model, "kind", "sparse") == "sparse", "a check leaves nothing behind"
    if isinstance(model, SwitchingConfig):
        assert model.config.kind == "sparse"


class Harmless(Plain):
    """Keeps a table, a count, the last length and a word of it, none of which is used for anything else."""

    def __init__(self):
        super().__init__()
        self.table, self.calls, self.seen, self.mode = None, 0, {}, "whole"

    def run(self, x, idx):
        if self.table is None or len(self.table) < idx.shape[1]:
            self.table = torch.ones(2 * idx.shape[1], 1, dtype=x.dtype)
        self.calls, self.mode, self.seen["length"] = self.calls + 1, "whole", idx.shape[1]
        self.form = "short" if idx.shape[1] < SHORT else "long"
        return super().run(x * self.table[: idx.shape[1]], idx)


@pytest.mark.parametrize("packing", ["always", "never"])
def test_what_changes_nothing_may_be_kept(packing):
    lw.prepare(Harmless().double(), rows(), steps=1, packing=packing, **OPTIONS).close()


def big_bird(kind):
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BigBirdConfig(
        vocab_size=71, attention_type=kind, block_size=2, num_random_blocks=1, max_position_embeddings=64, **sizes
    )
    return transformers.BigBirdForMaskedLM(config)


def test_big_bird_is_refused_that_goes_over_to_full_attention_and_trained_with_that():
    items = [{"input_ids": row, "labels": row} for row in rows()]
    with pytest.raises(CheckError, match=r"attention_type, which became 'original_full'.*config.attention_type='orig"):
        lw.prepare(big_bird("block_sparse"), items, steps=1, **OPTIONS)
    lw.prepare(big_bird("original_full"), items, steps=1, **OPTIONS).close()


class WithoutNumber(Plain):
    """Its loss is nan for short sequences."""

    def end(self, x, targets):
        logits, loss = super().end(x, targets)
        return logits, loss if loss is None or x.shape[1] > SHORT else loss * float("nan")


def test_a_loss_that_is_nan_is_said_to_be_with_its_lengths():
    with pytest.raises(CheckError, match=r"the loss of WithoutNumber is nan for sequences of 2 slots alone"):
        lw.prepare(WithoutNumber().double(), rows(), steps=1, **OPTIONS)


class Odd:
    """Cannot be looked into."""

    @property
    def __dict__(self):
        raise RuntimeError("not now")


def test_attributes_that_cannot_be_read_are_no_reason_to_fail():
    model = Plain().double()
    with torch.inference_mode():
        model.table = torch.ones(3)
    model.graph, model.odd = torch.eye(3).to_sparse(), Odd()
    shared = {number: [0.0] * 100 for number in range(1000)}
    for module in model.modules():
        module.shared = shared
    lw.prepare(model, rows(), steps=1, **OPTIONS).close()


class Drawing(Plain):
    """Draws from a generator of its own."""

    def __init__(self):
        super().__init__()
        self.noise = torch.Generator()

    def run(self, x, idx):
        return super().run(x * torch.rand(x.shape[2], generator=self.noise).to(x), idx)


def test_a_generator_of_a_models_own_is_refused_by_its_name():
    said = r"draws from noise \(torch's Generator\), a random generator of its own.*; leave the generator out"
    with pytest.raises(CheckError, match=said):
        lw.prepare(Drawing().double(), rows(), steps=1, **OPTIONS)


GENERATOR = np.random.default_rng(0)


class OfModule(nn.Module):
    """Draws from a generator that its module of Python has."""

    def forward(self):
        GENERATOR.random()


class OfAttribute(nn.Module):
    """Draws from a generator in a list."""

    def __init__(self, generator, draw):
        super().__init__()
        self.held, self.draw = [generator], draw

    def forward(self):
        self.draw(self.held[0])


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (OfModule(), r"GENERATOR of tests\.session\.test_state_between_calls \(numpy's Generator\)"),
        (OfAttribute(np.random.RandomState(0), lambda held: held.rand()), r"held \(numpy's RandomState\)"),
        (OfAttribute(random.Random(0), lambda held: held.random()), r"held \(random's Random\)"),
    ],
    ids=["of the module", "numpy's", "Python's"],
)
def test_generators_of_any_kind_are_named_where_they_were_drawn_from(model, name):
    state = StateBetweenCalls(model)
    assert "draws from" not in state.described()
    model()
    with pytest.raises(CheckError, match=rf"draws from {name}, a random generator of its own"):
        raise state.error()


class Wondering(Plain):
    """Warns of what its data does not have."""

    def run(self, x, idx):
        if idx.shape[1] not in (12, 20):
            warnings.warn("an odd length", stacklevel=1)
        return super().run(x, idx)


def test_made_up_sequences_warn_of_nothing_and_end_nothing_where_warnings_are_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lw.prepare(Wondering().double(), [[1] * 12, [2] * 20], steps=1, **OPTIONS).close()
