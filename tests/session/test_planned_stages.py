"""Pipelines that the planner of a prepared model chose train what one device trains."""

import logging
import re
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import lengthwise as lw
from lengthwise.core.errors import InfeasibleError, InputError
from lengthwise.core.specs import cluster_preset
from lengthwise.cost.profiled.dual_layer import DualLayerCost
from lengthwise.runtime.comm.group import Group
from lengthwise.runtime.comm.world import start_world
from lengthwise.runtime.loop.prepared_engine import PreparedEngine
from lengthwise.runtime.train import device_meter
from tests.cost.profiled.test_dual_layer import row, table
from tests.plan.costs import StagesFitMore
from tests.runtime.harness import with_check
from tests.runtime.loop import memory_runs
from tests.runtime.loop.runs import in_double
from tests.session import models
from tests.session.loops import as_started_by_torchrun, step_through, weights_of
from tests.session.memory_limit import Lying
from tests.session.memory_limit import corpus as memory_corpus
from tests.session.test_prepare import EXACT, OPTIONS, assert_equal_weights, batches_of

STAGED = OPTIONS | {
    "cost": StagesFitMore(capacity=40, loss=0.4, c_s=0.05), "memory_gib": 40, "max_degree": 1, "recompute": "none",
    "verbose": False, "policy": "static", "steps": 2,
}  # fmt: skip
"""A device holds 40 tokens, and the longest rows have 64: only stages fit them."""


def build(family):
    """A small model of a family, with as many layers as there may be ranks; the plain module has one fewer."""
    from transformers import (
        BertConfig,
        BertForTokenClassification,
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
    )

    torch.manual_seed(0)
    if family == "plain":
        return models.gpt()
    if family == "gpt2":
        dropouts = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
        sizes = {"vocab_size": models.VOCAB, "n_positions": 96, "n_embd": 24, "n_layer": 4, "n_head": 4}
        return GPT2LMHeadModel(GPT2Config(**sizes, **dropouts)).double()
    sizes = {
        "vocab_size": models.VOCAB, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 4,
        "num_attention_heads": 4, "max_position_embeddings": 96,
    }  # fmt: skip
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, tie_word_embeddings=True)).double()
    dropouts = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    return BertForTokenClassification(BertConfig(**sizes, **dropouts, num_labels=5)).double()


def stages_in(plan):
    return {pipeline.scheme.num_stages for pipeline in plan.pipelines if pipeline.micro_batches}


def items_of(family):
    """The rows of tokens; for BERT with a class for every token."""
    rows = models.rows()
    return rows if family != "bert" else [{"input_ids": row, "labels": row % 5} for row in rows]


def loop_alone(family):
    """Losses and weights of an ordinary loop of as many steps on one device."""
    model, rows, is_causal = build(family), models.rows(), family != "bert"

    def sum_of_losses(model, i):
        tokens = torch.as_tensor(rows[i])[None]
        logits = model(tokens)[0][0] if family == "plain" else model(tokens).logits[0]
        shown, targets = (logits[:-1], tokens[0, 1:]) if is_causal else (logits, tokens[0] % 5)
        return F.cross_entropy(shown, targets, reduction="sum")

    with in_double():
        losses = models.train_alone(
            model, batches_of(rows, num_steps=STAGED["steps"]), sum_of_losses,
            num_targets=lambda i: len(rows[i]) - is_causal, lr=lambda step: 1e-2,
        )  # fmt: skip
    return losses, weights_of(model)


def train(family, policy="auto", options=STAGED):
    """Losses, weights, and the stages of the pipelines of every step."""
    as_started_by_torchrun()
    with in_double():
        return train_in_double(build(family), items_of(family), options | {"policy": policy})


def train_in_double(model, items, options):
    stages = []
    run = lw.prepare(model, items, **options)
    planner = run.planner

    def noted(batch):
        plan = planner(batch)
        stages.append(stages_in(plan))
        return plan

    run.planner = noted
    losses, *_ = step_through(run, run.wrapped_model.loss_of)
    run.close()
    return losses, weights_of(model), stages


def assert_as_alone(found, family):
    expected_losses, expected = loop_alone(family)
    for losses, weights, stages in found:
        assert all(max(used) > 1 for used in stages), stages
        np.testing.assert_allclose(losses, expected_losses, rtol=EXACT)
        assert_equal_weights(weights, expected)


@pytest.mark.deep
@pytest.mark.parametrize(("family", "num_ranks"), [("plain", 3), ("llama", 2)])
def test_planned_stages_train_what_one_device_trains(ranks, family, num_ranks):
    assert_as_alone(ranks(num_ranks).run(train, family), family)


@pytest.mark.deep
@pytest.mark.parametrize("family", ["plain", "gpt2", "llama", "bert"])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_planned_stages_of_every_family_train_what_one_device_trains(ranks, family, num_ranks):
    for policy in ("auto", "static", "bucket"):
        assert_as_alone(ranks(num_ranks).run(train, family, policy), family)


def times_of_stages():
    """Measured seconds by a clock of the test's own: a layer takes one, and what a neighbour sends takes a hundred."""
    as_started_by_torchrun()
    now_s, received = [0.0], Group.receive

    def tick(*_):
        now_s[0] += 1

    def receive(group, *args, **kwargs):
        now_s[0] += 100
        return received(group, *args, **kwargs)

    model = models.gpt()
    for block in model.blocks:
        block.mlp.register_forward_pre_hook(tick)
    clock = SimpleNamespace(perf_counter=lambda: now_s[0])
    with mock.patch.object(device_meter, "time", clock), mock.patch.object(Group, "receive", receive):
        run, times = lw.prepare(model, models.rows(), **STAGED), []
        for step in run.steps():
            for micro_batch in step:
                step.backward(run.model(**micro_batch.inputs)[1])
            measured = [
                timing for timing in step.measured if step.plan.pipelines[timing.pipeline].scheme.num_stages == 3
            ]
            staged = [pipeline for pipeline in step.plan.pipelines if pipeline.scheme.num_stages == 3]
            assert len(measured) == sum(len(pipeline.micro_batches) for pipeline in staged)
            times += [timing.time_s for timing in measured]
            step.update()
    run.close()
    return times


def test_what_a_stage_waits_for_its_neighbours_is_not_measured_as_its_own(ranks):
    for times in ranks(3).run(times_of_stages):
        assert times and set(times) == {1.0}, "each has one layer"


def validate_and_resume(folder, first):
    """The validation loss of staged plans, on the checkpoint that there is or a new one after a step."""
    as_started_by_torchrun()
    model = models.gpt(seed=0 if first else 7)
    run = lw.prepare(model, models.rows(), **STAGED | {"steps": 1 if first else 2})
    if not first:
        assert run.resume(folder) == 1
    losses, *_ = step_through(run)
    run.save(folder)
    plans = [run.planner(next(run.stream)) for _ in range(2)]
    engine = PreparedEngine(run, validation=run.collator)
    loss = engine.mean_loss(plans, run.collator.source)
    ids = [id for plan in plans for pipeline in plan.pipelines for m in pipeline.micro_batches for id in m.pack.ids]
    run.close()
    return losses, weights_of(model), [stages_in(plan) for plan in plans], loss, ids


def test_runs_with_stages_are_validated_and_resumed_on_other_numbers_of_ranks(ranks, tmp_path):
    first = ranks(3).run(validate_and_resume, tmp_path, True)
    second = ranks(2).run(validate_and_resume, tmp_path, False)
    expected_losses, expected = loop_alone("plain")
    for (before, *_), (after, weights, stages, loss, ids) in zip(first, second):
        assert all(max(used) > 1 for used in stages)
        np.testing.assert_allclose(before + after, expected_losses, rtol=EXACT)
        assert_equal_weights(weights, expected)
        model, rows = models.gpt(), models.rows()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(torch.as_tensor(expected[name]))
            total = sum(float(models.sum_of_losses(model, rows[id])) for id in ids)
        assert loss == pytest.approx(total / sum(len(rows[id]) - 1 for id in ids), abs=1e-9)


def measured_cost(num_ranks):
    """As if measured of the model of three layers, on links so slow that gathering layers is dearer than sending.

    Its head takes hardly any time, so that a stage per layer is faster than fewer stages and an idle device.
    """
    cluster = cluster_preset(f"{num_ranks}xcpu", memory_gib=1.0)
    slow = replace(cluster, device=replace(cluster.device, link_bytes_per_s=2e7, link_call_s=1e-5))
    rows = [replace(row(lengths), constant_s=1e-6) for lengths in ((8,), (16,), (32,), (64,), (7, 8) * 4)]
    return DualLayerCost(table(rows, num_layers=3, num_params=12_000, longest=64, links=()), cluster=slow)


def train_gathered(family, num_ranks):
    """Two runs, of which the second goes on, and what ranks hold during a step of the first, in weights."""
    options = STAGED | {"cost": measured_cost(num_ranks), "memory_gib": None, "weights": "by-layer"}
    as_started_by_torchrun()
    model, held = build(family), []
    run = lw.prepare(model, models.rows(), **options)
    for step in run.steps():
        held.append((stages_in(step.plan), len(run.state.weights)))
        for micro_batch in step:
            with pytest.raises(InputError, match="within a step: weights are gathered"), run.plain():
                pass
            step.backward(run.wrapped_model.loss_of(model(**micro_batch.inputs), micro_batch))
        step.update()
        with run.plain() as plain:
            assert not any(parameter.isnan().any() for parameter in plain.parameters())
    plans = [run.planner(next(run.stream))]
    loss = PreparedEngine(run, validation=run.collator).mean_loss(plans, run.collator.source)
    ids = [id for pipeline in plans[0].pipelines for m in pipeline.micro_batches for id in m.pack.ids]
    run.close()
    return held, weights_of(model), loss, ids


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.deep), 3])
def test_stages_hold_the_weights_of_their_layers_alone_where_these_are_gathered(ranks, num_ranks):
    _, expected = loop_alone("plain")
    found = ranks(num_ranks).run(train_gathered, "plain", num_ranks)
    sizes = {name: value.size for name, value in expected.items()}
    for held, weights, loss, ids in found:
        assert_equal_weights(weights, expected)
        for stages, num_weights in held:
            assert stages == {num_ranks} and num_weights < sum(sizes.values())
        model, rows = models.gpt(), models.rows()
        model.load_state_dict({name: torch.as_tensor(value) for name, value in weights.items()})
        with torch.no_grad():
            total = sum(float(models.sum_of_losses(model, rows[id])) for id in ids)
        assert loss == pytest.approx(total / sum(len(rows[id]) - 1 for id in ids), abs=1e-9)
    if num_ranks == 3:
        outside = sum(size for name, size in sizes.items() if name.startswith(("tokens", "places")))
        layer = sum(size for name, size in sizes.items() if name.startswith("blocks.0."))
        assert [held[0][1] for held, *_ in found[:2]] == [outside + layer] * 2


class Skipping(models.GPT):
    """Adds the output of its first layer to that of its last."""

    def forward(self, idx, targets=None):
        x = first = self.blocks[0](self.tokens(idx) + self.places(torch.arange(idx.shape[1])))
        for block in self.blocks[1:]:
            x = block(x)
        logits = self.head(self.norm(x + first))
        loss = None if targets is None else F.cross_entropy(logits[0], targets[0], ignore_index=-100)
        return logits, loss


class PrefersStages(Lying):
    """Takes pipelines to be faster than they are."""

    def sequence_times_s(self, lengths, scheme):
        return super().sequence_times_s(lengths, scheme) / 100**scheme.num_stages

    def overhead_s(self, scheme):
        return 1e-6


def train_uncut(kind):
    """Stages that were planned, and what was said, of a model that cannot be cut, or gets a frozen one beside it."""
    as_started_by_torchrun()
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("lengthwise").addHandler(handler)
    cost = PrefersStages(cluster_preset("2xcpu", memory_gib=1 / 1024))
    options = STAGED | {"cost": cost, "max_stages": 2}
    model = Skipping().double() if kind.startswith("skipping") else models.gpt()
    if kind == "skipping by layer":
        options["weights"] = "by-layer"
    if kind == "frozen":
        options["frozen"] = [models.gpt(1)]
    if kind == "split":
        options |= {"max_stages": 1, "zero_bubble": "all"}
    run = lw.prepare(model, models.rows(), **options)
    if kind == "frozen later":
        assert max(stages_in(run.planner(next(run.stream)))) == 2
        run.frozen(models.gpt(1))
    plan = run.planner(next(run.stream))
    run.close()
    logging.getLogger("lengthwise").removeHandler(handler)
    return stages_in(plan), [record for record in records if "one pipeline stage" in record]


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("skipping", "learns something else in stages"),
        pytest.param("skipping by layer", "the loss reads what layer 0 returned", marks=pytest.mark.deep),
        ("frozen", "frozen models compute beside it"),
        pytest.param("frozen later", "", marks=pytest.mark.deep),
        ("split", "so zero_bubble='all' splits no backward: max_stages=1"),
    ],
)
def test_a_model_that_cannot_be_cut_is_planned_in_one_stage_and_the_first_rank_says_why(ranks, kind, reason):
    compared = (with_check,) if kind.startswith("skipping") else ()
    (first, said), (second, silent) = ranks(2).run(*compared, train_uncut, kind)
    assert first == second == {1} and not silent
    assert [reason in words for words in said] == ([True] if reason else [])


def refused_in_one_stage(options):
    """What ``prepare`` says where only stages would hold the corpus."""
    as_started_by_torchrun()
    with in_double(), pytest.raises(InfeasibleError) as error:
        lw.prepare(models.gpt(), models.rows(), **STAGED | options)
    return str(error.value)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"check": False}, r"stages were not compared with the whole model \(check=False\)"),
        ({"frozen": [models.gpt(1)]}, "frozen models compute beside it"),
    ],
)
def test_an_error_that_nothing_fits_says_why_there_are_no_stages(ranks, options, reason):
    for message in ranks(2).run(refused_in_one_stage, options):
        assert re.search(rf"needs .*Plans have one pipeline stage alone: {reason}\.$", message)


def frozen_where_only_stages_fit():
    """Stages before a frozen model came, and what is said when it has come."""
    as_started_by_torchrun()
    with in_double():
        run = lw.prepare(models.gpt(), models.rows(), **STAGED)
        stages = stages_in(run.planner(next(run.stream)))
        with pytest.raises(InfeasibleError, match=r"one pipeline stage alone: frozen models compute beside it\.$"):
            run.frozen(models.gpt(1))
        run.close()
    return stages


def test_a_frozen_model_that_comes_late_is_planned_for_under_costs_that_nothing_corrects(ranks):
    assert ranks(2).run(frozen_where_only_stages_fit) == [{2}, {2}]


def train_out_of_memory(place):
    """Two steps; the first rank runs out of memory in the first attempt of the first one."""
    as_started_by_torchrun()
    world = start_world("cpu")
    torch.manual_seed(0)
    model = memory_runs.Model().double()
    cost = PrefersStages(cluster_preset(f"{world.size}xcpu", memory_gib=1 / 1024))
    options = STAGED | {"steps": 2, "cost": cost, "recompute": "auto"}
    del options["memory_gib"]
    run, attempts, losses = lw.prepare(model, memory_corpus(), **options), [], []
    for step in run.steps():
        attempts.append(stages_in(step.plan))
        if step.number == step.attempt == 0 and world.rank == 0:
            memory_runs._fails_at.add(place)
        for micro_batch in step:
            step.backward(model(**micro_batch.inputs)[1])
        result = step.update()
        losses += [] if result is None else [result.loss]
    run.close()
    return losses, attempts, weights_of(model)


@pytest.mark.deep  # by default: tests/runtime/loop/test_stages.py, and one plan anew in test_memory_limit
@pytest.mark.parametrize("place", ["forward of layer 0", "backward of layer 0"])
def test_a_stage_that_runs_out_of_memory_has_the_step_planned_again_in_stages(ranks, place):
    ((losses, _, weights),) = ranks(1).run(train_out_of_memory, "nowhere")
    for found, attempts, others in ranks(2).run(train_out_of_memory, place):
        assert attempts == [{2}] * 3
        np.testing.assert_allclose(found, losses, rtol=EXACT)
        assert_equal_weights(others, weights)


def train_adapters(options):
    """LoRA on a GPT-2 in stages: losses, adapters, stages."""
    import peft

    as_started_by_torchrun()
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    with in_double():
        model = peft.get_peft_model(build("gpt2"), config).double()
        return train_in_double(model, models.rows(), options)


@pytest.mark.deep
def test_adapters_are_trained_in_stages_as_on_one_device(ranks):
    ((losses, weights, _),) = ranks(1).run(train_adapters, STAGED | {"cost": StagesFitMore(capacity=80)})
    for found, others, stages in ranks(2).run(train_adapters, STAGED):
        assert all(max(used) > 1 for used in stages)
        np.testing.assert_allclose(found, losses, rtol=EXACT)
        assert_equal_weights(others, weights)
