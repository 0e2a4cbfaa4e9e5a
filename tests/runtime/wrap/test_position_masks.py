"""Masks, soft-capping and sinks of transformers' attention are those of each sequence alone, at every degree."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lengthwise.core.errors import InputError
from lengthwise.core.pipeline_config import Method
from lengthwise.runtime.wrap.context import active
from lengthwise.runtime.wrap.hugging_face import attention
from lengthwise.runtime.wrap.position_masks import make_mask, sequence_mask
from tests.runtime.loop.runs import Case, Packs, assert_exact, cross_entropy, shard_of, step_on_ranks
from tests.runtime.loop.test_families import HEADS, next_token_losses
from tests.runtime.wrap.test_position_ids import DEGREES, built

LENGTHS = (13, 1, 6)


def built_with_experts(name, **options):
    model = built(name, **options)
    model.set_experts_implementation("eager")  # grouped products have no float64
    return model


SMALL = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4, "head_dim": 8}
NEXT = {"sum_of_losses": next_token_losses, "loss": cross_entropy}
CASES = {
    "Gemma 2: soft-capped logits": Case(
        build=partial(
            built, "Gemma2ForCausalLM", attn_logit_softcapping=1.5, attn_implementation="eager", **HEADS, **SMALL
        ),
        **NEXT,
    ),
    "gpt-oss: attention sinks": Case(
        build=partial(
            built_with_experts, "GptOssForCausalLM", num_local_experts=2, num_experts_per_tok=1, pad_token_id=0,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4}, **HEADS, **SMALL,
        ),
        **NEXT,
    ),
    "Bloom: by hand, with a bias by position": Case(
        build=partial(built, "BloomForCausalLM", n_layer=2, n_head=4, hidden_dropout=0.0, attention_dropout=0.0), **NEXT
    ),
    "GPT-J: by hand, rotary by position": Case(
        build=partial(
            built, "GPTJForCausalLM", n_embd=32, n_layer=2, n_head=4, n_positions=40, rotary_dim=4, attn_pdrop=0.0,
            resid_pdrop=0.0, embd_pdrop=0.0,
        ),
        **NEXT,
    ),
    "Llama 4: chunked attention": Case(
        build=partial(
            built_with_experts, "Llama4ForCausalLM", attention_chunk_size=4, intermediate_size_mlp=24, pad_token_id=0,
            num_local_experts=2, head_dim=8, floor_scale=4, no_rope_layers=[1, 0], **HEADS,
        ),
        **NEXT,
    ),
}  # fmt: skip


@pytest.mark.deep  # by default: rings in test_attention_methods, whole models in test_shared_prefixes
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.deep] * name.startswith(("GPT-J", "Llama 4", "Gemma 2", "Bloom")))
        for name in CASES
    ],
)
def test_attention_of_a_family_is_that_of_its_stock_model_at_degrees_1_to_3(ranks, name):
    for result in ranks(3).run(step_on_ranks, CASES[name], DEGREES):
        assert_exact(CASES[name], result, name)


NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
BY_HAND = {
    "GPT-J": {"name": "GPTJForCausalLM", "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, **NO_DROPOUT},
    "GPT-Neo": {
        "name": "GPTNeoForCausalLM", "hidden_size": 32, "num_layers": 2, "attention_types": [[["global", "local"], 1]],
        "num_heads": 4, "max_position_embeddings": 64, "window_size": 8,
    },
    "CodeGen": {"name": "CodeGenForCausalLM", "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, **NO_DROPOUT},
}  # fmt: skip
"""Families whose mask transformers makes of position ids, and takes a jump of them for the end of a sequence."""
PACKS = tuple(pack for groups in DEGREES for pack in groups.packs)
RING = (Packs(ranks=(0, 1), packs=PACKS, recompute=(True, False), method=Method.RING),)


@pytest.mark.deep  # by default: test_custom_masks by hand, families in rings in test_attention_methods
@pytest.mark.parametrize(
    "name", ["GPT-Neo", *(pytest.param(name, marks=pytest.mark.deep) for name in ("GPT-J", "CodeGen"))]
)
def test_attention_by_hand_is_that_of_its_stock_model_in_a_ring_too(ranks, name):
    case = Case(build=partial(built, **BY_HAND[name]), **NEXT)
    for result in ranks(2).run(step_on_ranks, case, RING):
        assert_exact(case, result, name)


def sinks_and_window(batch, head, query, key):
    return (key <= query) & ((key < 2) | (key > query - 3))


def strided(stride):
    return lambda batch, head, query, key: (query - key) % stride == 0


def functions(kinds):
    """Mask functions over the slots of one row, whose kinds are ``kinds`` [t]."""
    from transformers import masking_utils as masks

    packed = torch.zeros(1, len(kinds), dtype=torch.long)
    named = {
        "causal": masks.causal_mask_function,
        "window": masks.sliding_window_causal_mask_function(3),
        "window both ways": masks.sliding_window_bidirectional_mask_function(3),
        "two windows": masks.and_masks(masks.sliding_window_causal_mask_function(3), masks.sliding_window_overlay(6)),
        "chunks": masks.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.long)),
        "sinks and window": sinks_and_window,
        "strides": strided(3),
        "prefix": masks.or_masks(masks.causal_mask_function, lambda b, h, q, k: k < 3),
        "partial": partial(lambda n, b, h, q, k: (k <= q) & (q - k != n), 2),
        "partial by name": partial(lambda b, h, q, k, n: (k <= q) & (q - k != n), n=2),
        "blocks": masks.or_masks(masks.causal_mask_function, masks.blockwise_overlay(kinds[None])),
    }
    if hasattr(masks, "packed_sequence_compatibility_function"):  # not in transformers 5.17
        places = torch.arange(len(kinds))[None]
        named["within a pack"] = masks.packed_sequence_compatibility_function(strided(2), places, packed)
    return named


def _stock(q, k, v, name, kinds):
    """Of one sequence, by the mask that transformers makes for its sdpa attention."""
    from transformers.masking_utils import sdpa_mask

    mask = sdpa_mask(
        batch_size=1, q_length=q.shape[2], kv_length=q.shape[2], mask_function=functions(kinds)[name], use_vmap=True,
        allow_is_causal_skip=False,
    )  # fmt: skip
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


@pytest.mark.parametrize("name", functions(torch.zeros(1)))
def test_a_mask_function_is_evaluated_for_the_positions_of_each_sequence(name, monkeypatch):
    monkeypatch.setattr("lengthwise.runtime.wrap.sharded_attention.QUERY_CHUNK", 5)
    torch.manual_seed(0)
    shard = shard_of(LENGTHS)
    qkv = [torch.randn(1, 4, 20, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    kinds, weights = torch.randint(-1, 2, (20,)), torch.randn(20, 4, 8, dtype=torch.float64)
    module = nn.Module()
    module.is_causal = name in ("causal", "window", "two windows")
    with active(shard):
        out = attention(module, *qkv, make_mask(mask_function=functions(kinds)[name]))[0]
    grads = torch.autograd.grad((out[0] * weights).sum(), qkv)
    alone = [
        _stock(*(x[:, :, start:end] for x in qkv), name, kinds[start:end]) for start, end in pairwise(shard.cu_seqlens)
    ]
    expected = torch.cat(alone, dim=1)
    assert torch.allclose(out, expected, atol=1e-12)
    for grad, right in zip(grads, torch.autograd.grad((expected[0] * weights).sum(), qkv)):
        assert torch.allclose(grad, right, atol=1e-12)


@pytest.mark.parametrize("name", ["within a pack", "causal and packed"])
def test_what_a_mask_function_knows_of_packs_is_left_out_where_ranks_share_them(name):
    from transformers import masking_utils as masks

    shard, packed = shard_of(LENGTHS, rank=0, degree=2), torch.zeros(1, 10, dtype=torch.long)
    made = {
        **functions(torch.zeros(10)),
        "causal and packed": masks.and_masks(strided(2), masks.packed_sequence_mask_function(packed)),
    }
    if name not in made:
        pytest.skip("this version of transformers makes no such mask")
    seen = sequence_mask(made[name], shard)(0, range(1), range(13), range(13))
    distance = torch.arange(13)[:, None] - torch.arange(13)
    assert torch.equal(seen.expand(13, 13), distance % 2 == 0)


class Holding:
    """A mask that is an object."""

    def __init__(self, kinds):
        self.kinds = kinds

    def __call__(self, batch, head, query, key):
        return self.kinds[query] == self.kinds[key]


def test_a_mask_that_reads_values_of_slots_is_refused_where_ranks_share_them():
    kinds = torch.zeros(10, dtype=torch.long)
    q = torch.zeros(1, 4, 10, 8)
    with active(shard_of(LENGTHS, rank=0, degree=2)), pytest.raises(InputError, match="set max_degree=1"):
        attention(nn.Module(), q, q, q, make_mask(mask_function=functions(kinds)["blocks"]))
    with active(shard_of((4, 6))), pytest.raises(InputError, match=r"reads a tensor .* of the slots"):
        attention(nn.Module(), q, q, q, make_mask(mask_function=lambda b, h, query, key: kinds[query] == kinds[key]))
    with active(shard_of((4, 6))), pytest.raises(InputError, match=r"Holding object .*, an object that holds tensors"):
        attention(nn.Module(), q, q, q, make_mask(mask_function=Holding(kinds)))
    with pytest.raises(InputError, match="attention_mask hides tokens"):
        make_mask(mask_function=functions(kinds)["causal"], attention_mask=torch.tensor([[True, False]]))


def test_a_mask_of_numbers_that_hides_nothing_is_open_and_others_are_refused():
    q = torch.randn(1, 4, 20, 8, dtype=torch.float64)
    with active(shard_of(LENGTHS)):
        open_to_all = make_mask(mask_function=lambda b, h, query, key: query >= 0)
        both = [attention(nn.Module(), q, q, q, mask)[0] for mask in (torch.zeros(1, 1, 1, 20), open_to_all)]
        assert torch.allclose(*both, atol=1e-12)
        with pytest.raises(InputError, match="a mask of its own"):
            attention(nn.Module(), q, q, q, torch.zeros(1, 1, 1, 20).index_fill(3, torch.tensor(3), -1e9))
