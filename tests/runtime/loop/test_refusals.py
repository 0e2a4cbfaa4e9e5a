"""What cannot be right on shards of packs is refused before it trains, with the reason; nothing is ignored."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lengthwise.core.batch import EVERY_TOKEN, Pack
from lengthwise.core.errors import CheckError, InputError
from lengthwise.runtime.wrap.collator import PackCollator, pad_to_degree
from lengthwise.runtime.wrap.context import active
from lengthwise.runtime.wrap.flash_kernels import ends_note, read_call
from lengthwise.runtime.wrap.hugging_face import attention
from lengthwise.runtime.wrap.position_masks import SymbolicMask
from lengthwise.runtime.wrap.wrapped_model import WrappedModel
from tests.runtime.loop.modules import GPT, VOCAB, Llama, flash_attn_varlen_func
from tests.runtime.loop.runs import Source, learned, packed, shard_of
from tests.runtime.loop.test_families import llama
from tests.runtime.loop.test_plain_modules import built


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        ("cross", "it has 11 queries and 6 keys"),
        ("einsum", r"layers 0, 1, 2 of GPT \(transformer.h: Block\) make no call of attention that is known"),
    ],
)
def test_attention_that_shards_would_change_is_refused_when_it_is_learned(mask, reason):
    with pytest.raises(InputError, match=reason):
        learned(built(GPT, mask=mask))


def test_one_layer_that_attends_by_hand_is_named():
    model = built(GPT)
    model.transformer.h[1].attn.mask = "einsum"
    with pytest.raises(InputError, match="layers 1 of GPT"):
        learned(model)


class WithNoise(GPT):
    """A GPT that draws in its forward."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def forward(self, idx, targets=None):
        x = super().forward(idx)[0]
        return self.draw(x)


DRAWS = {
    "bernoulli_": lambda x: x * x.new_empty(1, 1, 1).bernoulli_(0.5),
    "rand": lambda x: x + torch.rand(x.shape),
    "randn": lambda x: x + torch.randn(1, 1, 1),
    "normal": lambda x: x + torch.normal(torch.zeros_like(x), 1.0),
    "uniform_": lambda x: x + torch.empty_like(x).uniform_(),
    "dropout1d": lambda x: F.dropout1d(x[0])[None],
    "multinomial": lambda x: x + x[0].softmax(-1).multinomial(1),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_that_ranks_would_not_share_are_refused(name):
    with pytest.raises(InputError, match=f"calls {name}, whose draws would differ between ranks"):
        learned(built(WithNoise, DRAWS[name]))


@pytest.mark.parametrize(
    "draw", [lambda x: F.alpha_dropout(x, 0.5, False), lambda x: F.dropout1d(x[0], training=False)[None]]
)
def test_what_would_draw_and_is_told_not_to_is_let_through(draw):
    model = built(WithNoise, draw)
    learned(model)
    packed(model, shard_of((9,)))


def test_products_of_a_layer_that_is_left_out_keep_their_numbers():
    model = built(GPT, mask="by hand")
    whole = learned(model)
    shard = shard_of((9,))
    packed(model, shard)
    intercept = whole._intercept
    intercept.shard = shard_of((9,))
    for layer in range(3):
        intercept.skip(layer)
    assert shard.counts.products == intercept.shard.counts.products > 0
    assert shard.counts.attention == intercept.shard.counts.attention == 3


def test_dropout_of_what_no_token_owns_is_refused():
    model = built(WithNoise, lambda x: x * F.dropout(torch.ones(VOCAB), 0.5))
    learned(model)
    with pytest.raises(InputError, match=r"dropout of \(37,\) has no axis of slots"):
        packed(model, shard_of((9,)))


def test_one_random_number_that_decides_nothing_is_let_through():
    model = built(WithNoise, lambda x: x if torch.rand([]) >= 0.0 else None)  # as models with layer-drop draw it
    learned(model)
    packed(model, shard_of((9,)))


def test_a_forward_that_computes_otherwise_than_when_it_was_learned_is_refused():
    model = built(GPT)
    learned(model)
    model.transformer.h[2].attn.mask = "einsum"
    with pytest.raises(CheckError, match="made 2 calls of attention, where it made 3 when it was prepared"):
        packed(model, shard_of((9,)))


def test_a_forward_that_depends_on_the_length_is_refused():
    class Twice(GPT):
        def forward(self, idx, targets=None):
            return super().forward(idx)[0] if idx.shape[1] < 9 else super().forward(idx)[0] + super().forward(idx)[0]

    with pytest.raises(InputError, match="makes 6 calls of attention for 11 slots and 3 for 7"):
        learned(built(Twice))


def test_a_sequence_longer_than_the_table_of_positions_is_refused():
    model = built(Llama)
    learned(model)
    packed(model, shard_of((64, 2)))
    with pytest.raises(InputError, match=r"a sequence has 65 slots, .* is for 64; set max_length=64"):
        packed(model, shard_of((65,)))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"s_aux": torch.zeros(4, 8)}, "attention sinks of shape"),
        ({"position_bias": torch.zeros(1, 4, 5, 5)}, "a bias by position"),
        ({"head_mask": torch.ones(4)}, "a mask of heads"),
        ({"attention_mask": torch.ones(1, 1, 5, 5)}, "a mask of its own"),
    ],
)
def test_arguments_of_attention_that_cannot_be_honoured_are_refused(given, reason):
    q = torch.zeros(1, 4, 5, 8)
    with active(shard_of((5,))):
        attention(nn.Module(), q, q, q, None, deterministic=True)  # of no consequence
        with pytest.raises(InputError, match=f"Module asks for {reason}"):
            attention(nn.Module(), q, q, q, **{"attention_mask": None, **given})


def test_attention_over_other_tokens_is_refused():
    q, k = torch.zeros(1, 4, 5, 8), torch.zeros(1, 4, 3, 8)
    with active(shard_of((5,))), pytest.raises(InputError, match="only self-attention"):
        attention(nn.Module(), q, k, k, None)
    with active(shard_of((5,))), pytest.raises(InputError, match="only self-attention"):
        attention(nn.Module(), q, q, q[:, :2], None)


def test_a_mask_and_an_attention_that_contradict_each_other_are_refused():
    q, module = torch.zeros(1, 4, 5, 8), nn.Module()
    module.is_causal = True
    with active(shard_of((5,))):
        with pytest.raises(InputError, match="attends causally, but the model's mask is both ways"):
            attention(module, q, q, q, SymbolicMask.of(False, None, q.device))
        with pytest.raises(InputError, match=r"causally within \(3, 0\) slots, but the model's mask is causally;"):
            attention(module, q, q, q, SymbolicMask.of(True, None, q.device), sliding_window=4)
        attention(module, q, q, q, SymbolicMask.of(True, (3, 0), q.device), sliding_window=4)
        attention(module, q, q, q, SymbolicMask.of(True, (3, 0), q.device))  # told to the mask alone


def test_encoders_with_decoders_are_refused():
    from transformers import T5Config, T5ForConditionalGeneration

    small = {"d_model": 16, "d_kv": 4, "d_ff": 8, "num_layers": 2, "num_heads": 2, "vocab_size": VOCAB}
    for layers in (None, "decoder.block"):  # and not by the two lists that it has
        with pytest.raises(InputError, match="an encoder with a decoder"):
            WrappedModel(T5ForConditionalGeneration(T5Config(**small)), layers=layers)


def test_a_batch_of_rows_is_refused():
    model = llama()
    learned(model)
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    with active(shard_of((5,))), pytest.raises(InputError, match="got a batch of 2; a pack is one row"):
        model(tokens, use_cache=False)


@pytest.mark.parametrize(
    ("given", "reason"),
    [({"softcap": 5.0}, "soft-capped logits"), ({"alibi_slopes": torch.ones(4)}, "a bias by position")],
)
def test_kernels_that_are_asked_for_more_are_refused(given, reason):
    q, ends = torch.zeros(5, 4, 8), torch.tensor([0, 5])
    call = read_call(flash_attn_varlen_func, (q, q, q, ends, ends, 5, 5), given)
    assert call.refused == f"refused: it asks for {reason}"


def test_a_kernel_that_is_told_other_ends_is_refused():
    q, ends = torch.zeros(5, 4, 8), torch.tensor([0, 2, 5])
    call = read_call(flash_attn_varlen_func, (q, q, q), dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), ends) | SIZE)
    assert ends_note(call) == "refused: its sequences end at [0, 2, 5] where one sequence of 5 was given"


SIZE = {"max_seqlen_q": 5, "max_seqlen_k": 5}


def test_torchs_own_varlen_attention_is_read_by_its_own_names():
    from torch.nn.attention.varlen import varlen_attn

    q, ends = torch.zeros(5, 4, 8), torch.tensor([0, 5], dtype=torch.int32)
    for window, causal, expected in (((-1, -1), False, None), ((-1, 0), True, None), ((3, 0), True, (3, 0))):
        call = read_call(varlen_attn, (q, q, q, ends, ends, 5, 5), {"window_size": window, "scale": 0.5})
        assert (call.causal, call.window, call.scale, call.refused) == (causal, expected, 0.5, "")
    assert read_call(varlen_attn, (q, q, q, ends, ends, 5, 5), {"window_size": (2, 1)}).window == (2, 1)
    assert "paged keys" in read_call(varlen_attn, (q, q, q, ends, ends, 5, 5), {"block_table": ends}).refused


def test_packs_with_fewer_slots_than_ranks_are_padded_or_refused():
    collator = PackCollator(source=Source(), objective="next-token")
    pack = Pack(ids=(3, 6), lengths=(1, 2))
    assert pad_to_degree(pack, 3, collator) == pack
    assert pad_to_degree(pack, 4, collator) == Pack(ids=(3, 6), lengths=(1, 2), padded_to=4)
    video = PackCollator(source=Source(), objective=EVERY_TOKEN, slot_tokens=2)
    assert pad_to_degree(Pack(ids=(1,), lengths=(8,)), 4, video).padded_to == 0
    with pytest.raises(InputError, match="of 3 slots would be padded to 4 for 4 ranks"):
        pad_to_degree(Pack(ids=(1,), lengths=(6,)), 4, video)
