"""Pull and push on real ranks: who computes with a weight gets it from its owner, and gradients come back summed."""

import random
from dataclasses import replace
from itertools import pairwise
from time import monotonic
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lengthwise.config.optimizer_settings import OptimizerSettings
from lengthwise.core.layout import Layout, moves_of, transfers
from lengthwise.core.node_exchange import landing_layout
from lengthwise.runtime.comm.group import AsyncResult
from lengthwise.runtime.models.registry import build_model
from lengthwise.runtime.parallel.shards import keep_own_rows
from lengthwise.runtime.state import propagation
from lengthwise.sim.schedule_check import weight_phases_of
from tests.runtime.train.families import FAMILIES, random_case
from tests.runtime.train.runs import SETTINGS, local_world, new_state

ADAFACTOR = OptimizerSettings(name="adafactor")
EXACT = 1e-12
"""float64: sums of a few numbers of order one in another order."""
CASES = [
    ("tied llama", SETTINGS), ("bert", ADAFACTOR),
    *(pytest.param(name, SETTINGS, marks=pytest.mark.deep) for name in ("gpt", "bert", "llama")),
]  # fmt: skip
every_case = pytest.mark.parametrize(("name", "settings"), CASES, ids=lambda one: getattr(one, "name", one))
NODES = [(3, 2), *(pytest.param(*sizes, marks=pytest.mark.deep) for sizes in ((3, 0), (4, 2), (2, 0), (4, 0)))]
"""Numbers of ranks, and of ranks in a node: steps elsewhere have one node, and four ranks in two are below."""


def layouts_of(name, seed, num_ranks):
    """What ranks hold in each weight phase of a random plan, and in each of its phases by itself."""
    _, plan = random_case(FAMILIES[name], seed, num_ranks)
    phases = [plan.holdings(phase) for phase in range(plan.num_phases)]
    return list(
        dict.fromkeys(
            [*(weight_phase.holdings for weight_phase in weight_phases_of(plan)), *phases][
                : None if num_ranks > 1 else 1
            ]
        )
    )


def pulled(state, holdings):
    state.hold(holdings)
    state.pull()
    for unit in range(state.table.num_units):
        state.need(unit)


@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), [(1, 0), *NODES])
@every_case
def test_every_rank_gets_the_rows_it_computes_with_and_nothing_else(ranks, name, settings, num_ranks, ranks_per_node):
    ranks(num_ranks).run(_check_pulled, name, settings, ranks_per_node)


def _check_pulled(name, settings, ranks_per_node):
    spec, world = FAMILIES[name], local_world(ranks_per_node)
    model, state = new_state(world, torch.float64, spec=spec, settings=settings)
    for seed in range(8):
        for holdings in layouts_of(name, seed, world.size):
            pulled(state, holdings)
            holding = holdings[world.rank]
            held = {part.slot.name for part in state.table.parts(holding)}
            expected = build_model(spec, dtype=torch.float64, seed=1)
            if holding is not None:
                keep_own_rows(expected, spec, rank=holding.shard, degree=holding.num_shards)
            for parameter, weight in expected.named_parameters():
                found = model.get_parameter(parameter)
                if parameter in held:
                    assert torch.equal(found, weight), f"{parameter}, seed {seed}"
                else:
                    assert found.numel() == 0, f"{parameter} is not computed with, seed {seed}"


@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), NODES)
@every_case
def test_owners_get_the_sum_of_the_gradients_of_all_that_computed_with_their_share(
    ranks, name, settings, num_ranks, ranks_per_node
):
    ranks(num_ranks).run(_check_pushed, name, settings, ranks_per_node)


def _check_pushed(name, settings, ranks_per_node):
    world = local_world(ranks_per_node)
    model, state = new_state(world, torch.float64, spec=FAMILIES[name], settings=settings)
    for seed in range(8):
        state.clear_gradient()
        expected = torch.zeros(state.table.num_elements, dtype=torch.float64)
        for phase, holdings in enumerate(layouts_of(name, seed, world.size)):
            pulled(state, holdings)
            fill_gradients(model, state, holdings, seed=(seed, phase))
            state.finish_push()
            assert not state.gradients.any()
            expected += summed_by_all_reduce(state, holdings, seed=(seed, phase))
        torch.testing.assert_close(pushed(state), own_part(state, expected), rtol=EXACT, atol=EXACT)


def gradient(part, rank, seed):
    generator = torch.Generator().manual_seed(hash((part.slot.start, rank, *seed)) & (2**62 - 1))
    return torch.randn(part.shape, generator=generator, dtype=torch.float64)


def fill_gradients(model, state, holdings, *, seed):
    """Random ones that every rank can work out, each added in two halves as two micro-batches would."""
    for part in state.table.parts(holdings[state.world.rank]):
        if part.interval[0] < part.interval[1]:
            half = gradient(part, state.world.rank, seed).to(state.master_dtype) / 2
            for _ in range(2):
                model.get_parameter(part.slot.name).grad.add_(half)


def summed_by_all_reduce(state, holdings, *, seed):
    """What this rank's gradients and everybody else's add up to, over the whole buffer."""
    total = torch.zeros(state.table.num_elements, dtype=torch.float64)
    for part in state.table.parts(holdings[state.world.rank]):
        total[slice(*part.interval)] += gradient(part, state.world.rank, seed).flatten()
    dist.all_reduce(total)
    return total


def pushed(state):
    return torch.cat([state.master[:0], *(s.parameter.grad.flatten() for s in state.owned.all)])


def own_part(state, whole):
    pieces = [whole[start:end] for start, end in state.owned_layout.intervals[state.world.rank]]
    return torch.cat([whole[:0], *pieces])


def test_gradients_are_added_rank_by_rank_to_the_bit(ranks):
    assert sum(ranks(4).run(_check_order)) > 0, "some seed has a unit that ranks hold unalike"


def _check_order():
    """In float32, where another order gives another sum; returns how many units had an order to check."""
    world, checked = local_world(), 0
    model, state = new_state(world, torch.float32)
    for seed in range(12):
        holdings = layouts_of("llama", seed, world.size)[0]
        results = []
        for _ in range(2):
            pulled(state, holdings)
            state.clear_gradient()
            fill_gradients(model, state, holdings, seed=(seed, 0))
            state.finish_push()
            results.append(pushed(state).clone())
        assert torch.equal(*results), "the same gradients, another sum"
        expected = torch.zeros(state.table.num_elements)
        for rank in range(world.size):
            for part in state.table.parts(holdings[rank]):
                half = gradient(part, rank, (seed, 0)).to(torch.float32) / 2
                expected[slice(*part.interval)] += (half + half).flatten()
        for unit, route in enumerate(state.routes.units):
            if not route.shard:
                first, end = state.table.bounds[unit], state.table.bounds[unit + 1]
                own = [expected[a:b] for a, b in state.owned_layout.intervals[world.rank] if first <= a < end]
                assert torch.equal(results[0][route.own_share], torch.cat([expected[:0], *own]))
                checked += 1
    return checked


@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), NODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("settings", [SETTINGS, ADAFACTOR], ids=lambda one: one.name)
def test_as_many_bytes_are_sent_as_the_layouts_transfers_say(ranks, num_ranks, dtype, settings, ranks_per_node):
    ranks(num_ranks).run(_check_traffic, dtype, settings, ranks_per_node)


def _check_traffic(dtype, settings, ranks_per_node):
    world, names = local_world(ranks_per_node), set()
    _, state = new_state(world, dtype, settings=settings)
    for seed in range(8):
        for holdings in layouts_of("llama", seed, world.size):
            pulled(state, holdings)  # so that what is counted next is one pull
            state.forget_weights()
            state.sent.clear()
            pulled(state, holdings)
            state.finish_push()
            pulls, pushes = expected_traffic(state, holdings)
            expected_bytes = (pulls * dtype.itemsize, pushes * 4)
            assert (state.sent.num_bytes["pull"], state.sent.num_bytes["push"]) == expected_bytes
            held = {part.slot.unit for holding in holdings for part in state.table.parts(holding)}
            held_routes = [state.routes.units[unit] for unit in held]
            num_calls = sum(1 if route.shard else len(route.hops) for route in held_routes)
            assert num_calls == len(held) or ranks_per_node
            assert state.sent.calls["pull"] == state.sent.calls["push"] == num_calls
            names.add(tuple(bool(route.shard) for route in state.routes.units))
    assert len(names) > 1 or settings == ADAFACTOR


@pytest.mark.parametrize(
    ("check", "of"),
    [
        (_check_pulled, "tied llama"),
        (_check_pushed, "tied llama"),
        pytest.param(_check_traffic, torch.bfloat16, marks=pytest.mark.deep),
    ],
)
def test_two_nodes_of_two_ranks_exchange_the_same(ranks, check, of):
    ranks(4).run(check, of, SETTINGS, 2)


def moves_among_all(source, target, ranks_per_node):
    """Transfers between layouts; from one of which each node has everything that it needs, those within each node."""
    if source.owns_each_element_once:
        return transfers(source, target)
    num_elements, num_ranks = source.num_elements, source.num_ranks
    moves = []
    for first in range(0, num_ranks, ranks_per_node):
        node = slice(first, min(first + ranks_per_node, num_ranks))
        parts = [Layout(num_elements=num_elements, intervals=layout.intervals[node]) for layout in (source, target)]
        for rank in range(node.stop - first):
            for move in moves_of(rank, *parts):
                if move.source == rank:
                    moves.append(replace(move, source=first + move.source, target=first + move.target))
    return moves


def expected_traffic(state, holdings):
    """Elements that this rank sends to others in a pull and in a push; an all-gather's padding counts."""
    rank, size, bounds = state.world.rank, state.world.size, state.table.bounds
    computed = state.table.propagation(holdings)
    hops = [(state.owned_layout, computed)]
    if state.world.nodes is not None:
        landing = landing_layout(state.owned_layout, computed, ranks_per_node=state.world.ranks_per_node)
        hops = [(state.owned_layout, landing), (landing, computed)]
    moves = [move for source, target in hops for move in moves_among_all(source, target, state.world.ranks_per_node)]
    pulls = pushes = 0
    for (first, end), route in zip(pairwise(bounds), state.routes.units):
        mine = [m for m in moves if first <= m.start < end and m.source != m.target]
        if route.shard:
            padded = -(-(end - first) // size) * (size - 1)
            sent = sum(m.num_elements for m in mine if m.source == rank)
            assert route.shard == -(-(end - first) // size)
            if size % (state.world.ranks_per_node or size) == 0:  # else a rank passes on more than others
                assert sent <= padded and ((end - first) % size or sent == padded)
            pulls, pushes = pulls + padded, pushes + padded
        else:
            pulls += sum(m.num_elements for m in mine if m.source == rank)
            pushes += sum(m.num_elements for m in mine if m.target == rank)
    return pulls, pushes


def test_a_unit_that_all_compute_with_whole_takes_an_all_gather_and_a_reduce_scatter(ranks):
    for found in ranks(3).run(_collectives):
        for holdings, expected, calls in found:
            assert calls == expected, holdings


def _collectives():
    """For some holdings, (is each unit held whole by all, in order of use) and what was called."""
    world = local_world()
    _, state = new_state(world, torch.float32, spec=FAMILIES["tied llama"])
    found, calls = [], []
    names = ("all_gather", "reduce_scatter", "all_to_all")
    originals = {name: getattr(propagation, name) for name in names}

    def recorded(name):
        def call(*arguments, **options):
            calls.append(name)
            return originals[name](*arguments, **options)

        return call

    for name in names:
        setattr(propagation, name, recorded(name))
    try:
        for seed in range(25):
            for holdings in layouts_of("tied llama", seed, world.size):
                calls.clear()
                pulled(state, holdings)
                state.finish_push()
                held = state.table.propagation(holdings)
                units = {part.slot.unit for holding in holdings for part in state.table.parts(holding)}
                whole = [
                    all(any(a <= first and end <= b for a, b in intervals) for intervals in held.intervals)
                    for unit, (first, end) in enumerate(pairwise(state.table.bounds))
                    if unit in units
                ]
                expected = ["all_gather" if one else "all_to_all" for one in whole]
                expected += ["reduce_scatter" if one else "all_to_all" for one in reversed(whole)]
                found.append((holdings, expected, list(calls)))
                state.forget_weights()
    finally:
        for name, original in originals.items():
            setattr(propagation, name, original)
    assert {name for _, _, names in found for name in names} == set(names)
    return found


def test_weights_of_one_layout_are_gone_when_another_is_held(ranks):
    """A pull must bring everything: what the buffer held before must not shine through."""
    ranks(3).run(_check_overwritten)


def _check_overwritten():
    world, rng = local_world(), random.Random(2)
    model, state = new_state(world, torch.float64)
    initial = dict(build_model(FAMILIES["llama"], dtype=torch.float64, seed=1).named_parameters())
    layouts = [holdings for seed in range(6) for holdings in layouts_of("llama", seed, world.size)]
    for holdings in rng.choices(layouts, k=30):
        state.weights.fill_(torch.nan)
        state.forget_weights()
        pulled(state, holdings)
        for part in state.table.parts(holdings[world.rank]):
            start, end = (element - part.slot.start for element in part.interval)
            assert torch.equal(
                model.get_parameter(part.slot.name).flatten(), initial[part.slot.name].flatten()[start:end]
            )


def test_pulled_weights_are_waited_for_unit_by_unit(ranks):
    ranks(2).run(_check_need)


def _check_need():
    """What a rank waits for is the unit it asks for; of the others it frees what was sent once it has come."""
    world, under_way = local_world(), set()
    _, state = new_state(world, torch.float64, spec=FAMILIES["tied llama"])
    last = state.table.num_units - 1
    pull = propagation.UnitRoute.pull

    def watched(route, *arguments):
        pending, unit = pull(route, *arguments), state.routes.units.index(route)
        under_way.add(unit)

        class Watched(AsyncResult):
            is_done = property(lambda self: unit in arrived)

            def wait(self):
                under_way.discard(unit)
                return pending.wait()

        return Watched(lambda: state.weights)

    arrived: set[int] = set()
    with mock.patch.object(propagation.UnitRoute, "pull", watched):
        state.hold(layouts_of("tied llama", 1, world.size)[0])
        state.pull()
    assert under_way == set(range(last + 1)) and all(map(state.is_coming, under_way))
    state.need(3)
    assert under_way == set(range(last + 1)) - {3} and not state.is_coming(3)
    state.need(last)
    assert under_way == set(range(1, last)) - {3}, "the output is tied to the input"
    arrived |= {1, 4}
    state.need(last)
    assert under_way == set(range(2, last)) - {3, 4}
    state.finish_push()
    assert not under_way and not any(map(state.is_coming, range(last + 1)))


def test_gradients_that_have_come_are_added_while_others_are_under_way(ranks):
    ranks(2).run(_check_going)


def _check_going():
    world = local_world()
    model, state = new_state(world, torch.float64)
    last = state.table.num_units - 1
    holdings = next(held for seed in range(30) for held in layouts_of("llama", seed, 2) if None not in held)
    pulled(state, holdings)
    fill_gradients(model, state, holdings, seed=(0, 0))
    state.push_from(last)
    dist.barrier()
    waiting = monotonic() + 30
    while state._going and monotonic() < waiting:
        state.push_from(last)  # issues nothing more
    route = state.routes.units[last]
    expected = own_part(state, summed_by_all_reduce(state, holdings, seed=(0, 0)))
    assert not state._going
    torch.testing.assert_close(pushed(state)[route.own_share], expected[route.own_share], rtol=EXACT, atol=EXACT)
    state.finish_push()
    torch.testing.assert_close(pushed(state), expected, rtol=EXACT, atol=EXACT)
