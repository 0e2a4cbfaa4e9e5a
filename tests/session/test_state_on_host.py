"""`prepare(offload_state="host")` trains what it trains with the state on the device, to the last bit of float64."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

import lengthwise as lw
from lengthwise.config.optimizer_settings import OptimizerSettings
from lengthwise.core.errors import CheckError, InputError
from lengthwise.core.specs import ClusterSpec, cluster_preset
from lengthwise.cost.profiled.dual_layer import DualLayerCost
from tests.cost.profiled.test_dual_layer import row, table
from tests.session import models
from tests.session.loops import as_started_by_torchrun, step_through, weights_of
from tests.session.test_prepare import OPTIONS, assert_equal_weights

WAYS = {
    "whole": {"weights": "whole"},
    "by layer": {"weights": "by-layer", "recompute": "all"},
    "adapters, by layer": {"weights": "by-layer", "adapted": True},
    "whole matrices": {"optimizer": OptimizerSettings(name="adafactor"), "weights": "whole"},
    "an optimizer of the user's": {"optimizer": torch.optim.NAdam},
}


def train(ways, place):
    """Losses and weights of each way, a change by hand after the second step included."""
    as_started_by_torchrun()
    results = []
    for way in ways:
        options = OPTIONS | {"steps": 3} | way
        model = models.adapted_gpt() if options.pop("adapted", False) else models.gpt()
        run = lw.prepare(
            model, models.rows(), cost=models.mixed_cost(), memory_gib=40, check=False, offload_state=place, **options
        )
        assert run.state.on_host == (place == "host")
        losses = []
        for step in run.steps():
            for micro_batch in step:
                step.backward(run.model(**micro_batch.inputs)[1])
            losses.append(step.update().loss)
            if step.number == 1:
                with run.plain(), torch.no_grad():
                    next(p for p in model.parameters() if p.requires_grad).mul_(1.5)
        run.close()
        results.append((losses, weights_of(model)))
    return results


@pytest.mark.parametrize(
    ("num_ranks", "ways"),
    [
        (1, ["whole"]),
        *(pytest.param(num_ranks, list(WAYS), marks=pytest.mark.deep) for num_ranks in (1, 2, 3)),
    ],
)
def test_a_model_learns_the_same_with_its_state_in_host_memory(ranks, num_ranks, ways):
    options = [WAYS[way] for way in ways]
    on_device, on_host = (ranks(num_ranks).run(train, options, place)[0] for place in ("device", "host"))
    for way, (expected, weights), (losses, moved) in zip(ways, on_device, on_host, strict=True):
        assert losses == expected and len(set(losses)) == len(losses), way
        for name, value in weights.items():
            assert np.array_equal(moved[name], value), (way, name)


TIGHT_MIB = {False: 1.0, True: 0.2}
"""Memory that holds the longest sequence beside the weights alone: a profile says 100,000 parameters, and where weights
are gathered by layer the model is asked, which has fewer."""


def tight_cost(num_ranks, memory_mib):
    """Costs of a model on GPUs of so much memory."""
    rows = [
        replace(row((length,), degree), input_bytes=8 * length, kept_bytes=8 * length, alive_bytes=8 * length)
        for degree in range(1, num_ranks + 1)
        for length in (8, 16, 32)
    ]
    device = replace(cluster_preset("1xH100-80GB").device, memory_bytes=int(memory_mib * 2**20))
    cluster = ClusterSpec(num_nodes=1, devices_per_node=num_ranks, device=device)
    return DualLayerCost(table(rows, num_layers=3, num_params=100_000, other_bytes=0, longest=32), cluster=cluster)


def placed(memory_mib, offload_state, by_layer):
    """Losses, weights, and whether the state is on the host."""
    as_started_by_torchrun()
    options = OPTIONS | {"steps": 3, "check": False, "recompute": "none", "offload": "none"}
    run = lw.prepare(
        models.gpt(), models.rows(longest=24), cost=tight_cost(dist.get_world_size(), memory_mib),
        weights="by-layer" if by_layer else "whole", offload_state=offload_state, **options,
    )  # fmt: skip
    losses, on_host = step_through(run)[0], run.state.on_host
    assert offload_state == "host" or run.planner.cost.base.state_on_host == on_host
    run.close()
    return losses, weights_of(run.model), on_host


@pytest.mark.parametrize(
    ("num_ranks", "by_layer", "places"),
    [
        (2, True, ("auto",)),
        *(
            pytest.param(n, by_layer, ("auto", "host"), marks=pytest.mark.deep)
            for n, by_layer in ((2, True), (1, False), (2, False))
        ),
    ],
)
def test_the_state_goes_to_the_host_where_the_longest_sequence_fits_no_other_way(ranks, num_ranks, by_layer, places):
    roomy, *moved = (
        ranks(num_ranks).run(placed, memory_mib, place, by_layer)[0]
        for memory_mib, place in ((8, "auto"), *((TIGHT_MIB[by_layer] if p == "auto" else 8, p) for p in places))
    )
    assert not roomy[2] and all(is_on_host for *_, is_on_host in moved)
    for losses, weights, _ in moved:
        assert losses == pytest.approx(roomy[0], rel=1e-12)
        assert_equal_weights(weights, roomy[1])


def test_gradients_that_a_loop_changes_are_noticed_on_their_way_to_the_host():
    run = lw.prepare(
        models.gpt(), models.rows(), cost=models.mixed_cost(), memory_gib=40, offload_state="host", **OPTIONS
    )
    with pytest.raises(CheckError, match="gradients were changed"):
        for step in run.steps():
            for micro_batch in step:
                loss = run.model(**micro_batch.inputs)[1]
                loss.backward(retain_graph=True)
                step.backward(loss)
    run.close()


def test_the_check_before_training_and_the_profile_leave_nothing_in_the_sums(ranks):
    run = lw.prepare(models.gpt(), models.rows(), memory_gib=40, offload_state="host", **OPTIONS | {"steps": 1})
    assert not run.state.pushed.any() and not run.state.optimizer.state
    assert len(step_through(run)[0]) == 1
    run.close()


def test_fsdp2_keeps_its_own_state(monkeypatch):
    monkeypatch.setattr("lengthwise.runtime.loop.prepared_model.fsdp_modules", lambda model: [model])
    with pytest.raises(InputError, match=r"offload_state='host': FSDP2 keeps the state of GPT.*CPUOffloadPolicy"):
        lw.prepare(
            models.gpt(), models.rows(), cost=models.mixed_cost(), memory_gib=40, offload_state="host", **OPTIONS
        )


@pytest.mark.parametrize("place", ["a/disk", "disk", "", 7])
def test_a_state_lies_in_memory(place):
    with pytest.raises(InputError, match="offload_state"):
        lw.prepare(models.gpt(), models.rows(), offload_state=place)
