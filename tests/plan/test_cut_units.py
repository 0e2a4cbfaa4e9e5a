"""Units whose sequences share prefixes are cut where they do not fit, and where the step is faster for it."""

import numpy as np
import pytest

from lengthwise.core.batch import GlobalBatch, attention_length
from lengthwise.core.errors import InfeasibleError
from lengthwise.core.lr_scaling import LrScaling
from lengthwise.core.prefix_tree import ROOT, PrefixTree
from lengthwise.plan.cut_units import plan_with_cuts
from lengthwise.plan.planner import Planner
from tests.plan.costs import SimpleCost, make_problem


def group(prompt, answers):
    """The tree of a prompt and answers to it."""
    return PrefixTree(
        bounds=(0, *np.cumsum([prompt, *answers]).tolist()),
        parents=(ROOT, *[0] * len(answers)),
        leaves=tuple(range(1, len(answers) + 1)),
    )


def batch_of(trees):
    return GlobalBatch(
        step=3,
        ids=tuple(range(len(trees))),
        lengths=tuple(tree.num_slots for tree in trees),
        attention_lengths=tuple(attention_length(tree.num_slots, tree.num_pairs) for tree in trees),
    )


def planned(trees, *, policy="auto", lr_scaling=None, **costs):
    batch = batch_of(trees)
    cost = SimpleCost(**{"c_s": 0.01, "a_s": 1e-6} | costs)
    given = make_problem(cost, max_length=max(batch.lengths), stages=(1,), samples=[batch.lengths])
    planner = Planner(policy=policy, problem=given, lr_scaling=lr_scaling)
    return plan_with_cuts(planner, batch, trees.__getitem__), planner, batch


def check_parts(cut, trees):
    """Every sequence is in one part or in a unit that is whole, and tokens are counted right."""
    members = [(unit, member) for unit, of_part in cut.parts.values() for member in of_part]
    whole = [number for number in cut.batch.ids if number not in cut.parts]
    assert len({unit for unit, _ in members} & set(whole)) == 0
    members += [(unit, member) for unit in whole for member in range(len(trees[unit].leaves))]
    assert sorted(members) == [(unit, member) for unit, tree in enumerate(trees) for member in range(len(tree.leaves))]
    repeated = {unit: -trees[unit].num_slots for unit, _ in cut.parts.values()}
    for number, (unit, of_part) in cut.parts.items():
        length = cut.batch.lengths[cut.batch.ids.index(number)]
        tree = trees[unit]
        assert length == len(np.unique(np.concatenate([tree.slots_of(member) for member in of_part])))
        repeated[unit] += length
    assert cut.repeated_tokens == sum(repeated.values())
    cut.plan.check_covers(cut.batch)


def test_a_unit_that_no_device_group_holds_is_cut_and_repeats_its_prompt_once():
    trees = [group(100, [60, 50, 40, 30]), group(20, [30, 10])]
    cut, _, _ = planned(trees, capacity=50)  # 4 devices hold 200 tokens
    check_parts(cut, trees)
    assert {unit for unit, _ in cut.parts.values()} == {0} and cut.repeated_tokens == 100
    assert max(cut.batch.lengths) <= 200


def test_a_planner_of_ones_own_plans_units_that_are_whole():
    trees = [group(900, [50] * 8)]
    _, planner, batch = planned(trees, capacity=2000)
    own = plan_with_cuts(lambda batch: planner(batch), batch, trees.__getitem__)
    assert own.plan.digest == planner(batch).digest and own.batch is batch and not own.parts


def test_a_unit_of_which_one_sequence_fits_nowhere_is_refused():
    with pytest.raises(InfeasibleError, match="sequence 0"):
        planned([group(100, [160, 50])], capacity=50)


def test_a_group_larger_than_a_fair_share_is_cut_where_the_step_is_faster():
    trees = [group(20, [200, 180, 220, 210]), group(20, [90, 80])]
    cut, planner, batch = planned(trees, capacity=2000, loss=1.0)
    check_parts(cut, trees)
    assert cut.parts and cut.plan.time_s < 0.8 * planner(batch).time_s


def test_what_is_balanced_already_stays_whole():
    trees = [group(100, [50, 50])] * 8
    cut, planner, batch = planned(trees, capacity=2000)
    assert not cut.parts and not cut.repeated_tokens and cut.plan.digest == planner(batch).digest


def test_prompts_that_make_up_most_of_a_group_are_not_repeated():
    trees = [group(1000, [5, 5])] + [group(30, [5])] * 3
    cut, planner, batch = planned(trees, capacity=2000, loss=0.05)
    assert not cut.parts and cut.plan.digest == planner(batch).digest


def test_the_learning_rate_is_that_of_the_whole_units():
    scaling = LrScaling(rule="linear", by="tokens", reference=1000.0)
    cut, _, batch = planned([group(100, [60, 50, 40, 30])], capacity=50, lr_scaling=scaling)
    assert cut.parts and cut.plan.lr_factor == batch.num_tokens / 1000


def test_a_group_alone_is_cut_though_no_plan_of_whole_groups_is_faster():
    trees = [group(20, [200, 180, 220, 210])]
    cut, planner, batch = planned(trees, capacity=2000, loss=1.0)
    check_parts(cut, trees)
    assert len(cut.parts) > 1 and cut.plan.time_s < 0.8 * planner(batch).time_s
