"""Sequences that begin alike: what they share is computed once, and every gradient is that of each by itself."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from lengthwise.core.errors import InputError
from lengthwise.core.lengths import LengthIndex
from lengthwise.core.prefix_tree import prefix_tree
from lengthwise.data.sampler import Sampler
from lengthwise.session.datasets import read_sequences
from lengthwise.session.item_values import ExpectedColumns
from tests.plan.costs import SimpleCost
from tests.runtime.wrap.test_position_masks import CASES
from tests.session import models
from tests.session.branches import (
    COLUMNS,
    FAMILIES,
    GROUPS_A_STEP,
    LOSSES,
    STEPS,
    brought,
    groups,
    score,
    train,
    train_alone,
    train_families,
)
from tests.session.pairs import prepared
from tests.session.test_prepare import assert_equal_weights

EXACT = 1e-11


def unique_tokens(unit):
    rows = [{"tokens": member["input_ids"]} for member in unit]
    return prefix_tree(rows, [np.append(member["labels"][1:] == -100, False) for member in unit]).num_slots


def batches_of_corpus():
    units = groups()
    index = LengthIndex(lengths=np.array([unique_tokens(unit) for unit in units]))
    sampler = Sampler(index, seed=3, sequences_per_step=GROUPS_A_STEP)
    return [[units[i] for i in next(sampler).ids] for _ in range(STEPS)]


WAYS = {
    1: [{"kind": kind} for kind in LOSSES] + [{"kind": "clipped", "check": True, "packing": "always"}],
    2: [{"kind": kind, "cost": SimpleCost(capacity=50), "recompute": "none"} for kind in LOSSES]
    + [{"kind": "clipped", "weights": "by-layer", "cost": SimpleCost(capacity=50), "recompute": "none"}],
    3: [
        {
            "kind": "clipped",
            "policy": "static",
            "methods": (method,),
            "cost": SimpleCost(capacity=30),
            "recompute": "none",
        }
        for method in ("ulysses", "ring", "ulysses_ring", "all_gather")
    ],
}


@pytest.mark.parametrize(
    ("num_ranks", "ways"), [(3, WAYS[3][2:3]), *(pytest.param(*item, marks=pytest.mark.deep) for item in WAYS.items())]
)
def test_a_shared_prefix_trains_what_every_sequence_by_itself_trains(ranks, num_ranks, ways):
    batches = batches_of_corpus()
    unique = sum(unique_tokens(unit) for units in batches for unit in units)
    assert unique < 0.8 * sum(len(member["input_ids"]) for units in batches for unit in units for member in unit)
    alone = {kind: train_alone(kind, batches) for kind in {way["kind"] for way in ways}}
    tight = {} if num_ranks == 1 else {"cost": SimpleCost(capacity=100 // num_ranks), "recompute": "none"}
    for found in ranks(num_ranks).run(train, [way | tight for way in ways]):
        for way, (losses, degrees, computed, weights) in zip(ways, found):
            expected_losses, expected_weights = alone[way["kind"]]
            np.testing.assert_allclose(losses, expected_losses, rtol=EXACT, err_msg=str(way))
            assert_equal_weights(weights, expected_weights)
            assert computed <= 1.01 * unique + num_ranks * len(batches), way
            assert num_ranks == 1 or max(degrees) > 1, way


@pytest.mark.deep  # by default: prefixes above, rollouts in test_own_batches
def test_groups_that_ranks_bring_share_prefixes_as_well(ranks):
    way = {"kind": "clipped", "cost": SimpleCost(capacity=50), "recompute": "none", "step_max_length": 90}
    losses, weights = train_alone("clipped", brought())
    unique = sum(unique_tokens(unit) for units in brought() for unit in units)
    for ((found, degrees, computed, theirs),) in ranks(2).run(train, [way], via="step"):
        np.testing.assert_allclose(found, losses, rtol=EXACT)
        assert_equal_weights(theirs, weights)
        assert computed <= 1.01 * unique
        assert max(degrees) > 1


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("per", ["token", "sequence"])
def test_scores_of_shared_tokens_come_back_for_every_sequence(ranks, per):
    model = models.gpt()
    for scores, units in ranks(2).run(score, per):
        for found, unit in zip(scores, units, strict=True):
            for value, member in zip(found, unit, strict=True):
                with torch.no_grad():
                    expected = model(torch.as_tensor(member["input_ids"])[None])[0][0, :, 0].numpy()
                np.testing.assert_allclose(value, expected if per == "token" else expected.sum(), rtol=1e-10)


def _prepared(items, model=None, **options):
    return prepared(items, model=model, loss_columns=COLUMNS, **{"share_prefixes": True, "check": True} | options)


SINGLE = [{"input_ids": [1, 2, 3, 4], "labels": [-100, 2, 3, 4]} | dict.fromkeys(COLUMNS, 1.0)] * 4
REFUSED = {
    "items are single sequences": (SINGLE, {}),
    "items have no labels": ([tuple({k: v for k, v in m.items() if k != "labels"} for m in u) for u in groups()], {}),
    "looks both ways": (groups(), {"model": models.GPT().double()}),
    "computed sequence by sequence": (groups(), {"packing": "never"}),
    "workers=2 processes read single sequences": (groups(), {"workers": 2}),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_share_is_refused_with_the_reason(reason):
    items, options = REFUSED[reason]
    if "model" in options:
        for block in options["model"].blocks:
            block.attention.causal = False
    with pytest.raises(InputError, match=reason):
        _prepared(items, **options)


@pytest.mark.parametrize(
    "name",
    [pytest.param("Bloom: by hand, with a bias by position", marks=pytest.mark.deep), "Llama 4: chunked attention"],
)
def test_masks_of_a_models_own_are_refused(name):
    with pytest.raises(InputError, match="share_prefixes=True is for causal attention"):
        _prepared(groups(longest=9, vocab=37), model=CASES[name].build().double())


class Sloped(models.Attention):
    """Attends with biases by distance, as ALiBi does."""

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(-3, -2) for part in self.qkv(x).chunk(3, -1))
        places = torch.arange(x.shape[-2])
        bias = 0.5 * (places - places[:, None]).to(x).masked_fill(places > places[:, None], -torch.inf)
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(-3, -2).flatten(-2))


def test_a_bias_by_distance_is_refused_as_what_it_is():
    model = models.GPT().double()
    for block in model.blocks:
        block.attention.__class__ = Sloped
    with pytest.raises(InputError, match="this model's attention has masks or biases of its own; leave share_prefixes"):
        _prepared(groups(), model=model)


@pytest.mark.parametrize(
    ("num_ranks", "methods"),
    [(2, ["ring"]), *(pytest.param(n, ["ulysses", "ring"], marks=pytest.mark.deep) for n in (1, 2))],
)
def test_windows_soft_caps_and_sinks_see_what_goes_before(ranks, num_ranks, methods):
    ways = [{"methods": (method,), "cost": SimpleCost(capacity=70 // num_ranks)} for method in methods]
    for found in ranks(num_ranks).run(train_families, FAMILIES, ways):
        for name, (degrees, shared, apart) in found.items():
            assert max(degrees) == num_ranks
            for key, value in apart.items():  # their norms are in float32
                np.testing.assert_allclose(shared[key], value, rtol=0, atol=1e-7, err_msg=f"{name}: {key}")


def test_what_is_shared_is_told_and_that_nothing_is(caplog):
    said, expected = [], ExpectedColumns(shares_prefixes=True, loss_columns=COLUMNS)
    read_sequences(groups(), expected=expected, say=said.append)
    tokens = sum(len(member["input_ids"]) for unit in groups() for member in unit)
    shared = tokens - sum(map(unique_tokens, groups()))
    assert any(line.startswith(f"{shared:,} of {tokens:,} tokens (") for line in said), said
    assert not caplog.records
    learned = [tuple(member | {"labels": member["input_ids"]} for member in unit) for unit in groups()]
    assert read_sequences(learned, expected=expected).lengths.lengths.sum() == tokens
    assert "nothing is shared; give the prompt's tokens labels of -100" in caplog.text


def attended(unit, *, shares):
    """The length whose tokens attend to as many on average as those of a unit, by counting its distinct beginnings."""
    pairs = {}
    for number, member in enumerate(unit):
        is_shared, tokens = shares, member["input_ids"]
        for place in range(len(tokens)):
            is_shared = is_shared and place + 1 < len(tokens) and member["labels"][place + 1] == -100
            pairs[(tokens[: place + 1].tobytes() if is_shared else number, place)] = place + 1
    return max(1, round(2 * sum(pairs.values()) / len(pairs) - 1))


@pytest.mark.parametrize("shares", [False, True])
def test_units_are_planned_with_the_attention_that_they_take(shares):
    expected = ExpectedColumns(shares_prefixes=shares, loss_columns=COLUMNS)
    sequences = read_sequences(groups(), expected=expected, say=lambda line: None)
    batch = next(Sampler(sequences.lengths, seed=3, sequences_per_step=len(groups())))
    assert list(batch.attention_lengths) == [attended(groups()[number], shares=shares) for number in batch.ids]
    assert all(alike < length for alike, length in zip(batch.attention_lengths, batch.lengths))


def test_means_over_own_tokens_are_refused():
    run = _prepared(groups(), count_targets=True)
    step = next(iter(run.steps()))
    with pytest.raises(InputError, match=r"micro_batch.mean\(values, over='tokens'\)"):
        for micro_batch in step:
            step.backward(run.model(**micro_batch.inputs)[1], mean_over="tokens")
    run.close()
