"""Proposals searched in another process are those searched here."""

import os

import numpy as np
import pytest

from lengthwise.core.errors import InfeasibleError
from lengthwise.plan.heterogeneous.adaptive_pipelines import candidate_families
from lengthwise.plan.heterogeneous.hydraulis import published_space
from lengthwise.plan.heterogeneous.propose import propose
from lengthwise.plan.heterogeneous.propose.beforehand import proposals, searching
from tests.plan.costs import make_problem

HOME = os.getpid()


def problem():
    samples = tuple(np.random.default_rng(step).integers(1, 90, size=20) for step in range(9))
    return make_problem(num_devices=4, max_length=90, samples=samples)


def dying_space(problem):
    if os.getpid() != HOME:
        os._exit(9)
    return list(problem.candidates)


def no_space(problem):
    raise InfeasibleError("nothing fits")


@pytest.mark.parametrize("space", [published_space, candidate_families])
def test_they_are_the_same_of_the_same_candidates(space):
    here, there = problem(), problem()
    with searching([there], [space], workers=1):
        found = proposals(there, space)
    expected = propose(here, space(here))
    assert [each.mean_s for each in found] == [each.mean_s for each in expected]
    assert [[(candidate.scheme, count) for candidate, count in each.counts] for each in found] == [
        [(candidate.scheme, count) for candidate, count in each.counts] for each in expected
    ]
    if space is published_space:
        assert all(candidate in there.candidates for each in found for candidate, _ in each.counts)


def test_they_are_searched_here_once_the_other_process_has_died():
    one = problem()
    with searching([one], [dying_space], workers=1):
        found = proposals(one, dying_space)
    assert [each.counts for each in found] == [each.counts for each in propose(one)]


def test_what_cannot_be_searched_is_refused_here_too():
    one = problem()
    with searching([one], [no_space], workers=1), pytest.raises(InfeasibleError, match="nothing fits"):
        proposals(one, no_space)
