"""Objectives over batches that ranks bring have the gradients of a plain loop on one device, whatever the plan."""

import numpy as np
import pytest

from tests.session.objective_cases import (
    OBJECTIVES,
    gradient_errors,
    pairs,
    planned_in_stages,
    refused,
    sequence,
    singles,
    step_alone,
    troubled,
)

EXACT = 1e-10
"""float64: sums in another order differ by rounding alone."""
NUM_BATCHES = 4
AT_ONCE = 32
"""Cases that ranks answer for well within the time that they have."""


def assert_random_plans_are_exact(pool, names, seeds, **options):
    """Every objective, under the plans of all seeds."""
    return assert_cases_are_exact(pool, [(name, seed) for name in names for seed in seeds], **options)


def assert_cases_are_exact(pool, names_and_seeds, **options):
    cases = [(name, seed % NUM_BATCHES, seed) for name, seed in names_and_seeds]
    expected = {(name, batch): step_alone(name, batch) for name, batch, _ in cases}
    largest = min(max(float(g.abs().max()) for g in gradients.values()) for _, gradients in expected.values())
    assert largest > 1e-3, "every objective learns something"
    degrees = set()
    for first in range(0, len(cases), AT_ONCE):
        some = cases[first : first + AT_ONCE]
        for errors, used in pool.run(gradient_errors, some, expected, **options):
            assert len(errors) == len(some) and max(errors)[0] <= EXACT, max(errors)
            degrees |= used
    return degrees


LIKE_OTHERS = ("coupled ipo", "coupled reward", "grpo by tokens", "grpo by constant")
"""Which couple the same values as DPO, or sum over what test_own_batches.py sums over."""
FEW = [name for name in OBJECTIVES if name not in LIKE_OTHERS]


@pytest.mark.parametrize(
    ("num_ranks", "names"), [(2, FEW), *(pytest.param(n, list(OBJECTIVES), marks=pytest.mark.deep) for n in (1, 3))]
)
def test_objectives_have_the_gradients_of_a_plain_loop(ranks, num_ranks, names):
    # Each under the plans of one seed; under more in deep runs.
    degrees = assert_cases_are_exact(ranks(num_ranks), [(name, k % 2) for k, name in enumerate(names)])
    assert degrees == set(range(1, num_ranks + 1)), "sequences, pairs and groups are split over ranks"


@pytest.mark.deep
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_objectives_are_exact_under_many_plans(ranks, name, num_ranks):
    assert_random_plans_are_exact(ranks(num_ranks), [name], range(28))


@pytest.mark.deep
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_objectives_are_exact_where_weights_are_gathered_by_layer(ranks, num_ranks):
    names = [name for name in OBJECTIVES if name != "all of a teacher"]
    assert_random_plans_are_exact(ranks(num_ranks), names, range(8), weights="by-layer")


IN_STAGES = [name for name, objective in OBJECTIVES.items() if name != "all of a teacher" and not objective.coupled]


@pytest.mark.deep
def test_objectives_of_tokens_sequences_and_units_are_exact_in_stages(ranks):
    assert_random_plans_are_exact(ranks(3), IN_STAGES, range(20), most_stages=3)


GOOD = singles(1)[0]
LENGTH = len(GOOD["input_ids"])
BAD_ITEMS = {
    "no rank brought an item": [[], []],
    f"mask of item 1 is int64 of shape ({LENGTH + 1},), and there are {LENGTH} tokens": [
        [GOOD], [GOOD, GOOD | {"mask": np.ones(LENGTH + 1, np.int64)}],
    ],
    "item 0 has no column advantage, which loss_columns names": [
        [{name: value for name, value in GOOD.items() if name != "advantage"}], [GOOD],
    ],
    "margin of item 0 is inf at token 0": [[], [GOOD | {"margin": np.inf}]],
    "old_logps of item 0 is nan at token 0": [[GOOD | {"old_logps": np.full(LENGTH, np.nan)}], []],
    "item 0 of rank 1 has 61 tokens, over 60": [[GOOD], [sequence(np.random.default_rng(0), 61)]],
    "run.step takes a list of items": [[GOOD], GOOD],
    "items of this rank could not be read (TypeError: 'int' object is not iterable)": [[GOOD], 5],
    "items of this rank could not be read (ValueError: invalid literal": [map(int, ["no number"]), [GOOD]],
}  # fmt: skip
BAD_PAIRS = {
    "item 1 of rank 0 has 62 tokens, over 60": [
        [pairs(1)[0], tuple(sequence(np.random.default_rng(0), 31) for _ in range(2))], [pairs(1)[0]],
    ],
    "item 0 is a single sequence, and item 0 of the corpus is a unit": [[], [GOOD]],
    "margin of member 1 of item 0 is -inf at token 0": [[(GOOD, GOOD | {"margin": -np.inf})], []],
}  # fmt: skip


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(("make", "bad"), [(singles, BAD_ITEMS), (pairs, BAD_PAIRS)], ids=["sequences", "pairs"])
def test_bad_items_are_refused_on_every_rank_and_the_run_goes_on(ranks, make, bad):
    expected, _ = step_alone("dpo" if make is pairs else "kto", 1)
    for told, loss in ranks(2).run(refused, make, list(bad.values())):
        for message, error in zip(bad, told, strict=True):
            assert error and error[0] == "InputError", (message, error)
            assert message in error[1], (message, error)
        assert loss == pytest.approx(expected, rel=EXACT)


SAID_FIRST = {
    "a wrong column": "no column 'nonesuch' of the items is kept for the loss",
    "a wrong total": "no total of 'nonesuch'",
    "an infinite loss": "are not both finite",
    "a loss that is no number": "are not both finite",
    "a wrong shape": "one value for each",
}


def test_a_loop_that_goes_wrong_on_one_rank_is_told_to_every_rank_and_the_step_comes_again(ranks):
    of_ranks = ranks(2).run(troubled, list(SAID_FIRST))
    assert len({str([loss for *_, loss in told]) for told in of_ranks}) == 1
    for rank, told in enumerate(of_ranks):
        for trouble, said, _ in told:
            assert len(said) == 1, (trouble, rank, said)
            assert rank or SAID_FIRST[trouble] in said[0], (trouble, said)


def test_pairs_that_only_stages_hold_are_planned_in_stages_and_learn_what_a_plain_loop_learns(ranks):
    loss, gradients = step_alone("reward", 1)
    for found_loss, error, stages in ranks(2).run(planned_in_stages, "reward", 1, gradients):
        assert found_loss == pytest.approx(loss, abs=EXACT) and error <= EXACT
        assert stages == {2}
