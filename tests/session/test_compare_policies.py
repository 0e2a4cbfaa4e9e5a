"""A comparison shows what users get: the times that plans certify, `auto` first, and a reason where a policy fails."""

import json

import numpy as np
import pytest

import lengthwise
from lengthwise.core.errors import InfeasibleError, InputError
from lengthwise.plan import policies as policies_module
from lengthwise.report.pages.compare_page import render_comparison

GIVEN = {"model": "llama-7b", "cluster": "8xH100-80GB", "steps": 1}


def lengths_of(name):
    """Tokens of sequences: rollouts of which a fifth are cut at the cap, equal ones, two humps, one giant."""
    rng = np.random.default_rng(0)
    rollouts = np.minimum(rng.lognormal(7.5, 1.0, 4000), 16_384)
    rollouts[: len(rollouts) // 5] = 16_384
    made = {
        "rollouts": rollouts,
        "equal": np.full(4000, 4096),
        "two-humped": np.concatenate([rng.normal(500, 50, 3000), rng.normal(14_000, 500, 300)]),
        "giant": np.append(rng.lognormal(6, 0.5, 4000), 100_000),
    }
    return np.maximum(made[name], 2).astype(np.int32)


@pytest.mark.deep
@pytest.mark.parametrize(
    "name", ["rollouts", *(pytest.param(n, marks=pytest.mark.deep) for n in ("equal", "two-humped", "giant"))]
)
def test_no_policy_is_faster_than_auto_and_the_time_shown_is_the_one_planned_and_certified(name):
    (result,) = lengthwise.compare(lengths_of(name), **GIVEN).clusters
    assert result.ranked[0].policy == "auto"
    for one in result.ranked:
        np.testing.assert_allclose(one.times_s, one.planned_s, rtol=1e-9)
        assert all(bound_s <= time_s for bound_s, time_s in zip(one.bounds_s, one.times_s)), one.policy


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(
    ("is_prepared", "error"),
    [
        (True, InputError("no such")),
        (False, ZeroDivisionError()),
        *(
            pytest.param(*case, marks=pytest.mark.deep)
            for case in ((True, AssertionError("too long")), (False, KeyError(3)))
        ),
    ],
)
def test_a_policy_that_fails_is_a_row_with_its_reason(monkeypatch, is_prepared, error):
    def fail(*_):
        raise error

    class Failing:
        name, __call__, phases, floor_s, bound_s = "failing", fail, fail, fail, fail

    lengths, given = lengths_of("two-humped"), GIVEN | {"cluster": "2xH100-80GB"}
    monkeypatch.setattr(policies_module, "fail", (lambda problem: Failing()) if is_prepared else fail, raising=False)
    monkeypatch.setitem(policies_module._PREPARE, "packed", "policies:fail")
    comparison = lengthwise.compare(lengths, **given, policies=["static", "packed", "auto"])
    reason = comparison.clusters[0].policies[1].refused
    assert [one.policy for one in comparison.clusters[0].ranked] == ["auto", "static"]
    assert str(error) in reason and (isinstance(error, InputError) or type(error).__name__ in reason)
    assert json.loads(json.dumps(comparison.to_json()))["policies"][1]["refused"] == reason
    assert "These cannot run" in render_comparison(comparison)
    with pytest.raises(type(error)):
        lengthwise.compare(lengths, **given, policies=["packed"])


def test_a_comparison_in_which_every_policy_fails_says_why(monkeypatch):
    monkeypatch.setitem(policies_module._PREPARE, "packed", "policies:none")
    monkeypatch.setitem(policies_module._PREPARE, "static", "policies:none")
    with pytest.raises(InfeasibleError, match="policy packed fails, which is its fault: AttributeError"):
        lengthwise.compare(lengths_of("equal"), **GIVEN, policies=["packed", "static"])
