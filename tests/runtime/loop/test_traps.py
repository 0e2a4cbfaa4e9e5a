"""What goes wrong without a word in transformers 5, or would go wrong with a swapped attention, does not here."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lengthwise.core.batch import Pack
from lengthwise.core.errors import InputError
from lengthwise.runtime.wrap.collator import PackCollator
from lengthwise.runtime.wrap.context import active
from lengthwise.runtime.wrap.hugging_face import NAME
from lengthwise.runtime.wrap.micro_batch import MicroBatch
from lengthwise.runtime.wrap.wrapped_model import WrappedModel
from tests.runtime.loop.runs import EXACT, VOCAB, Source, in_double, learned, packed, randomised, shard_of
from tests.runtime.loop.test_families import HEADS, SIZES, bert, gpt2, llama, mistral, modernbert

LENGTHS = (9, 13, 5)


def _tokens():
    return [torch.from_numpy(np.random.default_rng(i).integers(0, VOCAB, n)) for i, n in enumerate(LENGTHS)]


def _alone(model):
    """Logits of each sequence by itself, with the attention that the model came with."""
    return torch.cat([model(tokens[None]).logits[0] for tokens in _tokens()])


def _error(found, expected):
    return float((found - expected).detach().abs().max())


@pytest.mark.parametrize("build", [llama, mistral, gpt2, bert, modernbert])
def test_sequences_of_a_pack_do_not_see_each_other_whatever_transformers_would_do(build):
    with in_double():
        model, stock = build(), build()
        learned(model)
        expected = _alone(stock)
        mixed = stock(torch.cat(_tokens())[None], position_ids=shard_of(LENGTHS).positions[None]).logits[0]
        assert _error(mixed, expected) > 0.01, "stock attention mixes them: use_cache is on, or it is an encoder"
        cached = {"use_cache": True} if build in (llama, mistral, gpt2) else {}
        for options in ({}, cached, {"attention_mask": torch.ones(1, sum(LENGTHS), dtype=torch.int64)}):
            assert _error(packed(model, shard_of(LENGTHS), **options).logits[0], expected) < EXACT, options


def test_what_micro_batches_give_turns_the_cache_off_and_shifts_labels_itself():
    model = llama()
    wrapped_model = learned(model)
    shard, pack = shard_of(LENGTHS), Pack(ids=(0, 1, 2), lengths=LENGTHS)
    collator = PackCollator(source=Source(LENGTHS), objective="next-token")
    micro_batch = MicroBatch(shard, pack, collator, make_inputs=wrapped_model.inputs_of)
    assert micro_batch.inputs["use_cache"] is False
    with active(shard), in_double():
        output = model(**micro_batch.inputs)
    assert output.past_key_values is None
    alone = torch.cat([
        F.cross_entropy(model_logits[:-1], tokens[1:], reduction="none")
        for model_logits, tokens in zip(output.logits[0].split(LENGTHS), _tokens())
    ])  # fmt: skip
    loss = wrapped_model.loss_of(output, micro_batch)
    assert abs((loss - alone.mean()).item()) < 1e-6, "its own loss, in float32, does not cross the ends of sequences"


@pytest.mark.parametrize("build", [llama, bert])
def test_a_mask_that_hides_padding_is_refused(build):
    model = build()
    learned(model)
    mask = torch.ones(1, sum(LENGTHS), dtype=torch.int64)
    mask[0, -3:] = 0
    with pytest.raises(InputError, match="attention_mask hides tokens"):
        packed(model, shard_of(LENGTHS), attention_mask=mask)
    whole = torch.ones(1, 1, sum(LENGTHS), sum(LENGTHS), dtype=torch.bool)
    with pytest.raises(InputError, match="asks for a mask of its own"):
        packed(model, shard_of(LENGTHS), attention_mask=whole)
    with pytest.raises(InputError, match="attention_mask hides tokens"):
        packed(model, shard_of(LENGTHS), attention_mask=whole.tril())


def test_positions_with_gaps_are_not_taken_for_ends_of_sequences():
    from transformers.masking_utils import find_packed_sequence_indices

    shard = shard_of((20, 3), rank=1, degree=2)
    positions = shard.positions[None]
    zigzag = torch.tensor([[0, 1, 2, 17, 18, 19]])
    assert find_packed_sequence_indices(zigzag) is not None, "transformers takes the jump for a new sequence"
    from lengthwise.runtime.wrap.position_masks import SymbolicMask

    model = llama()
    wrapped_model = learned(model)
    seen = []
    model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True
    )
    for given in (positions, zigzag):
        with active(shard_of((given.shape[1],))):
            model(torch.zeros_like(given), position_ids=given, use_cache=False)
    assert (
        all(isinstance(mask, SymbolicMask) and mask.causal and mask.window is None for mask in seen) and len(seen) == 2
    )
    wrapped_model.release()


def test_without_a_micro_batch_the_model_refuses_and_plain_gives_the_stock_logits():
    model, stock = llama(), llama()
    wrapped_model = learned(model)
    tokens = _tokens()[0][None]
    with pytest.raises(InputError, match="called outside of a micro-batch"):
        model(tokens)
    with pytest.raises(InputError, match="called outside of a micro-batch"):
        model.model(tokens)  # not through the forward that is ours
    with wrapped_model.plain() as plain:
        assert torch.equal(plain(tokens).logits, stock(tokens).logits)
        assert model.config._attn_implementation == stock.config._attn_implementation == "sdpa"
        generated = plain.generate(tokens, max_new_tokens=3, do_sample=False, pad_token_id=0)
        assert torch.equal(generated, stock.generate(tokens, max_new_tokens=3, do_sample=False, pad_token_id=0))
    assert model.config._attn_implementation == NAME
    with pytest.raises(InputError, match="called outside of a micro-batch"):
        model(tokens)


@pytest.mark.parametrize("choice", ["eager", "sdpa", None])
def test_the_attention_that_was_chosen_is_chosen_again_afterwards(choice):
    model = llama()
    model.config._attn_implementation_internal = choice
    expected = model(_tokens()[0][None]).logits
    forward, layer_forward, config = model.forward, model.model.layers[0].forward, model.config
    wrapped_model = learned(model)
    with wrapped_model.plain():
        assert model.config._attn_implementation == choice
    wrapped_model.release()
    assert model.config is config and config._attn_implementation == choice
    assert model.forward == forward and model.model.layers[0].forward == layer_forward
    assert torch.equal(model(_tokens()[0][None]).logits, expected)
    again = learned(model)  # and it can be prepared anew
    assert packed(model, shard_of(LENGTHS)).logits.shape == (1, sum(LENGTHS), VOCAB)
    again.release()


def test_a_model_that_shares_its_config_is_left_alone():
    from transformers import LlamaForCausalLM

    one = llama()
    other = LlamaForCausalLM(one.config).double()
    before, tokens = copy.deepcopy(one.config.to_dict()), _tokens()[0][None]
    expected = other(tokens).logits
    wrapped_model = learned(one)
    assert other.config._attn_implementation == "sdpa"
    assert torch.equal(other(tokens).logits, expected)
    with wrapped_model.plain():
        assert torch.equal(other(tokens).logits, expected)
    wrapped_model.release()
    assert one.config is other.config and one.config.to_dict() == before


def test_gradient_checkpointing_of_the_model_itself_is_switched_off():
    model = llama()
    model.gradient_checkpointing_enable()
    model.train()
    wrapped_model = WrappedModel(model)
    wrapped_model.release()
    assert wrapped_model.checkpointing.is_used
    assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    assert not WrappedModel(llama()).checkpointing.is_used


def test_a_window_that_is_told_to_the_mask_alone_is_honoured():
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    def build():
        torch.manual_seed(0)
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
        config = Qwen2MoeConfig(
            **SIZES, **HEADS, **experts, shared_expert_intermediate_size=8, use_sliding_window=True, sliding_window=4,
            max_window_layers=1, experts_implementation="eager",
        )  # fmt: skip
        return randomised(Qwen2MoeForCausalLM(config))

    with in_double():
        model, stock, wide = build(), build(), build()
        wide.config.sliding_window = 1000
        learned(model)
        expected = _alone(stock)
        assert _error(_alone(wide), expected) > 0.01, "the window matters"
        assert _error(packed(model, shard_of(LENGTHS)).logits[0], expected) < EXACT


def test_a_model_that_neither_drops_nor_counts_positions_itself_is_not_watched():
    model = llama()
    assert learned(model)._intercept is None, "no call of torch is slowed down"
    dropping = gpt2(0.1)
    assert learned(dropping.eval())._intercept is not None, "it may be switched to training"
    dropping.train()
    assert not torch.equal(
        packed(dropping, shard_of(LENGTHS)).logits, packed(dropping.eval(), shard_of(LENGTHS)).logits
    )


class Wrapped(nn.Module):
    """A model of transformers inside of one's own, which counts positions by itself."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.bias = inner, nn.Parameter(torch.ones(VOCAB, dtype=torch.float64))

    def forward(self, tokens):
        return self.inner(tokens, use_cache=False).logits + self.bias


@pytest.mark.parametrize("build", [llama, mistral, bert])
def test_a_model_of_transformers_inside_of_ones_own_is_prepared_as_well(build):
    with in_double():
        model, stock = Wrapped(build()), build()
        wrapped_model = learned(model)
        expected = _alone(stock) + 1.0
        assert _error(packed(model, shard_of(LENGTHS))[0], expected) < EXACT
        wrapped_model.release()
        assert _error(model(_tokens()[0][None])[0], expected[: LENGTHS[0]]) < EXACT


def test_a_model_prepared_in_training_evaluates_without_dropping():
    model, stock = gpt2(0.1), gpt2(0.1).eval()
    learned(model.train())
    model.eval()
    assert _error(packed(model, shard_of(LENGTHS)).logits[0], _alone(stock)) < EXACT
