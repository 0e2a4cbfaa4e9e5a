"""The factor of a step's learning-rate is part of its plan, whoever makes the plan and whatever becomes of it."""

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from lengthwise.core.lengths import LengthIndex
from lengthwise.core.lr_scaling import LrScaling
from lengthwise.data.sampler import Sampler
from lengthwise.plan.layerwise.random_methods import RandomMethods
from lengthwise.plan.planner import Planner
from lengthwise.plan.prefetch import PlanAhead
from tests.plan.costs import make_problem

CORPUS = LengthIndex(lengths=np.arange(1, 91))
SCALING = LrScaling(rule="sqrt", by="sequences", reference=3)
PROBLEM = make_problem(num_devices=2, degrees=[2], stages=[1])


def fails(batch):
    raise ValueError("no plan")


@pytest.mark.parametrize("policy", ["static", pytest.param("auto", marks=pytest.mark.deep)])
def test_every_plan_says_the_factor_of_its_own_batch(policy):
    planner = Planner(policy=policy, problem=PROBLEM, lr_scaling=SCALING)
    drawn = RandomMethods(planner=planner, seed=0)
    fallen_back = PlanAhead(
        Sampler(CORPUS, seed=3, tokens_per_step=200), fails, fallback=planner, workers=0, warn=False
    )
    for batch in islice(Sampler(CORPUS, seed=3, tokens_per_step=200), 4):
        expected = (len(batch.ids) / 3) ** 0.5
        assert planner(batch).lr_factor == drawn(batch).lr_factor == expected
        assert fallen_back(next(fallen_back)).lr_factor == expected
        assert replace(planner, lr_scaling=None)(batch).lr_factor == 1.0
        assert (planner(batch).digest == replace(planner, lr_scaling=None)(batch).digest) == (expected == 1.0)
