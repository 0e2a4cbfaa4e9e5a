"""The halves of a layer that are compiled are one graph each, also with CUDA as the target."""

import json
import subprocess
import sys

import pytest

SCRIPT = """
from lengthwise.runtime.dryrun.shim import load_shim

load_shim()

import json
import sys
from dataclasses import replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lengthwise.core.specs import ModelSpec
from lengthwise.runtime.compile.compiled_layers import after_attention, before_attention
from lengthwise.runtime.dryrun import fake_cuda
from lengthwise.runtime.models.execution import OneDevice
from lengthwise.runtime.models.registry import empty_model

fake_cuda.install()
torch.cuda.get_rng_state, torch.cuda.set_rng_state = lambda *device: torch.zeros(1), lambda *state: None
LLAMA = ModelSpec(
    name="traced", num_layers=2, hidden_size=64, ffn_size=128, num_heads=4, num_kv_heads=2, head_size=16, vocab_size=37
)
BIASED = {"gated_ffn": False, "qkv_bias": True, "max_positions": 64}
found = {}
with FakeTensorMode():
    for spec in (LLAMA, replace(LLAMA, family="gpt", **BIASED), replace(LLAMA, family="bert", causal=False, **BIASED)):
        model = empty_model(spec, dtype=torch.bfloat16, device=torch.device("cuda", 0))
        alone = OneDevice(
            torch.zeros(48, dtype=torch.int64, device="cuda"), None, views=model.views((0, 48)), tables=model.tables,
            layers=range(2),
        )
        x_tD = torch.zeros(48, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        out_tNH = torch.zeros(48, 4, 16, dtype=torch.bfloat16, device="cuda")
        calls = [(before_attention, alone.operators(0).tables), (after_attention, out_tNH)]
        traced = [torch._dynamo.explain(half)(model.layers[0], x_tD, other) for half, other in calls]
        found[spec.family] = [(one.graph_count, one.graph_break_count, one.op_count > 0) for one in traced]
sys.stdout.write(json.dumps(found))
"""


@pytest.mark.deep
def test_halves_of_layers_are_traced_for_cuda_without_a_break():
    ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert json.loads(ran.stdout) == {family: [[1, 0, True]] * 2 for family in ("llama", "gpt", "bert")}
