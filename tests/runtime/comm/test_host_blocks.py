"""Host memory in blocks: used again, freed when steps need less, and refused by name when there is no more."""

import pytest

from lengthwise.runtime.comm import host_blocks
from lengthwise.runtime.comm.host_blocks import HostBlocks, HostMemoryError
from lengthwise.runtime.comm.out_of_memory import is_out_of_memory

BLOCK = host_blocks.BLOCK_BYTES[False]


def test_leases_have_the_bytes_that_were_asked_for_and_share_none():
    blocks = HostBlocks(pinned=False)
    leases = [lease for size in (1, 700, 3 * BLOCK, 5) for lease in blocks.take(size)]
    assert sum(lease.size for lease in leases) == 3 * BLOCK + 706
    for number, lease in enumerate(leases):
        lease.memory.fill_(number)
    assert all((lease.memory == number).all() for number, lease in enumerate(leases))
    assert blocks.num_used_bytes == blocks.num_bytes == 4 * BLOCK


def test_a_block_is_used_again_once_nobody_has_any_of_it():
    blocks = HostBlocks(pinned=False)
    for _ in range(5):
        leases = blocks.take(BLOCK), blocks.take(BLOCK)
        assert len(leases) == 2
        del leases
    assert blocks.num_blocks == 2


def test_what_a_step_does_not_need_is_freed_after_it():
    blocks = HostBlocks(pinned=False)
    many = [blocks.take(BLOCK) for _ in range(8)]
    del many
    blocks.trim()
    assert blocks.num_blocks == 8, "the step needed them"
    few = [blocks.take(BLOCK) for _ in range(3)]
    del few
    blocks.trim()
    assert (blocks.num_blocks, blocks.num_used_bytes) == (3, 0)


def test_no_room_is_an_error_of_memory_with_its_numbers_and_a_way_out(monkeypatch):
    blocks = HostBlocks(pinned=False, limit_bytes=2 * BLOCK)
    leases = blocks.take(2 * BLOCK)
    with pytest.raises(
        HostMemoryError, match=r"take 0.0 GiB and need more, which may take 0.0 GiB; offload fewer"
    ) as info:
        blocks.take(1)
    assert is_out_of_memory(info.value) and len(leases) == 2
    monkeypatch.setattr(host_blocks, "host_memory_bytes", lambda: (2.0**20, 2.0**34))
    with pytest.raises(HostMemoryError, match=r"the host has 0\.0 GiB left"):
        HostBlocks(pinned=False).take(1)
