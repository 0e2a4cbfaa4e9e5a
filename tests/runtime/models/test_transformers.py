"""Transformer-1D and -2D (DCP) beside plain loops over sequences, frames and places."""

from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F

from lengthwise.core.errors import InputError
from lengthwise.runtime.models.registry import build_model
from lengthwise.runtime.models.rope import rotary_tables
from tests.runtime.models.cases import assert_same, loss_and_gradients, model_of, pack_of, sequences, tiny, tokens_of

SPECS = {
    "1d": tiny(family="transformer-1d", gated_ffn=False),
    "2d, frames of 4": tiny(family="transformer-2d", gated_ffn=False, causal=False, frame_size=4),
    "2d, frames of 1": tiny(family="transformer-2d", gated_ffn=False, causal=False, frame_size=1),
    "2d, one frame": tiny(family="transformer-2d", gated_ffn=False, causal=False, frame_size=50),
}
LENGTHS = (11, 1, 6, 4, 8, 3)


def groups(spec, layer, start, end):
    """The tokens of one sequence that attend to one another in a layer, in their order."""
    tokens = list(range(start, end))
    if spec.family == "transformer-1d":
        return [tokens]
    frames = [tokens[first : first + spec.frame_size] for first in range(0, len(tokens), spec.frame_size)]
    if layer % 2 == 0:
        return frames
    return [[frame[place] for frame in frames if place < len(frame)] for place in range(len(frames[0]))]


def rotate(x_H, offset, spec):
    cos, sin = (
        table[0] for table in rotary_tables(spec, torch.tensor([offset]).numpy(), dtype=x_H.dtype, device="cpu")
    )
    first, second = x_H.chunk(2)
    return torch.cat([first * cos - second * sin, second * cos + first * sin])


def attend_slowly(spec, qkv_GE):
    """One group's attention, head by head and token by token; ``[tokens, N H]``."""
    shared, out = spec.num_heads // spec.num_kv_heads, []
    qkv = qkv_GE.unflatten(1, (spec.num_kv_heads, shared + 2, spec.head_size))
    for here in range(len(qkv)):
        for head in range(spec.num_heads):
            group, member = divmod(head, shared)
            query = rotate(qkv[here, group, member], here, spec)
            seen = range(here + 1 if spec.causal else len(qkv))
            scores = torch.stack([query @ rotate(qkv[there, group, shared], there, spec) for there in seen])
            weights = (scores / spec.head_size**0.5).softmax(0)
            out.append(sum(weight * qkv[there, group, shared + 1] for weight, there in zip(weights, seen)))
    return torch.stack(out).view(len(qkv), -1)


def rms_norm(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def logits_slowly(model, tokens_T, cu_seqlens):
    spec, x_TD = model.spec, model.embedding[tokens_T]
    for number, layer in enumerate(model.layers):
        qkv_TE = rms_norm(x_TD, layer.attention_norm, spec.norm_eps) @ layer.qkv.T
        attended = {}
        for start, end in pairwise(cu_seqlens):
            for tokens in groups(spec, number, start, end):
                attended.update(zip(tokens, attend_slowly(spec, qkv_TE[tokens])))
        x_TD = x_TD + torch.stack([attended[token] for token in range(len(tokens_T))]) @ layer.proj
        x_TD = x_TD + F.gelu(rms_norm(x_TD, layer.ffn_norm, spec.norm_eps) @ layer.up.T) @ layer.down
    return rms_norm(x_TD, model.final_norm, spec.norm_eps) @ model.head.T


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(spec, id=name, marks=[pytest.mark.deep] * (name in ("2d, frames of 1", "2d, one frame")))
        for name, spec in SPECS.items()
    ],
)
def test_logits_and_gradients_are_those_of_slow_loops(spec):
    model, pack = model_of(spec), pack_of(*LENGTHS)
    tokens_T = tokens_of(pack, spec.vocab_size)
    slow = logits_slowly(model, tokens_T, pack.cu_seqlens)
    assert_same(model.logits(tokens_T, pack.cu_seqlens).detach(), slow.detach())
    targets_T = tokens_T.flip(0)
    model.zero_grad()
    F.cross_entropy(slow, targets_T, reduction="sum").backward()
    slow_grads = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    assert_same(loss_and_gradients(model, tokens_T, pack, targets_T=targets_T)[1], slow_grads)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_pack_is_its_sequences_one_by_one(spec):
    model, pack = model_of(spec), pack_of(*LENGTHS)
    tokens_T = tokens_of(pack, spec.vocab_size)
    loss, grads = loss_and_gradients(model, tokens_T, pack)
    parts = [loss_and_gradients(model, part, pack_of(len(part))) for part in sequences(tokens_T, pack)]
    assert_same(loss, sum(part[0] for part in parts))
    assert_same(grads, {name: sum(part[1][name] for part in parts) for name in grads})


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_recompute_changes_no_bit(spec):
    model, pack = model_of(spec), pack_of(*LENGTHS)
    tokens_T = tokens_of(pack, 61)
    loss, grads = loss_and_gradients(model, tokens_T, pack)
    for flags in ((True, True), (False, True)):
        again_loss, again_grads = loss_and_gradients(model, tokens_T, pack, recompute=flags)
        assert_same(again_loss, loss, tolerance=0)
        assert_same(again_grads, grads, tolerance=0)


@pytest.mark.parametrize("change", [{"frame_size": 0}, {"frame_size": 4, "causal": True}])
def test_a_transformer_2d_has_frames_and_no_mask(change):
    with pytest.raises(InputError, match="transformer-2d is not causal and needs frame_size"):
        build_model(tiny(**{"family": "transformer-2d", "gated_ffn": False, "causal": False, **change}))
