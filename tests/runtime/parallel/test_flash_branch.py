"""What GPUs run of attention, its kernels replaced by ones for CPUs: offsets, layouts and dtypes are right."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from lengthwise.core.pipeline_config import Method
from lengthwise.runtime.dryrun.attention_kernels import _pairs
from lengthwise.runtime.models.varlen_attention import attend_by_run, attend_varlen
from tests.examples import examples
from tests.runtime.models.cases import assert_same
from tests.runtime.models.test_varlen_attention import output_and_gradients, random_qkv
from tests.runtime.parallel.cases import SHARDED, WHOLE, able, on_ranks
from tests.runtime.parallel.flash_on_cpu import flash_on_cpu
from tests.runtime.parallel.test_exactness import BIDIRECTIONAL, CAUSAL, CLOSE, EXACT, check

LENGTHS = (13, 1, 8, 8, 8, 2)
RINGS = {Method.RING: 1, Method.MEGATRON_CZ: 1, Method.COLOSSAL_Z: 2}
"""Methods by a ring of keys and values, and how often each goes round forward."""


@pytest.mark.parametrize(
    ("num_ranks", "in_turn"), [(3, True), *(pytest.param(n, False, marks=pytest.mark.deep) for n in (2, 3))]
)
def test_every_method_is_exact_by_the_kernels_of_gpus(ranks, num_ranks, in_turn):
    ranks(num_ranks).run(check_methods, num_ranks, in_turn)


def check_methods(num_ranks, in_turn):
    """``in_turn``: whether each method meets one of the models, or both."""
    for number, spec in enumerate((CAUSAL, BIDIRECTIONAL)):
        methods = able((*SHARDED, *WHOLE), spec, num_ranks)
        for method in methods[number::2] if in_turn else methods:
            with flash_on_cpu() as calls:
                check(spec, LENGTHS, (method,) * 2, tolerance=EXACT, recompute=(True, False))
            assert calls["forward"] and calls["backward"], method


def test_a_ring_launches_one_kernel_a_hop_whatever_the_lengths(ranks):
    ranks(2).run(check_launches)


def check_launches():
    layers = CAUSAL.num_layers
    for method, rounds in RINGS.items():
        counted = []
        for lengths in (LENGTHS, tuple(range(2, 9)) * 3):
            with flash_on_cpu() as calls:
                on_ranks(CAUSAL, lengths, (method,) * layers)
            counted.append((calls["forward"], calls["backward"]))
        assert counted == [(2 * rounds * layers, 2 * layers)] * 2, method


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.deep)], ids=str)
def test_precisions_of_gpus_are_close(ranks, dtype):
    ranks(2).run(check_precision, dtype)


def check_precision(dtype):
    for method in (Method.RING, Method.ULYSSES, Method.COLOSSAL_Z):
        with flash_on_cpu():
            check(CAUSAL, LENGTHS, (method,) * 2, tolerance=CLOSE[dtype], dtype=dtype)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
def test_packed_attention_equals_runs_of_equal_lengths(heads, causal):
    cu_seqlens = (0, 5, 6, 14, 22)
    qkv = random_qkv(22, *heads)
    expected = output_and_gradients(attend_by_run, qkv, cu_seqlens, causal=causal)
    with flash_on_cpu() as calls:
        found = output_and_gradients(attend_varlen, qkv, cu_seqlens, causal=causal)
    assert calls == {"forward": 1, "backward": 1}
    assert_same(found, expected)


@pytest.mark.parametrize(
    ("causal", "window"), [(True, (2, 0)), (True, (0, 0)), (True, (9, 0)), (False, (1, 3)), (False, (99, 2))]
)
def test_windows_are_one_launch_over_all_sequences_and_cost_what_each_token_sees(causal, window):
    cu_seqlens = (0, 5, 6, 14, 22)
    lengths = np.diff(cu_seqlens)
    place = np.concatenate([np.arange(length) for length in lengths])
    owner = np.repeat(np.arange(len(lengths)), lengths)
    distance = place[:, None] - place
    sees = (owner[:, None] == owner) & (distance <= window[0]) & (distance >= -window[1])
    qkv = random_qkv(22, 4, 2)

    def masked(q_TNH, k_TKH, v_TKH, cu_seqlens):
        k_TNH, v_TNH = (x.repeat_interleave(2, dim=1) for x in (k_TKH, v_TKH))
        q, k, v = (x.transpose(0, 1) for x in (q_TNH, k_TNH, v_TNH))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.from_numpy(sees)).transpose(0, 1)

    expected = output_and_gradients(masked, qkv, cu_seqlens)
    with flash_on_cpu() as calls:
        found = output_and_gradients(attend_varlen, qkv, cu_seqlens, causal=causal, window=window)
    assert calls == {"forward": 1, "backward": 1}
    assert_same(found, expected)
    before, after = (size if size < 8 else -1 for size in window)
    assert _pairs(lengths, lengths, before=before, after=after) == sees.sum()


@given(queries=st.integers(1, 9), keys=st.integers(1, 9), before=st.integers(-1, 9), after=st.integers(-1, 9))
@settings(max_examples=examples(100), deadline=None)
def test_pairs_of_queries_and_keys_are_those_that_see_each_other(queries, keys, before, after):
    distance = np.arange(queries)[:, None] + keys - queries - np.arange(keys)
    sees = ((before < 0) | (distance <= before)) & ((after < 0) | (distance >= -after))
    assert _pairs(np.array([queries]), np.array([keys]), before=before, after=after) == sees.sum()
