"""Models whose layers and forward liger-kernel replaced train what one device trains.

Its kernels run on GPUs alone: these have the names, arguments and places of those of liger-kernel 0.8.
"""

from types import MethodType

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import lengthwise as lw
from tests.runtime.loop.runs import in_double
from tests.session import models
from tests.session.loops import as_started_by_torchrun, step_through, weights_of
from tests.session.test_planned_stages import build, items_of, loop_alone
from tests.session.test_prepare import EXACT, OPTIONS, assert_equal_weights

SHARED = OPTIONS | {
    "cost": models.mixed_cost(),
    "policy": "dcp-intra",
    "recompute": "none",
    "memory_gib": 40,
    "steps": 2,
}
WAYS = ((True, {"weights": "by-layer"}), (False, {"packing": "always"}))
"""With its fused loss or kernels of layers alone."""


def liger_rotary_pos_emb(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return tuple(
        x * cos + torch.cat([-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]], -1) * sin for x in (q, k)
    )


class LigerSiLUMulFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx, grad):
        gate, up = ctx.saved_tensors
        sigmoid = torch.sigmoid(gate)
        return grad * up * sigmoid * (1 + gate * (1 - sigmoid)), grad * F.silu(gate)


def rms_norm_forward(self, hidden_states):
    return F.rms_norm(hidden_states, (hidden_states.shape[-1],), self.weight, self.variance_epsilon)


def swiglu_forward(self, x):
    return self.down_proj(LigerSiLUMulFunction.apply(self.gate_proj(x), self.up_proj(x)))


def lce_forward(self, input_ids=None, attention_mask=None, position_ids=None, labels=None, use_cache=None, **kwargs):
    from transformers.modeling_outputs import CausalLMOutputWithPast

    hidden = self.model(
        input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=use_cache, **kwargs
    )[0]
    shift_labels, logits, loss = kwargs.pop("shift_labels", None), None, None
    if self.training and (labels is not None or shift_labels is not None):
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=-100)[..., 1:]
        loss = F.cross_entropy(hidden.flatten(0, 1) @ self.lm_head.weight.T, shift_labels.flatten())
    else:
        logits = self.lm_head(hidden)
    return CausalLMOutputWithPast(loss=loss, logits=logits)


def apply_liger_kernel_to_llama(model, *, fused_linear_cross_entropy):
    from transformers.models.llama import modeling_llama

    modeling_llama.apply_rotary_pos_emb = liger_rotary_pos_emb
    if fused_linear_cross_entropy:
        model.forward = MethodType(lce_forward, model)
    norms = [norm for layer in model.model.layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
    for norm in (model.model.norm, *norms):
        norm.forward = MethodType(rms_norm_forward, norm)
    for layer in model.model.layers:
        layer.mlp.forward = MethodType(swiglu_forward, layer.mlp)


def train(ways):
    """Losses, weights, degrees and the types of logits of each way."""
    from transformers.models.llama import modeling_llama

    as_started_by_torchrun()
    found, rotate = [], modeling_llama.apply_rotary_pos_emb
    for is_fused, options in ways:
        model, logits = build("llama"), set()
        try:
            apply_liger_kernel_to_llama(model, fused_linear_cross_entropy=is_fused)
            with in_double():
                run = lw.prepare(model, items_of("llama"), **(SHARED | options))
                model.register_forward_hook(
                    lambda module, args, output, logits=logits: logits.add(type(output.logits).__name__)
                )
                losses, degrees, _ = step_through(run, run.wrapped_model.loss_of)
                run.close()
        finally:
            modeling_llama.apply_rotary_pos_emb = rotate
        assert all(vars(part).get("forward") is not None for part in (model.model.norm, model.model.layers[0].mlp))
        found.append((losses, weights_of(model), degrees, logits))
    return found


@pytest.mark.parametrize("ways", [WAYS[:1], pytest.param(WAYS[1:], marks=pytest.mark.deep)], ids=["fused", "layers"])
def test_replaced_layers_and_losses_train_what_one_device_trains(ranks, ways):
    expected_losses, expected = loop_alone("llama")
    for found in ranks(2).run(train, ways):
        for (is_fused, _), (losses, weights, degrees, logits) in zip(ways, found, strict=True):
            np.testing.assert_allclose(losses, expected_losses, rtol=EXACT)
            assert_equal_weights(weights, expected)
            assert max(map(max, degrees)) == 2
            assert logits == ({"NoneType"} if is_fused else {"DeferredLogits"}), "no matrix of logits"
