"""ParaDySe's Algorithm 1, as benchmarks run it beside our exact counts."""

from pathlib import Path

import numpy as np
import pytest

from lengthwise.plan.layerwise.layer_assignment import best_counts

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def layer_methods(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import published

    return published.layer_methods


def test_the_fastest_method_runs_all_layers_where_it_fits(layer_methods):
    assert layer_methods([2.0, 1.0], [1.0, 3.0], num_layers=3, budget=9.0) == [1, 1, 1]


def test_one_exchange_is_exact_for_two_methods(layer_methods):
    assert layer_methods([1.0, 2.0], [3.0, 1.0], num_layers=4, budget=8.0) == [0, 0, 1, 1]


def test_later_exchanges_start_where_the_last_one_ended_unless_they_are_reset(layer_methods):
    times, sizes = [1.0, 2.0, 3.0], [4.0, 3.5, 1.0]
    as_printed = layer_methods(times, sizes, num_layers=4, budget=13.0)
    assert as_printed == [1, 1, 1, 2]  # the first method is gone when the third is exchanged
    assert layer_methods(times, sizes, num_layers=4, budget=13.0, resets=True) == [0, 0, 0, 2]


def test_no_answer_of_it_beats_the_exact_counts(layer_methods):
    for seed in range(40):
        numbers = np.random.default_rng(seed)
        times, sizes = np.sort(numbers.uniform(1, 4, 4)).tolist(), np.sort(numbers.uniform(1, 4, 4))[::-1].tolist()
        budget = 6 * float(numbers.uniform(min(sizes), max(sizes)))
        counts = best_counts(times, sizes, num_layers=6, budget_bytes=budget)
        theirs = layer_methods(times, sizes, num_layers=6, budget=budget, resets=bool(seed % 2))
        assert sum(sizes[method] for method in theirs) <= budget
        assert sum(times[method] for method in theirs) >= float(np.array(times) @ counts) - 1e-12
