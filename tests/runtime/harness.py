"""CPU ranks that outlive a test: started once per world size, they run any module-level function sent to them."""

import gc
import os
import secrets
import socket
import traceback
from contextlib import suppress
from datetime import timedelta
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.imported import leave_imported_alone
from tests.warm import context

TIMEOUT = timedelta(seconds=60)
"""A rank that waits longer in a collective is taken for hung."""


FIRST_PORT, NUM_PORTS = 20_000, 12_000
"""Below those that connections to elsewhere are given, which could take one that is free when it is looked for."""


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", FIRST_PORT + secrets.randbelow(NUM_PORTS)))
            return int(probe.getsockname()[1])


class RankPool:
    """``num_ranks`` processes joined by Gloo. A failure ends the pool: its groups cannot be used again."""

    def __init__(self, num_ranks: int, **environment: str) -> None:
        port = free_port()
        warm = context()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(num_ranks):
            ours, theirs = warm.Pipe()
            process = warm.Process(target=_serve, args=(rank, num_ranks, port, theirs, environment), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    @property
    def is_usable(self) -> bool:
        """Whether every rank still serves."""
        return all(process.is_alive() for process in self._processes)

    def run(self, function: Any, *arguments: Any, **options: Any) -> list[Any]:
        """``function(*arguments)`` on every rank; returns what each returned, by rank.

        Raises ``AssertionError`` with the traceback of the rank that failed first.
        """
        for pipe in self._pipes:
            pipe.send((function, arguments, options))
        results: dict[int, Any] = {}
        while len(results) < len(self._pipes):
            ready = wait([p for i, p in enumerate(self._pipes) if i not in results], TIMEOUT.total_seconds() * 1.5)
            if not ready:
                self.close()
                raise AssertionError(f"ranks {sorted(set(range(len(self._pipes))) - set(results))} hang")
            for pipe in ready:
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    failed, value = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    failed, value = True, "the process died"
                if failed:
                    self.close()
                    raise AssertionError(f"rank {rank} of {len(self._pipes)}:\n{value}")
                results[rank] = value
        return [results[rank] for rank in range(len(self._pipes))]

    def close(self) -> None:
        """End all ranks."""
        for process in self._processes:
            process.kill()
            process.join()


def _serve(rank: int, num_ranks: int, port: int, pipe: Connection, environment: dict[str, str]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(num_ranks))
    os.environ.update(environment)
    import torch
    import torch.distributed as dist

    gc.freeze()  # what was imported before stays: nothing of it is looked at again
    torch.set_num_threads(1)
    _share_one_device()
    compare_where_asked()
    _learn_labels_once()
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks, timeout=TIMEOUT)
    while True:
        try:
            function, arguments, options = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((False, function(*arguments, **options)))
        except BaseException:
            pipe.send((True, traceback.format_exc()))
        leave_imported_alone()


def _share_one_device() -> None:
    """All groups of this process listen by one thread.

    Else each has its own, which wakes up a hundred times a second: a rank has hundreds of groups before long.
    """
    from torch.distributed import distributed_c10d

    device = distributed_c10d.ProcessGroupGloo.create_default_device()

    class Sharing(distributed_c10d.ProcessGroupGloo):
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
            options = distributed_c10d.ProcessGroupGloo._Options()
            options._devices, options._timeout = [device], timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = Sharing  # type: ignore[misc]


def with_check(function: Any, *arguments: Any, **options: Any) -> Any:
    """Call ``function`` on a rank of a pool with the comparison of ``prepare``, which is left out there else."""
    COMPARES.append(True)
    try:
        return function(*arguments, **options)
    finally:
        COMPARES.pop()


COMPARES: list[bool] = []
COMPARISONS = (
    ("stock_comparison", "check_exact"), ("stock_comparison", "_check_ways"), ("prepare", "check_stages"),
    ("stage_limit", "check_stages"),
    ("zero_bubble_costs", "check_stages"), ("slice_costs", "check_stages"),
)  # fmt: skip
"""Modules of ``lengthwise.session`` and what they compare with."""


def compare_where_asked() -> None:
    """Let ``prepare`` compare models with stock ones, and stages with whole models, under :func:`with_check` alone.

    It is most of its time. What tests train on ranks they compare with a loop of their own.
    """
    for place, name in COMPARISONS:
        module = import_module(f"lengthwise.session.{place}")
        setattr(module, name, partial(where_asked, getattr(module, name)))


LEARNED_ONCE = ("tests.session.models.GPT", "tests.runtime.loop.memory_runs.Model")


def _learn_labels_once() -> None:
    """Let ``prepare`` find out once in a process how the losses inside some models of these tests use labels."""
    trace = import_module("lengthwise.runtime.verify.trace")
    learn, learned = trace.learn_labels, {}

    def remembered(run: Any, tokens: Any) -> Any:
        wrapped, kind = run.wrapped_model, type(run.model)
        if (name := f"{kind.__module__}.{kind.__name__}") not in LEARNED_ONCE:
            return learn(run, tokens)
        case = (name, wrapped.objective, wrapped.uses_labels, wrapped.make_inputs is None, run.gather is None)
        if case not in learned:
            learned[case] = learn(run, tokens)
        return learned[case]

    trace.learn_labels = remembered


def where_asked(compare: Any, *arguments: Any, **options: Any) -> None:
    """Compare under :func:`with_check` alone."""
    if COMPARES:
        compare(*arguments, **options)
