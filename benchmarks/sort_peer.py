"""The distributed sort as it was published, for comparison: a sample sort by the first column, over Python lists.

Written anew from the text and listing of the post on training with variable-length inputs; its steps and its faults
are kept: splitters from 100 evenly spaced rows of every rank, however many it holds; rows between two of them by their
first column alone; the last bound made larger by one, in the rows' dtype.
"""

from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

NUM_SAMPLES = 100


def sample_sort(rows: Tensor) -> Tensor:
    """This rank's rows of the whole order, as the published function gives them."""
    count = dist.get_world_size()
    rows = _sorted_by_python(rows)
    chosen = torch.linspace(0, len(rows) - 1, NUM_SAMPLES).round().long()
    seen = [torch.zeros(NUM_SAMPLES, dtype=rows.dtype) for _ in range(count)]
    dist.all_gather(seen, rows[chosen, 0].contiguous())
    samples = torch.cat(seen).sort().values
    bounds = samples[torch.linspace(0, len(samples) - 1, count + 1).round().long()]
    bounds[-1] += 1
    keys = rows[:, 0]
    buckets = [rows[(keys >= low) & (keys < high)] for low, high in pairwise(bounds)]
    send = [bucket.numel() for bucket in buckets]
    receive = torch.empty(count, dtype=torch.int64)
    dist.all_to_all_single(receive, torch.tensor(send))
    out = torch.zeros(int(receive.sum()), dtype=rows.dtype)
    dist.all_to_all_single(out, torch.cat(buckets).flatten(), receive.tolist(), send)
    return _sorted_by_python(out.view(-1, rows.shape[1]))


def _sorted_by_python(rows: Tensor) -> Tensor:
    return torch.tensor(sorted(rows.tolist()), dtype=rows.dtype)
