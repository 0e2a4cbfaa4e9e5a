"""What dropout leaves is scaled as torch scales it, in every way that a prepared model drops."""

import pytest
import torch
from torch.nn import functional as F

from lengthwise.runtime.wrap.call_rules import CallRule, CallRules
from lengthwise.runtime.wrap.counter_rng import attend_rows_dropping
from lengthwise.runtime.wrap.sharded_attention import AttentionRequest, attend_shard
from lengthwise.runtime.wrap.torch_function_mode import InterceptCalls
from tests.runtime.loop.runs import shard_of

P = 0.4
ONES = torch.ones(1, 500, 40, dtype=torch.float64)


def torch_value():
    """What torch makes of a one that it leaves."""
    left = F.dropout(ONES, P, training=True)
    return float(left[left != 0].unique())


def assert_scaled_as_in_torch(dropped):
    """Numbers that would all be one without dropout."""
    kept = dropped[dropped != 0]
    torch.testing.assert_close(kept, torch.full_like(kept, torch_value()), rtol=1e-12, atol=0)
    assert abs(float(dropped.mean()) - 1.0) < 0.02, "the mean stays"
    assert abs(len(kept) / dropped.numel() - (1.0 - P)) < 0.02


@pytest.mark.parametrize(
    "drop",
    [
        lambda x: F.dropout(x, P),
        lambda x: F.dropout(x.clone(), P, inplace=True),
        lambda x: torch.dropout(x, P, True),
        torch.nn.Dropout(P),
    ],
    ids=["functional", "in place", "torch.dropout", "module"],
)
def test_dropout_of_tokens_has_the_scale_of_torch(drop):
    intercept = InterceptCalls([], rules=CallRules(noise=(CallRule(dim=1),)))
    intercept.shard = shard_of((300, 200))
    with intercept:
        dropped = drop(ONES)
    assert_scaled_as_in_torch(dropped)


def test_dropout_of_attention_weights_has_the_scale_of_torch():
    """Sequences of one slot attend to themselves with weight one."""
    shard, x = shard_of((1,) * 300), torch.ones(300, 40, 1, dtype=torch.float64)
    assert_scaled_as_in_torch(attend_shard(x, x, x, AttentionRequest(causal=True, dropout=P), shard))


def test_dropout_of_attention_weights_keeps_the_mean_over_longer_sequences():
    shard, x = shard_of((64, 30)), torch.ones(94, 100, 1, dtype=torch.float64)
    out = attend_shard(x, x, x, AttentionRequest(causal=False, dropout=P), shard)
    expected = F.scaled_dot_product_attention(*(x.transpose(0, 1)[None],) * 3, dropout_p=P)
    assert abs(float(out.mean()) - 1.0) < 0.01 and abs(float(expected.mean()) - 1.0) < 0.01


def test_dropout_of_attention_within_slots_has_the_scale_of_torch():
    x = torch.ones(500, 40, 1, 1, dtype=torch.float64)
    assert_scaled_as_in_torch(attend_rows_dropping(x, x, x, None, P, False, None, 0, 0, shard_of((300, 200))))


WITHIN = {
    "open": (None, False, None),
    "causal": (None, True, None),
    "scale": (None, False, 0.7),
    "mask": (torch.ones(6, 6, dtype=torch.bool).tril().triu(-2), False, None),
    "bias": (torch.linspace(-2, 2, 36, dtype=torch.float64).view(6, 6), False, None),
}


@pytest.mark.parametrize("name", WITHIN)
def test_attention_within_slots_is_that_of_torch_where_nothing_is_dropped(name):
    """Slots of 6 places, 4 query heads and 2 key heads."""
    mask, causal, scale = WITHIN[name]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(5, heads, 6, 8, dtype=torch.float64, generator=generator) for heads in (4, 2, 2))
    expected = F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=True)
    out = attend_rows_dropping(q, k, v, mask, 0.0, causal, scale, 0, 0, shard_of((3, 2)))
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
