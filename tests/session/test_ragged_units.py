"""Units with different numbers of members train what a plain loop over them trains."""

import numpy as np
import pytest

from lengthwise.core.errors import InputError
from lengthwise.core.lengths import LengthIndex
from lengthwise.data.sampler import Sampler
from lengthwise.session.datasets import read_sequences
from lengthwise.session.item_values import ExpectedColumns
from tests.plan.costs import SimpleCost
from tests.session import models
from tests.session.branches import COLUMNS, GROUPS_A_STEP
from tests.session.pairs import log_probability, prepared
from tests.session.ragged_units import STEPS, brought, ragged, refused, train, train_alone
from tests.session.test_prepare import assert_equal_weights
from tests.session.test_shared_prefixes import unique_tokens

EXACT = 1e-11
WAYS = [
    {"coupled": False, "via": "corpus"},
    {"coupled": True, "via": "step"},
    {"coupled": True, "via": "corpus", "policy": "dcp-intra"},
    {"coupled": False, "via": "step", "share_prefixes": True},
    {"coupled": True, "via": "corpus", "share_prefixes": True, "weights": "by-layer"},
]


def _batches(way):
    if way["via"] == "step":
        return brought()
    units, shares = ragged(), way.get("share_prefixes")
    sizes = [unique_tokens(u) if shares else sum(len(member["input_ids"]) for member in u) for u in units]
    sampler = Sampler(LengthIndex(lengths=np.array(sizes)), seed=3, sequences_per_step=GROUPS_A_STEP)
    batches = [next(sampler) for _ in range(STEPS)]
    return [[units[i] for i in sorted(batch.ids)] for batch in batches]


@pytest.mark.parametrize(
    ("num_ranks", "ways"), [(3, WAYS[3:]), *(pytest.param(n, WAYS, marks=pytest.mark.deep) for n in (1, 3))]
)
def test_units_of_any_number_of_members_train_what_a_plain_loop_trains(ranks, num_ranks, ways):
    tight = {"cost": SimpleCost(capacity=200 // num_ranks), "recompute": "none"}
    alone = [train_alone(way["coupled"], _batches(way)) for way in ways]
    model = models.gpt()
    for trained in ranks(num_ranks).run(train, [way | tight for way in ways]):
        for way, expected, (losses, degrees, is_apart, weights, scored) in zip(ways, alone, trained, strict=True):
            np.testing.assert_allclose(losses, expected[0], rtol=EXACT, err_msg=str(way))
            assert_equal_weights(weights, expected[1])
            assert num_ranks == 1 or max(degrees) > 1 or is_apart, way
            for values, unit in scored:
                by_member = [float(log_probability(model, member).detach()) for member in unit]
                np.testing.assert_allclose(np.array(values, dtype=float), by_member, rtol=EXACT)


def test_a_loop_that_takes_equal_units_is_told_of_others_on_every_rank_and_the_run_goes_on(ranks):
    for first_loss, unequal, loss, single, coupled in ranks(2).run(refused):
        assert "units have 1 to 3 sequences, so micro_batch.units is no [u, M]" in unequal
        assert np.isfinite(first_loss) and np.isfinite(loss)
        assert "item 0 is a single sequence, and item 0 of the corpus is a unit" in single
        assert "coupled_loss has one parameter" in coupled and "units have 1 to 5 sequences here" in coupled


def test_a_coupled_loss_of_equal_units_is_refused_for_others_before_the_run():
    with pytest.raises(InputError, match=r"units have 1 to 5 sequences here; with a second one, coupled_loss\(values"):
        prepared(ragged(), coupled_loss=lambda gains: gains[:, 0].sum(), loss_columns=COLUMNS, steps=1)


def test_units_that_are_left_out_keep_the_members_of_others_in_place():
    units = ragged()
    longest = sorted(sum(len(member["input_ids"]) for member in unit) for unit in units)[-3]
    kept = [unit for unit in units if sum(len(member["input_ids"]) for member in unit) <= longest]
    found = read_sequences(
        units, max_length=longest, over_length="drop", expected=ExpectedColumns(loss_columns=COLUMNS)
    )
    assert 2 < len(kept) == len(found.lengths) < len(units)
    assert np.diff(found.units.offsets).tolist() == list(map(len, kept))
    assert found.units.name(len(kept[0])) == "member 0 of item 1"
    for number, member in enumerate(member for unit in kept for member in unit):
        assert found.tokens(number).tolist() == member["input_ids"].tolist()
