"""Prepared models whose recomputed layers keep what attention gave: the same gradients, and plans that choose it."""

from dataclasses import replace

import numpy as np
import pytest
from torch.utils._python_dispatch import TorchDispatchMode

import lengthwise as lw
from lengthwise.core.errors import InputError
from lengthwise.core.layer_profile import LayerVariant
from lengthwise.core.pipeline_config import Method, uniform_scheme
from lengthwise.core.specs import ClusterSpec, cluster_preset
from lengthwise.cost.profiled.dual_layer import DualLayerCost
from lengthwise.runtime.models.kept_attention import is_attention
from lengthwise.runtime.profile.two_layer_profile import ProfilingEffort, measure
from tests.cost.profiled.test_dual_layer import row, seconds, table
from tests.plan.costs import SimpleCost
from tests.runtime.loop import test_families as families
from tests.session import models
from tests.session.loops import as_started_by_torchrun, noted_schemes, step_through, weights_of
from tests.session.test_offloaded_layers import flags, rows_for
from tests.session.test_prepare import OPTIONS

pytestmark = pytest.mark.usefixtures("unchecked")

FAMILIES = {
    "llama": families.llama,
    "qwen3": families.qwen3,
    "mistral": families.mistral,
    "gpt2": families.gpt2,
    "modernbert": families.modernbert,
    "adapters": models.adapted_gpt,
}
RUNGS = {"none": ("none", False), "full": ("all", False), "selective": ("all", True), "some": ("odd", True)}


class Kernels(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.num_attention = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_attention += is_attention(func)
        return func(*args, **(kwargs or {}))


def on_rung(planner, rung):
    """The plans of a planner, whose layers are recomputed as a rung says."""
    name, keeps = RUNGS[rung]

    def changed(pipeline):
        recompute = flags(name, pipeline.scheme.num_layers)
        changes = {"recompute": recompute, "keep_attention": keeps}
        return replace(pipeline, micro_batches=tuple(replace(m, **changes) for m in pipeline.micro_batches))

    def plan(batch):
        made = planner(batch)
        return replace(made, pipelines=tuple(map(changed, made.pipelines)))

    return plan


def train(make, rung, rows, *, is_compared=True, **options):
    """Losses, weights, and the kernels of attention that were launched."""
    as_started_by_torchrun()
    model = make()
    run = lw.prepare(model, rows, cost=SimpleCost(capacity=100), **{"check": False, **OPTIONS, "steps": 2, **options})
    run.wrapped_model.layers.may_keep_attention = is_compared
    run.planner = on_rung(run.planner, rung)
    with Kernels() as kernels:
        losses = step_through(run, lambda output, micro_batch: output["loss"] if "loss" in output else output[1])[0]
    run.close()
    return losses, weights_of(model), kernels.num_attention


@pytest.mark.parametrize(
    "name",
    # Layers of the others are offloaded in other tests, which compare to the last bit as well.
    [pytest.param(name, marks=[pytest.mark.deep] * (name != "adapters")) for name in FAMILIES],
)
def test_families_train_the_same_to_the_last_bit_with_no_full_and_selective_recompute(name):
    options = {"rows": models.rows() if name == "adapters" else rows_for(name), "tokens_per_step": 60}
    if name == "modernbert":
        options |= {"objective": "masked", "mask_token_id": 1}
    (losses, weights, plain), full, selective, some = (train(FAMILIES[name], rung, **options) for rung in RUNGS)
    assert len(set(losses)) == 2
    for other_losses, other_weights, _ in (full, selective, some):
        assert other_losses == losses
        assert all(np.array_equal(other_weights[key], value) for key, value in weights.items())
    assert full[2] == 2 * plain > 0 and selective[2] == some[2] == plain


def test_a_plan_that_keeps_attention_is_refused_where_that_was_not_compared():
    with pytest.raises(InputError, match='give recompute="selective" to prepare'):
        train(models.gpt, "selective", models.rows(), is_compared=False)


def test_a_profile_of_layers_that_keep_attention_counts_what_it_gave():
    as_started_by_torchrun()
    run = lw.prepare(models.gpt(), models.rows(), cost=SimpleCost(capacity=100), check=False, **OPTIONS)
    effort = ProfilingEffort(repeats=1, budget_s=0.0)
    plain, kept = (
        measure(run, longest=64, effort=effort, update_s=0.0, variant=LayerVariant(keep_attention=keeps)).rows
        for keeps in (False, True)
    )
    run.close()
    for whole, selective in zip(plain, kept, strict=True):
        width, num_heads, num_tokens = 24, 4, whole.num_tokens
        assert selective.keep_attention and selective.lengths == whole.lengths
        assert selective.kept_bytes == num_tokens * (8 * width + 8 * num_heads)  # output and log-sum-exps in float64
        assert selective.kept_bytes + selective.alive_bytes == whole.alive_bytes
        assert selective.input_bytes == whole.input_bytes


LONGEST = 512
KEPT, INPUT, ATTENTION = 8000, 64, 200
FORWARD, BACKWARD = (1e-8, 1e-6, 1e-4), (2e-8, 2e-6, 2e-4)


def selective_cost(memory_mib, *, pays=True):
    """Costs of a GPT on a GPU of so much memory; attention is most of a long sequence's second forward, if it pays."""
    rows = []
    for length in (64, 128, 256, LONGEST):
        forward_s, backward_s = (seconds((length,), curve, 1) for curve in (FORWARD, BACKWARD))
        again_s = seconds((length,), (0.0, *FORWARD[1:]), 1) if pays else forward_s
        plain = replace(
            row((length,)), forward_s=forward_s, backward_s=backward_s, kept_bytes=KEPT * length,
            input_bytes=INPUT * length, alive_bytes=KEPT * length, constant_bytes=0,
        )  # fmt: skip
        rows += [plain, replace(
            plain, keep_attention=True, backward_s=backward_s + again_s, kept_bytes=ATTENTION * length,
            alive_bytes=(KEPT - ATTENTION) * length,
        )]  # fmt: skip
    device = replace(cluster_preset("1xH100-80GB").device, memory_bytes=int(memory_mib * 2**20))
    cluster = ClusterSpec(num_nodes=1, devices_per_node=1, device=device)
    made = table(rows, num_layers=3, num_params=10_000, other_bytes=0, longest=LONGEST)
    return DualLayerCost(made, cluster=cluster)


def test_seconds_and_bytes_are_those_of_rows_that_keep_attention():
    cost, lengths = selective_cost(100), np.array([100, 400])
    none, full, selective = (
        replace(uniform_scheme(3, degree=1, method=Method.DENSE, recomputed=count), keep_attention=keeps)
        for count, keeps in ((0, False), (2, False), (2, True))
    )
    times_s = [cost.sequence_times_s(lengths, scheme) for scheme in (none, full, selective)]
    without_attention_s = FORWARD[1] * lengths
    np.testing.assert_allclose(times_s[2] - times_s[0], 2 * without_attention_s, rtol=1e-6)
    np.testing.assert_allclose(times_s[1] - times_s[2], 2 * FORWARD[0] * lengths**2, rtol=1e-6)
    assert cost.overhead_s(selective) == pytest.approx(cost.overhead_s(full))
    bytes_of = [cost.micro_batch_bytes(1000, scheme) for scheme in (none, full, selective)]
    assert bytes_of[1] == pytest.approx(1000 * (KEPT + 3 * INPUT + KEPT))
    assert bytes_of[2] - bytes_of[1] == pytest.approx(1000 * (2 * ATTENTION - ATTENTION))
    for changes in ({"offload": (True,) * 3}, {"tile_tokens": 8}):
        with pytest.raises(InputError, match="no layer profile for scheme"):
            cost.sequence_times_s(lengths, replace(selective, **changes))


@pytest.mark.parametrize(
    ("memory_mib", "pays", "chosen"),
    [(7, True, {3}), (7, False, set()), pytest.param(100, True, set(), marks=pytest.mark.deep)],
)
def test_plans_keep_attention_where_that_pays(memory_mib, pays, chosen):
    as_started_by_torchrun()
    rows = [np.arange(length) % models.VOCAB for length in (LONGEST, 40, 30, 200)]
    run = lw.prepare(
        models.GPT(max_length=LONGEST).double(), rows, cost=selective_cost(memory_mib, pays=pays), offload="none",
        check=pays, steps=2, sequences_per_step=2, seed=3, policy="dcp-intra",
    )  # fmt: skip
    kept = noted_schemes(run, lambda scheme: scheme.num_recomputed if scheme.keep_attention else 0)
    losses = step_through(run)[0]
    run.close()
    assert len(losses) == 2 and {count for count in kept.values() if count} == chosen
    assert not chosen or kept[LONGEST] == 3


class GivenCost:
    """A cost model of one's own, of which nothing is known but what it answers."""

    def __init__(self, cost):
        self._cost = cost

    def __getattr__(self, name):
        return getattr(self._cost, name)


@pytest.mark.parametrize("recompute", ["auto", "selective"])
def test_plans_by_a_given_cost_keep_attention_where_the_model_may(recompute):
    as_started_by_torchrun()
    rows = [np.arange(length) % models.VOCAB for length in (LONGEST, 40, 30, 200)]
    run = lw.prepare(
        models.GPT(max_length=LONGEST).double(), rows, cost=GivenCost(selective_cost(7, pays=True)), offload="none",
        check=False, steps=2, sequences_per_step=2, seed=3, recompute=recompute,
    )  # fmt: skip
    candidates = run.planner.problem.candidates
    losses = step_through(run)[0]
    run.close()
    assert len(losses) == 2
    assert any(candidate.scheme.keep_attention for candidate in candidates) == (recompute == "selective")
