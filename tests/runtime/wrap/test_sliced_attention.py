"""Attention of a pack in slices is that of the pack at once, and so are the gradients, whatever a query sees."""

from contextlib import nullcontext

import pytest
import torch

from lengthwise.core.errors import InputError
from lengthwise.runtime.parallel.slice_attention import PackSlices
from lengthwise.runtime.wrap.sharded_attention import AttentionRequest, attend_shard
from tests.runtime.loop.runs import shard_of
from tests.runtime.parallel.flash_on_cpu import flash_on_cpu

LENGTHS = (13, 5, 9)
CUTS = (range(5), range(5, 6), range(6, 16), range(16, 22), range(22, 27))
"""Within a sequence, of one token, over two ends of sequences."""
HEADS, KV_HEADS, SIZE = 4, 2, 8
KINDS = {
    "causal": AttentionRequest(causal=True),
    "scaled": AttentionRequest(causal=True, scale=0.2),
    "window": AttentionRequest(causal=True, window=(3, 0)),
    "capped": AttentionRequest(causal=True, softcap=0.7),
    "capped in a window": AttentionRequest(causal=True, softcap=0.7, window=(4, 0)),
    "dropout": AttentionRequest(causal=True, dropout=0.3, call=2),
}


def made(seed=0, sinks=False):
    """Queries, keys and values of the pack, sinks if there are any, and the gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(sum(LENGTHS), heads, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)] + [(HEADS,)] * sinks
    q, k, v, dout, *rest = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [x.requires_grad_() for x in (q, k, v, *rest)], dout


def request(kind, leaves):
    options = {**vars(kind), "sinks": leaves[3] if len(leaves) > 3 else None}
    return AttentionRequest(**options)


def at_once(kind, sinks):
    leaves, dout = made(sinks=sinks)
    shard = shard_of(LENGTHS)
    shard.counts.attention = 1
    out = attend_shard(*leaves[:3], request(kind, leaves), shard)
    return out, torch.autograd.grad(out, leaves, dout)


def in_slices(kind, sinks):
    leaves, dout = made(sinks=sinks)
    slices, outs = PackSlices(shard_of(LENGTHS).cu_seqlens), []
    for tokens in CUTS:
        shard = shard_of(LENGTHS, part=slices.slice(tokens))
        shard.counts.attention = 1
        qkv = (x[tokens.start : tokens.stop] for x in leaves[:3])
        outs.append(attend_shard(*qkv, request(kind, leaves), shard))
    totals = [torch.zeros_like(x) for x in leaves]
    for tokens, out in reversed(list(zip(CUTS, outs))):
        added = torch.autograd.grad(out, leaves, dout[tokens.start : tokens.stop])
        for total, gradient in zip(totals, added):
            total += gradient
    return torch.cat(outs), totals


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_attention_in_slices_is_that_of_the_pack_at_once(name, sinks):
    (out, gradients), (sliced, added) = at_once(KINDS[name], sinks), in_slices(KINDS[name], sinks)
    torch.testing.assert_close(sliced, out, rtol=0, atol=1e-12)
    for number, (gradient, total) in enumerate(zip(gradients, added)):
        torch.testing.assert_close(total, gradient, rtol=0, atol=1e-12, msg=f"gradient {number}")


@pytest.mark.parametrize("name", ["causal", "window"])
def test_by_the_kernels_of_gpus_too(name):
    (out, gradients) = at_once(KINDS[name], False)
    with flash_on_cpu() as calls:
        sliced, added = in_slices(KINDS[name], False)
        launches = dict(calls)
    of_earlier = 4 * (name == "causal")  # those of a window are one with the slice's own
    assert launches == dict.fromkeys(("forward", "backward"), len(CUTS) + of_earlier)
    torch.testing.assert_close(sliced, out, rtol=0, atol=1e-12)
    for gradient, total in zip(gradients, added):
        torch.testing.assert_close(total, gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (AttentionRequest(causal=False), "this model's attention looks both ways; plan with .*slices=none"),
        (AttentionRequest(causal=False, mask=lambda *_: None), "has masks or biases of its own"),
    ],
)
def test_attention_that_may_look_ahead_is_refused(kind, said):
    with pytest.raises(InputError, match=said), nullcontext():
        in_slices(kind, False)


def test_slices_attend_in_the_dtype_of_autocast():
    """Queries and keys may be wider, as norms leave them."""
    leaves, _ = made()
    whole = attend_shard(*(x.bfloat16() for x in leaves[:3]), KINDS["causal"], shard_of(LENGTHS))
    slices, outs = PackSlices(shard_of(LENGTHS).cu_seqlens), []
    for tokens in CUTS:
        shard = shard_of(LENGTHS, part=slices.slice(tokens), dtype=torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16):
            qkv = (x[tokens.start : tokens.stop].float() for x in leaves[:3])
            outs.append(attend_shard(*qkv, KINDS["causal"], shard))
    assert all(out.dtype == torch.bfloat16 for out in outs)
    torch.testing.assert_close(torch.cat(outs), whole, rtol=2e-2, atol=2e-2)  # products of 8 bits
