"""Ranks for the benchmark of the parallel methods, processes of one thread joined by Gloo; and one layer on them."""

import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from itertools import accumulate
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from time import perf_counter, process_time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lengthwise.core.pipeline_config import WEIGHTS_OF, Method, WeightPlacement
from lengthwise.core.specs import ModelSpec
from lengthwise.runtime.comm.group import Group
from lengthwise.runtime.comm.groups import GroupRegistry
from lengthwise.runtime.models.base import Transformer
from lengthwise.runtime.models.registry import build_model
from lengthwise.runtime.parallel.sharded_execution import StageExecution
from lengthwise.runtime.parallel.shards import keep_own_rows

METHODS = (*WEIGHTS_OF,)
"""All but dense."""
TIMEOUT = timedelta(minutes=10)


class RankError(RuntimeError):
    """A function raised on some rank; the ranks are gone."""


class Ranks:
    """``count`` processes that run any module-level function sent to them."""

    def __init__(self, count: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        context = get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, count, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Any, *arguments: Any, **options: Any) -> list[Any]:
        """What ``function`` returns on every rank, by rank.

        Raises:
            RankError: with the first line of the error of the rank that failed first.
        """
        for pipe in self._pipes:
            pipe.send((function, arguments, options))
        answers: dict[Any, Any] = {}
        while len(answers) < len(self._pipes):
            for pipe in wait([pipe for pipe in self._pipes if pipe not in answers]):
                try:
                    failed, answers[pipe] = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    failed, answers[pipe] = True, "the process died"
                if failed:
                    self.close()
                    raise RankError(answers[pipe])
        return [answers[pipe] for pipe in self._pipes]

    def close(self) -> None:
        """End them."""
        for process in self._processes:
            process.kill()
            process.join()


def _serve(rank: int, count: int, port: int, pipe: Connection) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(count))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=count, timeout=TIMEOUT)
    while True:
        try:
            function, arguments, options = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((False, function(*arguments, **options)))
        except Exception as error:
            pipe.send((True, f"{type(error).__name__}: {error}".splitlines()[0]))


@cache
def group() -> Group:
    """All ranks."""
    made = GroupRegistry(dist.get_rank()).of(tuple(range(dist.get_world_size())))
    assert made is not None
    return made


@cache
def model_of(spec: ModelSpec, weights: WeightPlacement) -> Transformer:
    """Whole, or this rank's rows of it."""
    model = build_model(spec, seed=0)
    if weights is WeightPlacement.SHARDED:
        keep_own_rows(model, spec, rank=group().rank, degree=group().size)
    return model


def execution_of(spec: ModelSpec, method: Method, lengths: Sequence[int]) -> tuple[Transformer, StageExecution]:
    """Every layer under ``method``; what depends on the pack's lengths alone is made already, as it is once for all
    layers of a micro-batch."""
    weights = WEIGHTS_OF.get(method, WeightPlacement.WHOLE)
    model = model_of(spec, weights)
    model.zero_grad(set_to_none=True)
    tokens_T, targets_T = torch.randint(spec.vocab_size, (2, sum(lengths)), generator=torch.Generator().manual_seed(1))
    execution = StageExecution(
        model, group(), tokens_T=tokens_T, targets_T=targets_T, cu_seqlens=tuple(accumulate(lengths, initial=0)),
        methods=(method,) * spec.num_layers, weights=weights,
    )  # fmt: skip
    for view in execution._views:
        _ = view.tables, view.ordered_tables, view.exchange, view.ring
    return model, execution


class Kept:
    """Counts the bytes that autograd keeps for the backward; weights and rotary tables are not counted."""

    def __init__(self, model: Transformer, execution: StageExecution, *, integers: bool) -> None:
        """``integers``: count indices too."""
        known: list[Tensor] = [*model.parameters()]
        for view in execution._views:
            known += [table for tables in (view.tables, view.ordered_tables) for table in tables or ()]
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self._integers = integers
        self._kept: dict[int, int] = {}
        self._alive: list[Tensor] = []
        """An address must not be used twice while we count."""

    def __enter__(self) -> "Kept":
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._note, lambda tensor: tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    @property
    def num_bytes(self) -> int:
        """Every storage once."""
        return sum(self._kept.values())

    def _note(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._known and (self._integers or tensor.dtype.is_floating_point):
            self._kept[storage.data_ptr()] = storage.nbytes()
            self._alive.append(tensor)
        return tensor


def layer_seconds(spec: ModelSpec, method: Method, lengths: Sequence[int]) -> tuple[float, float]:
    """Forward and backward of one layer: seconds by the clock, and of this rank's processor."""
    model, execution = execution_of(spec, method, lengths)
    x_tD = _input(spec, execution)
    dist.barrier()
    clock_s, processor_s = perf_counter(), process_time()
    out = model.layers[0](x_tD, execution.operators(0))
    out.backward(torch.ones_like(out))
    return perf_counter() - clock_s, process_time() - processor_s


def layer_bytes(
    spec: ModelSpec, method: Method, lengths: Sequence[int]
) -> tuple[dict[str, float], dict[str, float], int]:
    """Of one layer: bytes sent forward and backward, by kind, and bytes kept in between."""
    model, execution = execution_of(spec, method, lengths)
    x_tD = _input(spec, execution)
    group().sent.clear()
    with Kept(model, execution, integers=False) as kept:
        out = model.layers[0](x_tD, execution.operators(0))
    forward = dict(group().sent.num_bytes)
    group().sent.clear()
    out.backward(torch.ones_like(out))
    return forward, dict(group().sent.num_bytes), kept.num_bytes


def _input(spec: ModelSpec, execution: StageExecution) -> Tensor:
    count = len(execution._places[group().rank])
    generator = torch.Generator().manual_seed(2)
    return torch.randn(count, spec.hidden_size, generator=generator).requires_grad_()
