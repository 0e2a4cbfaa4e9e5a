"""Models that compute large packs otherwise than small ones have packs that they compute as they do sequences."""

import logging
import re
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lengthwise as lw
from lengthwise.core.errors import InputError
from lengthwise.runtime.verify.crowded_packs import _computed
from lengthwise.runtime.verify.float64_mode import noise_free
from tests.session.loops import train_video
from tests.session.models import VOCAB, Block
from tests.session.structure_runs import OPTIONS, plan_of
from tests.session.structures import LAYERS, WIDTH, Plain

LONGEST = 60
CAPACITY = 150
"""Tokens that an expert takes: more than the longest sequence has, and fewer than the corpus."""


class Expert(nn.Module):
    """The first tokens of a forward go through it, up to its capacity."""

    capacity = CAPACITY

    def __init__(self, mlp):
        super().__init__()
        self.mlp = mlp

    def forward(self, x):
        return torch.cat([self.mlp(x[:, : self.capacity]), 0.0 * x[:, self.capacity :]], 1)


class Experts(Plain):
    def layers(self):
        blocks = super().layers()
        for block in blocks:
            block.mlp = Expert(block.mlp)
        return blocks


class Asserting(Plain):
    """Asserts that no forward is longer than the longest sequence, as nanoGPT does."""

    def run(self, x, idx):
        assert idx.shape[1] <= LONGEST, f"a forward of {idx.shape[1]} tokens"
        return super().run(x, idx)


class Few(Experts):
    """Experts that take less than the longest sequence; what is beyond is left out there as well."""

    def layers(self):
        blocks = super().layers()
        for block in blocks:
            block.mlp.capacity = LONGEST // 2
        return blocks


class Statistics(Plain):
    """Layers return a number of each slot, and one of each pair of slots, before the hidden states."""

    class Layer(Block):
        def forward(self, x):
            x = super().forward(x)
            return x.detach()[0].norm(dim=-1), x.detach()[0] @ x.detach()[0].mT, x

    def layer(self):
        return self.Layer(WIDTH, 2)

    def run(self, x, idx):
        for block in self.blocks:
            x = block(x)[2]
        return x


class Chunks(Plain):
    """Its loss is the mean of those of chunks, which are longer than any sequence."""

    def end(self, x, targets):
        logits, loss = super().end(x, targets)
        if targets is None:
            return logits, loss
        chunks = zip(logits[0].split(CAPACITY), targets[0].split(CAPACITY))
        return logits, torch.stack([F.cross_entropy(rows, of_rows) for rows, of_rows in chunks]).mean()


class Memory(Plain):
    """After its layers a token reads what lies as far back as no sequence goes."""

    def end(self, x, targets):
        return super().end(x + F.pad(x, (0, 0, CAPACITY, 0))[:, : x.shape[1]], targets)


class Sharper(Plain):
    """Its logits are sharper in longer forwards, beyond the longest sequence."""

    def end(self, x, targets):
        logits, _ = super().end(x, None)
        logits = logits * max(1.0, x.shape[1] / CAPACITY)
        return logits, None if targets is None else F.cross_entropy(logits[0], targets[0])


def corpus():
    drawn = np.random.default_rng(0)
    return [drawn.integers(0, VOCAB, length) for length in (LONGEST, *[9, 14, 5] * 10)]


def weights_of_a_loop(model):
    rows, lr = corpus(), OPTIONS["lr"]
    total = sum(len(row) - 1 for row in rows)
    for row in rows:
        tokens = torch.as_tensor(row)[None]
        targets = torch.cat([tokens[:, 1:], torch.full((1, 1), -100)], 1)
        (model(tokens, targets)[1] * (len(row) - 1) / total).backward()
    return [value.detach() - lr * value.grad for value in model.parameters()]


def made(kind):
    torch.manual_seed(0)
    return kind().double()


def train(run, model, expected, sizes=None):
    """The largest difference of a weight after the steps; ``sizes`` gets the tokens of each pack."""
    for step in run.steps():
        for micro_batch in step:
            step.backward(model(**micro_batch.inputs)[1])
            if sizes is not None:
                sizes.append(sum(micro_batch.pack.lengths))
        step.update()
    difference = max(float((a - b.detach()).abs().max()) for a, b in zip(expected, model.parameters()))
    run.close()
    return difference


def test_a_model_that_computes_a_sequence_otherwise_in_any_pack_is_computed_sequence_by_sequence(caplog):
    expected, model = weights_of_a_loop(made(Few)), made(Few)
    run = lw.prepare(model, corpus(), steps=1, **{**OPTIONS, "sequences_per_step": 31})
    assert run.wrapped_model.by_sequence is not None
    assert train(run, model, expected) < 1e-12


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(
    ("kind", "limit", "reason"),
    [
        (Experts, LONGEST, r"computes something else of two sequences in a pack of \d+ slots than in one of 18"),
        (Asserting, LONGEST, r"AssertionError: a forward of \d+ tokens"),
        pytest.param(Chunks, LONGEST, "makes another loss of two sequences in a pack", marks=pytest.mark.deep),
        (Memory, LONGEST, "computes something else of two sequences in a pack"),
        pytest.param(Sharper, LONGEST, "computes something else of two sequences in a pack", marks=pytest.mark.deep),
        (Plain, None, ""),
        pytest.param(Statistics, None, "", marks=pytest.mark.deep),
    ],
)
def test_packs_are_as_large_as_the_longest_sequence_where_larger_ones_are_computed_otherwise(
    kind, limit, reason, caplog
):
    expected, model, options = (
        weights_of_a_loop(made(kind)),
        made(kind),
        {**OPTIONS, "sequences_per_step": 31, "policy": "auto"},
    )
    with caplog.at_level(logging.WARNING, logger="lengthwise"):
        run = lw.prepare(model, corpus(), steps=1, packing="always", **options)
    assert bool(reason) == ("packs have at most 60 tokens, as the longest sequence has:" in caplog.text)
    assert re.search(reason, caplog.text)
    sizes: list[int] = []
    assert train(run, model, expected, sizes) < 1e-12
    assert (max(sizes) <= LONGEST) == (limit is not None)


@pytest.mark.deep
def test_what_is_drawn_by_sequence_is_no_difference():
    """Masks of tokens, and the noise of a model of frames."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2, intermediate_size=WIDTH, vocab_size=VOCAB
    )
    options = {**OPTIONS, "packing": "always", "sequences_per_step": 31}
    run = lw.prepare(BertForMaskedLM(config).double(), corpus(), steps=1, mask_token_id=VOCAB - 1, **options)
    assert run.wrapped_model.most_slots is None
    run.close()
    frames = {"steps": 1, "sequences_per_step": 4, "lr": 1e-2, "optimizer": "sgd", "policy": "static", "verbose": False}
    train_video({**frames, "cost": OPTIONS["cost"], "memory_gib": 1000, "packing": "always"})


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.deep), torch.bfloat16])
def test_losses_of_logits_that_are_not_made_are_compared_as_well(dtype):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2, intermediate_size=WIDTH, vocab_size=VOCAB
    )
    run = lw.prepare(LlamaForCausalLM(config).to(dtype), corpus(), steps=1, **{**OPTIONS, "sequences_per_step": 31})
    assert run.wrapped_model.by_sequence is None and run.wrapped_model.most_slots is None
    with noise_free(run):
        few, many = (_computed(run, (11, 7), copies, 2) for copies in (1, 16))
    assert few.gradients[0].shape == (18, WIDTH) and many.gradients[0].shape == (16 * 18, WIDTH)
    assert many.gradients[0].norm() == pytest.approx(4 * float(few.gradients[0].norm()), rel=0.02)
    run.close()


def test_a_plan_of_a_loop_whose_packs_are_too_large_is_refused():
    model = made(Experts)
    run = lw.prepare(model, corpus(), steps=1, **{**OPTIONS, "sequences_per_step": 31})
    run.planner = partial(plan_of, "alone", LAYERS, 1, True)
    with pytest.raises(InputError, match=rf"pipelines\[0\] has a pack of \d+ tokens, and .* at most {LONGEST}"):
        next(run.steps())
    run.close()
