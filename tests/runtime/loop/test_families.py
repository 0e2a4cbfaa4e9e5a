"""Each family of transformers trains as its user's own loop does, whatever the degrees, packs and recompute."""

import pytest
import torch
from torch.nn import functional as F

from lengthwise.core.batch import MASKED
from lengthwise.runtime.models.targets import TokenMasking
from tests.runtime.harness import with_check
from tests.runtime.loop.runs import LENGTHS, VOCAB, Case, Packs, assert_exact, cross_entropy, randomised, step_on_ranks

DEGREES = (
    # All of degrees 1 to 4 in one step, packs of one and of many, layers that recompute and layers that do not.
    Packs(ranks=(0, 1, 2, 3), packs=((2, 3), (6,), (0, 8)), recompute=(True, False, True)),
    Packs(ranks=(0, 1, 2), packs=((4, 1),), phase=1),
    Packs(ranks=(3,), packs=((5,), (7,)), recompute=(False, True), phase=1),
    Packs(ranks=(2, 1), packs=((9,),), phase=2),
    Packs(ranks=(0,), packs=(), phase=2),
    Packs(ranks=(3,), packs=(), phase=2),
)
AT_TWO = (Packs(ranks=(0, 1), packs=((2, 3, 6), (0, 8), (4, 1, 5, 7, 9)), recompute=(True, False, True)),)
FEW = Packs(ranks=(0,), packs=((3, 0, 2), (1,), (4, 5), tuple(range(6, len(LENGTHS)))), recompute=(True,))
"""Degree 1, four micro-batches."""
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "max_position_embeddings": 40}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24}


def next_token_losses(model, tokens, targets):
    logits = model(torch.as_tensor(tokens)[None], use_cache=False).logits[0]
    return F.cross_entropy(logits[:-1], torch.as_tensor(tokens)[1:], reduction="sum")


def masked_losses(model, tokens, targets):
    return F.cross_entropy(model(torch.as_tensor(tokens)[None]).logits[0], targets, reduction="sum")


def _new(model_class, config):
    torch.manual_seed(0)
    return randomised(model_class(config))


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return _new(LlamaForCausalLM, LlamaConfig(**SIZES, **HEADS))


def qwen2():
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(**SIZES, **HEADS, use_sliding_window=True, sliding_window=6, max_window_layers=1)
    assert config.layer_types == ["full_attention", "sliding_attention", "sliding_attention"]
    return _new(Qwen2ForCausalLM, config)


def qwen3():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return _new(Qwen3ForCausalLM, Qwen3Config(**SIZES, **HEADS, head_dim=8, tie_word_embeddings=True))


def mistral():
    from transformers import MistralConfig, MistralForCausalLM

    return _new(MistralForCausalLM, MistralConfig(**SIZES, **HEADS, sliding_window=5))


def gpt2(dropout=0.0):
    from transformers import GPT2Config, GPT2LMHeadModel

    dropouts = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), dropout)
    config = GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=3, n_head=4, n_positions=40, **dropouts)
    return _new(GPT2LMHeadModel, config)


def gpt_neox():
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    return _new(GPTNeoXForCausalLM, GPTNeoXConfig(**SIZES, num_attention_heads=4, intermediate_size=24))


def bert(dropout=0.0):
    from transformers import BertConfig, BertForMaskedLM

    dropouts = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), dropout)
    config = BertConfig(**SIZES, num_attention_heads=4, intermediate_size=24, **dropouts)
    return _new(BertForMaskedLM, config)


def modernbert():
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0)
    config = ModernBertConfig(
        **SIZES, num_attention_heads=4, intermediate_size=24, local_attention=8, global_attn_every_n_layers=2, **special
    )
    assert config.layer_types == ["full_attention", "sliding_attention", "full_attention"]
    return _new(ModernBertForMaskedLM, config)


MASKING = TokenMasking(seed=3, vocab_size=VOCAB, mask_token_id=1)
CASES = {
    **{
        build.__name__: Case(build=build, sum_of_losses=next_token_losses, loss=cross_entropy)
        for build in (llama, qwen2, qwen3, mistral, gpt2, gpt_neox)
    },
    **{
        build.__name__: Case(
            build=build, sum_of_losses=masked_losses, loss=cross_entropy, objective=MASKED, masking=MASKING
        )
        for build in (bert, modernbert)
    },
}


@pytest.mark.deep
@pytest.mark.parametrize("name", CASES)
def test_a_family_passes_the_check_and_trains_as_its_own_loop_does_at_degrees_1_to_4(ranks, name):
    for found in ranks(4).run(with_check, step_on_ranks, CASES[name], DEGREES):
        assert_exact(CASES[name], found, name)


def test_a_family_that_attends_both_ways_passes_the_check_and_trains_as_its_own_loop_does(ranks):
    for found in ranks(2).run(with_check, step_on_ranks, CASES["modernbert"], AT_TWO):
        assert_exact(CASES["modernbert"], found)


@pytest.mark.parametrize("name", [pytest.param("mistral", marks=pytest.mark.deep), "bert"])
def test_accumulation_and_recompute_on_one_rank_change_nothing(ranks, name):
    assert_exact(CASES[name], ranks(1).run(step_on_ranks, CASES[name], (FEW,))[0], name)
