"""A step of this library's own models as one rank of a fake world runs it."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from lengthwise.config.optimizer_settings import OptimizerSettings
from lengthwise.core.errors import CheckError
from lengthwise.core.pass_order import PipelineSchedule
from lengthwise.core.pipeline_config import GradientShare, WeightShard
from lengthwise.core.specs import ModelSpec
from lengthwise.core.step_plan import StepPlan
from lengthwise.core.timeline import SpanKind
from lengthwise.runtime.comm.world import DistContext
from lengthwise.runtime.dryrun import attention_kernels, fake_cuda
from lengthwise.runtime.dryrun.device_memory import MemoryKind
from lengthwise.runtime.dryrun.recorder import Recorder
from lengthwise.runtime.models.registry import empty_model
from lengthwise.runtime.state.contents import contents, room_for
from lengthwise.runtime.state.sharded import ShardedState
from lengthwise.runtime.train.clock import StepClock
from lengthwise.runtime.train.execute_pipeline import make_groups
from lengthwise.runtime.train.execute_step import run_step
from lengthwise.runtime.train.micro_batch_tensors import masking_of

MOST_FILES = 1 << 20
"""Files that a rank may open, which the ranks of a real world ask one another once."""


SHORT = 64
"""Tokens of a sequence before there is a plan."""


class PlannedTokens:
    """Random tokens of the sequences of a plan; sequences that it has not are short."""

    def __init__(self, plan: StepPlan | None, vocab_size: int) -> None:
        packs = [
            micro_batch.pack for pipeline in (plan.pipelines if plan else ()) for micro_batch in pipeline.micro_batches
        ]
        self._lengths = {sequence: length for pack in packs for sequence, length in zip(pack.ids, pack.lengths)}
        self._vocab_size = vocab_size

    def tokens(self, sequence: int) -> np.ndarray:
        """Token ids of one sequence."""
        return np.random.default_rng(sequence).integers(0, self._vocab_size, self._lengths.get(sequence, SHORT))


class LabelledState(ShardedState):
    """A state that tells a recorder what its buffers are for."""

    recorder: Recorder | None = None

    def label(self) -> None:
        """Label all buffers."""
        if self.recorder is None:
            return
        memory, moments = self.recorder.memory, self.optimizer.state.values() if self.optimizer else ()
        memory.label([self.gradients], MemoryKind.GRADIENTS)
        memory.label([self.weights], MemoryKind.WEIGHTS)
        memory.label([x for state in moments for x in state.values() if x.is_cuda], MemoryKind.OPTIMIZER)
        memory.label([self.master, self.pushed], MemoryKind.OPTIMIZER)

    def collect_gradient(self, name: str, view: Tensor | None) -> None:
        """Let backwards add a gradient to ``view``, and label it."""
        super().collect_gradient(name, view)
        if self.recorder is not None and view is not None:
            self.recorder.memory.label([view], MemoryKind.GRADIENTS)

    def hold(
        self, holdings: Sequence[WeightShard | None], shares: Sequence[GradientShare | None] | None = None
    ) -> None:
        """Lay out what every rank computes with, and label it."""
        super().hold(holdings, shares)
        self.label()


class RecordedClock(StepClock):
    """A clock that tells a recorder what the rank is doing."""

    def __init__(self, world: DistContext, recorder: Recorder) -> None:
        super().__init__(world)
        self._recorder = recorder

    @contextmanager
    def span(self, kind: SpanKind, name: str = "") -> Iterator[None]:
        """Note the name of the block inside."""
        outer, self._recorder.operation = self._recorder.operation, name
        with super().span(kind, name):
            yield
        self._recorder.operation = outer


def dry_step(
    plan: StepPlan,
    spec: ModelSpec,
    rank: int,
    *,
    dtype: str,
    optimizer: OptimizerSettings,
    schedule: PipelineSchedule,
    ranks_per_node: int,
    state_on_host: bool = False,
) -> dict[str, Any]:
    """Run the step of ``plan`` as ``rank``; what it asked of its device, as plain values."""
    with fake_rank(rank, plan.num_devices, ranks_per_node=ranks_per_node) as (world, recorder):
        model = empty_model(spec, dtype=getattr(torch, dtype), device=world.device)
        state = LabelledState(model, world, optimizer, on_host=state_on_host)
        state.recorder = recorder
        state.step(lr=0.0, clip=1.0)  # the optimizer's state of the steps before
        make_groups(plan, state)
        state.label()
        recorder.restart()
        clock, source = RecordedClock(world, recorder), PlannedTokens(plan, spec.vocab_size)
        run_step(
            plan, model, state, source, lr=1e-4, clip_norm=1.0, clock=clock, masking=masking_of(spec, seed=0),
            schedule=schedule,
        )  # fmt: skip
        return {**document_of(recorder, rank), "checkpoint": checkpoint_of(state)}


def checkpoint_of(state: ShardedState) -> dict[str, int]:
    """How many tensors of a checkpoint this rank writes (or its share of them), and how many bytes of host memory.

    Raises:
        CheckError: a run would read other shapes than it writes.
    """
    with torch.device("meta"):  # copies that take no memory of the host
        written = contents(state)
        sizes = {
            name: ((part.num_elements,) if part.num_elements else part.local.shape, part.local.dtype)
            for name, part in written.items()
        }
        room = room_for(state, sizes)
    for name, part in room.items():
        if part.local.shape != written[name].local.shape:
            raise CheckError(f"{name} is saved as {written[name].local.shape} and read as {part.local.shape}")
    return {"tensors": len(written), "bytes": sum(part.local.nbytes for part in written.values())}


@contextmanager
def fake_rank(rank: int, num_ranks: int, *, ranks_per_node: int) -> Iterator[tuple[DistContext, Recorder]]:
    """Within, this process is ``rank`` of a fake world, and everything that goes to its device is recorded."""
    dist.init_process_group("fake", rank=rank, world_size=num_ranks, store=FakeStore())
    fakes = FakeTensorMode()
    recorder = Recorder(rank, fakes)
    fake_cuda.record_with(recorder)
    world = DistContext(rank=rank, size=num_ranks, device=torch.device("cuda", 0), ranks_per_node=ranks_per_node)
    world.groups._limit = MOST_FILES
    try:
        with fakes, recorder, _kept_is_labelled(recorder):
            yield world, recorder
    finally:
        world.groups.close()
        dist.destroy_process_group()


def _kept_is_labelled(recorder: Recorder) -> Any:
    def pack(tensor: Tensor) -> Tensor:
        if tensor.is_cuda:
            recorder.memory.keep(tensor)
        return attention_kernels.carry(tensor, tensor.detach())  # what is saved as it is would keep its own graph alive

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)


def document_of(recorder: Recorder, rank: int) -> dict[str, Any]:
    """What ``rank`` asked of its device since the recorder began, as plain values."""
    memory = recorder.memory

    def rows(counted: Mapping[tuple[str, str], int]) -> list[dict[str, Any]]:
        return [{"line": line, "reason": reason, "count": count} for (line, reason), count in counted.items()]

    return {
        "rank": rank,
        "time_s": time.perf_counter() - recorder.start_s,
        "peak_bytes": {str(kind): num_bytes for kind, num_bytes in memory.peak.items()},
        "peak_at": memory.peak_at,
        "largest_allocation": memory.largest,
        "memory": [[place, *usage.values()] for place, usage in memory.samples],
        "flops": dict(recorder.flops),
        "kernels": dict(recorder.kernels.most_common()),
        "collectives": [asdict(collective) for collective in recorder.collectives],
        "synchronisations": rows(recorder.synchronisations),
        "copies": rows(recorder.copies),
        "host_copies": [
            {"direction": direction, "stream": stream, "bytes": num_bytes}
            for (direction, stream), num_bytes in recorder.host_copies.items()
        ],
        **recorder.order.document,
    }
