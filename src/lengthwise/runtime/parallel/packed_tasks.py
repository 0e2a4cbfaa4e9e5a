"""Attention tasks between two ranks as few launches of the flash kernel, whatever the lengths of their blocks.

t queries, s keys, Q queries of a launch, N query heads, H head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lengthwise.runtime.models.host_copies import to_device
from lengthwise.runtime.parallel.attention_blocks import Task
from lengthwise.runtime.parallel.first_writes import Rows, Runs

_FLASH_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedTask:
    """Tasks between two ranks as one launch of the flash kernel, by the offsets of their blocks. Q queries."""

    query_rows: Rows
    key_rows: Rows
    query_offsets: Tensor
    key_offsets: Tensor
    longest: tuple[int, int]
    """Queries and keys of the largest block."""
    causal: bool
    window: tuple[int, int] | None = None
    """How many keys before and after its own place a query sees, -1: all; None: no window."""

    def is_of_all(self, num_queries: int, num_keys: int) -> bool:
        """Whether it is of so many queries and keys, each where it lies."""
        return self.query_rows.are_all(num_queries) and self.key_rows.are_all(num_keys)

    @property
    def query_runs(self) -> Runs:
        """The rows of its queries."""
        return self.query_rows.runs

    @property
    def key_runs(self) -> Runs:
        """The rows of its keys."""
        return self.key_rows.runs

    def queries(self, x: Tensor) -> Tensor:
        """Rows of ``x`` [t, ...]: ``[Q, ...]``; a view where they are neighbours, else a copy."""
        return self.query_rows.read(x)

    def keys(self, x: Tensor) -> Tensor:
        """Rows of the keys, as of :meth:`queries`."""
        return self.key_rows.read(x)

    def put_queries(self, x: Tensor, rows: Tensor) -> None:
        """Write changed rows of :meth:`queries` back, if they are no view."""
        if isinstance(self.query_rows.index, Tensor):
            self.query_rows.write(x, rows)

    def write_queries(self, x: Tensor, rows: Tensor) -> None:
        """Overwrite the rows of the queries."""
        self.query_rows.write(x, rows)

    def write_keys(self, x: Tensor, rows: Tensor) -> None:
        """Overwrite the rows of the keys."""
        self.key_rows.write(x, rows)

    def add_to_queries(self, x: Tensor, rows: Tensor) -> None:
        """Add to the rows of the queries."""
        self.query_rows.add(x, rows)

    def add_to_keys(self, x: Tensor, rows: Tensor) -> None:
        """Add to the rows of the keys."""
        self.key_rows.add(x, rows)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Output ``[Q, N, H]`` and log-sum-exps ``[Q, N]``."""
        out, lse_NQ, *_ = torch.ops.aten._flash_attention_forward(
            q.contiguous(), k.contiguous(), v.contiguous(), self.query_offsets, self.key_offsets, *self.longest, 0.0,
            self.causal, False, **self._sides,
        )  # fmt: skip
        return out, lse_NQ.T

    def attend_backward(
        self, dout: Tensor, qkv: tuple[Tensor, Tensor, Tensor], out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of ``qkv``, given the output and log-sum-exps over all keys."""
        q, k, v = (x.contiguous() for x in qkv)
        no_dropout, unused = q.new_zeros(2, dtype=torch.uint64), q.new_empty(0)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            dout.contiguous(), q, k, v, out.contiguous(), lse.T.contiguous(), self.query_offsets, self.key_offsets,
            *self.longest, 0.0, self.causal, no_dropout, unused, **self._sides,
        )  # fmt: skip
        return dq, dk, dv

    @property
    def _sides(self) -> dict[str, int]:
        return {} if self.window is None else dict(zip(("window_size_left", "window_size_right"), self.window))


def packed(tasks: Sequence[Task], device: torch.device) -> tuple[PackedTask, ...]:
    """Pack ``tasks`` into as few launches as can be: each is causal or not, and has a query once at most."""
    launches: list[list[Task]] = []
    for task in tasks:
        for launch in launches:
            last = launch[-1]
            if last.causal == task.causal and last.query + last.count * last.num_queries <= task.query:
                launch.append(task)
                break
        else:
            launches.append([task])
    return tuple(_packed(launch, device) for launch in launches)


def _packed(tasks: Sequence[Task], device: torch.device) -> PackedTask:
    queries = np.repeat([task.num_queries for task in tasks], [task.count for task in tasks])
    keys = np.repeat([task.num_keys for task in tasks], [task.count for task in tasks])
    return PackedTask(
        query_rows=Rows.of([run for task in tasks for run in task.query_runs], device),
        key_rows=Rows.of([run for task in tasks for run in task.key_runs], device),
        query_offsets=_offsets(queries, device),
        key_offsets=_offsets(keys, device),
        longest=(int(queries.max()), int(keys.max())),
        causal=tasks[0].causal,
    )


def _offsets(lengths: np.ndarray, device: torch.device) -> Tensor:
    return to_device(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32), device)


def uses_flash(q: Tensor) -> bool:
    """Whether the flash kernel takes these queries."""
    return q.is_cuda and q.dtype in _FLASH_DTYPES and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
