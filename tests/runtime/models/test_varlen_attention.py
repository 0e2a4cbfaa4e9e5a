import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from lengthwise.runtime.models import varlen_attention as attention
from lengthwise.runtime.models.varlen_attention import attend, attend_by_run, attend_varlen, equal_runs
from tests.runtime.models.cases import assert_same, pack_of

# Half precision rounds inputs of order one to 2^-8 (bfloat16) or 2^-11 (float16); kernels differ by a few roundings.
HALF_TOLERANCE = {torch.bfloat16: 4e-2, torch.float16: 5e-3}


def random_qkv(num_tokens, num_heads, num_kv_heads, head_size=8, *, dtype=torch.float64, device="cpu"):
    generator = torch.Generator().manual_seed(num_tokens)
    shapes = [(num_tokens, heads, head_size) for heads in (num_heads, num_kv_heads, num_kv_heads)]
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [x.to(device, dtype).requires_grad_() for x in drawn]


def textbook(q_TNH, k_TKH, v_TKH, cu_seqlens, *, causal=True):
    """softmax(q k^T / sqrt(H) + mask) v with one mask over the whole pack."""
    group_size = q_TNH.shape[1] // k_TKH.shape[1]
    k_TNH, v_TNH = (x.repeat_interleave(group_size, dim=1) for x in (k_TKH, v_TKH))
    owner_T = torch.cat([torch.full((end - start,), i) for i, (start, end) in enumerate(pairwise(cu_seqlens))])
    visible_TT = owner_T[:, None] == owner_T
    if causal:
        visible_TT = visible_TT.tril()
    scores_NTT = torch.einsum("tnh,snh->nts", q_TNH, k_TNH) / math.sqrt(q_TNH.shape[-1])
    weights_NTT = scores_NTT.masked_fill(~visible_TT, -math.inf).softmax(-1)
    return torch.einsum("nts,snh->tnh", weights_NTT, v_TNH)


def output_and_gradients(function, qkv, cu_seqlens, **options):
    out = function(*qkv, cu_seqlens, **options)
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).to(out.device, out.dtype).view_as(out)
    grads = torch.autograd.grad((out * weights).sum(), qkv)
    return {"out": out.detach(), "dq": grads[0], "dk": grads[1], "dv": grads[2]}


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=7),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)]),
    causal=st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_attention_over_a_pack_is_the_textbook_formula_under_a_block_mask(lengths, heads, causal):
    cu_seqlens = pack_of(*lengths).cu_seqlens
    qkv = random_qkv(sum(lengths), *heads)
    expected = output_and_gradients(textbook, qkv, cu_seqlens, causal=causal)
    assert_same(output_and_gradients(attend, qkv, cu_seqlens, causal=causal), expected)


def test_gradients_are_those_of_finite_differences():
    qkv = random_qkv(7, 4, 2, 4)
    assert torch.autograd.gradcheck(lambda *x: attend(*x, (0, 2, 4, 7)), qkv)


def test_equal_neighbours_share_one_call():
    assert equal_runs((0, 4, 8, 9, 10, 14)) == [(2, 4), (2, 1), (1, 4)]
    assert equal_runs((0, 3, 3, 6)) == [(1, 3), (1, 3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_every_dtype_reaches_the_flash_kernel_on_cpu(dtype, heads):
    qkv = random_qkv(48, *heads, dtype=dtype)
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        attend(*qkv, (0, 16, 32, 48)).sum().backward()
    names = [event.name for event in trace.events()]
    assert names.count("aten::_scaled_dot_product_flash_attention_for_cpu") == 1
    assert names.count("aten::_scaled_dot_product_flash_attention_for_cpu_backward") == 1


class RecordedKernel:
    """Stands in for varlen_attn: computes by runs, and keeps what it was called with."""

    def __init__(self, monkeypatch, *parameters):
        module = pytest.importorskip("torch.nn.attention.varlen")
        monkeypatch.setattr(module, "varlen_attn", self)
        monkeypatch.setattr(attention, "_varlen_parameters", lambda: frozenset(parameters))

    def __call__(self, q, k, v, cu_q, cu_k, max_q, max_k, **options):
        self.cu_seqlens, self.longest, self.options, self.num_kv_heads = cu_q, max_q, options, k.shape[1]
        self.head_size = q.shape[2]
        return attend_by_run(q, k, v, tuple(cu_q.tolist()))


def test_varlen_of_torch_2_13_is_given_a_causal_window_and_shared_heads(monkeypatch):
    kernel = RecordedKernel(monkeypatch, "window_size", "enable_gqa")
    qkv = random_qkv(9, 4, 2)
    assert_same(attend_varlen(*qkv, (0, 4, 9)), textbook(*qkv, (0, 4, 9)))
    assert kernel.options == {"window_size": (-1, 0), "enable_gqa": True}
    assert (kernel.cu_seqlens.dtype, kernel.longest) == (torch.int32, 5)


def test_varlen_of_torch_2_10_is_given_a_flag_and_repeated_heads(monkeypatch):
    kernel = RecordedKernel(monkeypatch, "is_causal")
    qkv = random_qkv(9, 4, 2)
    assert_same(attend_varlen(*qkv, (0, 4, 9)), textbook(*qkv, (0, 4, 9)))
    assert kernel.options == {"is_causal": True}
    assert kernel.num_kv_heads == 4


@pytest.mark.parametrize("size", [6, 12])
def test_heads_are_padded_to_sizes_that_the_kernel_takes(size, monkeypatch):
    kernel = RecordedKernel(monkeypatch, "is_causal")
    qkv = random_qkv(9, 4, 2, size)
    assert_same(attend_varlen(*qkv, (0, 4, 9)), textbook(*qkv, (0, 4, 9)))
    assert kernel.head_size % 8 == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF_TOLERANCE)
@pytest.mark.parametrize("heads", [(4, 4, 64), (8, 2, 64), (4, 2, 6)])
@pytest.mark.parametrize("causal", [True, False])
def test_varlen_kernel_equals_the_loop_on_gpu(dtype, heads, causal):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if not attention._varlen_parameters():
        pytest.skip("this torch has no varlen attention")
    cu_seqlens = pack_of(1, 64, 64, 200, 33).cu_seqlens
    qkv = random_qkv(cu_seqlens[-1], *heads, dtype=dtype, device="cuda")
    exact = [x.detach().double().requires_grad_() for x in qkv]
    expected = output_and_gradients(attend_by_run, exact, cu_seqlens, causal=causal)
    for function in (attend, attend_varlen, attend_by_run):
        actual = output_and_gradients(function, qkv, cu_seqlens, causal=causal)
        assert_same({k: x.double() for k, x in actual.items()}, expected, tolerance=HALF_TOLERANCE[dtype])


@pytest.mark.gpu
def test_float32_on_gpu_takes_the_loop():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    qkv = random_qkv(30, 4, 2, 64, dtype=torch.float32, device="cuda")
    assert_same(attend(*qkv, (0, 10, 30)), attend_by_run(*qkv, (0, 10, 30)), tolerance=0)
    exact = [x.detach().double().requires_grad_() for x in qkv]
    for causal in (True, False):
        actual, expected = (
            output_and_gradients(attend_by_run, given, (0, 10, 30), causal=causal) for given in (qkv, exact)
        )
        assert_same({k: x.double() for k, x in actual.items()}, expected, tolerance=1e-3)
