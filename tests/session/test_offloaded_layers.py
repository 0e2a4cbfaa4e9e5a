"""Layers of prepared models whose saved tensors are in host memory between forward and backward: the same gradients."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import lengthwise as lw
from lengthwise.core.errors import InfeasibleError
from lengthwise.runtime.comm.activation_offload import HostOffload
from tests.plan.costs import SimpleCost
from tests.runtime.loop import test_families as families
from tests.session import models
from tests.session.loops import as_started_by_torchrun, step_through, weights_of
from tests.session.test_prepare import OPTIONS

pytestmark = pytest.mark.usefixtures("unchecked")


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    return families._new(
        MixtralForCausalLM, MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, **EAGER)
    )


def gpt_oss():
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(**SIZES, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=6, **EAGER)
    return families._new(GptOssForCausalLM, config)


EAGER = {"experts_implementation": "eager"}
"""Grouped products have no float64."""
SIZES = families.SIZES | families.HEADS
RUNGS = {"keep": ("none", "none"), "recompute": ("all", "none"), "offload": ("none", "all"), "both": ("all", "all"),
         "mixed": ("even", "odd"), "all but one": ("odd", "not 1")}  # fmt: skip


def flags(name, num_layers):
    chosen = {"none": (), "all": range(num_layers), "even": range(0, num_layers, 2), "odd": range(1, num_layers, 2),
              "not 1": {*range(num_layers)} - {1}}[name]  # fmt: skip
    return tuple(layer in chosen for layer in range(num_layers))


def on_rung(planner, rung):
    """The plans of a planner, with the recompute and offload flags of a rung."""

    def changed(pipeline):
        recompute, offload = (flags(name, pipeline.scheme.num_layers) for name in RUNGS[rung])
        return replace(
            pipeline,
            micro_batches=tuple(replace(m, recompute=recompute, offload=offload) for m in pipeline.micro_batches),
        )

    def plan(batch):
        made = planner(batch)
        return replace(made, pipelines=tuple(map(changed, made.pipelines)))

    return plan


def train(make, rung, rows=None, autocast=None, **options):
    """Losses and weights of a model under a rung, and the bytes that went to the host."""
    as_started_by_torchrun()
    model = make()
    run = lw.prepare(
        model, models.rows() if rows is None else rows, cost=SimpleCost(capacity=100),
        **{"check": False, **OPTIONS, "steps": 2, "recompute": "none", **options},
    )  # fmt: skip
    run.planner = on_rung(run.planner, rung)
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        losses = step_through(run, lambda output, micro_batch: output["loss"] if "loss" in output else output[1])[0]
    copied = run.world.offload.num_copied_bytes
    run.close()
    return losses, weights_of(model), copied


def assert_same(found, expected, rung):
    (losses, weights, copied), (expected_losses, expected_weights, _) = found, expected
    assert losses == expected_losses and len(set(losses)) == 2
    for name, value in expected_weights.items():
        assert np.array_equal(weights[name], value), name
    assert (copied > 0) == (rung not in ("keep", "recompute"))


@pytest.mark.deep  # by default: families below, under all rungs
@pytest.mark.parametrize(
    "options",
    [
        {"recompute": "selective"},
        *(pytest.param(other, marks=pytest.mark.deep) for other in ({"recompute": "none"}, {"feed_forward_tile": 5})),
    ],
    ids=str,
)
def test_each_rung_trains_the_same_to_the_last_bit(options):
    expected = train(models.gpt, "keep", **options)
    for rung in RUNGS:
        if rung != "keep":
            assert_same(train(models.gpt, rung, **options), expected, rung)


def rows_for(name):
    return [row[:20] % families.VOCAB for row in models.rows(16)]


FAMILIES = {
    "llama": families.llama,
    "qwen3": families.qwen3,
    "gpt2 with dropout": partial(families.gpt2, dropout=0.1),
    "modernbert": families.modernbert,
    "mixtral": mixtral,
    "gpt-oss": gpt_oss,
}


@pytest.mark.deep
@pytest.mark.parametrize(
    "name",
    # Layers of Llama and Qwen 3 are those of GPT-OSS but for experts, which are routed as Mixtral's are.
    [
        pytest.param(
            name, marks=[pytest.mark.deep] * (name in ("llama", "qwen3", "mixtral", "modernbert", "gpt2 with dropout"))
        )
        for name in FAMILIES
    ],
)
def test_families_of_transformers_train_the_same_to_the_last_bit(name):
    options = {"rows": rows_for(name), "tokens_per_step": 60}
    if name == "modernbert":
        options |= {"objective": "masked", "mask_token_id": 1}
    expected = train(FAMILIES[name], "keep", **options)
    for rung in ("offload", "mixed"):
        assert_same(train(FAMILIES[name], rung, **options), expected, rung)


def low_precision_gpt():
    return models.gpt().float()


@pytest.mark.deep  # by default: families above; gathered weights in test_gathered_weights
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (models.adapted_gpt, {"weights": "by-layer"}),
        pytest.param(low_precision_gpt, {"autocast": torch.bfloat16}, marks=pytest.mark.deep),
        pytest.param(low_precision_gpt, {"autocast": torch.bfloat16, "weights": "by-layer"}, marks=pytest.mark.deep),
        pytest.param(models.gpt, {"packing": "never"}, marks=pytest.mark.deep),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_gathered_weights_and_autocast_change_nothing(ranks, make, options):
    expected, found = (ranks(2).run(train, make, rung, **options)[0] for rung in ("keep", "mixed"))
    assert_same(found, expected, "mixed")


class LiveStorages(TorchDispatchMode):
    """Knows the storages of all tensors that operations gave within."""

    def __init__(self):
        super().__init__()
        self._seen = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outputs = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(outputs):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._seen[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return outputs

    @property
    def num_bytes(self):
        return sum(size for reference, size in self._seen.values() if not reference.expired())


def held_bytes(rung, length=64, **options):
    """Bytes that a forward leaves on the device for the backward, and that it copied to the host."""
    run = lw.prepare(
        models.gpt(), [np.arange(length) % models.VOCAB] * 4, sequences_per_step=1, steps=1, check=False,
        cost=SimpleCost(capacity=100), **{"recompute": "none", **options},
    )  # fmt: skip
    run.planner = on_rung(run.planner, rung)
    offload = run.world.offload
    for step in run.steps():
        for micro_batch in step:
            before = offload.blocks.num_bytes
            with LiveStorages() as live:
                loss = run.model(**micro_batch.inputs)[1]
            held, copied = live.num_bytes - (offload.blocks.num_bytes - before), offload.num_copied_bytes
            step.backward(loss)
        step.update()
    run.close()
    return held, copied


def test_what_layers_keep_is_not_on_the_device_between_forward_and_backward():
    """Of three layers of 64 tokens: one that is recomputed has its input there, 24 numbers a token; then nothing."""
    (kept, nothing), (offloaded, copied) = held_bytes("keep"), held_bytes("offload")
    assert nothing == 0 and copied > 0
    inputs = 3 * 64 * 24 * 8
    (recomputed, _), (both, copied_inputs) = held_bytes("recompute"), held_bytes("both")
    assert copied_inputs == inputs
    assert recomputed - both == pytest.approx(inputs, rel=0.02)
    assert kept - offloaded == pytest.approx(copied, rel=0.02)
    assert both == pytest.approx(offloaded, rel=0.02)


def test_attention_that_a_selective_recompute_keeps_goes_to_the_host_too():
    """Beside the input of each layer, of four heads: output, 24 numbers a token, and the sums of softmax."""
    (recomputed, _), (both, copied) = (held_bytes(rung, recompute="selective") for rung in ("recompute", "both"))
    assert copied == 3 * 64 * (24 + 24 + 4) * 8
    assert recomputed - both == pytest.approx(copied, rel=0.02)


def test_a_host_without_room_aborts_the_step_which_comes_again_without_offload():
    expected = train(models.gpt, "keep")
    torch.manual_seed(0)
    model, failures = models.gpt(), []
    run = lw.prepare(
        model, models.rows(), cost=SimpleCost(capacity=100), check=False, **OPTIONS | {"steps": 2, "recompute": "none"}
    )
    vars(run.world)["offload"] = HostOffload("cpu", limit_bytes=0)
    whole = run.planner
    run.planner = on_rung(whole, "offload")

    def refuse(step, places):
        failures.append(places)
        run.planner = whole

    run.on_oom = refuse
    losses, results = [], []
    for step in run.steps():
        for micro_batch in step:
            step.backward(model(**micro_batch.inputs)[1])
        results.append(step.update())
        losses += [] if results[-1] is None else [results[-1].loss]
    run.close()
    assert results[0] is None and results.count(None) == 1
    assert [(place.micro_batch, place.host_bytes) for (place,) in failures] == [(0, 1 << 20)]
    assert losses == expected[0]


def test_what_the_host_has_no_room_for_is_named():
    run = lw.prepare(
        models.gpt(), models.rows(), cost=SimpleCost(capacity=100), check=False,
        **OPTIONS | {"steps": 1, "recompute": "none"},
    )  # fmt: skip
    vars(run.world)["offload"] = HostOffload("cpu", limit_bytes=0)
    run.planner, run.on_oom = on_rung(run.planner, "offload"), None
    with pytest.raises(
        InfeasibleError,
        match=r"host memory \(offloaded activations need at least 1 MiB\) in a micro-batch of .* lower host_memory_gib",
    ):
        step_through(run)
    run.close()
