"""`prepare(offload_state="host")` trains what it trains with the state on the device, to the last bit of float64."""

import numpy as np
import pytest
import torch

import lengthwise as lw
from lengthwise.config.optimizer_settings import OptimizerSettings
from lengthwise.core.errors import CheckError, InputError
from tests.session import models
from tests.session.loops import as_started_by_torchrun, step_through, weights_of
from tests.session.test_prepare import OPTIONS

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
        (2, ["adapters, by layer"]),
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
