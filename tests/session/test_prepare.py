"""A prepared run trains what the user's own loop on one device would have trained."""

import json
from collections import Counter
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch

import lengthwise as lw
from lengthwise.config.run_config import DataConfig
from lengthwise.core.errors import CheckError, InfeasibleError, InputError
from lengthwise.core.lengths import LengthIndex
from lengthwise.data.corpus import open_corpus
from lengthwise.data.sampler import Sampler
from lengthwise.index.build import build_index
from lengthwise.index.settings import IndexSettings
from lengthwise.runtime.profile.validate import Prediction
from tests.session import models
from tests.session.loops import step_through, train_gpt, train_in_parts, train_video, weights_of

EXACT = 1e-10
"""Of float64 over a few steps; AdamW divides by the root of tiny squares, which adds to rounding."""
POLICIES = ("dcp-inter", "dcp-intra", "bucket", "static", "auto")
FEW_POLICIES = ("dcp-inter", "auto")
"""Those of most tests here are planned by dcp-intra."""
STEPS = 3
OPTIONS = {"steps": STEPS, "tokens_per_step": 200, "lr": 1e-2, "seed": 3, "policy": "dcp-intra"}
"""With a policy that is ready at once: what is not about plans does not wait for a search on every rank."""


def batches_of(rows, *, num_steps, seed=3, tokens_per_step=200):
    index = LengthIndex(lengths=np.array([len(row) for row in rows]))
    sampler = Sampler(index, seed=seed, tokens_per_step=tokens_per_step)
    return [next(sampler).ids for _ in range(num_steps)]


def loop_on_one_device(num_steps=STEPS, labels=None, make=models.gpt):
    model, rows = make(), models.rows()

    def count(i):
        return len(rows[i]) - 1 if labels is None else int((labels[i][1:] != -100).sum())

    losses = models.train_alone(
        model,
        batches_of(rows, num_steps=num_steps),
        lambda model, i: models.sum_of_losses(model, rows[i], None if labels is None else labels[i]),
        num_targets=count,
        lr=lambda step: 1e-2,
    )
    return losses, weights_of(model)


@pytest.fixture(scope="module")
def alone():
    return loop_on_one_device()


def assert_equal_weights(found, expected):
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=EXACT, err_msg=name)


@pytest.mark.parametrize("num_ranks", [3, *(pytest.param(n, marks=pytest.mark.deep) for n in (1, 2, 4))])
def test_every_policy_trains_what_one_device_trains(ranks, alone, num_ranks):
    steps, policies = (2, FEW_POLICIES) if num_ranks == 3 else (STEPS, POLICIES)
    options = OPTIONS | {"recompute": "auto" if num_ranks == 1 else "none", "steps": steps}
    expected_losses, expected = alone if steps == STEPS else loop_on_one_device(steps)
    used = set()
    for rank, found in enumerate(ranks(num_ranks).run(train_gpt, policies, options)):
        for policy in policies:
            losses, degrees, ids, weights = found[policy]
            np.testing.assert_allclose(losses, expected_losses, rtol=EXACT, err_msg=f"{policy}, rank {rank}")
            assert_equal_weights(weights, expected)
            assert [sorted(counted.elements()) for counted in ids] == [
                sorted(batch) for batch in batches_of(models.rows(), num_steps=steps)
            ]
            used |= {tuple(step) for step in degrees}
    if num_ranks > 1:
        assert any(len(step) > 1 for step in used), f"no step mixed degrees: {used}"


def test_an_epoch_computes_every_sequence_once(ranks):
    found = ranks(2).run(train_gpt, ("packed",), {"epochs": 2, "sequences_per_step": 11, "recompute": "none"})
    ids = found[0]["packed"][2]
    assert len(ids) == 8, "two epochs of 40 sequences, 11 a step, the last of each smaller"
    for epoch in (ids[:4], ids[4:]):
        assert sum(epoch, Counter()) == Counter(range(40))


FORMED = {"form_batches": True, "policy": "dcp-intra", "tokens_per_step": 200, "lr": 1e-2, "recompute": "none"}


def test_batches_that_are_formed_hold_every_sequence_once_and_train_what_one_device_trains(ranks):
    options = {name: value for name, value in FORMED.items() if name != "policy"}
    losses, _, ids, weights = ranks(3).run(train_gpt, ("dcp-intra",), options | {"g_max": 3})[0]["dcp-intra"]
    assert sum(ids, Counter()) == Counter(range(40)) and max(map(Counter.total, ids)) > 1
    model, rows = models.gpt(), models.rows()
    expected = models.train_alone(
        model,
        [tuple(sorted(counted)) for counted in ids],
        lambda model, i: models.sum_of_losses(model, rows[i], None),
        num_targets=lambda i: len(rows[i]) - 1,
        lr=lambda step: 1e-2,
    )
    np.testing.assert_allclose(losses, expected, rtol=EXACT)
    assert_equal_weights(weights, weights_of(model))


@pytest.mark.deep
def test_a_run_that_forms_batches_goes_on_with_those_that_wait(ranks, tmp_path):
    whole = ranks(2).run(train_in_parts, tmp_path / "whole", first=True, last=4, options=FORMED)[0]
    first = ranks(2).run(train_in_parts, tmp_path / "parts", first=True, last=2, options=FORMED)[0]
    second = ranks(2).run(train_in_parts, tmp_path / "parts", first=False, last=4, options=FORMED)[0]
    np.testing.assert_allclose(first[0] + second[0], whole[0], rtol=EXACT)
    assert_equal_weights(second[1], whole[1])


@pytest.mark.deep  # by default: test_gathered_weights, test_pairs, test_planned_stages
def test_a_run_goes_on_with_another_number_of_ranks(ranks, tmp_path):
    options = {name: value for name, value in OPTIONS.items() if name != "steps"}
    losses, weights = loop_on_one_device(3)
    first = ranks(3).run(train_in_parts, tmp_path, first=True, last=1, options=options | {"recompute": "none"})[0]
    alone = train_in_parts(tmp_path, first=False, last=2, options=options | {"check": False})
    last = ranks(2).run(train_in_parts, tmp_path, first=False, last=3, options=options)[0]
    np.testing.assert_allclose(first[0] + alone[0] + last[0], losses, rtol=EXACT)
    assert_equal_weights(last[1], weights)


@pytest.mark.usefixtures("unchecked")
def test_labels_of_items_are_the_targets():
    rows = models.rows()
    labels = [np.where(np.arange(len(row)) < len(row) // 2, -100, row) for row in rows]
    labels[3] = np.full(len(rows[3]), -100)
    losses, weights = loop_on_one_device(labels=labels)
    model = models.gpt()
    items = [{"input_ids": row.tolist(), "labels": label.tolist()} for row, label in zip(rows, labels)]
    run = lw.prepare(model, items, cost=models.mixed_cost(), memory_gib=40, **OPTIONS)
    np.testing.assert_allclose(step_through(run)[0], losses, rtol=EXACT)
    assert_equal_weights(weights_of(model), weights)


@pytest.mark.usefixtures("unchecked")
def test_labels_of_an_index_are_the_targets(tmp_path):
    """Rows that were cut too: the first token of a piece has no target, whatever its label."""
    rows = models.rows()
    labels = [np.where(np.arange(len(row)) < len(row) // 2, -100, row) for row in rows]
    lines = (json.dumps({"input_ids": row.tolist(), "labels": label.tolist()}) for row, label in zip(rows, labels))
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    build_index(IndexSettings(source=tmp_path / "rows.jsonl"), tmp_path / "index", workers=1)
    losses, weights = loop_on_one_device(labels=labels)
    for corpus in (tmp_path / "index", open_corpus(DataConfig(index=str(tmp_path / "index")))):
        model = models.gpt()
        run = lw.prepare(model, corpus, objective="next-token", **OPTIONS)
        np.testing.assert_allclose(step_through(run)[0], losses, rtol=EXACT)
        run.close()
        assert_equal_weights(weights_of(model), weights)
    with pytest.raises(InputError, match="the index says which tokens have a loss, and the model learns 'every-token'"):
        lw.prepare(models.gpt(), tmp_path / "index", objective="every-token", **OPTIONS)


@pytest.mark.deep
def test_a_model_of_frames_trains_the_same_on_any_number_of_ranks(ranks):
    options = {"steps": 3, "sequences_per_step": 4, "lr": 1e-2, "optimizer": "sgd", "policy": "auto"}
    options |= {"cost": models.SimpleCost(capacity=32, loss=0.4, c_s=0.05), "memory_gib": 32}
    (losses, _, weights) = ranks(1).run(train_video, options)[0]
    assert losses[0] > 0
    for number in (2, 4):
        found = ranks(number).run(train_video, options | {"recompute": "none"})
        for other, degrees, others in found:
            np.testing.assert_allclose(other, losses, rtol=EXACT)
            assert_equal_weights(others, weights)
            assert max(map(max, degrees)) > 1


def test_what_a_model_of_transformers_has_no_row_for_is_refused_before_anything_is_measured(caplog):
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=8, n_layer=2, n_head=2))
    for corpus, message in (
        (
            [[1, 2], list(range(17))],
            r"has 17 tokens, GPT2LMHeadModel was made for 16 .* max_length=16",
        ),
        ([[1, 2], [3, 50]], r"token id 50, GPT2LMHeadModel embeds ids up to 49"),
        (
            [{"input_ids": [1, 2, 0, 3], "attention_mask": [1, 1, 0, 1]}],
            r"item 0 has an attention_mask that hides token 2",
        ),
    ):
        with pytest.raises(InputError, match=message):
            lw.prepare(gpt2, corpus, cost=models.mixed_cost(), **OPTIONS)
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=16,
    )  # fmt: skip
    rows = [list(range(17)), [1, 2, 3]]
    llama = LlamaForCausalLM(config)
    llama.gradient_checkpointing_enable()
    lw.prepare(llama, rows, cost=models.mixed_cost(), memory_gib=40, **OPTIONS).close()
    assert "17 tokens, LlamaForCausalLM was made for 16 positions; rotary positions" in caplog.text
    assert "the model's activation checkpointing is left out" in caplog.text


@pytest.mark.usefixtures("unchecked")
def test_a_limit_of_positions_below_one_is_none():
    from transformers import XLNetConfig, XLNetLMHeadModel

    model = XLNetLMHeadModel(XLNetConfig(vocab_size=50, d_model=8, n_layer=2, n_head=2, d_inner=8)).double()
    assert model.config.max_position_embeddings == -1
    options = {"cost": models.mixed_cost(), "memory_gib": 40, "objective": "next-token"}
    lw.prepare(model, [list(range(17)), [1, 2, 3]], **(OPTIONS | options)).close()


def test_a_position_that_a_model_of_ones_own_lacks_is_named():
    with pytest.raises(
        InputError, match=r"GPT looked up a row that one of its tables has not .* the longest sequence, 64"
    ):
        lw.prepare(models.GPT(max_length=8).double(), models.rows(), cost=models.mixed_cost(), memory_gib=40)


def test_what_fits_nowhere_is_refused_before_the_first_step():
    with pytest.raises(InfeasibleError, match="64 tokens"):
        lw.prepare(models.gpt(), models.rows(), cost=models.mixed_cost(), memory_gib=40, recompute="none")


def test_more_ranks_than_there_are_cannot_share_a_sequence():
    with pytest.raises(InputError, match=r"max_degree=2, and there are 1 ranks"):
        lw.prepare(models.gpt(), models.rows(), cost=models.mixed_cost(), memory_gib=40, max_degree=2)


def test_the_model_is_given_back_when_the_run_cannot_be_made():
    model = models.gpt()
    before = model.forward.__func__
    with pytest.raises(InfeasibleError):
        lw.prepare(model, models.rows(), cost=models.mixed_cost(), memory_gib=40, recompute="none")
    assert model.forward.__func__ is before
    assert all("forward" not in vars(block) for block in model.blocks)


class Averaging(models.GPT):
    """Its tokens meet elsewhere than in attention."""

    def forward(self, idx, targets=None):
        logits, _ = super().forward(idx)
        logits = logits + logits.cumsum(1)
        return logits, torch.nn.functional.cross_entropy(logits[0], targets[0])


def test_a_model_that_packs_would_change_is_computed_sequence_by_sequence_with_a_warning(caplog):
    options = {"cost": models.mixed_cost(), "memory_gib": 40, "steps": 1, "sequences_per_step": 6}
    with caplog.at_level("WARNING", logger="lengthwise"):
        run = lw.prepare(Averaging(), models.rows(), **options)
    assert "Averaging is computed sequence by sequence" in caplog.text and "which calls cumsum" in caplog.text
    for step in run.steps():
        assert {pipeline.scheme.degree for pipeline in step.plan.pipelines} == {1}
        for micro_batch in step:
            logits, loss = run.model(**micro_batch.inputs)
            assert logits.shape[1] == micro_batch.pack.num_tokens
            step.backward(loss)
        assert step.update().loss > 0.0
    run.close()
    with pytest.raises(CheckError, match="which calls cumsum"):
        lw.prepare(Averaging(), models.rows(), packing="always", **options)
    run = lw.prepare(models.gpt(), models.rows(), packing="never", **options)
    assert run.wrapped_model.by_sequence is not None
    run.close()


def test_what_a_run_says_of_its_measurements_fits_a_console(capsys, tmp_path):
    path = tmp_path / "profile.json"
    lw.prepare(models.gpt(), models.rows(), profile=path, device="cpu", **OPTIONS).close()
    lines = capsys.readouterr().err.replace(str(path), "PATH").splitlines()
    assert any("PATH" in line for line in lines) and any("recomputed" in line for line in lines)
    assert max(map(len, lines)) <= 100
    widest = Prediction(
        lengths=(131_072,), degree=16, method="ring", recomputed=32, measured_s=12.3456, predicted_s=13,
        measured_bytes=10**11, predicted_bytes=11 * 10**10,
    )  # fmt: skip
    assert len(f"  {widest}") <= 100 and "ring of 16" in str(widest)


def test_the_comparison_before_a_run_says_how_far_it_is(monkeypatch):
    shares, bars = [], []

    @contextmanager
    def recorded(words, *, shown):
        bars.append((words, shown))
        yield shares.append

    monkeypatch.setattr("lengthwise.session.stock_comparison.progress_bar", recorded)
    for verbose in (True, False):
        lw.prepare(
            models.gpt(), models.rows(), cost=models.mixed_cost(), memory_gib=40, verbose=verbose, **OPTIONS
        ).close()
    assert bars == [("comparing with the stock model", True), ("comparing with the stock model", False)]
    assert len(shares) > 4 and shares[0] == 0 and all(0 <= share < 1 for share in shares)


def losses_under_autocast(is_around_loop):
    run = lw.prepare(
        models.gpt().float(), models.rows(longest=40), cost=models.mixed_cost(), memory_gib=40, check=False,
        max_degree=1, **OPTIONS | {"lr": 0.05, "recompute": "none"},
    )  # fmt: skip
    losses = []
    with torch.autocast("cpu", torch.bfloat16) if is_around_loop else nullcontext():
        for step in run.steps():
            for micro_batch in step:
                with torch.autocast("cpu", torch.bfloat16):
                    loss = run.model(**micro_batch.inputs)[1]
                step.backward(loss)
            losses.append(step.update().loss)
    run.close()
    return losses


@pytest.mark.usefixtures("unchecked")
def test_autocast_around_the_whole_loop_computes_with_weights_as_they_are_now():
    assert losses_under_autocast(True) == pytest.approx(losses_under_autocast(False), rel=1e-4)


def test_steps_and_epochs_are_not_given_both():
    with pytest.raises(InputError, match=r"epochs: steps=10 says already how long"):
        lw.prepare(models.gpt(), models.rows(), steps=10, epochs=1, cost=models.mixed_cost(), memory_gib=40)
