"""Plans made ahead are the plans made on the spot, and nothing that goes wrong in planning stops training."""

import os

import numpy as np
import pytest

from lengthwise.core.errors import InfeasibleError
from lengthwise.core.lengths import LengthIndex
from lengthwise.data.sampler import Sampler
from lengthwise.plan.ahead import PlanAhead
from lengthwise.plan.planner import Planner
from tests.plan.costs import make_problem

CORPUS = LengthIndex(lengths=np.arange(1, 91))
PROBLEM = make_problem(num_devices=2, degrees=[1], stages=[1])
STATIC = Planner(policy="static", problem=PROBLEM)


def sampler():
    return Sampler(CORPUS, seed=3, tokens_per_step=200)


class Failing:
    """A planner that fails at one step."""

    def __init__(self, step, error):
        self.step, self.error = step, error

    def __call__(self, batch):
        if batch.step == self.step:
            raise self.error
        return STATIC(batch)


class Dying:
    """A planner whose worker process dies at one step."""

    def __init__(self, step):
        self.step, self.home = step, os.getpid()

    def __call__(self, batch):
        if batch.step == self.step and os.getpid() != self.home:
            os._exit(9)
        return STATIC(batch)


def digests(ahead, steps):
    return [ahead(next(ahead)).digest for _ in range(steps)]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_plans_do_not_depend_on_the_number_of_workers(workers):
    ahead = PlanAhead(sampler(), STATIC, fallback=STATIC, workers=workers, depth=3)
    try:
        stream = sampler()
        assert digests(ahead, 8) == [STATIC(next(stream)).digest for _ in range(8)]
    finally:
        ahead.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_the_state_is_that_of_the_batch_handed_out_not_of_those_drawn_ahead(workers):
    ahead = PlanAhead(sampler(), STATIC, fallback=STATIC, workers=workers, depth=3)
    try:
        digests(ahead, 4)
        state = ahead.state_dict()
        following = digests(ahead, 3)
        ahead.load_state_dict(state)
        assert digests(ahead, 3) == following
        plain = sampler()
        plain.load_state_dict(state)
        assert next(plain).step == 4
    finally:
        ahead.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_step_whose_planning_fails_is_planned_by_the_fallback_with_a_warning(workers, capsys):
    ahead = PlanAhead(sampler(), Failing(2, RuntimeError("no plan today")), fallback=STATIC, workers=workers, depth=3)
    try:
        stream = sampler()
        assert digests(ahead, 5) == [STATIC(next(stream)).digest for _ in range(5)]
    finally:
        ahead.close()
    assert "planning step 2 failed (RuntimeError: no plan today)" in capsys.readouterr().err


def test_a_sequence_that_fits_nowhere_still_stops_the_run():
    ahead = PlanAhead(sampler(), Failing(1, InfeasibleError("too long")), fallback=STATIC, workers=1)
    try:
        with pytest.raises(InfeasibleError, match="too long"):
            digests(ahead, 3)
    finally:
        ahead.close()


def test_where_a_worker_dies_this_process_makes_the_same_plans():
    ahead = PlanAhead(sampler(), Dying(2), fallback=Failing(2, AssertionError("not needed")), workers=1, depth=2)
    try:
        stream = sampler()
        assert digests(ahead, 6) == [STATIC(next(stream)).digest for _ in range(6)]
    finally:
        ahead.close()
