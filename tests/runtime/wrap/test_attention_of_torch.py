"""Attention weights of ``nn.MultiheadAttention`` and keys of no slot, which packs do not have, are refused by name."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lengthwise as lw
from lengthwise.core.errors import InputError
from lengthwise.runtime.wrap.unusable import Unusable, attention_weights
from tests.session import models

OPTIONS = {"cost": models.mixed_cost(), "memory_gib": 40, "packing": "always", "verbose": False, "check": False}
WIDTH = 24


class Torchs(nn.Module):
    """Torch's own module, and what a layer makes of the weights that it returns."""

    def __init__(self, use=None, **options):
        super().__init__()
        self.inner, self.use = nn.MultiheadAttention(WIDTH, 4, batch_first=True, **options), use

    def forward(self, x):
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        y, weights = self.inner(x, x, x, attn_mask=mask)
        return y if self.use is None else self.use(y, weights)


class WithMemory(models.Attention):
    """Every query sees three keys that are learned."""

    def __init__(self):
        super().__init__(WIDTH, 4, causal=True)
        self.memory = nn.Parameter(torch.randn(2, 4, 3, WIDTH // 4))

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(-3, -2) for part in self.qkv(x).chunk(3, -1))
        k, v = (torch.cat([learned[None], z], dim=2) for learned, z in zip(self.memory, (k, v)))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(-3, -2).flatten(-2))


class EveryOther(models.Attention):
    """Queries see every other key."""

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(-3, -2) for part in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k[..., ::2, :], v[..., ::2, :]).transpose(-3, -2).flatten(-2))


def with_attention(make):
    model = models.gpt()
    for block in model.blocks:
        block.attention = make()
    return model.double()


def test_weights_of_attention_may_be_returned_and_kept_unread():
    seen = []
    run = lw.prepare(
        with_attention(partial(Torchs, lambda y, weights: seen.append(weights) or y)), models.rows(), **OPTIONS
    )
    run.close()
    assert any(isinstance(copy.deepcopy(weights), Unusable) for weights in seen)


@pytest.mark.parametrize(
    "use",
    [
        lambda y, weights: y + weights.diagonal(dim1=1, dim2=2)[..., None],
        lambda y, weights: y + weights[:, :, :1],
        lambda y, weights: y + torch.mean(weights),
        lambda y, weights: y * weights,
    ],
)
def test_weights_of_attention_that_are_read_are_the_reason(use):
    reason = r"^the attention weights that nn.MultiheadAttention returns \(need_weights=True\) are not there in packs"
    with pytest.raises(InputError, match=reason) as refused:
        lw.prepare(with_attention(partial(Torchs, use)), models.rows(), **OPTIONS)
    assert "need_weights=False" in str(refused.value) and "inputs=" not in str(refused.value)


def test_what_is_not_there_says_so_wherever_it_is_used():
    weights = attention_weights()
    for use in (bool, float, len, lambda x: x.shape, lambda x: x + 1, lambda x: x @ x, torch.sum, lambda x: list(x)):
        with pytest.raises(InputError, match="need_weights=True"):
            use(weights)
    assert "need_weights=True" in repr(weights)


@pytest.mark.parametrize(
    ("make", "keys"),
    [
        (partial(Torchs, add_bias_kv=True), "1 more key than"),
        (partial(Torchs, add_zero_attn=True), "1 more key than"),
        (WithMemory, "3 more keys than"),
    ],
)
def test_keys_that_belong_to_no_slot_are_named(make, keys):
    said = rf"attention call 0 of GPT is refused: it has {keys} queries, .*\(add_bias_kv=, add_zero_attn= of nn.Multih"
    with pytest.raises(InputError, match=said):
        lw.prepare(with_attention(make), models.rows(), **OPTIONS)


def test_other_numbers_of_keys_are_given_for_both_lengths():
    said = "is refused: it has 11 queries and 6 keys for 11 slots, 7 queries and 4 keys for 7$"
    with pytest.raises(InputError, match=said):
        lw.prepare(with_attention(partial(EveryOther, WIDTH, 4, causal=False)), models.rows(), **OPTIONS)
