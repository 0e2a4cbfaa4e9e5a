"""Feed-forward modules in tiles: the same gradients, and fewer bytes for the backward."""

import numpy as np
import pytest
import torch

import lengthwise as lw
from lengthwise.core.errors import InputError
from tests.plan.costs import SimpleCost
from tests.runtime.loop.test_families import HEADS
from tests.runtime.wrap.test_position_ids import built
from tests.session import models
from tests.session.loops import step_through, weights_of
from tests.session.pairs import prepared
from tests.session.test_prepare import assert_equal_weights

OPTIONS = {"sequences_per_step": 8, "steps": 2}


def train(ways):
    """Losses, degrees, tiled modules and weights by way."""
    found = []
    for way in ways:
        make = {"gpt": models.gpt, "adapted": models.adapted_gpt}[way.pop("model", "gpt")]
        run = prepared(models.rows(16), model=make(), **OPTIONS | way)
        tiles = run.wrapped_model.tiles
        losses, degrees, _ = step_through(run)
        run.close()
        found.append((losses, degrees, [] if tiles is None else tiles.names, weights_of(run.model)))
    return found


WAYS = (
    {"recompute": "none"},
    {"recompute": "all", "check": True, "packing": "always"},
    {"weights": "by-layer", "recompute": "none"},
    {"model": "adapted", "recompute": "none"},
)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_tiles_change_no_gradient(ranks, num_ranks):
    tight = {"cost": SimpleCost(capacity=100 if num_ranks == 1 else 34)}
    whole = train([{"model": "adapted", "cost": SimpleCost(capacity=100)}, {"cost": SimpleCost(capacity=100)}])
    for found in ranks(num_ranks).run(train, [tight | way | {"feed_forward_tile": 5} for way in WAYS]):
        for way, (losses, degrees, names, weights) in zip(WAYS, found, strict=True):
            expected = whole[0 if way.get("model") else -1]
            np.testing.assert_allclose(losses, expected[0], rtol=1e-11)
            assert_equal_weights(weights, expected[3])
            assert names == [f"layers.{layer}.mlp" for layer in range(3)]
            assert max(map(max, degrees)) == num_ranks or way.get("recompute") == "all"


def saved_bytes(tile, length=64):
    """Bytes that the forward of one micro-batch saves for the backward."""
    run = prepared(
        [np.arange(length) % models.VOCAB] * 4, feed_forward_tile=tile, sequences_per_step=1, steps=1,
        recompute="none", cost=SimpleCost(capacity=100),
    )  # fmt: skip
    saved = []

    def note(tensor):
        saved.append(tensor)
        return tensor

    for step in run.steps():
        for micro_batch in step:
            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                loss = run.model(**micro_batch.inputs)[1]
            step.backward(loss)
        step.update()
    run.close()
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in saved}.values())


def test_tiles_keep_the_input_of_feed_forward_modules_alone():
    inside = 3 * 64 * (2 * 48) * 8  # of each of three layers, before and after the activation
    assert saved_bytes(None) - saved_bytes(16) == inside
    assert saved_bytes(None) == saved_bytes(64)


def test_models_of_transformers_are_tiled_where_they_can_be():
    model = built("Gemma2ForCausalLM", **HEADS | {"intermediate_size": 64, "head_dim": 8}).double()
    before = [set(vars(module)) for module in model.modules()]
    run = prepared([row[:20] % 37 for row in models.rows(8)], model=model, feed_forward_tile=4)
    assert run.wrapped_model.tiles.names == ["layers.0.mlp", "layers.1.mlp"]
    assert [set(vars(module)) for module in model.modules()] != before
    run.close()
    assert ["forward" in vars(module) for module in model.modules()] == ["forward" in names for names in before]


class Dropping(models.GPT):
    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.mlp.append(torch.nn.Dropout(0.1))


REFUSED = {
    "no module in the layers of Dropping maps each token by itself": {"model": Dropping},
    "is computed sequence by sequence": {"packing": "never"},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_tiled_is_refused(reason):
    options = dict(REFUSED[reason])
    model = options.pop("model", models.GPT)().double()
    with pytest.raises(InputError, match=f"feed_forward_tile=4.*{reason}"):
        prepared(models.rows(8), model=model, feed_forward_tile=4, **options)
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_tile_has_tokens():
    with pytest.raises(InputError, match="feed_forward_tile"):
        lw.prepare(models.gpt(), models.rows(8), feed_forward_tile=0)
