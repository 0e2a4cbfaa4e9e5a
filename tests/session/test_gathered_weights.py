"""`prepare(weights="by-layer")` trains what one device trains, of weights of which each rank holds a share."""

import copy
import io
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel

import lengthwise as lw
from lengthwise.config.optimizer_settings import OptimizerSettings
from lengthwise.config.prepare_options import PrepareOptions
from lengthwise.core.errors import InputError
from lengthwise.core.pipeline_config import Method, uniform_scheme
from lengthwise.cost.profiled.dual_layer import DualLayerCost
from lengthwise.cost.profiled.layer_gather_cost import LayerGatherCost, Moment
from lengthwise.session import weight_placement
from lengthwise.session.weight_placement import place_weights
from tests.cost.profiled.test_dual_layer import CLUSTER, LAYERS
from tests.cost.profiled.test_dual_layer import table as profiled
from tests.session import models
from tests.session.loops import as_started_by_torchrun, step_through, train_gpt, train_in_parts, weights_of
from tests.session.test_prepare import EXACT, OPTIONS, STEPS, assert_equal_weights, loop_on_one_device

pytestmark = pytest.mark.usefixtures("unchecked")

BY_LAYER = OPTIONS | {"weights": "by-layer"}


@pytest.fixture(scope="module")
def alone():
    return loop_on_one_device()


@pytest.mark.deep
@pytest.mark.parametrize(
    ("num_ranks", "recompute"),
    [(3, "none"), *(pytest.param(*p, marks=pytest.mark.deep) for p in ((2, "all"), (4, "auto")))],
)
def test_weights_gathered_by_layer_train_what_one_device_trains(ranks, alone, num_ranks, recompute):
    steps = 2 if num_ranks == 3 else STEPS
    expected_losses, expected = alone if steps == STEPS else loop_on_one_device(steps)
    options = BY_LAYER | {"recompute": recompute, "steps": steps}
    for found in ranks(num_ranks).run(train_gpt, ("static", "dcp-intra"), options):
        for losses, _, _, weights in found.values():
            np.testing.assert_allclose(losses, expected_losses, rtol=EXACT)
            assert_equal_weights(weights, expected)


def test_a_run_and_an_average_of_its_weights_go_on_with_other_ranks_and_other_weight_placement(ranks, alone, tmp_path):
    options = {name: value for name, value in OPTIONS.items() if name != "steps"}
    found = []
    for num_ranks, weights, last in ((3, "whole", 1), (2, "by-layer", STEPS)):
        losses, averages = ranks(num_ranks).run(
            train_in_parts, tmp_path, first=not found, last=last, options=options | {"weights": weights}, decay=0.75
        )[0]
        found += losses
    np.testing.assert_allclose(found, alone[0], rtol=EXACT)
    expected = weights_of(models.gpt())
    for num_steps in range(1, STEPS + 1):
        now = loop_on_one_device(num_steps)[1]
        expected = {name: 0.75 * value + 0.25 * now[name] for name, value in expected.items()}
    assert_equal_weights(averages, expected)


def train_sparse(weights):
    as_started_by_torchrun()
    model = models.gpt()
    model.tokens.sparse = True
    run = lw.prepare(model, models.rows(), cost=models.mixed_cost(), memory_gib=40, weights=weights, **OPTIONS)
    assert run.wrapped_model.by_sequence is None
    losses, *_ = step_through(run)
    run.close()
    assert model.tokens.sparse
    return losses, weights_of(model)


@pytest.mark.deep
@pytest.mark.parametrize("weights", ["whole", "by-layer"])
def test_an_embedding_with_sparse_gradients_trains_what_a_dense_one_does(ranks, alone, weights):
    for losses, found in ranks(2).run(train_sparse, weights):
        np.testing.assert_allclose(losses, alone[0], rtol=EXACT)
        assert_equal_weights(found, alone[1])


def held_bytes(run):
    """Bytes of all tensors of the model and its state between two steps, and of the largest two units in full."""
    state = run.state
    tensors = [state.master, state.pushed, state.weights, state.gradients, *run.model.parameters()]
    tensors += [gradient for gradient in state.gradients_of(list(state.named)) if gradient is not None]
    tensors += [value for values in state.optimizer.state.values() for value in values.values() if value.dim()]
    tensors += [] if run.gather is None else [shares.master for shares in run.gather._parts]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def train_and_count(weights):
    as_started_by_torchrun()
    run = lw.prepare(
        models.gpt(), models.rows(), cost=models.mixed_cost(), memory_gib=40, weights=weights,
        **OPTIONS | {"steps": 1, "recompute": "none"},
    )  # fmt: skip
    step_through(run)
    num_bytes = held_bytes(run)
    run.close()
    return num_bytes, 8 * run.num_params


@pytest.mark.deep
def test_between_steps_a_rank_holds_its_share_of_the_state_and_nothing_else(ranks):
    (by_layer, weights), *_ = ranks(3).run(train_and_count, "by-layer")
    (whole, _), *_ = ranks(2).run(train_and_count, "whole")
    assert by_layer <= 1.1 * 4 * weights / 3
    assert whole >= 2 * weights + 4 * weights / 2, "weights and gradients whole, a share of the rest"


def average_by_hand(model):
    with torch.no_grad():
        torch._foreach_lerp_([torch.zeros_like(p) for p in models.gpt().parameters()], list(model.parameters()), 0.1)


USES_OF_ALL_WEIGHTS = {
    "state_dict": lambda model: model.state_dict(),
    "saving the model": lambda model: torch.save(model, io.BytesIO()),
    "a change": lambda model: model.head.weight.detach().clamp_(-1, 1),
    "other values": lambda model: setattr(model.head.weight, "data", torch.zeros(models.VOCAB, 24).double()),
    "a norm": lambda model: sum(parameter.square().sum() for parameter in model.parameters()),
    "norms at once": lambda model: torch._foreach_norm(list(model.parameters())),
    "a vector of all": lambda model: nn.utils.parameters_to_vector(model.parameters()),
    "a copy": copy.deepcopy,
    "an average": lambda model: AveragedModel(model),
    "an average that was made before": lambda model: AveragedModel(models.gpt()).update_parameters(model),
    "an average by hand": average_by_hand,
    "an array": lambda model: model.head.weight.detach().numpy(),
    "a comparison": lambda model: torch.equal(model.head.weight, model.head.weight),
    "a cast": lambda model: model.float(),
    "a look": lambda model: print(model.head.weight),
    "a layer called by hand": lambda model: model.blocks[0](torch.zeros(1, 3, 24).double()),
    "a part called by hand": lambda model: functional_call(model.head, {}, torch.zeros(1, 3, 24).double()),
}


def check_uses():
    as_started_by_torchrun()
    model = models.gpt()
    run = lw.prepare(
        model, models.rows(), cost=models.mixed_cost(), memory_gib=40, **BY_LAYER | {"steps": 2, "recompute": "none"}
    )
    for use in USES_OF_ALL_WEIGHTS.values():
        with pytest.raises(InputError, match=r"^\w.*weight.* cannot be read or written here.*`with run.plain\(\)"):
            use(model)
    with pytest.raises(RuntimeError, match="cannot be read or written here"):
        model.load_state_dict(models.gpt().state_dict())
    assert next(model.parameters()).shape == (models.VOCAB, 24) and {p.dtype for p in model.parameters()} == {
        torch.float64
    }
    with run.plain(), torch.no_grad():
        model.head.weight.clamp_(-0.1, 0.1)
    step = next(run.steps())
    with run.plain():
        average = AveragedModel(model)
        before = {name: value.detach().clone() for name, value in model.named_parameters()}
    for micro_batch in step:
        step.backward(model(**micro_batch.inputs)[1])
    with pytest.raises(InputError, match=r"within a step: .* call it after step.update\(\)"), run.plain():
        average.update_parameters(model)
    step.update()
    with run.plain():
        assert not torch.equal(before["head.weight"], model.head.weight)
        model.load_state_dict(before)
    micro_batches = iter(next(run.steps()))
    micro_batch = next(micro_batches)
    loss = model(**micro_batch.inputs)[1]
    with pytest.raises(InputError, match=r"called twice in a micro-batch.*weights='whole'"):
        model(**micro_batch.inputs)
    with pytest.raises(InputError, match="within a step"), run.plain():
        pass
    del loss
    run.close()
    return float(weights_of(model)["head.weight"].max())


def test_uses_that_need_all_weights_say_so_and_changes_within_plain_are_kept(ranks):
    assert ranks(2).run(check_uses) == [pytest.approx(0.1, abs=1e-7)] * 2


def placed(weights, memory_bytes, *, problem="", frozen_bytes=0):
    table = replace(profiled(num_params=1000 * (LAYERS + 2)), other_bytes=frozen_bytes * (LAYERS + 2))
    cost = DualLayerCost(table, cluster=replace(CLUSTER, device=replace(CLUSTER.device, memory_bytes=memory_bytes)))
    sizes, frozen = SimpleNamespace(unit_sizes=(1000,) * (LAYERS + 2)), (frozen_bytes,) * (LAYERS + 2)
    structure = SimpleNamespace(table=lambda: sizes, unit_frozen_bytes=lambda: frozen)
    prepared = SimpleNamespace(
        world=SimpleNamespace(size=4, is_first=False), gather_problem=problem,
        gather=object() if weights == "by-layer" else None, gather_by_layer=lambda: None,
        wrapped_model=SimpleNamespace(structure=structure, used_units=()),
    )  # fmt: skip
    with mock.patch.object(weight_placement, "check_exact") as check:
        places = place_weights(prepared, PrepareOptions(weights=weights), cost, 64)
    assert check.call_count == (weights == "auto" and places[1] is not None), "gathered after it was compared whole"
    return places


def test_auto_gathers_only_where_the_longest_sequence_does_not_fit_beside_all_weights():
    """8,000 parameters in float32 on 4 ranks: 64,000 bytes whole beside 32,000 of shares, else 16,000 of two layers and
    a share of the gradients that are on their way."""
    cost, keep_layers = placed("auto", 600_000)
    assert keep_layers is None and cost.gather is None
    cost, keep_layers = placed("auto", 120_000)
    assert keep_layers is not None and cost.gather.state_bytes(4) == 32_000 + 16_000 + 1000
    assert placed("auto", 120_000, problem="it is odd")[1] is None
    assert placed("whole", 120_000)[1] is None
    assert placed("by-layer", 600_000)[1] is not None


def test_a_rank_holds_the_head_in_the_loss_and_two_units_in_a_backward():
    gather = LayerGatherCost(unit_params=(50, 10, 10, 40, 80), unit_frozen_bytes=(0,) * 5, dtype="bfloat16")
    shares = 16 * 190 // 2
    assert gather.state_parts(2) == {
        Moment.LOSS: (2 * 80, 0, shares),
        Moment.LOSS_BACKWARD: (2 * (80 + 40), 4 * 80, shares),
        Moment.BACKWARD: (2 * (40 + 10), 4 * (40 + 80 + 80 // 2), shares),
        Moment.EMBEDDING_BACKWARD: (2 * 50, 4 * (50 + 10 + 10 // 2), shares),
    }
    tied = replace(gather, head_units=(0, 4), unit_params=(50, 10, 10, 40, 2))
    assert tied.state_parts(2)[Moment.LOSS][:2] == (2 * 52, 0), "a tied embedding is what the loss computes with"
    whole = gather.state_parts(2, num_kept=2)
    assert whole[Moment.LOSS][:2] == (2 * 130, 4 * 130)
    assert whole[Moment.BACKWARD][:2] == (2 * (130 + 10 + 50), 4 * (130 + 10)), "what stays sends nothing"


def test_a_step_keeps_as_many_of_the_last_layers_whole_as_its_plan_leaves_memory_for():
    _, keep_layers = placed("by-layer", 600_000)
    plans = [SimpleNamespace(pipelines=[SimpleNamespace(micro_batches=[SimpleNamespace(peak_bytes=peak)])])
             for peak in (600_000, 600_000 - 16_000, 600_000 - 15_999, 0)]  # fmt: skip
    assert [keep_layers(plan) for plan in plans] == [0, 1, 0, LAYERS], "8 bytes of each of 1,000 weights, and the head"


def test_frozen_weights_are_counted_at_their_own_bytes_and_without_gradient_or_state():
    """Of 8 units of 4,000 bytes a share of a quarter, and two gathered ones; other bytes would count them whole."""
    cost, keep_layers = placed("by-layer", 600_000, frozen_bytes=4000)
    assert cost.gather.state_bytes(4) == 32_000 + 8 * 4000 // 4 + 16_000 + 1000 + 2 * 4000
    scheme = uniform_scheme(LAYERS, degree=1, method=Method.DENSE)
    assert cost._state_bytes(scheme, 4) == (cost.gather.state_bytes(4),)
    plan = SimpleNamespace(pipelines=[SimpleNamespace(micro_batches=[SimpleNamespace(peak_bytes=600_000 - 24_000)])])
    assert keep_layers(plan) == 1, "8 bytes of each of 1,000 trained weights and 4,000 frozen ones, and the head"


@pytest.mark.parametrize(
    ("recompute", "parts"),
    [
        ("all", ((3, "by-layer", 1), (2, "whole", STEPS))),
        *(
            pytest.param(
                recompute, ((3, "by-layer", 1), (2, "whole", 2), (3, "by-layer", STEPS)), marks=pytest.mark.deep
            )
            for recompute in ("all", "none")
        ),
    ],
)
def test_a_frozen_model_with_adapters_trains_as_on_one_device_and_goes_on_with_other_ranks(
    ranks, tmp_path, recompute, parts
):
    losses, weights = loop_on_one_device(make=models.adapted_gpt)
    options = {name: value for name, value in OPTIONS.items() if name != "steps"} | {"recompute": recompute}
    found = []
    for num_ranks, placement, last in parts:
        part = ranks(num_ranks).run(
            train_in_parts, tmp_path, first=not found, last=last, options=options | {"weights": placement},
            make=models.adapted_gpt,
        )[0]  # fmt: skip
        found += part[0]
    np.testing.assert_allclose(found, losses, rtol=EXACT)
    assert_equal_weights(part[1], weights)


def count_frozen(weights):
    as_started_by_torchrun()
    model = models.adapted_gpt(width=64, num_layers=6)
    whole = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    run = lw.prepare(
        model, models.rows(), cost=models.mixed_cost(), memory_gib=40, weights=weights, check=False,
        **OPTIONS | {"steps": 1, "recompute": "none"},
    )  # fmt: skip
    step_through(run)
    between = held_bytes(run)
    with run.plain(), torch.no_grad():
        model.blocks[0].mlp[0].bias.fill_(0.5)
    assert held_bytes(run) == between
    run.close()
    return between / whole, float(model.blocks[0].mlp[0].bias[3])


def test_between_steps_a_rank_holds_its_share_of_frozen_weights_too(ranks):
    for share, changed in ranks(3).run(count_frozen, "by-layer"):
        assert share <= 0.48, "a third of the weights, and of the adapters' states"
        assert changed == 0.5, "what was changed within plain() is kept"


@pytest.mark.deep
def test_between_steps_a_rank_holds_whole_frozen_weights_where_none_are_gathered(ranks):
    assert min(share for share, _ in ranks(2).run(count_frozen, "whole")) >= 1


def train_in(dtype, autocast):
    as_started_by_torchrun()
    losses = []
    for weights in ("whole", "by-layer"):
        run = lw.prepare(
            models.gpt().to(dtype), models.rows(), cost=models.mixed_cost(), memory_gib=40, weights=weights,
            check=False, **OPTIONS | {"recompute": "all", "steps": 2},
        )  # fmt: skip
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            losses.append(step_through(run)[0])
        run.close()
    return losses


@pytest.mark.deep  # by default: float64 above, bfloat16 by layer in test_narrow_gradients
@pytest.mark.parametrize(
    ("dtype", "autocast"), [pytest.param(torch.bfloat16, False, marks=pytest.mark.deep), (torch.float32, True)]
)
def test_a_model_in_bfloat16_or_under_autocast_learns_as_with_whole_weights(ranks, dtype, autocast):
    for whole, by_layer in ranks(2).run(train_in, dtype, autocast):
        np.testing.assert_allclose(by_layer, whole, rtol=2e-2)
        assert len(set(np.round(whole, 3))) > 1, "it learns nothing"


def train_with_whole_matrices():
    as_started_by_torchrun()
    losses = []
    for weights in ("whole", "by-layer"):
        optimizer = OptimizerSettings(name="adafactor", weight_decay=0.0)
        run = lw.prepare(
            models.gpt(), models.rows(), cost=models.mixed_cost(), memory_gib=40, optimizer=optimizer, weights=weights,
            **OPTIONS | {"recompute": "none", "steps": 2},
        )  # fmt: skip
        losses.append(step_through(run)[0])
        run.close()
    return losses


@pytest.mark.deep
def test_whole_matrices_of_an_optimizer_may_be_gathered_too(ranks):
    for whole, by_layer in ranks(2).run(train_with_whole_matrices):
        np.testing.assert_allclose(by_layer, whole, rtol=EXACT)
