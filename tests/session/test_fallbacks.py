"""Models that packs, or layers computed again, would change are computed by what is exact, with a warning of it."""

import logging
import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lengthwise as lw
from lengthwise.core.errors import CheckError, InputError
from lengthwise.session.fallbacks import reason_of
from tests.runtime.harness import with_check
from tests.session import models
from tests.session.loops import as_started_by_torchrun, weights_of
from tests.session.structure_runs import OPTIONS, build, plan_of, rows, train_alone
from tests.session.test_made_labels import prompt_hidden
from tests.session.test_partial_calls import llama

OWN_PLANS = {**OPTIONS, "steps": 1, "cost": models.mixed_cost(), "memory_gib": 40}
BY_ITSELF = "no layer of {} is recomputed, as by recompute='none': exact, but what all layers save must fit"


class WithMask(models.Attention):
    """Attends by a mask that its model leaves on it."""

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(-3, -2) for part in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
        return self.out(y.transpose(-3, -2).flatten(-2))


class Documents(models.GPT):
    """Tokens see nothing beyond the last token 5."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.attention = WithMask(24, 4, causal=True)

    def forward(self, idx, targets=None):
        documents = (idx == 5).cumsum(1)
        for block in self.blocks:
            block.attention.mask = (documents[:, :, None] == documents[:, None]).tril()[:, None]
        return super().forward(idx, targets)


def step_of(model):
    """Whether it is computed in packs, and its weights after a step."""
    run = lw.prepare(model, rows(), **OWN_PLANS)
    step = next(run.steps())
    assert not any(any(p.scheme_of(m).recompute) for p in step.plan.pipelines for m in p.micro_batches)
    for micro_batch in step:
        step.backward(model(**micro_batch.inputs)[1])
    step.update()
    run.close()
    return run.wrapped_model.by_sequence is None, dict(model.named_parameters())


@pytest.mark.parametrize("is_packed", [pytest.param(False, marks=pytest.mark.deep), True])
def test_layers_that_cannot_be_recomputed_are_not_by_themselves(caplog, is_packed):
    torch.manual_seed(0)
    make = (lambda: build("layer_forms.StateChanged")) if is_packed else (lambda: Documents().double())
    model = make()
    stock = make()
    stock.load_state_dict(model.state_dict())
    _, (expected,) = train_alone(stock, 1)
    with caplog.at_level("WARNING", logger="lengthwise"):
        in_packs, weights = step_of(model)
    assert in_packs == is_packed
    assert BY_ITSELF.format(type(model).__name__) in caplog.text
    assert caplog.text.count("is computed sequence by sequence") == (not is_packed)
    assert "set recompute='none' for them" in caplog.text and "check=False" not in caplog.text
    for name, value in expected.items():
        torch.testing.assert_close(weights[name].detach(), value, rtol=0, atol=1e-10)


def test_what_was_asked_for_is_refused_instead():
    message = r"every layer recomputed.*cannot be recomputed; set recompute='none' for them"
    with pytest.raises((InputError, CheckError), match=message):
        lw.prepare(Documents().double(), rows(), **{**OWN_PLANS, "recompute": "all"})


@pytest.mark.parametrize("recompute", [pytest.param("none", marks=pytest.mark.deep), "all"])
def test_what_layers_recompute_themselves_is_left_to_plans(caplog, recompute):
    model = build("layer_forms.CheckpointsAttention")
    stock = build("layer_forms.CheckpointsAttention")
    stock.load_state_dict(model.state_dict())
    _, (expected,) = train_alone(stock, 1)
    run = lw.prepare(model, rows(), **{**OWN_PLANS, "recompute": recompute, "packing": "always"})
    for step in run.steps():
        for micro_batch in step:
            step.backward(model(**micro_batch.inputs)[1])
        step.update()
    run.close()
    assert caplog.text.count("the model's activation checkpointing is left out: plans choose") == 1
    weights = dict(model.named_parameters())
    for name, value in expected.items():
        torch.testing.assert_close(weights[name].detach(), value, rtol=0, atol=1e-10)


class Weighted(models.GPT):
    """Its loss weighs one token more than others, so that a pack's is no mean of those of its sequences."""

    def forward(self, idx, targets=None):
        logits, _ = super().forward(idx)
        weights = torch.ones(models.VOCAB, dtype=logits.dtype)
        weights[:20] = 3.0
        losses = nn.functional.cross_entropy(logits[0], targets[0], ignore_index=-100, reduction="none")
        weights = weights[targets[0].clamp(min=0)] * (targets[0] != -100)
        return logits, (losses * weights).sum() / weights.sum()


def test_a_difference_that_is_there_without_recompute_is_not_laid_to_it():
    with pytest.raises(CheckError, match=r"in its loss, or in its backward\. check=False") as refused:
        lw.prepare(Weighted().double(), rows(), **{**OWN_PLANS, "recompute": "all", "packing": "always"})
    assert "every layer recomputed)" in str(refused.value) and "recompute='none'" not in str(refused.value)


def trained_with_made_labels():
    """Whether packs of two ranks were shared and what was said, of a model that shifts the labels of ``inputs=``."""
    as_started_by_torchrun()
    model, said = llama(), []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("lengthwise").addHandler(handler)

    def inputs(micro_batch):
        own = torch.cat([prompt_hidden(torch.as_tensor(row)) for row in micro_batch.sequences])
        return {"input_ids": micro_batch.tokens[None], "labels": micro_batch.own(own)[None]}

    run = lw.prepare(model, rows(), inputs=inputs, **OWN_PLANS | {"policy": "auto"})
    for step in run.steps():
        degrees = {p.scheme.degree for p in step.plan.pipelines}
        for micro_batch in step:
            step.backward(model(**micro_batch.inputs).loss)
        step.update()
    run.close()
    logging.getLogger("lengthwise").removeHandler(handler)
    return run.wrapped_model.by_sequence is None, degrees, said, weights_of(model)


def test_packs_that_ranks_cannot_share_are_packs_of_single_ranks(ranks):
    stock = llama()
    tokens = [torch.as_tensor(row) for row in rows()]
    counts = [int((prompt_hidden(row)[1:] != -100).sum()) for row in tokens]
    for row, count in zip(tokens, counts):
        (stock(input_ids=row[None], labels=prompt_hidden(row)[None]).loss * count / sum(counts)).backward()
    for number, (in_packs, degrees, said, weights) in enumerate(ranks(2).run(with_check, trained_with_made_labels)):
        assert in_packs and degrees == {1}
        if number == 0:
            assert any("no two ranks share a sequence of LlamaForCausalLM, as by max_degree=1" in text for text in said)
        for name, parameter in stock.named_parameters():
            expected = (parameter - OPTIONS["lr"] * parameter.grad).detach()
            torch.testing.assert_close(torch.from_numpy(weights[name]), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (
            "A asks for a mask of its own; switch that off, or have it computed sequence by sequence (packing='never')",
            "A asks for a mask of its own; switch that off",
        ),
        (
            "A cannot: set it before prepare and leave it, or compute sequence by sequence, with packing='never' of it",
            "A cannot: set it before prepare and leave it",
        ),
        ("x.a and x.b have 2 layers each; say which: prepare(..., layers='x.a')", None),
        (
            "the forward of A fails with 7 slots (odd); say how it is called with inputs=",
            "the forward of A fails with 7 slots (odd)",
        ),
    ],
)
def test_reasons_advise_nothing_that_is_done_or_not_needed(message, reason):
    assert reason_of(InputError(message)) == (reason or message)
    is_of_call = " fails " in message
    at_other_lengths = reason_of(InputError(message), is_of_length=True)
    assert at_other_lengths.endswith(", a length that the corpus need not have") is is_of_call


class ShiftedByPositions(models.GPT):
    """Adds what the token before has, which is none where positions begin again: exact in packs, not in shards."""

    def forward(self, idx, targets=None, position_ids=None):
        places = torch.arange(idx.shape[1]) if position_ids is None else position_ids
        return super().forward((idx + F.pad(idx, (1, -1)) * (places != 0)) % models.VOCAB, targets)


class Convolved(models.GPT):
    """Adds what the token before has, in packs that of another sequence."""

    def forward(self, idx, targets=None):
        return super().forward((idx + F.pad(idx, (1, -1))) % models.VOCAB, targets)


def refused_plans(kind, methods):
    """What each of two ranks says to plans of its user's own that share sequences by each of some methods."""
    as_started_by_torchrun()
    model = {"shifted": ShiftedByPositions, "convolved": Convolved, "exact": models.GPT}[kind]().double()
    run = lw.prepare(model, rows(), **{**OWN_PLANS, "max_stages": 1, "recompute": "none"})
    refusals = []
    for method in methods:
        run.planner = partial(plan_of, method, run.wrapped_model.structure.num_layers, run.world.size, False)
        try:
            next(run.steps())
            refusals.append("")
        except InputError as error:
            refusals.append(str(error))
    run.close()
    return refusals


@pytest.mark.parametrize(
    ("kind", "reasons"),
    [
        (
            "shifted",
            {"ulysses": "has degree 2, and at most 1 may share a sequence of ShiftedByPositions: max_degree=1"},
        ),
        ("convolved", {"ring": "has degree 2, and Convolved is computed sequence by sequence, each on one rank"}),
        ("exact", {"ulysses_ring": "shares sequences by ulysses_ring, and GPT was compared .* by ulysses, ring alone"}),
    ],
)
def test_plans_of_any_planner_are_refused_where_sharing_is_not_exact_or_was_not_compared(ranks, kind, reasons):
    for refusals in ranks(2).run(with_check, refused_plans, kind, (*reasons,)):
        for reason, refusal in zip(reasons.values(), refusals):
            assert re.search(rf"plan for step 0: pipelines\[0\] {reason}", refusal), refusal


class AfterPrompt(models.GPT):
    """Has no loss of the first two tokens, and so a mean over nothing for a sequence of two."""

    def forward(self, idx, targets=None):
        logits, _ = super().forward(idx)
        return logits, F.cross_entropy(logits[:, 2:].flatten(0, 1), targets[:, 2:].flatten())


def test_a_mean_over_nothing_is_refused_with_the_way_to_divide():
    with pytest.raises(
        CheckError, match=r"is nan for sequences of 2 slots alone, .* 0 / 0: divide by their number, 1 "
    ):
        lw.prepare(AfterPrompt().double(), rows(), **{**OWN_PLANS, "packing": "always"})
