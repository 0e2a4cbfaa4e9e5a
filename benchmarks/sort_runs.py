"""What every rank does for the benchmark of the sort; inputs by name."""

from time import perf_counter

import torch
import torch.distributed as dist
from sort_peer import sample_sort
from torch import Tensor

from lengthwise.runtime.sort.rows import sort_rows

SIDES = {"published": sample_sort, "ours": sort_rows}
EACH = 5_000
"""Rows a rank of the adversarial inputs."""
INPUTS = (
    "log-normal lengths", "half at the context limit", "three lengths", "all equal",
    "100 rows a rank, 100,000 on the last", "the first rank empty", "three rows a rank", "float32 up to 2^24",
    "uint8 up to 255",
)  # fmt: skip


def lengths_and_ids(num_rows: int, seed: int) -> Tensor:
    """This rank's share of ``num_rows`` [length, id], int64; log-normal lengths to 131,072."""
    rank, size = dist.get_rank(), dist.get_world_size()
    ids = torch.arange(rank * num_rows // size, (rank + 1) * num_rows // size)
    return torch.stack([_log_normal(len(ids), seed + rank), ids], dim=1)


def seconds(side: str, num_rows: int, seed: int) -> tuple[float, int]:
    """Of one sort, from a barrier to its end on this rank; and the rows that this rank then has."""
    rows = lengths_and_ids(num_rows, seed)
    dist.barrier()
    start_s = perf_counter()
    out = SIDES[side](rows)
    return perf_counter() - start_s, len(out)


def adversarial(name: str) -> Tensor:
    """This rank's rows of one of ``INPUTS``."""
    rank, size = dist.get_rank(), dist.get_world_size()
    counts = {INPUTS[4]: [100] * (size - 1) + [100_000], INPUTS[5]: [0] + [EACH] * (size - 1), INPUTS[6]: [3] * size}
    count = counts.get(name, [EACH] * size)[rank]
    length = _log_normal(count, seed=rank)
    generator = torch.Generator().manual_seed(rank)
    if name == INPUTS[1]:
        length = torch.where(torch.rand(count, generator=generator) < 0.5, 131_072, length.clamp(max=131_071))
    if name == INPUTS[2]:
        length = torch.randint(1, 4, (count,), generator=generator)
    if name == INPUTS[3]:
        length = torch.full_like(length, 4096)
    rows = torch.stack([length, torch.arange(count) + rank * 100_000], dim=1)
    if name == INPUTS[7]:
        return torch.randint(2**24 - 1000, 2**24 + 1, (count, 2), generator=generator).float()
    if name == INPUTS[8]:
        return torch.randint(200, 256, (count, 2), generator=generator).to(torch.uint8)
    return rows


def outcome(side: str, name: str) -> tuple[int, int]:
    """Rows that this rank gives and gets of an adversarial input."""
    rows = adversarial(name)
    return len(rows), len(SIDES[side](rows))


def _log_normal(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(count, generator=generator) * 1.3 + 6.5).exp().long().clamp(1, 131_072)
