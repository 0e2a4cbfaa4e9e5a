"""What the runtime sends and keeps is what the closed forms of ``cost.volume`` say."""

import pytest
import torch

from lengthwise.core.pipeline_config import WEIGHTS_OF, WeightPlacement
from lengthwise.cost.analytic.volume import layer_volume
from lengthwise.cost.links import Sent
from lengthwise.runtime.parallel.sharded_execution import StageExecution
from lengthwise.runtime.parallel.shards import keep_own_rows
from tests.runtime.parallel.cases import SHARDED, WHOLE, model_of, pack_of, small, whole_group

KINDS = ("all_gather", "reduce_scatter", "all_to_all", "ring", "broadcast", "reduce")
KEPT = 0.02
"""Share by which kept bytes may differ: a closed form has no index of a few integers in it."""


def divisible(**sizes):
    """Heads, columns and tokens that 2, 3 and 4 ranks share evenly: closed forms speak of the busiest rank."""
    return small(num_layers=1, hidden_size=24, ffn_size=48, num_heads=24, num_kv_heads=12, head_size=4, **sizes)


SPECS = (
    divisible(),
    divisible(qkv_bias=False, gated_ffn=False, family="transformer-1d"),
    divisible(gated_ffn=False, family="gpt", max_positions=500),
    divisible(gated_ffn=False, family="bert", max_positions=500, causal=False),
)


def sent_and_kept(spec, method, num_tokens, dtype):
    """Of one layer: bytes sent forward and backward, by kind, and bytes kept in between."""
    group = whole_group()
    weights = WEIGHTS_OF[method]
    model = model_of(spec, dtype=dtype)
    if weights is WeightPlacement.SHARDED:
        keep_own_rows(model, spec, rank=group.rank, degree=group.size)
    tokens_T, targets_T, cu_seqlens = pack_of((num_tokens,), spec)
    execution = StageExecution(
        model, group, tokens_T=tokens_T, targets_T=targets_T, cu_seqlens=cu_seqlens,
        methods=(method,) * spec.num_layers, weights=weights,
    )  # fmt: skip
    x_tD = torch.randn(num_tokens // group.size, spec.hidden_size, dtype=dtype, requires_grad=True)
    known = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    view = execution._views[0]
    for table in (*(view.tables or ()), *(view.ordered_tables or ())):
        known.add(table.untyped_storage().data_ptr())
    kept, alive = {}, []

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known and tensor.dtype.is_floating_point:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)  # an address must not be used twice while we count
        return tensor

    group.sent.clear()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = model.layers[-1](x_tD, execution.operators(spec.num_layers - 1))
    forward = dict(group.sent.num_bytes)
    group.sent.clear()
    out.backward(torch.ones_like(out))
    return forward, dict(group.sent.num_bytes), sum(kept.values())


def closed(sent: Sent, weights: Sent, num_tokens):
    both = {kind: getattr(sent, kind) * num_tokens + getattr(weights, kind) for kind in KINDS}
    return {kind: value for kind, value in both.items() if value}


@pytest.mark.parametrize(
    ("method", "num_ranks", "specs"),
    [
        *((method, 3, SPECS[::3]) for method in (*SHARDED, *WHOLE)),
        *((methods[0], 1, SPECS[::3]) for methods in (SHARDED, WHOLE)),
        *(
            pytest.param(method, n, SPECS, marks=pytest.mark.deep)
            for method in (*SHARDED, *WHOLE)
            for n in (1, 2, 3, 4)
        ),
    ],
)
def test_a_layer_sends_and_keeps_what_its_closed_form_says(ranks, method, num_ranks, specs):
    for spec in specs:
        volume = layer_volume(spec, method, degree=num_ranks, dtype="float32")
        for forward, backward, kept in ranks(num_ranks).run(sent_and_kept, spec, method, 480, torch.float32):
            assert forward == pytest.approx(closed(volume.forward.tokens, volume.forward.weights, 480))
            assert backward == pytest.approx(closed(volume.backward.tokens, volume.backward.weights, 480))
            assert kept == pytest.approx(volume.kept_bytes * 480, rel=KEPT)
