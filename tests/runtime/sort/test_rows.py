"""Every rank gets an even share of the exact order, whatever rows there are and wherever they lie."""

import ctypes
import re

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from lengthwise.core.errors import InputError
from lengthwise.runtime.sort import rows as sorting
from lengthwise.runtime.sort.deal_rows import deal
from lengthwise.runtime.sort.rows import sort_rows
from tests.examples import examples
from tests.runtime.harness import RankPool
from tests.runtime.sort.cases import (
    NAMES,
    as_bits,
    check_drawn,
    check_sorted,
    in_order,
    make_rows,
    own_part,
    share_of,
)

MEMORY_LIMIT = 3.0
"""Peak over a rank's own rows, these included."""
MEMORY_CONSTANT = 4 << 20
"""For blocks that are turned at a time."""
FIND = (Phase.explicit, Phase.reuse, Phase.generate)
"""Not to shrink: every failure takes new ranks."""
M_MMAP_THRESHOLD = -3
"""mallopt's: larger pieces go back to the system as soon as they are freed, so that the peak is of what is in use."""


def cases(num_ranks):
    """Of ``check_drawn``."""
    sizes = st.lists(st.sampled_from([0, 1, 2, 7, 40, 300]), min_size=num_ranks, max_size=num_ranks)
    kinds = st.sampled_from(["whole", "few", "special"])
    seeds, widths, names = st.integers(0, 999), st.sampled_from([1, 2, 3, 5]), st.sampled_from(NAMES)
    return st.lists(st.tuples(seeds, sizes, widths, names, kinds, st.none() | names), min_size=4, max_size=4)


@pytest.mark.parametrize("num_ranks", [1, 3, *(pytest.param(n, marks=pytest.mark.deep) for n in (2, 4))])
def test_any_rows_come_out_as_numpy_sorts_them_in_even_shares(ranks, num_ranks):
    @settings(max_examples=6, deadline=None, derandomize=True, phases=FIND)
    @given(cases(num_ranks))
    def check(drawn):
        ranks(num_ranks).run(check_drawn, drawn)

    check()


@pytest.mark.deep
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_a_thousand_drawn_inputs_come_out_as_numpy_sorts_them(ranks, num_ranks):
    @settings(max_examples=examples(250), deadline=None, phases=FIND)
    @given(cases(num_ranks))
    def check(drawn):
        ranks(num_ranks).run(check_drawn, drawn)

    check()


@pytest.mark.parametrize("num_ranks", [3, *(pytest.param(n, marks=pytest.mark.deep) for n in (1, 2, 4))])
def test_every_dtype_is_sorted_by_row_and_as_a_key(ranks, num_ranks):
    sizes = [90, 0, 31, 200][:num_ranks]
    kinds = (("special",), ("special",)) if num_ranks == 3 else (("whole", "special"),) * 2
    drawn = [(7, sizes, 2, name, kind, None) for name in NAMES for kind in kinds[0]]
    drawn += [(8, sizes, 1, "int32", kind, name) for name in NAMES for kind in kinds[1]]
    ranks(num_ranks).run(check_drawn, drawn)


@pytest.mark.parametrize("num_ranks", [*(pytest.param(n, marks=pytest.mark.deep) for n in (1, 2)), 3])
def test_rows_that_come_from_numpy_are_sorted_on_ranks_without_any_and_with_one_column_of_many(ranks, num_ranks):
    """Arrays without rows have strides of 0, and those of one row or column any; torch calls both contiguous."""
    ranks(num_ranks).run(_check_from_numpy)


def _check_from_numpy():
    size, rank = dist.get_world_size(), dist.get_rank()
    for name in (name for name in NAMES if name != "bfloat16"):
        for empty, width in ((0, 2), (size - 1, 1), (size - 1, 3)):
            sizes = [0 if other == empty else 5 + other for other in range(size)]
            whole = make_rows(3, sum(sizes), width, name, kind="whole")
            keys = make_rows(4, sum(sizes), 1, name, kind="whole")
            dtype = whole[:0].numpy().dtype
            if rank == empty:
                rows, key = torch.from_numpy(np.zeros((0, width), dtype)), torch.from_numpy(np.zeros(0, dtype))
            else:
                wide = np.zeros((sizes[rank], 7), dtype)
                wide[:, :width] = own_part(whole, sizes).numpy()
                rows, key = torch.from_numpy(wide)[:, :width], own_part(keys, sizes)[:, 0]
            assert torch.equal(as_bits(sort_rows(rows)), as_bits(share_of(in_order(whole))))
            assert torch.equal(as_bits(sort_rows(rows, key=key)), as_bits(share_of(in_order(whole, keys[:, 0]))))
            assert torch.equal(as_bits(deal(rows)), as_bits(whole[rank::size].clone()))


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.deep)])
def test_inputs_that_unbalance_a_sample_sort_come_out_in_even_shares(ranks, num_ranks):
    ranks(num_ranks).run(_check_adversarial)


def _check_adversarial():
    even = [500] * dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    ids = torch.arange(sum(even))
    lengths = torch.randint(1, 4096, (sum(even),), generator=generator)
    capped = torch.where(torch.rand(sum(even), generator=generator) < 0.5, 4096, lengths)
    for length in (capped, ids % 3, torch.full_like(ids, 9), ids, ids.flip(0)):
        check_sorted(torch.stack([length, ids], dim=1), even)
        check_sorted(ids[:, None], even, key=length)
        check_sorted(length[:, None], even)
    first_is_empty = [0, *even[2:], sum(even[:2])]
    check_sorted(torch.stack([capped, ids], dim=1), first_is_empty)
    one_has_all = [100] * (dist.get_world_size() - 1) + [100_000]
    check_sorted(torch.arange(sum(one_has_all)).flip(0)[:, None] % 977, one_has_all)
    check_sorted((16_777_216 - ids % 5).float()[:, None], even)
    check_sorted((16_777_216 - ids % 5).float()[:, None], even, key=(2**24 - ids % 7).float())
    check_sorted((255 - ids % 2).to(torch.uint8)[:, None], even)
    check_sorted(torch.tensor([[7], [3]]), [1, 1] + [0] * (dist.get_world_size() - 2))
    check_sorted(torch.tensor([[3, 1]]), [0] * (dist.get_world_size() - 1) + [1])
    check_sorted(torch.zeros(0, 3, dtype=torch.float16), [0] * dist.get_world_size())
    check_sorted(torch.zeros(0, 3), [0] * dist.get_world_size(), key=torch.zeros(0))
    extremes = torch.tensor([-(2**63), 2**63 - 1, 0, -1]).repeat(sum(even) // 4)
    check_sorted(torch.stack([extremes, extremes.flip(0)], dim=1), even)


def test_more_rows_than_travel_at_a_time_are_sorted_in_parts(ranks):
    ranks(3).run(_check_parts)


def _check_parts():
    kept, sorting.PART_ROWS = sorting.PART_ROWS, 16
    try:
        for num_rows in (17 * 3, 48 * 3 + 1, 3000):
            sizes = [num_rows - num_rows // 2 - 5, 5, num_rows // 2]
            check_drawn([(1, sizes, 2, "float64", "special", None), (2, sizes, 3, "int64", "whole", "float32")])
    finally:
        sorting.PART_ROWS = kept


def test_the_order_does_not_depend_on_how_many_ranks_hold_the_rows(ranks):
    found = [np.concatenate(ranks(count).run(_sorted_bits, count)) for count in (1, 2, 3, 4)]
    whole = make_rows(5, 1001, 2, "float32", kind="special")
    assert (found[0] == as_bits(in_order(whole)).numpy()).all()
    for other in found[1:]:
        assert (other == found[0]).all()


def _sorted_bits(count):
    whole = make_rows(5, 1001, 2, "float32", kind="special")
    sizes = [1001 - 17 * (count - 1), *[17] * (count - 1)]
    return as_bits(sort_rows(own_part(whole, sizes))).numpy()


def test_without_other_ranks_it_is_a_plain_sort(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: False)  # whatever other tests left in this process
    rows = make_rows(3, 500, 2, "float64", kind="special")
    assert torch.equal(as_bits(sort_rows(rows)), as_bits(in_order(rows)))
    key = make_rows(4, 500, 1, "uint64", kind="whole")[:, 0]
    assert torch.equal(as_bits(sort_rows(rows, key=key)), as_bits(in_order(rows, key)))
    with pytest.raises(InputError, match=re.escape("rows of shape [500] are not [n, D]")):
        sort_rows(rows[:, 0])


MISTAKES = {
    "another dtype": "rank 0 has [n, 2] of int64 and rank 1 [n, 2] of float32",
    "another width": "rank 0 has [n, 2] of int64 and rank 1 [n, 3] of int64",
    "an empty part of another dtype": "rank 0 has [n, 2] of int64 and rank 1 [n, 2] of uint8",
    "a key on one": "rank 0 has [n, 2] of int64 and rank 1 [n, 2] of int64 by a key of int64",
    "complex": "rank 1: rows are torch.complex64, which has no order here",
    "one number": "rank 1: rows of shape [] are not [n, D]",
    "a short key": "rank 1: the key has shape [3] and there are 4 rows",
    "no column": "rank 1: rows of shape [4, 0] are not [n, D]",
}


def test_a_mistake_on_one_rank_is_named_on_all_and_nobody_waits(ranks):
    for told in ranks(3).run(_try_mistakes):
        for mistake, message in MISTAKES.items():
            assert message in told[mistake]
    ranks(3).run(check_drawn, [(1, [5, 6, 7], 2, "int64", "whole", None)])


def _try_mistakes():
    good, told = torch.ones(4, 2, dtype=torch.int64), {}
    wrong = {
        "another dtype": (good.float(), None),
        "another width": (torch.ones(4, 3, dtype=torch.int64), None),
        "an empty part of another dtype": (good[:0].to(torch.uint8), None),
        "a key on one": (good, good[:, 0]),
        "complex": (good.to(torch.complex64), None),
        "one number": (torch.tensor(1), None),
        "a short key": (good, good[:3, 0]),
        "no column": (good[:, :0], None),
    }
    for mistake, (rows, key) in wrong.items():
        with pytest.raises(InputError) as error:
            rows, key = (rows, key) if dist.get_rank() == 1 else (good, None)
            sort_rows(rows, key=key)
        told[mistake] = str(error.value)
    return told


@pytest.mark.deep
def test_memory_stays_within_three_times_the_local_rows():
    pool = RankPool(2)  # of its own: it changes how these processes allocate
    try:
        found = pool.run(_peaks)
    finally:
        pool.close()
    for peaks in found:
        for what, (own, peak) in peaks.items():
            assert peak <= MEMORY_LIMIT * own + MEMORY_CONSTANT, f"{what}: {peak / own:.2f} times {own:,} bytes"


def _peaks():
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 21)
    generator = torch.Generator().manual_seed(dist.get_rank())
    pairs = torch.stack([torch.randint(4096, (1 << 21,), generator=generator), torch.randperm(1 << 21)], dim=1)
    wide = torch.rand(1 << 18, 16, generator=generator, dtype=torch.float64)
    wide[::1000, 0] = float("nan")
    metric = torch.randint(1000, (1 << 18,), generator=generator).float()
    _peak(pairs[:5000], None)  # what the first sort of a process loads
    return {
        "integers in a word": _peak(pairs, None),
        "integers by a key": _peak(pairs, pairs[:, 0].to(torch.int16)),
        "wide rows by a key": _peak(wide, metric),
    }


def _peak(rows, key):
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak starts anew from what there is now
    before = _status("VmRSS")
    found = sort_rows(rows, key=key)
    own = rows.nbytes + (0 if key is None else key.nbytes)
    assert len(found) == len(rows)
    return own, own + _status("VmHWM") - before


def _status(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))
