"""What is drawn for a token is the token's: the same at every degree, in every pack, computed once or twice."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from lengthwise.core.batch import Pack
from lengthwise.runtime.wrap import counter_rng as noise
from lengthwise.runtime.wrap import sharded_attention as attention
from lengthwise.runtime.wrap.call_rules import CallRule, CallRules
from lengthwise.runtime.wrap.collator import PackCollator
from lengthwise.runtime.wrap.counter_rng import attention_keep, keep_like, mix, mix_word, normal_like, uniform_like
from lengthwise.runtime.wrap.micro_batch import MicroBatch
from lengthwise.runtime.wrap.sharded_attention import AttentionRequest, attend_shard
from lengthwise.runtime.wrap.torch_function_mode import InterceptCalls
from tests.runtime.loop.modules import CHANNELS, GPT, PLACES, TorchEncoder
from tests.runtime.loop.runs import (
    EXACT,
    Case,
    Frames,
    Packs,
    cross_entropy,
    local_world,
    prepared,
    shard_of,
    step_on_ranks,
    train,
)
from tests.runtime.loop.test_families import MASKED, MASKING, bert, gpt2, masked_losses, next_token_losses
from tests.runtime.loop.test_plain_modules import IGNORES, LOGITS, VIDEO_PACKS, built, gpt_losses, video_case

ALONE = tuple(
    Packs(ranks=(rank,), packs=packs)
    for rank, packs in enumerate([((0,), (1,), (2,)), ((3,), (4,), (5,)), ((6,), (7,), (8,), (9,)), ()])
)
PACKED = (Packs(ranks=(0,), packs=(tuple(range(9, -1, -1)),)), *(Packs(ranks=(rank,), packs=()) for rank in (1, 2, 3)))
TWO = (
    Packs(ranks=(0, 1), packs=((5, 3), (0,)), recompute=(True, False, True)),
    Packs(ranks=(2, 3), packs=((1,), (9, 2, 8), (4, 6, 7)), recompute=(True, True, True)),
)
FOUR = (Packs(ranks=(3, 2, 1, 0), packs=((2,), (0, 1, 3, 4), (5, 6, 7), (8, 9)), recompute=(False, True)),)
DROPPING = {
    "gpt2": Case(build=partial(gpt2, 0.1), sum_of_losses=next_token_losses, loss=cross_entropy),
    "bert": Case(
        build=partial(bert, 0.1), sum_of_losses=masked_losses, loss=cross_entropy, objective=MASKED, masking=MASKING
    ),
    "a gpt of one's own": Case(build=partial(built, GPT, dropout=0.2), sum_of_losses=gpt_losses, **IGNORES),
    "torch's encoder": Case(build=partial(built, TorchEncoder, True, False, dropout=0.2), **LOGITS),
}


@pytest.mark.parametrize(
    ("name", "shared"),
    [pytest.param(name, (PACKED, TWO, FOUR), marks=pytest.mark.deep) for name in DROPPING],
)
def test_a_run_that_drops_is_the_same_at_any_degree_in_any_packs_with_and_without_recompute(ranks, name, shared):
    first = ranks(4).run(step_on_ranks, DROPPING[name], ALONE)[0]
    for groups in shared:
        _assert_same(ranks(4).run(step_on_ranks, DROPPING[name], groups)[0], first)
    other = ranks(4).run(step_on_ranks, DROPPING[name], ALONE, seed=1)[0]
    assert abs(other[0][0] - first[0][0]) > 1e-3, "another seed drops others"


def test_a_video_model_drops_within_frames_and_across_them_alike_at_every_degree(ranks):
    case = video_case(dropout=0.2)
    alone = tuple(
        Packs(ranks=(rank,), packs=packs)
        for rank, packs in enumerate([((0,), (1,), (2,)), ((3, 4),), ((5,), (6,)), ()])
    )
    first = ranks(4).run(step_on_ranks, case, alone)[0]
    _assert_same(ranks(4).run(step_on_ranks, case, VIDEO_PACKS)[0], first)
    without = ranks(4).run(step_on_ranks, video_case(), alone)[0]
    assert abs(without[0][0] - first[0][0]) > 1e-3, "it drops"


def test_steps_drop_differently(ranks):
    losses = ranks(4).run(_two_steps_that_learn_nothing)[0]
    assert abs(losses[0] - losses[1]) > 1e-3


def _two_steps_that_learn_nothing():
    run = prepared(DROPPING["a gpt of one's own"], TWO, local_world(), num_steps=2)
    run.lr = lambda step: 0.0
    return train(run)


def _assert_same(found, expected):
    assert abs(found[0][0] - expected[0][0]) <= EXACT
    for name, change in expected[1].items():
        torch.testing.assert_close(found[1][name], change, rtol=EXACT, atol=EXACT, msg=name)


def _whole(lengths, degree, draw):
    """What all ranks of a group draw, in the order of the pack."""
    shards = [shard_of(lengths, rank=rank, degree=degree) for rank in range(degree)]
    parts = [draw(shard) for shard in shards]
    places = np.concatenate([shard.places for shard in shards])
    return torch.cat(parts)[torch.from_numpy(np.argsort(places))]


@pytest.mark.parametrize("draw", [keep_like, normal_like, uniform_like])
def test_draws_are_those_of_the_tokens_at_every_degree(draw):
    lengths = (13, 1, 8, 2)

    def draws(shard):
        x = torch.empty(3, shard.num_slots, 5, dtype=torch.float64)
        args = (0.3,) if draw is keep_like else ()
        return draw(x, 1, *args, 7, shard).movedim(1, 0)

    whole = _whole(lengths, 1, draws)
    for degree in (2, 3, 4, 8):
        assert torch.equal(_whole(lengths, degree, draws), whole)
    alone = draws(shard_of((8,), ids=(2,)))
    assert torch.equal(alone, whole[14:22]), "a sequence draws the same in a pack as alone"


@pytest.mark.parametrize("p", [0.05, 0.1, 0.5, 0.9])
def test_dropout_drops_as_many_as_it_says(p):
    num = 400 * 1000
    kept = keep_like(torch.empty(400, 1000), 0, p, 0, shard_of((400,))).double()
    assert abs(float(kept.mean()) - (1 - p)) < 5 * (p * (1 - p) / num) ** 0.5
    weights = attention_keep(shard_of((4,)), 0, 0, 0, p, 8, range(200), range(250)).double()
    assert abs(float(weights.mean()) - (1 - p)) < 5 * (p * (1 - p) / num) ** 0.5


@pytest.mark.parametrize(
    "kind",
    [
        AttentionRequest(causal=True, window=(5, 0)),
        AttentionRequest(causal=False, window=(2, 3)),
        AttentionRequest(causal=True),
    ],
)
def test_long_sequences_attend_and_drop_some_queries_at_a_time(monkeypatch, kind):
    lengths, heads = (23, 1, 40), 4
    qkv = torch.randn(3, sum(lengths), heads, 8, dtype=torch.float64)
    distance = torch.arange(sum(lengths))[:, None] - torch.arange(sum(lengths))
    before, after = kind.window or (100, 0)
    of = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    sees = (distance <= before) & (distance >= -after) & (of[:, None] == of)
    expected = F.scaled_dot_product_attention(*qkv.transpose(1, 2), attn_mask=sees).transpose(0, 1)
    shard, dropping = shard_of(lengths), replace(kind, dropout=0.3)
    torch.testing.assert_close(attend_shard(*qkv, kind, shard), expected, rtol=EXACT, atol=EXACT)
    whole, grad = _out_and_gradient(qkv, dropping, shard)
    assert float((whole - expected).abs().max()) > 0.1, "it drops"
    for name, value in (("QUERY_CHUNK", 7), ("DRAWN_AT_ONCE", 3 * heads * 40)):
        monkeypatch.setattr(attention, name, value)
        torch.testing.assert_close(attend_shard(*qkv, kind, shard), expected, rtol=EXACT, atol=EXACT)
        again, grad_again = _out_and_gradient(qkv, dropping, shard)
        torch.testing.assert_close(again, whole, rtol=EXACT, atol=EXACT)
        torch.testing.assert_close(grad_again, grad, rtol=EXACT, atol=EXACT)


def _out_and_gradient(qkv, kind, shard):
    qkv = qkv.clone().requires_grad_()
    out = attend_shard(*qkv, kind, shard)
    out.square().sum().backward()
    return out.detach(), qkv.grad


def test_many_numbers_are_drawn_some_slots_at_a_time(monkeypatch):
    x, shard = torch.empty(9, 7, 3, dtype=torch.float64), shard_of((6, 1, 2))
    whole = keep_like(x, 0, 0.5, 0, shard), normal_like(x, 0, 0, shard), uniform_like(x, 0, 0, shard)
    for chunk in (1, 50):
        monkeypatch.setattr(noise, "CHUNK", chunk)
        parts = keep_like(x, 0, 0.5, 0, shard), normal_like(x, 0, 0, shard), uniform_like(x, 0, 0, shard)
        assert all(map(torch.equal, parts, whole))


def test_draws_differ_between_steps_seeds_calls_sequences_positions_and_channels():
    num, p = 64, 0.5
    x = torch.empty(num, num)
    first = keep_like(x, 0, p, 0, shard_of((num,)))
    others = {
        "step": keep_like(x, 0, p, 0, shard_of((num,), step=1)),
        "seed": keep_like(x, 0, p, 0, shard_of((num,), seed=1)),
        "call": keep_like(x, 0, p, 1, shard_of((num,))),
        "sequence": keep_like(x, 0, p, 0, shard_of((num,), ids=(1,))),
        "position": first.roll(1, 0),
        "channel": first.roll(1, 1),
        "transposed": first.T,
        "weights of attention": attention_keep(shard_of((num,)), 0, 0, 0, p, 1, range(num), range(num))[0],
    }
    for what, other in others.items():
        agree = float((first == other).double().mean())
        assert abs(agree - 0.5) < 5 * 0.5 / num, f"{what}: {agree} agree"


def test_seeds_share_no_draws_whatever_the_step():
    """As they would if some steps of one seed had the draws of other steps of another."""
    shards = [shard_of((16,), seed=seed, step=step) for seed in (0, 1, 2, 3, 1000) for step in range(4)]
    draws = [normal_like(torch.empty(16, 2, dtype=torch.float64), 0, 0, shard) for shard in shards]
    assert len(torch.cat(draws).unique()) == 16 * 2 * len(shards)
    sequences = [noise.uniform_sequences(shard, 0)[:1] for shard in shards]
    assert len(torch.cat(sequences).unique()) == len(shards)


def test_weights_of_attention_are_dropped_by_call_sequence_and_head():
    """Heads that another rank computes have the draws that they have where one rank computes all."""
    num, shard = 64, shard_of((64,))

    def keep(sequence=0, call=0, first_head=0, num_heads=4):
        return attention_keep(shard, sequence, call, first_head, 0.5, num_heads, range(num), range(num))

    whole = keep()
    assert torch.equal(keep(first_head=2, num_heads=2), whole[2:])
    for other in (keep(sequence=1)[0], keep(call=1)[0], whole[1], whole[0].T):
        assert abs(float((whole[0] == other).double().mean()) - 0.5) < 5 * 0.5 / num


@pytest.mark.parametrize("draw", ["dropout", "rrelu", "randn_like", "rand_like", "attention", "attention within slots"])
def test_calls_of_one_forward_draw_differently(draw):
    x = torch.zeros(12, 1, 4, 12, 12, dtype=torch.float64) if "within" in draw else torch.zeros(1, 4, 12, 12)
    rules = {
        "attention": CallRules(attention=(CallRule(dim=2, shape=(1, 4, 11, 12)),) * 2),
        "attention within slots": CallRules(attention=(CallRule(dim=0, shape=(11, 1, 4, 12, 12)),) * 2),
    }
    intercept = InterceptCalls([], rules=rules.get(draw, CallRules(noise=(CallRule(dim=2, shape=(1, 4, 11, 12)),) * 2)))
    intercept.shard = shard_of((12,))
    calls = {
        "dropout": lambda: F.dropout(x + 1.0, 0.5),
        "rrelu": lambda: F.rrelu(x - 1.0, 0.2, 0.7, True),
        "randn_like": lambda: torch.randn_like(x),
        "rand_like": lambda: torch.rand_like(x),
    }
    attends = partial(F.scaled_dot_product_attention, x, x, torch.rand(x.shape, dtype=x.dtype), dropout_p=0.5)
    with intercept:
        first, second = (calls.get(draw, attends)() for _ in range(2))
    assert not torch.allclose(first, second)


def test_random_slopes_are_those_of_negative_numbers_within_their_bounds():
    x = torch.randn(1, 4, 12, 500, requires_grad=True)
    intercept = InterceptCalls([], rules=CallRules(noise=(CallRule(dim=2, shape=(1, 4, 11, 500)),) * 2))
    intercept.shard = shard_of((12,))
    with intercept:
        y = F.rrelu(x, 0.2, 0.7, True)
        evaluated = F.rrelu(x, 0.2, 0.7, False)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    slopes = (y / x).detach()
    torch.testing.assert_close(gradient, slopes)
    torch.testing.assert_close(evaluated, F.leaky_relu(x, 0.45))
    assert bool((slopes[x > 0] == 1).all())
    assert 0.2 - 1e-6 < slopes[x < 0].min() < 0.21 and 0.69 < slopes[x < 0].max() < 0.7 + 1e-6


def test_draws_outside_of_the_forward_are_not_those_within():
    one = shard_of((7,))
    within = normal_like(torch.empty(7, 2), 0, 0, one)
    assert not torch.equal(noise.normal_slots(one, (2,), 0), within)


def test_normal_numbers_are_normal_and_uniform_ones_uniform():
    x, shard = torch.empty(500, 400, dtype=torch.float64), shard_of((500,))
    normal, uniform = normal_like(x, 0, 0, shard), uniform_like(x, 0, 1, shard)
    sigma = x.numel() ** -0.5
    assert abs(normal.mean()) < 5 * sigma and abs(normal.var() - 1) < 5 * 2**0.5 * sigma
    assert abs((normal**4).mean() - 3) < 5 * 96**0.5 * sigma
    assert abs(uniform.mean() - 0.5) < 5 * sigma / 12**0.5 and abs(uniform.var() - 1 / 12) < 5 * sigma / 180**0.5
    assert uniform.min() >= 0 and uniform.max() < 1
    assert uniform_like(x.to(torch.bfloat16), 0, 1, shard).max() < 1, "rounding does not reach 1"


def test_micro_batches_give_noise_of_slots_and_numbers_of_sequences():
    lengths, source = (4, 2, 7), Frames((4, 2, 7), PLACES, CHANNELS)
    pack = Pack(ids=(0, 1, 2), lengths=source.lengths)
    collator = PackCollator(source=source, objective="every-token", slot_tokens=PLACES)

    def micro_batch(shard):
        return MicroBatch(shard, pack, collator, make_inputs=lambda micro_batch: {})

    for draw in (lambda m: m.normal(PLACES, CHANNELS), lambda m: m.uniform_of_sequences()[:, None]):
        one, two, four = (
            _whole(lengths, degree, lambda shard, draw=draw: draw(micro_batch(shard))) for degree in (1, 2, 4)
        )
        assert torch.equal(one, two) and torch.equal(one, four)
    times = micro_batch(shard_of(lengths)).uniform_of_sequences()
    assert len(times.unique()) == 3 and bool((times >= 0).all() and (times < 1).all())
    one = micro_batch(shard_of(lengths))
    assert not torch.equal(one.normal(2), one.normal(2, call=1))
    assert not torch.equal(one.uniform_of_sequences(), one.uniform_of_sequences(call=1))


def test_numbers_and_tensors_are_mixed_alike():
    words = [0, 1, -1, 2**63 - 1, -(2**63), 123456789123456789]
    mixed = [int(value) for value in mix(torch.tensor(words))]
    assert mixed == [(each ^ (1 << 63)) - (1 << 63) for each in (mix_word(word & (2**64 - 1)) for word in words)]
    assert mix_word(0) == 0xE220A8397B1DCDAF, "the first number of SplitMix64 with seed 0"
