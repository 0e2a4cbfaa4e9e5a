"""Dealt rows interleave and are all there; a file written by all ranks is the whole order or nothing."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lengthwise.core.errors import InputError
from lengthwise.runtime.sort.deal_rows import deal, write_ordered
from lengthwise.runtime.sort.rows import sort_rows
from tests.runtime.sort.cases import NAMES, as_bits, make_rows, own_part


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_row_i_of_the_order_is_dealt_to_rank_i_modulo_the_ranks(ranks, num_ranks):
    ranks(num_ranks).run(_check_deal)


def _check_deal():
    rank, size = dist.get_rank(), dist.get_world_size()
    for sizes in ([5] * size, [0] * (size - 1) + [11], [*range(size)], [13, *[1] * (size - 1)], [0] * size):
        whole = torch.arange(2 * sum(sizes), dtype=torch.int32).view(-1, 2)
        dealt = deal(own_part(whole, sizes))
        assert dealt.shape[1:] == (2,)
        assert torch.equal(dealt, whole[rank::size])
    whole = make_rows(1, 103, 1, "int64", kind="whole")
    shares = deal(sort_rows(own_part(whole, [103 - 2 * (size - 1), *[2] * (size - 1)])))
    assert torch.equal(shares, torch.from_numpy(np.sort(whole.numpy(), axis=0))[rank::size])


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_the_written_file_is_what_numpy_sorts_and_saves(ranks, num_ranks, tmp_path):
    ranks(num_ranks).run(_check_written, str(tmp_path))
    assert list(tmp_path.iterdir()) == [tmp_path / "sorted.npy"]


def _check_written(folder):
    path, size = Path(folder) / "sorted.npy", dist.get_world_size()
    for name in NAMES:
        for num_rows in (0, 1, 401):
            whole = make_rows(2, num_rows, 1, name, kind="few")
            sizes = [num_rows - num_rows // 3 * (size - 1), *[num_rows // 3] * (size - 1)]
            block = sort_rows(own_part(whole, sizes))
            if name == "bfloat16":
                with pytest.raises(InputError, match=r"NumPy files have no bfloat16; write block\.float\(\)"):
                    write_ordered(block, path)
                continue
            for flat, shape in ((False, (num_rows, 1)), (True, (num_rows,))):
                write_ordered(block, path, flat=flat)
                found = np.load(path)
                assert (found.dtype, found.shape) == (whole.numpy().dtype, shape)
                assert (found == np.sort(whole.numpy(), axis=0).reshape(shape)).all()
                dist.barrier()
    with pytest.raises(InputError, match="rows of 2 numbers cannot be written flat"):
        write_ordered(make_rows(2, 4, 2, "int64", kind="few"), path, flat=True)


def test_a_rank_that_cannot_write_is_named_on_all_and_the_old_file_stays(ranks, tmp_path):
    path = tmp_path / "kept.npy"
    path.write_bytes(b"old")
    told = ranks(3).run(_try_to_write, str(path))
    assert told == ["rank 1: disk of rank 1 is full"] * 3
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
    missing = tmp_path / "nowhere" / "x.npy"
    for message in ranks(3).run(_try_to_write, str(missing)):
        assert message.startswith("rank 0: ") and "No such file" in message and str(missing.parent) in message


def _try_to_write(path):
    from lengthwise.runtime.sort import deal_rows as writing

    write = writing._write

    def fail_on_one(file, block):
        write(file, block)
        if dist.get_rank() == 1:
            raise OSError("disk of rank 1 is full")

    writing._write = fail_on_one
    try:
        with pytest.raises(InputError) as error:
            write_ordered(torch.ones(4, 2), path)
    finally:
        writing._write = write
    return str(error.value)


def test_rows_of_another_dtype_on_one_rank_are_refused_on_all(ranks, tmp_path):
    ranks(2).run(_check_refused, str(tmp_path / "x.npy"))
    assert not list(tmp_path.iterdir())


def _check_refused(path):
    block = torch.ones(3, 2, dtype=torch.float64 if dist.get_rank() else torch.float32)
    told = r"rank 0 has \[n, 2\] of float32 and rank 1 \[n, 2\] of float64"
    with pytest.raises(InputError, match=told):
        deal(block)
    with pytest.raises(InputError, match=told):
        write_ordered(block, path)


def test_written_bits_are_those_of_the_rows(ranks, tmp_path):
    path = tmp_path / "bits.npy"
    ranks(2).run(_write_special, str(path))
    wanted = make_rows(6, 50, 3, "float32", kind="special")
    assert torch.equal(as_bits(torch.from_numpy(np.load(path))), as_bits(wanted))


def _write_special(path):
    write_ordered(own_part(make_rows(6, 50, 3, "float32", kind="special"), [20, 30]), path)
