"""Layouts and transfers are pure integers; every property is checked against a plain list of owners."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.core.errors import InputError
from lengthwise.core.layout import (
    Layout,
    fully_sharded,
    row_bounds,
    shard_size,
    sharded_by_unit,
    transfers,
    transfers_of,
)
from lengthwise.core.specs import ModelSpec

RANKS = 5
UNIT_SIZES = st.lists(st.integers(0, 30), min_size=1, max_size=6)


def replicated(num_elements: int, num_ranks: int) -> Layout:
    """Every rank holds everything."""
    all_elements = ((0, num_elements),) if num_elements else ()
    return Layout(num_elements=num_elements, intervals=(all_elements,) * num_ranks)


def layout_of(num_elements, holders):
    """The layout in which ``holders[e]`` are the ranks that hold element e; intervals may end where they like."""
    intervals = [[] for _ in range(RANKS)]
    for element, ranks in enumerate(holders):
        for rank in ranks:
            held = intervals[rank]
            if held and held[-1][1] == element and element % 7:  # neighbours are not always one interval
                held[-1] = (held[-1][0], element + 1)
            else:
                held.append((element, element + 1))
    return Layout(num_elements=num_elements, intervals=tuple(map(tuple, intervals)))


@st.composite
def ownerships(draw, size=None):
    """A layout in which every element has one owner, drawn element by element."""
    size = draw(st.integers(1, 40)) if size is None else size
    owners = draw(st.lists(st.integers(0, RANKS - 1), min_size=size, max_size=size))
    return layout_of(size, [[owner] for owner in owners])


@st.composite
def moves(draw):
    """From a layout that owns each element once to one in which every rank holds whatever it likes."""
    source = draw(ownerships())
    holders = draw(
        st.lists(st.sets(st.integers(0, RANKS - 1)), min_size=source.num_elements, max_size=source.num_elements)
    )
    return source, layout_of(source.num_elements, holders)


def bounds_of(sizes):
    bounds = [0]
    for size in sizes:
        bounds.append(bounds[-1] + size)
    return bounds


def elements(layout, rank):
    return [e for start, end in layout.intervals[rank] for e in range(start, end)]


def carried_out(values, source, target):
    """What each rank has, by element, after every transfer from a source that has it."""
    found = [{} for _ in values]
    for move in transfers(source, target):
        for element in range(move.start, move.end):
            assert element not in found[move.target], "an element that is sent twice"
            found[move.target][element] = values[move.source][element]
    return found


@given(moves())
def test_transfers_give_each_rank_exactly_what_it_shall_hold_from_its_owner(case):
    source, target = case
    owned = [{element: (rank, element) for element in elements(source, rank)} for rank in range(RANKS)]
    found = carried_out(owned, source, target)
    assert [list(held) for held in found] == [elements(target, rank) for rank in range(RANKS)]
    assert all(element == of for held in found for element, (_, of) in held.items())


@given(st.integers(1, 40).flatmap(lambda size: st.tuples(ownerships(size), ownerships(size))))
def test_a_move_there_and_back_changes_nothing(case):
    first, second = case
    values = [{element: f"{rank}:{element}" for element in elements(first, rank)} for rank in range(RANKS)]
    assert carried_out(carried_out(values, first, second), second, first) == values


@given(moves())
def test_the_transfers_of_a_rank_are_those_of_all_that_it_takes_part_in(case):
    source, target = case
    everything = transfers(source, target)
    for rank in range(RANKS):
        assert transfers_of(rank, source, target) == tuple(m for m in everything if rank in (m.source, m.target))


@pytest.mark.parametrize("move", [transfers, lambda *layouts: transfers_of(0, *layouts)], ids=["all", "of a rank"])
def test_what_cannot_be_moved_is_refused(move):
    with pytest.raises(InputError, match="3 elements cannot become one of 2"):
        move(replicated(3, 1), replicated(2, 1))
    for intervals in ((((0, 1),),), (((0, 2),), ((1, 2),)), (((0, 1),), ()), ((), ((1, 2),))):
        with pytest.raises(InputError, match="exactly once"):
            move(Layout(num_elements=2, intervals=intervals), replicated(2, 1))


@given(ownerships())
def test_a_layout_moves_nothing_to_itself(layout):
    assert all(move.source == move.target for move in transfers(layout, layout))


@given(st.integers(0, 200), st.integers(1, 9))
def test_full_sharding_owns_each_element_once_in_chunks_of_one_size(num_elements, num_ranks):
    layout = fully_sharded(num_elements, num_ranks)
    assert layout.owns_each_element_once
    held = [layout.num_held(rank) for rank in range(num_ranks)]
    assert sum(held) == num_elements
    assert all(before >= after for before, after in pairwise(held))
    assert max(held) == held[0] == shard_size(num_elements, num_ranks)
    assert all(here == held[0] for here, after in pairwise(held) if after), "all but the last that holds any are full"


@given(UNIT_SIZES, st.integers(1, 9))
def test_sharding_by_unit_owns_each_element_once_and_shards_every_unit_by_itself(sizes, num_ranks):
    bounds = bounds_of(sizes)
    layout = sharded_by_unit(bounds, num_ranks)
    assert layout.num_elements == bounds[-1] and layout.num_ranks == num_ranks
    assert layout.owns_each_element_once
    for first, end in pairwise(bounds):
        inside = [[(a - first, b - first) for a, b in held if first <= a < end] for held in layout.intervals]
        assert inside == [list(held) for held in fully_sharded(end - first, num_ranks).intervals]
        assert all(b <= end for held in layout.intervals for a, b in held if first <= a < end)


@given(UNIT_SIZES, st.integers(1, 9))
def test_pulling_whole_weights_is_an_all_gather(sizes, num_ranks):
    bounds = bounds_of(sizes)
    owned, whole = sharded_by_unit(bounds, num_ranks), replicated(bounds[-1], num_ranks)
    for rank in range(num_ranks):
        leaving = [m.num_elements for m in transfers_of(rank, owned, whole) if rank == m.source != m.target]
        arriving = [m.num_elements for m in transfers_of(rank, owned, whole) if rank == m.target != m.source]
        assert sum(leaving) == (num_ranks - 1) * owned.num_held(rank)
        assert sum(arriving) == bounds[-1] - owned.num_held(rank)
        if all(size % num_ranks == 0 for size in sizes):
            assert sum(leaving) == sum(arriving) == bounds[-1] * (num_ranks - 1) // num_ranks


@given(moves())
def test_a_rank_receives_what_it_holds_but_for_what_it_owns(case):
    source, target = case
    for rank in range(RANKS):
        overlap = set(elements(source, rank)) & set(elements(target, rank))
        arriving = sum(m.num_elements for m in transfers(source, target) if rank == m.target != m.source)
        assert arriving == target.num_held(rank) - len(overlap)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=4), st.integers(1, 4), st.integers(1, 4))
def test_shards_that_groups_hold_alike_are_gathered_within_each_group(units, degree, copies):
    """Every unit in ``degree`` shards, each held by ``copies`` ranks: those that own it between them."""
    num_ranks = degree * copies
    bounds = bounds_of([size * num_ranks for size in units])
    owned = sharded_by_unit(bounds, num_ranks)
    held = []
    for rank in range(num_ranks):
        shard = rank // copies
        cuts = [(a + shard * (b - a) // degree, a + (shard + 1) * (b - a) // degree) for a, b in pairwise(bounds)]
        held.append(tuple(cut for cut in cuts if cut[0] < cut[1]))
    target = Layout(num_elements=bounds[-1], intervals=tuple(held))
    for rank in range(num_ranks):
        mine = [m for m in transfers_of(rank, owned, target) if m.source != m.target]
        assert all(m.source // copies == m.target // copies for m in mine)
        for end in ("source", "target"):
            moved = sum(m.num_elements for m in mine if getattr(m, end) == rank)
            assert moved == bounds[-1] // degree * (copies - 1) // copies


@pytest.mark.parametrize("intervals", [((0, 2), (1, 3)), ((2, 2),), ((3, 5),), ((-1, 1),)])
def test_intervals_that_overlap_or_leave_the_buffer_are_refused(intervals):
    with pytest.raises(InputError, match="rank 0: interval"):
        Layout(num_elements=4, intervals=(intervals,))


@st.composite
def specs(draw):
    kv_heads = draw(st.integers(1, 9))
    return ModelSpec(
        name="any", num_layers=1, hidden_size=4, ffn_size=draw(st.integers(1, 50)),
        num_heads=kv_heads * draw(st.integers(1, 3)), num_kv_heads=kv_heads, head_size=draw(st.integers(1, 4)),
        vocab_size=draw(st.integers(1, 50)),
    )  # fmt: skip


@given(specs(), st.integers(1, 9))
def test_the_shares_of_a_stage_tile_the_rows_of_every_weight(spec, degree):
    group = (spec.num_heads // spec.num_kv_heads + 2) * spec.head_size
    attention = dict.fromkeys(("qkv", "qkv_bias"), (spec.qkv_size, group))
    attention["proj"] = (spec.num_heads * spec.head_size, group - 2 * spec.head_size)
    ffn = dict.fromkeys(("gate", "up", "up_bias", "down"), (spec.ffn_size, 1))
    vocabulary = dict.fromkeys(("embedding", "head", "output_bias"), (spec.vocab_size, 1))
    for name, (rows, unit) in (attention | ffn | vocabulary).items():
        bounds = row_bounds(f"layers.0.{name}", spec, degree=degree)
        assert bounds[0] == 0 and bounds[-1] == rows and len(bounds) == degree + 1
        shares = [end - start for start, end in pairwise(bounds)]
        assert min(shares) >= 0 and all(share % unit == 0 for share in shares)
        assert max(shares) - min(shares) <= unit


@pytest.mark.parametrize("name", ["attention_norm", "proj_bias", "down_bias", "position", "final_norm", "token_type"])
def test_what_is_small_is_whole_on_every_rank(name):
    spec = ModelSpec(
        name="any", num_layers=1, hidden_size=4, ffn_size=4, num_heads=2, num_kv_heads=2, head_size=2, vocab_size=9
    )
    assert row_bounds(f"layers.0.{name}", spec, degree=2) is None
    with pytest.raises(AssertionError, match=r"nothing says how ranks share the parameter .*query_norm"):
        row_bounds("layers.0.query_norm", spec, degree=2)
