"""Protocols of what steps, shards and synthetic batches use of a run, and the timings that they give it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from lengthwise.core.batch import Pack
from lengthwise.core.step_plan import StepPlan
from lengthwise.runtime.comm.group import Group
from lengthwise.runtime.comm.world import DistContext
from lengthwise.runtime.loop.call_order import RankReports
from lengthwise.runtime.loop.coupled_values import Coupling
from lengthwise.runtime.loop.fsdp2 import Fsdp2State
from lengthwise.runtime.loop.loop_gradients import LoopGradients
from lengthwise.runtime.loop.loop_ledger import LoopLedger
from lengthwise.runtime.loop.unprepared_models import UnpreparedModels
from lengthwise.runtime.loop.workers import ItemReaders
from lengthwise.runtime.state.layer_gather import LayerGather
from lengthwise.runtime.state.sharded import ShardedState
from lengthwise.runtime.state.update_overlap import UpdateOverlap
from lengthwise.runtime.train.device_meter import DeviceMeter
from lengthwise.runtime.wrap.collator import PackCollator
from lengthwise.runtime.wrap.context import PackShard
from lengthwise.runtime.wrap.exchange_script import ExchangeScript
from lengthwise.runtime.wrap.loss_check import LossCheck
from lengthwise.runtime.wrap.micro_batch import MicroBatch
from lengthwise.runtime.wrap.trained_outside import TrainedOutside
from lengthwise.runtime.wrap.wrapped_model import WrappedModel


class MicroBatchMaker(Protocol):
    """A run, as far as micro-batches of its model are made of it."""

    wrapped_model: WrappedModel
    world: DistContext
    collator: PackCollator
    seed: int
    alone: Group
    """A group of this rank only."""

    @property
    def model(self) -> nn.Module:
        """The user's model."""
        ...

    @property
    def models(self) -> list[nn.Module]:
        """The trained model and the frozen ones beside it."""
        ...

    def make(self, shard: PackShard, pack: Pack) -> MicroBatch:
        """The micro-batch of a shard."""
        ...


@dataclass(frozen=True)
class MicroBatchTiming:
    """Compute time and peak memory of one micro-batch on this rank."""

    pipeline: int
    """The pipeline's number in the plan."""
    micro_batch: int
    time_s: float
    peak_bytes: int
    """Peak memory above that before the micro-batch; 0 where the device does not count it."""


class UsualScripts(Protocol):
    """A run, as far as it knows what its loop usually computes."""

    @property
    def usual_scripts(self) -> tuple[ExchangeScript, ...]:
        """Exchanges of the forwards that a micro-batch usually has; none where that is not known yet."""
        ...


class RunState(MicroBatchMaker, UsualScripts, Protocol):
    """A run, as far as a step uses it."""

    state: ShardedState | Fsdp2State
    meter: DeviceMeter
    gradients: LoopGradients
    loss_check: LossCheck
    trained_outside: TrainedOutside
    unprepared: UnpreparedModels
    ledger: LoopLedger
    skipped: list[int]
    counts_targets: bool
    seen_scripts: tuple[ExchangeScript, ...]
    lr: Callable[[int], float]
    clip_norm: float

    @property
    def readers(self) -> ItemReaders | None:
        """The processes that read sequences ahead."""
        ...

    def inspect(self) -> tuple[str, int, bool]:
        """What is wrong with the model, the fingerprint of this rank's weights, and whether a loop changed them."""
        ...

    def take_over_changes(self, reports: RankReports, where: str, *, columns: tuple[int, int]) -> None:
        """Keep what loops did to weights between updates, if every rank's did the same."""
        ...

    @property
    def gather(self) -> LayerGather | None:
        """Gathers the weights of one layer at a time; None: every rank holds all of them."""
        ...

    def begin_backward(self) -> None:
        """Gather what a backward begins with, where weights are gathered by layer."""
        ...

    def update_weights(self) -> None:
        """Bring every rank the weights that it holds between micro-batches."""
        ...

    def pull_weights(self) -> None:
        """Start to bring every rank the weights that it holds between micro-batches."""
        ...

    def push_rest(self) -> None:
        """Push gradients that no backward pushed."""
        ...

    @property
    def overlap(self) -> UpdateOverlap | None:
        """Moves weights and gradients beneath passes; None: nothing moves there."""
        ...

    def push_late(self, is_late: Sequence[int]) -> None:
        """Push all gradients again where backwards of a rank added to some that it had pushed."""
        ...

    def discard(self) -> None:
        """Forget gradients that belong to no step."""
        ...

    def note_failure(self, reason: str) -> None:
        """Remember why the step comes again."""
        ...

    def abort_step(self, step: Any, reports: RankReports) -> None:
        """Discard a step in which a rank ran out of memory."""
        ...

    def note_skipped(self, step: Any) -> None:
        """Record a step that every rank leaves out."""
        ...

    def finish(self, step: Any) -> None:
        """Record a step that is done."""
        ...


class CoupledRunState(RunState, Protocol):
    """A run, as far as a step whose loss couples sequences uses it."""

    coupling: Coupling | None

    def begin_plan(self, plan: StepPlan) -> None:
        """Start to gather what a plan computes with."""
        ...
