"""Adapters of peft whose computation depends on their row, or whose modules stand for others."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import copy

import numpy as np
import peft
import pytest
import torch

import lengthwise as lw
from lengthwise.core.errors import CheckError, InputError
from lengthwise.session.objectives import _label_limit
from tests.session import models
from tests.session.columns import OPTIONS, assert_equal, following, gpt2, gradient, learned
from tests.session.test_partial_calls import llama


@pytest.mark.usefixtures("unchecked")
def test_an_activated_adapter_learns_sequence_by_sequence_what_it_learns_alone():
    torch.manual_seed(1)
    options = {"r": 2, "init_lora_weights": False, "alora_invocation_tokens": [5, 6], "fan_in_fan_out": True}
    config = peft.LoraConfig(target_modules=["c_attn"], task_type="CAUSAL_LM", **options)
    model = peft.get_peft_model(gpt2(), config).double()
    rows = [np.array(row) for row in ([1, 2, 5, 6, 3], [5, 6, 7, 4], [8, 5, 6])]
    expected = gradient(copy.deepcopy(model), rows, [following(row) for row in rows])
    trained = {name for name, value in model.named_parameters() if value.requires_grad}
    found = learned(model, rows, packing="never", recompute="none")
    assert_equal({name: found[name] for name in trained}, {name: expected[name] for name in trained}, 1e-5)


def lokr(**options):
    torch.manual_seed(1)
    config = peft.LoKrConfig(r=2, alpha=4, target_modules=["q_proj", "v_proj"], init_weights=False, **options)
    return peft.get_peft_model(llama(), config).double()


ROWS = [np.array([1, 2, 5, 6, 3]), np.array([5, 6, 7, 4])]


def test_a_draw_that_never_drops_an_adapter_is_harmless_in_packs():
    """``torch.rand(1) > module_dropout`` of 0."""
    model, rows = lokr(), [np.array(row) for row in ([1, 2, 5, 6, 3], [5, 6, 7, 4], [8, 5, 6])]
    expected = gradient(copy.deepcopy(model), rows, [following(row) for row in rows])
    trained = {name for name, value in model.named_parameters() if value.requires_grad}
    found = learned(model, rows, packing="always", recompute="none", check=True)
    assert_equal({name: found[name] for name in trained}, {name: expected[name] for name in trained}, 1e-5)


def test_a_draw_that_drops_an_adapter_is_refused_by_the_name_of_its_module():
    with pytest.raises(CheckError, match=r"in .*layers.0.self_attn.q_proj \(Linear\), that decides .* module_dropout"):
        learned(lokr(module_dropout=0.5), ROWS, packing="always", check=True)


@pytest.mark.usefixtures("unchecked")
def test_a_merged_adapter_is_a_reason_for_a_loss_without_a_gradient():
    model = lokr()
    model.merge_adapter()
    with pytest.raises(InputError, match=r"the loss has no gradient: .* an adapter is merged .*unmerge_adapter\(\)"):
        learned(model, ROWS, packing="never", check=True)


@pytest.mark.usefixtures("unchecked")
def test_a_tied_embedding_that_is_saved_with_an_adapter_has_as_many_labels_as_rows():
    options = {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}
    config = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", **options)
    model = peft.get_peft_model(llama(tie_word_embeddings=True), config)
    assert _label_limit(model.get_base_model(), classifies=False) == models.VOCAB > model.config.hidden_size


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("options", [{"logits_to_keep": 3}, {"logits_to_keep": torch.tensor([0, 1])}])
def test_a_call_that_keeps_some_logits_is_refused_beside_labels(options):
    model = gpt2()
    run = lw.prepare(model, [[1, 2, 3, 4], [5, 6, 7], [8, 9]], **OPTIONS)
    for step in run.steps():
        for micro_batch in step:
            with pytest.raises(InputError, match=r"GPT2LMHeadModel was called with logits_to_keep=.*; leave it out"):
                model(**micro_batch.inputs, **options)
            break
        break
    run.close()


@pytest.mark.usefixtures("unchecked")
def test_items_without_a_loss_are_named_before_the_run_and_a_step_of_no_others_is_skipped(capsys):
    items = [{"input_ids": [1, 2, 3], "labels": [-100] * 3 if number in (2, 3) else [1, 2, 3]} for number in range(6)]
    run = lw.prepare(
        gpt2(), items, **OPTIONS | {"sequences_per_step": 2, "steps": 3, "order": "corpus", "verbose": True}
    )
    said = " ".join("".join(capsys.readouterr()).split())
    assert "2 of 6 items have no token with a loss (2, 3)" in said
    for step in run.steps():
        for micro_batch in step:
            step.backward(run.model(**micro_batch.inputs).loss)
        before = [weight.clone() for weight in run.model.parameters()]
        result = step.update()
        assert result.is_skipped == (step.number == 1)
        same = all(torch.equal(a, b) for a, b in zip(before, run.model.parameters()))
        assert same == result.is_skipped
    assert (run.ledger.updates, run.ledger.skipped_sequences, run.skipped) == (2, 2, [1])
    run.close()
