"""A model on its ranks, ready to compute micro-batches: what is traced, checked and measured before a run has plans."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from torch import nn

from lengthwise.config.optimizer_settings import OptimizerSettings
from lengthwise.core.batch import Pack
from lengthwise.core.errors import CheckError, CommunicationError, InputError
from lengthwise.core.pipeline_config import WeightShard
from lengthwise.runtime.comm.collectives import gather_rows
from lengthwise.runtime.comm.consensus import require_equal
from lengthwise.runtime.comm.differences import ranks_text
from lengthwise.runtime.comm.group import Group
from lengthwise.runtime.comm.world import DistContext
from lengthwise.runtime.loop.call_order import all_succeed
from lengthwise.runtime.loop.frozen_models import wrap_frozen
from lengthwise.runtime.loop.frozen_weights import FrozenWeights
from lengthwise.runtime.loop.fsdp2 import Fsdp2State, fsdp_modules
from lengthwise.runtime.loop.shared_reads import with_read_digests
from lengthwise.runtime.loop.synthetic_batches import zero_loss
from lengthwise.runtime.models.checksum import weight_checksums
from lengthwise.runtime.state.layer_gather import LayerGather
from lengthwise.runtime.state.optimizer_trial import check_coupling
from lengthwise.runtime.state.sharded import ShardedState
from lengthwise.runtime.state.sharded_weights import ShardedWeights
from lengthwise.runtime.state.update_overlap import UpdateOverlap, finish_at_exit
from lengthwise.runtime.wrap.collator import PackCollator
from lengthwise.runtime.wrap.context import PackShard
from lengthwise.runtime.wrap.micro_batch import MicroBatch
from lengthwise.runtime.wrap.parameter_use import units_of_modules
from lengthwise.runtime.wrap.preserved_state import preserve_state
from lengthwise.runtime.wrap.wrapped_model import WrappedModel

CheckIds = Callable[[tuple[int, str] | None, tuple[int, str] | None], None]


class PreparedModel:
    """A wrapped model with its sharded state, the collator of its micro-batches, and frozen models beside it."""

    frozen_weights: FrozenWeights | None = None
    """Its own frozen weights, as checkpoints have them; None: it is of no run that has checkpoints."""

    def __init__(
        self,
        wrapped_model: WrappedModel,
        world: DistContext,
        *,
        collator: PackCollator,
        state: ShardedState | Fsdp2State,
        seed: int = 0,
    ) -> None:
        self.wrapped_model, self.world, self.collator, self.state = wrapped_model, world, collator, state
        self.seed, self.alone = seed, Group(rank=0)
        self.frozen_models: list[WrappedModel] = []
        self.is_cuttable = False
        """Whether stages of one layer each were compared with the whole model, so that all others are exact too."""
        self.one_stage_because = ""
        """Why plans have one pipeline stage, where that was looked at and they may have no more."""
        self.decides_anew: Callable[[np.ndarray], np.ndarray] | None = None
        """[L] for each of some lengths, whether the forward decides otherwise there than where packs were compared."""
        self.hidden_weights: frozenset[str] = frozenset()  # parameters that comparisons fill as they fill zeros
        self.can_recompute = True
        """Whether plans may recompute layers: ``recompute="none"`` leaves that out of a comparison."""
        self.check_ids: CheckIds = lambda token, label: None
        """Raises ``InputError`` where the largest token or label of sequences, with its place, is none of the model."""

    @classmethod
    def with_optimizer(
        cls,
        wrapped_model: WrappedModel,
        world: DistContext,
        *,
        collator: PackCollator,
        optimizer: OptimizerSettings,
        seed: int = 0,
        by_layer: bool = False,
        state_on_host: bool = False,
    ) -> "PreparedModel":
        """Prepare a model with a new state of the optimizer; every rank calls this.

        ``by_layer``: ranks get shares of its weights alone, and it need not be on their devices. ``state_on_host``:
        master weights, summed gradients and optimizer lie in host memory.

        Raises:
            InputError: FSDP2's state is to be other than FSDP2 has it, or the optimizer couples parameters of ranks.
        """
        state: ShardedState | Fsdp2State
        if fsdp_modules(wrapped_model.model):
            if state_on_host:
                raise InputError(
                    f"offload_state='host': FSDP2 keeps the state of {type(wrapped_model.model).__name__}; leave it "
                    "out, and give fully_shard an offload_policy=CPUOffloadPolicy(), or do not call fully_shard"
                )
            if optimizer.narrow_gradients:
                raise InputError(
                    f"gradient_dtype='compute': FSDP2 keeps the gradients of {type(wrapped_model.model).__name__}; "
                    "leave it out, and give fully_shard a MixedPrecisionPolicy, or do not call fully_shard"
                )
            state = Fsdp2State(wrapped_model.model, world, optimizer, close=lambda: zero_loss(prepared))
        else:
            if by_layer:
                wrapped_model.check_gathers()
                wrapped_model.structure.move_rest(world.device)
            check_coupling(optimizer, world.size)
            table = wrapped_model.structure.table()
            state = ShardedState(wrapped_model.model, world, optimizer, table=table, on_host=state_on_host)
        prepared = cls(wrapped_model, world, collator=collator, state=state, seed=seed)
        if isinstance(state, ShardedState):
            prepared.frozen_weights = FrozenWeights(wrapped_model.model, world)
        if by_layer:
            prepared.gather_by_layer()
        prepared.update_weights()
        return prepared

    @property
    def gather(self) -> LayerGather | None:
        """Gathers the weights of one layer at a time; None: every rank holds all of them."""
        return self.wrapped_model.layers.gather

    @property
    def overlap(self) -> UpdateOverlap | None:
        """Moves weights and gradients that ranks hold for a whole step beneath passes; None: nothing moves there."""
        return self.wrapped_model.layers.overlap

    @property
    def model(self) -> nn.Module:
        """The user's model, which is trained."""
        return self.wrapped_model.model

    @property
    def num_params(self) -> int:
        """The number of trained parameters of the whole model."""
        return sum(parameter.numel() for parameter in self.wrapped_model.structure.parameters.values())

    @property
    def models(self) -> list[nn.Module]:
        """The trained model and the frozen ones beside it."""
        return [wrapped_model.model for wrapped_model in (self.wrapped_model, *self.frozen_models)]

    @property
    def gather_problem(self) -> str:
        """Why the weights cannot be gathered layer by layer; an empty string if they can."""
        return "FSDP2 shards them" if isinstance(self.state, Fsdp2State) else self.wrapped_model.gather_problem

    @property
    def stage_problem(self) -> str:
        """Why the model cannot be cut into the stages of a pipeline; an empty string if it can."""
        outside = any(call.layer is None for call in self.wrapped_model.script.calls.values())
        elsewhere = self.gather is not None and any(
            0 < unit <= self.wrapped_model.structure.num_layers and unit != position
            for position, units in enumerate(self.wrapped_model.used_units)
            for unit in units
        )
        problems = {
            "FSDP2 shards the model": isinstance(self.state, Fsdp2State),
            "weights of a layer, which its stage alone gathers, are used in another layer or outside": elsewhere,
            "frozen models compute beside it": bool(self.frozen_models),
            "its ranks exchange tokens outside of its layers": outside and self.world.size > 1,
            self.wrapped_model.gather_problem: bool(self.wrapped_model.gather_problem),
        }
        return next((problem for problem, applies in problems.items() if applies), "")

    @property
    def split_problem(self) -> str:
        """Why stages cannot split the model's backwards; an empty string if they can."""
        return "backwards of compiled layers are whole" if self.wrapped_model.compiled is not None else ""

    def check_gathers(self) -> None:
        """Raise ``InputError`` if the weights cannot be gathered layer by layer."""
        self.wrapped_model.check_gathers(self.gather_problem)

    def gather_by_layer(self) -> None:
        """Leave every rank its share of the weights, from which layers are gathered when they are computed.

        Every rank calls this.

        Raises:
            InputError: this model's weights cannot be gathered layer by layer.
        """
        self.check_gathers()
        if self.world.size == 1 or self.gather is not None:
            return  # its share is all of them, or is all that it has
        assert isinstance(self.state, ShardedState)
        on_host, tables = self.state.on_host, self.wrapped_model.structure.frozen_tables()
        frozen = [ShardedWeights(self.model, self.world, table, on_host=on_host) for table in tables]
        used = self.wrapped_model.used_units or units_of_modules(self.wrapped_model.structure)
        gather = LayerGather(self.state, used, frozen=frozen)
        self.wrapped_model.layers.gather = gather
        self.update_weights()

    @contextmanager
    def gathered(self, *, is_active: bool = True) -> Iterator[None]:
        """Within, one forward and backward may be computed outside of steps; each layer's weights come when it is.

        Every rank enters it where weights are gathered by layer; ``is_active``: whether this rank computes.

        Raises:
            CheckError: another rank could not compute.
        """
        if self.gather is None:
            yield
            return
        error: Exception | None = None
        is_active_by_rank = self._bools_of_ranks(is_active)
        self.gather.start((is_active_by_rank,))
        self.gather.begin_round(0)
        try:
            yield
            self.gather.finish_rounds()
        except CommunicationError:
            raise
        except Exception as raised:
            error = raised
            self.gather.abandon_rounds()
        self.gather.start(())
        self._raise_together(error)

    @contextmanager
    def pinned(self, shard: WeightShard) -> Iterator[None]:
        """Within, outside of steps, every rank computes with the weights of ``shard``; their gradients are summed.

        Every rank enters it where weights are gathered by layer, and computes; such contexts may be nested.

        Raises:
            CheckError: another rank could not compute.
        """
        if self.gather is None:
            yield
            return
        error: Exception | None = None
        with self.gather.pinned(shard, is_summed=True):
            try:
                yield
            except CommunicationError:
                raise
            except Exception as raised:
                error = raised
        self._raise_together(error)

    def _raise_together(self, error: Exception | None) -> None:
        """Raise this rank's error, or a ``CheckError`` if another rank has one; every rank calls this."""
        has_failed = self._bools_of_ranks(error is not None)
        if error is not None:
            raise error
        if any(has_failed):
            failed = ranks_text([rank for rank, failed in enumerate(has_failed) if failed])
            raise CheckError(f"{failed} could not compute {type(self.model).__name__}")

    def _bools_of_ranks(self, value: bool) -> tuple[bool, ...]:
        rows = gather_rows(torch.tensor([value], dtype=torch.int64, device=self.world.device))
        return tuple(map(bool, rows[:, 0].tolist()))

    def begin_backward(self) -> None:
        """Gather what a backward begins with, where weights are gathered by layer."""
        if (gather := self.gather) is not None:
            gather.reach_backward(self.wrapped_model.structure.num_layers + 1)

    def update_weights(self) -> None:
        """Bring every rank the weights that it holds between micro-batches, after they were updated or loaded."""
        if self.gather is None:
            self.state.materialize_all()
        else:
            self.gather.start(())

    def begin_update(self) -> None:
        """Begin a step: its gradients are pushed within backwards, and weights are waited for where they are used.

        FSDP2 has its own ways; one rank alone moves nothing.
        """
        self.state.begin_step()
        if self.world.size == 1 or not isinstance(self.state, ShardedState):
            return
        layers, structure = self.wrapped_model.layers, self.wrapped_model.structure
        if layers.overlap is None:
            layers.overlap = UpdateOverlap(self.state)
            self.state.pulls_ahead = self.gather is None
            finish_at_exit(self.state)
        used = self.wrapped_model.used_units or units_of_modules(structure)
        layers.overlap.begin_step(used, pushes_early=self.gather is None or self.gather.holds_shards)

    def pull_weights(self) -> None:
        """Start to bring every rank the weights that it holds between micro-batches; who reads one waits for it."""
        if self.overlap is None or self.gather is not None:
            self.update_weights()
        else:
            assert isinstance(self.state, ShardedState)
            self.state.pull_whole()

    def push_rest(self) -> None:
        """Push gradients that no backward pushed; every rank calls this before other collectives end the step."""
        if self.gather is not None:
            self.gather.wait()
        if self.overlap is not None and isinstance(self.state, ShardedState):
            self.state.push_rest()

    def push_late(self, is_late: Sequence[int]) -> None:
        """Push all gradients again where backwards of a rank added to some that it had pushed, such as by a loss that
        reads weights outside of the forward; ``is_late``: whether, of each rank."""
        if self.overlap is not None and any(is_late):
            self.overlap.push_late()

    @contextmanager
    def plain(self) -> Iterator[nn.Module]:
        """Let the model and the frozen ones compute as before ``prepare``, with current weights, as for evaluation.

        Where weights are gathered layer by layer every rank has to enter it, between two steps: all ranks get all
        weights, and what was changed of them on every rank is kept.
        """
        with ExitStack() as stack:
            if isinstance(self.state, ShardedState):
                self.state.finish_pull()
            if self.gather is not None and not self.wrapped_model.is_plain:
                if self.gather.is_begun:
                    raise InputError(
                        "run.plain() within a step: weights are gathered layer by layer, and other ranks compute with "
                        "them; call it after step.update(), or use weights='whole' in prepare(...)"
                    )
                if self.frozen_weights is not None:
                    self.frozen_weights.note_access()
                stack.enter_context(self.gather.whole())
            for wrapped_model in self.frozen_models:
                stack.enter_context(wrapped_model.plain())
            yield stack.enter_context(self.wrapped_model.plain())

    def frozen(self, model: nn.Module, *, layers: str | None = None, check: bool = True) -> nn.Module:
        """Prepare a teacher or reference model to compute micro-batches beside the trained one; every rank calls this.

        Call it in the loop as the trained model, such as ``teacher(**micro_batch.inputs)``. It computes without
        gradients, has no state in checkpoints, and is whole on every rank. ``layers``: the name of its list of layers.

        Raises:
            InputError: it shares layers with a prepared model, differs between ranks, or attends in an unknown way.
            CheckError: its outputs on a pack are not those on single sequences.
        """
        with preserve_state(model):
            require_equal(self.world, {"frozen": {"class": type(model).__qualname__, **weight_checksums(model)}})
            wrapped_model = all_succeed(self.world, lambda: wrap_frozen(self, model, layers=layers, check=check))
        self.frozen_models.append(wrapped_model)
        return model

    def make(self, shard: PackShard, pack: Pack) -> MicroBatch:
        """Make the micro-batch of a shard."""
        collator = self.collator if shard.group.size == 1 else with_read_digests(self.collator, shard)
        return MicroBatch(shard, pack, collator, make_inputs=self.wrapped_model.inputs_of)

    def discard(self) -> None:
        """Discard gradients that belong to no step, and what was gathered for it."""
        self.world.offload.release()
        self.state.discard_gradient()
        if self.gather is not None:
            self.update_weights()

    def move_state_to_host(self) -> None:
        """Put master weights, summed gradients and optimizer into host memory; all ranks do, before the first step."""
        assert isinstance(self.state, ShardedState) and not self.state.on_host, "it is on the device, and of this run"
        by_layer, structure = self.gather is not None, self.wrapped_model.structure
        self.restore_weights()
        if by_layer:
            structure.move_rest(self.world.device)
        table = structure.table()
        self.state = ShardedState(self.model, self.world, self.state.settings, table=table, on_host=True)
        if by_layer:
            self.gather_by_layer()
        else:
            self.update_weights()

    def close(self) -> None:
        """Restore the model as it was before ``prepare``, with current weights.

        Where weights are gathered layer by layer every rank has to call it; while an error ends this rank's loop,
        others may not, and the weights are left as shares.
        """
        self._release()

    def _release(self, *, is_together: bool | None = None) -> None:
        """Do what :meth:`close` does; ``is_together``: whether all ranks do, None: not known."""
        if is_together is not None:
            self.discard() if is_together else self.state.discard_gradient()
        if self.overlap is not None:
            self.overlap.close()
        self.wrapped_model.layers.overlap = None
        for wrapped_model in (*self.frozen_models, self.wrapped_model):
            wrapped_model.release()
        if self.gather is None or (sys.exc_info()[0] is None if is_together is None else is_together):
            self.restore_weights()

    def restore_weights(self) -> None:
        """Give the model all weights back, where they were before they were gathered by layer; every rank calls it."""
        if self.gather is None:
            self.state.release_params()
            return
        self.gather.restore()
        self.model.to(self.gather.home)
        self.wrapped_model.layers.gather = None
