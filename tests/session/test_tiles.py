"""Feed-forward modules in tiles: the same gradients, and fewer bytes for the backward."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import lengthwise as lw
from lengthwise.core.errors import InputError
from tests.plan.costs import SimpleCost
from tests.runtime.loop.test_families import HEADS
from tests.runtime.wrap.test_position_ids import built
from tests.session import models
from tests.session.loops import noted_schemes, step_through, weights_of
from tests.session.pairs import prepared
from tests.session.test_prepare import assert_equal_weights

pytestmark = pytest.mark.usefixtures("unchecked")

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


@pytest.mark.parametrize(
    ("num_ranks", "ways"),
    # All layers recomputed, and weights by layer; adapters and one rank in deep runs.
    [(2, WAYS[1:3]), *(pytest.param(n, WAYS, marks=pytest.mark.deep) for n in (1, 2))],
)
def test_tiles_change_no_gradient(ranks, num_ranks, ways):
    tight = {"cost": SimpleCost(capacity=100 if num_ranks == 1 else 34)}
    whole = train([{"model": "adapted", "cost": SimpleCost(capacity=100)}, {"cost": SimpleCost(capacity=100)}])
    for found in ranks(num_ranks).run(train, [tight | way | {"feed_forward_tile": 5} for way in ways]):
        for way, (losses, degrees, names, weights) in zip(ways, found, strict=True):
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


def planned(tile_tokens, option=4, by_scheme=False):
    """Losses, weights and the sizes of tiles under a plan that says ``tile_tokens``."""
    run = prepared(
        models.rows(16), model=models.gpt(), feed_forward_tile=option, cost=SimpleCost(capacity=100), **OPTIONS
    )
    made, sizes = run.planner, set()

    def plan(batch):
        def changed(pipeline):
            if by_scheme:
                return replace(pipeline, scheme=replace(pipeline.scheme, tile_tokens=tile_tokens))
            return replace(
                pipeline, micro_batches=tuple(replace(m, tile_tokens=tile_tokens) for m in pipeline.micro_batches)
            )

        step_plan = made(batch)
        return replace(step_plan, pipelines=tuple(map(changed, step_plan.pipelines)))

    run.planner = plan
    for block in run.model.blocks:
        block.mlp[0].register_forward_pre_hook(lambda module, args: sizes.add(args[0].shape[1]))
    try:
        return step_through(run)[0], weights_of(run.model), sizes
    finally:
        run.close()


@pytest.mark.deep
def test_a_plan_says_how_many_tokens_a_tile_has():
    """7 divides nothing; 10,000 is more than there are; 0 is all; nothing said is what the model was prepared with."""
    losses, weights, whole = planned(0)
    for tile, by_scheme in ((7, False), (10_000, False), (None, False), (9, True)):
        found, moved, sizes = planned(tile, by_scheme=by_scheme)
        np.testing.assert_allclose(found, losses, rtol=1e-11)
        assert_equal_weights(moved, weights)
        assert max(sizes) == (max(whole) if tile == 10_000 else tile or 4)
    assert max(whole) > 40


def test_tiles_of_a_plan_need_modules_that_were_compared():
    with pytest.raises(InputError, match="in tiles of 7 tokens, and no module of this model was compared in tiles"):
        planned(7, option=None)


def test_models_of_transformers_are_tiled_where_they_can_be():
    model = built("Gemma2ForCausalLM", **HEADS | {"intermediate_size": 64, "head_dim": 8}).double()
    before = [set(vars(module)) for module in model.modules()]
    run = prepared([row[:20] % 37 for row in models.rows(8)], model=model, feed_forward_tile=4)
    assert run.wrapped_model.tiles.names == ["layers.0.mlp", "layers.1.mlp"]
    assert [set(vars(module)) for module in model.modules()] != before
    run.close()
    assert ["forward" in vars(module) for module in model.modules()] == ["forward" in names for names in before]


@pytest.mark.deep
@pytest.mark.parametrize("num_tight", [1, pytest.param(2, marks=pytest.mark.deep)])
def test_plans_choose_tiles_where_the_longest_sequence_does_not_fit_otherwise(tmp_path, num_tight):
    """2.6 MiB hold 512 tokens of a small model with all layers recomputed in tiles alone; no number changes by them.

    Nor do scores, whose forwards are planned with tiles as well.
    """
    rows = [np.arange(length) % models.VOCAB for length in (512, 40, 30, 200)]
    found, first_scores = [], None
    for memory_gib in (1.0, *[0.0026] * num_tight):
        torch.manual_seed(0)
        run = lw.prepare(
            models.GPT(max_length=512).double(), rows, device="cpu", memory_gib=memory_gib, verbose=False, lr=0.1,
            profile=tmp_path / f"{memory_gib}.json", sequences_per_step=2, steps=2, optimizer="sgd",
            check=memory_gib < 1,
        )  # fmt: skip
        tiles = noted_schemes(run, lambda scheme: scheme.tile_tokens)
        scores = run.score(rows, mean_logits)
        losses, names = step_through(run)[0], [] if run.wrapped_model.tiles is None else run.wrapped_model.tiles.names
        run.close()
        assert not any("forward" in vars(module) for module in run.model.modules())
        found.append((losses, tiles, names, weights_of(run.model)))
        for found_scores, expected in zip(scores, first_scores or scores, strict=True):
            np.testing.assert_allclose(found_scores, expected, rtol=1e-11)
        first_scores = first_scores or scores
    whole, *tiled = found
    assert not any(whole[1].values()) and whole[2] == []
    for losses, tiles, names, weights in tiled:  # the second from the profile that the first has saved
        assert tiles[512] == 32 and set(tiles.values()) <= {0, 32}  # of others what is measured to be faster
        assert names == [f"layers.{block}.mlp" for block in range(3)]
        np.testing.assert_allclose(losses, whole[0], rtol=1e-11)
        assert_equal_weights(weights, whole[3])


def mean_logits(output, micro_batch):
    return output[0][0].mean(-1)


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
