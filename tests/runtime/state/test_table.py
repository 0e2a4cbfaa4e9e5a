"""Where parameters lie, and what a rank computes with: integers alone, for every family."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.core.layout import row_bounds, sharded_by_unit
from lengthwise.core.parameter_shapes import unit_shapes
from lengthwise.core.pipeline_config import Method, WeightPlacement, uniform_scheme
from lengthwise.cost.weight_shards import held_params
from lengthwise.runtime.models.registry import empty_model
from lengthwise.runtime.parallel.shards import keep_own_rows
from lengthwise.runtime.state.table import ParameterTable
from tests.runtime.train.families import FAMILIES, random_case
from tests.sim.random_plans import random_strategy

MODELS = {name: empty_model(spec) for name, spec in FAMILIES.items()}
TABLES = {name: ParameterTable.of(model) for name, model in MODELS.items()}
every_family = pytest.mark.parametrize("name", FAMILIES)


def held_elements(table, holding):
    return {element for part in table.parts(holding) for element in range(*part.interval)}


@every_family
def test_every_parameter_lies_in_one_unit_and_units_follow_one_another(name):
    model, table = MODELS[name], TABLES[name]
    assert table.slots.keys() == {name for name, _ in model.named_parameters()}
    assert table.num_elements == sum(p.numel() for p in model.parameters()) == FAMILIES[name].num_params
    assert table.num_units == FAMILIES[name].num_layers + 2
    at = 0
    for slot in table.slots.values():
        assert slot.interval[0] == at, "no gap, no overlap, in the order of the buffer"
        at = slot.interval[1]
        assert table.bounds[slot.unit] <= slot.interval[0] and at <= table.bounds[slot.unit + 1]
        assert slot.shape == tuple(model.get_parameter(slot.name).shape)
    assert at == table.num_elements


@every_family
def test_units_are_the_input_each_layer_and_the_output(name):
    units = {slot.name: slot.unit for slot in TABLES[name].slots.values()}
    for parameter, unit in units.items():
        if parameter.startswith("layers."):
            assert unit == int(parameter.split(".")[1]) + 1
    outside = {parameter: unit for parameter, unit in units.items() if not parameter.startswith("layers.")}
    last = FAMILIES[name].num_layers + 1
    first = {"embedding", "position", "token_type", "embedding_norm", "embedding_norm_bias"}
    assert outside == {parameter: 0 if parameter in first else last for parameter in outside}
    assert "embedding" in outside and ("head" in outside) is not FAMILIES[name].tied_embeddings


@every_family
def test_costs_know_every_parameter_in_the_order_of_the_buffer(name):
    spec, slots = FAMILIES[name], TABLES[name].slots.values()
    for unit, number in (("input", 0), *(("layer", 1 + n) for n in range(spec.num_layers)), ("output", -1)):
        there = [slot for slot in slots if slot.unit == number % (spec.num_layers + 2)]
        shapes = {slot.name.rpartition(".")[2]: (*slot.shape, 1)[:2] for slot in there}
        assert list(unit_shapes(spec, unit).items()) == list(shapes.items())


@every_family
def test_the_rows_of_shards_are_those_of_the_parameters(name):
    for slot in TABLES[name].slots.values():
        bounds = row_bounds(slot.name, FAMILIES[name], degree=3)
        assert bounds is None or bounds[-1] == slot.shape[0]


@every_family
@pytest.mark.parametrize("seed", range(8))
def test_the_ranks_of_every_stage_hold_all_that_it_computes_with(name, seed):
    table, rng = TABLES[name], random.Random(seed)
    last = table.num_units - 1
    for _, scheme in random_strategy(rng, 12):
        for stage in range(scheme.num_stages):
            needed = {layer + 1 for layer in scheme.layers_of_stage(stage)}
            needed |= ({0} if stage == 0 else set()) | ({last} if stage == scheme.num_stages - 1 else set())
            wanted = {e for unit in needed for e in range(table.bounds[unit], table.bounds[unit + 1])}
            if last in needed and FAMILIES[name].tied_embeddings:
                wanted |= set(range(*table.slots["embedding"].interval))
            held = [held_elements(table, scheme.holding(stage, place)) for place in range(scheme.degree)]
            assert set().union(*held) == wanted
            assert scheme.weights is WeightPlacement.SHARDED or all(each == wanted for each in held)


@every_family
def test_a_rank_of_a_sharded_stage_holds_its_own_rows_of_each_parameter(name):
    spec = FAMILIES[name]
    for degree in (2, 3, 4):
        for rank in range(degree):
            model = empty_model(spec)
            keep_own_rows(model, spec, rank=rank, degree=degree)
            holding = uniform_scheme(spec.num_layers, degree=degree, method=Method.METP).holding(0, rank)
            parts = {part.slot.name: part for part in TABLES[name].parts(holding)}
            assert parts.keys() == TABLES[name].slots.keys()
            for parameter, weight in model.named_parameters():
                part = parts[parameter]
                assert part.shape == tuple(weight.shape)
                assert part.interval[1] - part.interval[0] == weight.numel()
                bounds = row_bounds(parameter, spec, degree=degree)
                first = bounds[rank] * weight[:1].numel() if bounds and len(weight) else 0
                assert not len(weight) or part.interval[0] == part.slot.start + first


@every_family
@pytest.mark.parametrize("seed", range(8))
def test_the_fullest_rank_of_a_stage_holds_what_the_cost_model_counts(name, seed):
    for _, scheme in random_strategy(random.Random(seed), 12):
        for stage in range(scheme.num_stages):
            sizes = [len(held_elements(TABLES[name], scheme.holding(stage, p))) for p in range(scheme.degree)]
            assert max(sizes) == held_params(FAMILIES[name], scheme, stage=stage)


@given(st.sampled_from(sorted(FAMILIES)), st.integers(0, 10**6), st.integers(1, 9))
def test_a_propagation_layout_is_what_its_ranks_hold(name, seed, num_ranks):
    table = TABLES[name]
    _, plan = random_case(FAMILIES[name], seed, num_ranks)
    for phase in range(plan.num_phases):
        holdings = plan.holdings(phase)
        layout = table.propagation(holdings)
        assert layout.num_elements == table.num_elements and layout.num_ranks == num_ranks
        for holding, held in zip(holdings, layout.intervals):
            assert {e for interval in held for e in range(*interval)} == held_elements(table, holding)
            for start, end in held:
                assert any(a <= start < end <= b for a, b in pairwise(table.bounds)), "no interval leaves its unit"
            assert all(a[1] < b[0] or a[1] in table.bounds for a, b in pairwise(held)), "neighbours are one interval"


@given(st.sampled_from(sorted(FAMILIES)), st.integers(1, 9))
def test_owners_hold_a_share_of_every_unit_or_whole_parameters(name, num_ranks):
    table = TABLES[name]
    assert table.sharded(num_ranks) == sharded_by_unit(table.bounds, num_ranks)
    whole = table.whole_parameters(num_ranks)
    assert whole.owns_each_element_once
    assert sorted(interval for held in whole.intervals for interval in held) == sorted(table.intervals.values())
    sizes = [whole.num_held(rank) for rank in range(num_ranks)]
    largest = max(end - start for start, end in table.intervals.values())
    assert max(sizes) - min(sizes) <= largest, "the largest first, each to the rank that owns least"
