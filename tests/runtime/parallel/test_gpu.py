"""The methods' kernels on a GPU: flash attention with log-sum-exps, put together block by block; a layer at p = 1."""

import pytest
import torch

from lengthwise.core.pipeline_config import WEIGHTS_OF, Method
from lengthwise.runtime.comm.group import Group
from lengthwise.runtime.parallel.attention_blocks import Task, attend_block, attend_block_backward
from lengthwise.runtime.parallel.packed_tasks import packed
from tests.runtime.models.cases import assert_same
from tests.runtime.parallel.cases import SHARDED, WHOLE, execution_of, model_of, pack_of, small

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

HALF = 0.03
"""bfloat16 against float64, relative to the largest entry; as on CPU, see test_exactness."""


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
def test_blocks_with_log_sum_exps_equal_plain_attention(heads, causal):
    num_heads, num_kv_heads = heads
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, dout = draw(2, 96, num_heads, 64), draw(2, 96, num_heads, 64)
    k, v = draw(2, 96, num_kv_heads, 64), draw(2, 96, num_kv_heads, 64)
    half = [x.to("cuda", torch.bfloat16) for x in (q, k, v, dout)]
    blocks = Task(query=0, num_queries=96, key=0, num_keys=96, causal=causal, count=2)
    (task,) = packed([blocks], torch.device("cuda"))
    rows = [x.flatten(0, 1) for x in half]
    out, lse = task.attend(*rows[:3])
    found = {"out": out, "lse": lse}
    found |= dict(zip("qkv", task.attend_backward(rows[3], tuple(rows[:3]), out, lse)))
    found = {name: x.unflatten(0, (2, 96)) for name, x in found.items()}
    expected_out, expected_lse = attend_block(q, k, v, causal=causal)
    expected = {"out": expected_out, "lse": expected_lse}
    expected |= dict(zip("qkv", attend_block_backward(dout, (q, k, v), expected_out, expected_lse, causal=causal)))
    assert_same({name: x.double().cpu() for name, x in found.items()}, expected, tolerance=HALF)


@pytest.mark.parametrize("method", [Method.DENSE, *SHARDED, *WHOLE])
def test_a_method_on_one_gpu_equals_one_device(method):
    spec = small(head_size=8)
    model = model_of(spec)
    tokens_T, targets_T, cu_seqlens = pack_of((40, 7, 7, 1), spec)
    loss = model(tokens_T, cu_seqlens, targets_T)
    loss.backward()
    on_gpu = model_of(spec, dtype=torch.bfloat16).cuda()
    weights = WEIGHTS_OF.get(method, "whole")
    group = Group(rank=0)
    execution = execution_of(on_gpu, group, (40, 7, 7, 1), (method,) * 2, weights, device="cuda")
    found = on_gpu.run(execution)
    found.backward()
    assert_same(found.double().cpu(), loss.detach(), tolerance=HALF)
    grads = {name: weight.grad.double().cpu() for name, weight in on_gpu.named_parameters()}
    assert_same(grads, {name: weight.grad for name, weight in model.named_parameters()}, tolerance=HALF)
