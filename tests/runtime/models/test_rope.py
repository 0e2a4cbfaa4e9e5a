from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lengthwise.core.errors import InputError
from lengthwise.runtime.models.attention_view import in_order
from lengthwise.runtime.models.rope import inverse_frequencies, rotary_tables, split, split_and_rotate
from tests.runtime.models.cases import assert_same, pack_of, tiny

LLAMA3 = (
    ("factor", 8.0), ("high_freq_factor", 4.0), ("low_freq_factor", 1.0), ("original_max_position_embeddings", 256.0),
    ("rope_type", "llama3"),
)  # fmt: skip
SCALINGS = {"default": (), "linear": (("factor", 4.0), ("rope_type", "linear")), "llama3": LLAMA3}


@pytest.mark.parametrize("kind", SCALINGS)
def test_frequencies_are_those_of_transformers_bit_for_bit(transformers, kind):
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    spec = tiny(head_size=64, rope_theta=500_000.0, rope_scaling=SCALINGS[kind])
    rope = {"rope_type": "default", "rope_theta": spec.rope_theta, **dict(spec.rope_scaling)}
    config = transformers.LlamaConfig(hidden_size=256, num_attention_heads=4, head_dim=64, rope_parameters=rope)
    assert torch.equal(inverse_frequencies(spec), LlamaRotaryEmbedding(config).inv_freq)


@pytest.mark.parametrize(
    ("scaling", "named"),
    [
        ((("rope_type", "yarn"),), "'yarn'"),
        ((("rope_type", "linear"),), "factor"),
        (LLAMA3[1:], "factor"),
    ],
)
def test_scaling_that_cannot_be_honoured_is_refused_by_name(scaling, named):
    with pytest.raises(InputError, match=named):
        inverse_frequencies(tiny(rope_scaling=scaling))


@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=5))
@settings(max_examples=20, deadline=None)
def test_tables_start_again_at_every_sequence(lengths):
    cos, sin = rotary_tables(
        tiny(),
        in_order(pack_of(*lengths).cu_seqlens, causal=True).offsets,
        dtype=torch.float64,
        device=torch.device("cpu"),
    )
    positions = torch.cat([torch.arange(length) for length in lengths]).double()
    angles = positions[:, None] * inverse_frequencies(tiny()).double()
    assert_same(cos, angles.cos())
    assert_same(sin, angles.sin())


def test_angles_of_far_tokens_are_as_exact_as_those_of_near_ones():
    spec = tiny(head_size=64)
    cos, _ = rotary_tables(spec, np.array([0, 1_000_000]), dtype=torch.float32, device=torch.device("cpu"))
    exact = (1_000_000 * inverse_frequencies(spec).double()).cos()
    assert_same(cos[-1], exact.float(), tolerance=0)


def rotate_half_reference(x_TNH, cos_TH, sin_TH):
    """Hugging Face's formula."""
    x1, x2 = x_TNH.chunk(2, dim=-1)
    cos, sin = (torch.cat([table, table], dim=-1)[:, None] for table in (cos_TH, sin_TH))
    return x_TNH * cos + torch.cat([-x2, x1], dim=-1) * sin


def split_reference(qkv_TKGH, cos_TH, sin_TH):
    q_TNH, k_TKH, v_TKH = qkv_TKGH[:, :, :-2].flatten(1, 2), qkv_TKGH[:, :, -2], qkv_TKGH[:, :, -1]
    return rotate_half_reference(q_TNH, cos_TH, sin_TH), rotate_half_reference(k_TKH, cos_TH, sin_TH), v_TKH


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("group_size", [1, 3])
def test_split_and_rotate_is_the_plain_formula_with_its_gradients(group_size):
    spec = replace(tiny(), head_size=8)
    tables = rotary_tables(
        spec, in_order((0, 5, 11), causal=True).offsets, dtype=torch.float64, device=torch.device("cpu")
    )
    qkv = torch.randn(11, 2, group_size + 2, 8, dtype=torch.float64, requires_grad=True)
    expected, actual = split_reference(qkv, *tables), split_and_rotate(qkv, *tables)
    grads = [torch.randn_like(x) for x in expected]
    for ours, theirs in zip(actual, expected):
        assert_same(ours, theirs)
        assert ours.is_contiguous()
    assert_same(torch.autograd.grad(actual, qkv, grads)[0], torch.autograd.grad(expected, qkv, grads)[0])
    assert torch.autograd.gradcheck(lambda x: split_and_rotate(x, *tables), qkv)


@pytest.mark.parametrize("group_size", [1, 3])
def test_heads_without_rotation_have_the_gradients_of_slices(group_size):
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(5, 2, group_size + 2, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    slices = qkv[:, :, :-2].flatten(1, 2), qkv[:, :, -2], qkv[:, :, -1]
    weights = [torch.randn(part.shape, dtype=torch.float64, generator=generator) for part in slices]
    gradients = []
    for parts in (slices, split(qkv)):
        for part, expected in zip(parts, slices):
            assert torch.equal(part, expected)
        gradients += torch.autograd.grad(sum((part**2 * w).sum() for part, w in zip(parts, weights)), qkv)
    assert torch.equal(*gradients)
