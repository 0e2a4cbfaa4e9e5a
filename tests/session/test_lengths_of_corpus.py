"""Models that fail with sequences of other lengths than their corpus has are compared and trained at those."""

import copy

import numpy as np
import pytest
import torch

import lengthwise as lw
from lengthwise.core.errors import InputError
from lengthwise.runtime.profile.measured_packs import FEWEST, packs_of_corpus
from lengthwise.runtime.wrap.model_accessors import input_embeddings, output_embeddings, readable
from tests.session import models
from tests.session.loops import as_started_by_torchrun

pytestmark = pytest.mark.usefixtures("unchecked")

OPTIONS = {"lr": 0.1, "optimizer": torch.optim.SGD, "clip_norm": 0.0, "steps": 1, "sequences_per_step": 4}
OPTIONS |= {"memory_gib": 40, "verbose": False}
BLOCK = 8
EXACT = 1e-11


class Blocks(models.GPT):
    """Computes whole blocks of tokens alone, as models with landmarks do, and says nothing of its embedding."""

    def get_input_embeddings(self):
        raise NotImplementedError("not auto-handled")

    def get_output_embeddings(self):
        raise NotImplementedError("not auto-handled")

    def forward(self, idx, targets=None):
        return super().forward(idx.unflatten(1, (-1, BLOCK)).flatten(1), targets)


class Silent(Blocks):
    """Fails at any length."""

    def forward(self, idx, targets=None):
        raise RuntimeError("expected 3 channels")


def rows_of(*slots):
    """Rows of one token more than slots: the last is a target alone."""
    return [np.random.default_rng(length).integers(0, models.VOCAB, length + 1) for length in slots]


def prepared(model, rows, **options):
    as_started_by_torchrun()
    items = [{"input_ids": row[:-1], "labels": row[1:]} for row in rows]
    return lw.prepare(model, items, objective="every-token", **OPTIONS, **options)


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("options", [{"cost": models.mixed_cost()}, {"packing": "never"}])
@pytest.mark.parametrize("slots", [pytest.param((16, 16, 16, 16), marks=pytest.mark.deep), (8, 24, 40, 8)])
def test_a_model_of_whole_blocks_is_trained_on_a_corpus_of_them(caplog, tmp_path, options, slots):
    torch.manual_seed(0)
    model = Blocks().double()
    stock, rows = copy.deepcopy(model), rows_of(*slots)
    run = prepared(model, rows, profile=tmp_path / "profile.json", **options)
    for step in run.steps():
        for micro_batch in step:
            step.backward(model(**micro_batch.inputs)[1])
        step.update()
    run.close()
    for row in rows:
        tokens = torch.as_tensor(row)[None]
        (stock(tokens[:, :-1], tokens[:, 1:])[1] * (len(row) - 1) / sum(slots)).backward()
    torch.optim.SGD(stock.parameters(), lr=OPTIONS["lr"]).step()
    weights = dict(model.named_parameters())
    for name, value in stock.named_parameters():
        torch.testing.assert_close(weights[name], value, rtol=EXACT, atol=EXACT)
    if "packing" not in options:
        assert "a length that the corpus need not have" in caplog.text and "inputs=" not in caplog.text


def test_one_that_fails_at_these_as_well_is_refused_with_them():
    with pytest.raises(
        InputError, match=r"with one sequence, of 40 or 8 slots, .*expected 3 channels\); say how it is"
    ):
        prepared(Silent().double(), rows_of(8, 24, 40, 8), cost=models.mixed_cost())


@pytest.mark.parametrize(("slots", "longest"), [((64, 64, 64), 128), ((24, 8, 16), 48), ((4000, 1, 70), 8000)])
def test_packs_of_the_corpus_suffice_for_a_profile(slots, longest):
    packs = packs_of_corpus(slots, longest, slot_tokens=2)
    assert len(packs) >= FEWEST and {length // 2 for pack in packs for length in pack} == {*slots, longest // 2}
    assert [sum(pack) for pack in packs] == sorted(sum(pack) for pack in packs)


def test_what_a_model_does_not_say_of_itself_is_not_asked_for():
    class Config:
        @property
        def eos_token_id(self):
            raise ValueError("set by the tokenizer")

    class Named(models.GPT):
        def get_input_embeddings(self):
            return self.tokens

    assert input_embeddings(Blocks()) is None and output_embeddings(Blocks()) is None
    model = Named()
    assert input_embeddings(model) is model.tokens and output_embeddings(model) is None
    assert readable(Config(), "eos_token_id") is None and readable(Config(), "pad_token_id", 3) == 3
