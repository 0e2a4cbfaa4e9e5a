"""Wrap a third-party model so that its forward computes shards of packs, until it is released."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from lengthwise.config.setting_names import as_option
from lengthwise.core.batch import NEXT_TOKEN
from lengthwise.core.errors import InputError, errors_spelt
from lengthwise.runtime.comm.out_of_memory import is_out_of_memory
from lengthwise.runtime.wrap import context as shards
from lengthwise.runtime.wrap.call_rules import CallRules, ForwardCalls, compare
from lengthwise.runtime.wrap.collator import PackCollator
from lengthwise.runtime.wrap.compiled_modules import CompiledModules, Modes
from lengthwise.runtime.wrap.completed_calls import CompletedCall
from lengthwise.runtime.wrap.custom_masks import MaskTables
from lengthwise.runtime.wrap.deferred_logits import DeferredHead
from lengthwise.runtime.wrap.deferred_loss import computed
from lengthwise.runtime.wrap.dense_embeddings import DenseEmbeddings
from lengthwise.runtime.wrap.exchange_script import ExchangeScript
from lengthwise.runtime.wrap.flash_kernels import ImportedKernels
from lengthwise.runtime.wrap.forward_arguments import check_arguments, check_constant, check_frozen
from lengthwise.runtime.wrap.forward_inputs import ForwardInputs, MakeInputs
from lengthwise.runtime.wrap.forward_patch import Memo, PreparedForward
from lengthwise.runtime.wrap.gradient_changes import hooks_on_gradients
from lengthwise.runtime.wrap.growing_tables import GrowingTables, WithoutAttention
from lengthwise.runtime.wrap.hugging_face import AttentionSwitch, OwnCaches
from lengthwise.runtime.wrap.label_convention import LabelConvention, loss_in, loss_of_logits
from lengthwise.runtime.wrap.late_changes import LateChanges
from lengthwise.runtime.wrap.layer_hooks import HookedLayers, intercepting
from lengthwise.runtime.wrap.loss_backward import roots_of
from lengthwise.runtime.wrap.loss_check import NotedLoss
from lengthwise.runtime.wrap.loss_guard import guard_losses
from lengthwise.runtime.wrap.mask_forwards import learn_masks, note_masks
from lengthwise.runtime.wrap.micro_batch import MicroBatch
from lengthwise.runtime.wrap.oom_recovery import OutputStructure, autocast_dtype
from lengthwise.runtime.wrap.own_checkpointing import OwnCheckpointing
from lengthwise.runtime.wrap.position_ids import StockPositions
from lengthwise.runtime.wrap.rotary_factors import LengthwiseRotary
from lengthwise.runtime.wrap.router_losses import BalancingLosses
from lengthwise.runtime.wrap.sequence_by_sequence import SequenceBySequence
from lengthwise.runtime.wrap.sequence_labels import with_label_of_sequence
from lengthwise.runtime.wrap.split_products import splitting
from lengthwise.runtime.wrap.stage_pass import StageEndError
from lengthwise.runtime.wrap.state_between_calls import StateBetweenCalls
from lengthwise.runtime.wrap.structure import find_structure, hugging_face_models
from lengthwise.runtime.wrap.tiled_modules import TiledModules
from lengthwise.runtime.wrap.torch_function_mode import InterceptCalls
from lengthwise.runtime.wrap.user_functions import LOSS, checked_loss, user_function
from lengthwise.runtime.wrap.zero_collectives import finish_forward

LossOf = Callable[[Any, MicroBatch], Tensor]


class WrappedModel:
    """A model whose forward computes the active micro-batch (:func:`~lengthwise.runtime.wrap.context.active`)."""

    _prepared: PreparedForward | None = None
    next_step = 0
    """The step that its weights are for, counted by the run."""
    late_changes: LateChanges | None = None
    """What is new in the model since packs were compared with it; None: they were not yet."""
    own_state: set[str]
    """Attributes of the model that its forwards change themselves."""
    ignored_labels: frozenset[int] = frozenset()
    """Labels that its loss was seen to leave out or to weigh otherwise, beside those of which it is known."""
    most_slots: int | None = None
    """Slots of a pack that it can be given; None: any number."""
    is_mean: bool | None = None
    """Whether the loss of a batch is the mean of its sequences' losses by their targets; None: that is not known."""

    def __init__(
        self,
        model: nn.Module,
        *,
        objective: str = NEXT_TOKEN,
        layers: str | None = None,
        loss: LossOf | None = None,
        inputs: MakeInputs | None = None,
        context: Callable[[], Any] | None = None,
        by_sequence: bool = False,
        labels_sequences: bool = False,
        is_frozen: bool = False,
        tile: int | None = None,
        compile_backend: str | None = None,
    ) -> None:
        """``loss``: from what the forward returns to the mean loss of this rank's targets; ``inputs``: from a
        micro-batch to the forward's arguments; ``context``: see :class:`HookedLayers`; ``by_sequence``: compute the
        stock forward once for each sequence, which this rank has whole, instead of packs and shards;
        ``labels_sequences``: the model takes one label for each sequence; ``is_frozen``: it has no gradients;
        ``tile``: slots that feed-forward modules compute at once, None: all; ``compile_backend``: of torch.compile,
        which compiles what it can of the layers, None: nothing.

        Raises:
            InputError: its layers are not known, or it trains no parameters.
        """
        self.model, self.objective, self.labels_sequences = model, objective, labels_sequences
        parts = hugging_face_models(model)
        self.structure = find_structure(model, layers=layers, of_any_class=by_sequence, is_trained=not is_frozen)
        self._is_frozen, self._loss, self.make_inputs, self.keeps_output = is_frozen, loss, inputs, False
        self.labels, self.gradient_changes = LabelConvention(), hooks_on_gradients(model)
        """How a model of transformers uses labels; what may make the backward more than linear, as far as is known."""
        self._plain, self._outputs, self.rules, self.own_state = 0, OutputStructure(), CallRules(), set()
        self.script = ExchangeScript(calls={})
        """Exchanges of a forward and its backward, once they were observed."""
        self.used_units: tuple[frozenset[int], ...] = ()
        """The units of parameters that each position of the forward uses, once they were observed."""
        self.checkpointing = OwnCheckpointing(model, *parts)
        forward = with_label_of_sequence(model.forward) if labels_sequences else model.forward
        self._forward = self.checkpointing.replaced_in(forward)
        self._constants, self._imported = list(self.structure.constants()), ImportedKernels(model)
        self.masks, self.tables = MaskTables(type(model).__name__), GrowingTables(model, self.structure.layers)
        self._balancing, self._dense, self._caches = BalancingLosses(model), DenseEmbeddings(model), OwnCaches(*parts)
        self._intercept: InterceptCalls | None = self._new_intercept(rules=CallRules())
        self.by_sequence = self._by_sequence() if by_sequence else None
        """Computes micro-batches sequence by sequence; None: they are computed in packs."""
        self.compiled = CompiledModules.of(self.structure, compile_backend, self._modes)
        self.layers = HookedLayers(self.structure.layers, context=context, is_plain=lambda: self._plain > 0)
        self.tiles = None if tile is None else TiledModules(self.structure.layers, tile, lambda: self.is_plain)
        positions = None if by_sequence else StockPositions(model, self._forward, self.layers)
        self._inputs = ForwardInputs(
            model, self._forward, objective=objective, make=inputs, labels=lambda: self.labels, positions=positions,
            is_hugging_face=self.structure.is_hugging_face, has_loss=loss is not None,
        )  # fmt: skip
        self._rotary = LengthwiseRotary(model, is_plain=lambda: by_sequence or self._plain > 0)
        self._head = None if by_sequence else DeferredHead(model, is_plain=lambda: self._plain > 0, of=self)
        self._switches = [] if by_sequence else [AttentionSwitch(part) for part in parts]
        for switch in self._switches:
            switch.on()
        self._prepared = PreparedForward(model, self._forward_micro_batch, on_copy=self._copied)

    def watch_changes(self) -> None:
        """Refuse hooks and forwards that come from now on, where packs would not be what they were compared as."""
        self.late_changes = LateChanges(self.model, is_plain=lambda: self.is_plain, own_state=self.own_state)

    def max_tokens(self, collator: PackCollator) -> int | None:
        """Tokens of a pack that it can be given, whose slots are as ``collator`` has them; None: any number."""
        return None if self.most_slots is None else self.most_slots * collator.slot_tokens

    def _by_sequence(self) -> SequenceBySequence:
        return SequenceBySequence(
            self._forward, type(self.model).__name__, self.make_inputs, made_labels=lambda: self.labels.made,
            has_rows=self.labels_sequences or self._is_frozen, has_loss=self._loss is not None,
        )  # fmt: skip

    def targets_of(self, micro_batch: MicroBatch) -> int:
        """The number of targets of a micro-batch: of the labels that ``inputs=`` makes for it, or as it is planned."""
        made = self.labels.made
        if made is None or not made.is_mean:
            return micro_batch.num_targets
        return made.count_made(micro_batch, by_sequence=self.by_sequence is not None)

    def _copied(self, memo: Memo) -> None:
        """Restore the attention of a copy of the model."""
        for switch in self._switches:
            switch.turn_off_copies(memo)

    def _modes(self) -> Modes:
        return Modes(is_plain=self.is_plain, intercept=self.layers.intercept, compared=self.layers.mode)

    @property
    def is_plain(self) -> bool:
        """Whether the model currently computes as it did before it was prepared."""
        return self._plain > 0

    @property
    def deferred_parameters(self) -> list[nn.Parameter]:
        """Parameters of the head that computes its logits where a loss is made of them."""
        return [] if self._head is None else self._head.parameters

    @property
    def gather_problem(self) -> str:
        """Why its weights cannot be gathered layer by layer; an empty string if they can."""
        if self.by_sequence is not None:
            return "it is computed sequence by sequence"
        if self.masks or self.tables.has_grown:
            return f"its {'attention masks' if self.masks else 'tables of positions'} are made by further forwards"
        return self.layers.order_problem or self.layers.gather_problem

    def check_gathers(self, problem: str = "") -> None:
        """Raise ``InputError`` if its weights cannot be gathered layer by layer: of a ``problem`` given, or its own."""
        if problem := problem or self.gather_problem:
            raise InputError(
                f"the weights of {type(self.model).__name__} cannot be gathered layer by layer: {problem}; use "
                "weights='whole' in prepare(...)"
            )

    @property
    def has_own_loss(self) -> bool:
        """Whether the user gave a function that makes the loss."""
        return self._loss is not None

    def release(self) -> None:
        """Restore the model's own forward, layers and attention."""
        patches = (self._rotary, self._head, self.tiles, self.compiled, self._dense, *self._switches)
        for patched in (self._prepared, self.layers, *patches):
            if patched is not None:
                patched.release()

    @contextmanager
    def plain(self) -> Iterator[nn.Module]:
        """Within, the model computes as before it was prepared, as for evaluation and generation."""
        self._plain += 1
        for switch in self._switches:
            switch.off()
        try:
            yield self.model
        finally:
            self._plain -= 1
            for switch in [] if self._plain else self._switches:
                switch.on()

    def learn(self, forwards: list[Callable[[], Any]], lengths: tuple[int, int], *, is_compared: bool = False) -> None:
        """Learn the rules of the forward's calls from two forwards of one sequence each, of ``lengths`` slots.

        ``is_compared``: packs are compared with single sequences next, at every degree, so some layers may be without
        attention: tokens that meet in them otherwise are noticed.

        Raises:
            InputError: it attends in a way that cannot be sharded.
        """
        if self.by_sequence is not None:
            self._intercept = self.layers.intercept = None
            for forward in forwards:
                forward()
            self.layers.check(self.structure, each_attends=None)
            self.by_sequence.learn(lengths)
            return
        self.masks.use(self.structure.precision())
        seen, state = self._traced(forwards)
        if self.tables.note_traced(max(lengths)):
            self.own_state |= state.names()
            seen, state = self._traced(forwards)
        self.rules = compare(seen[0], seen[1], lengths)
        self.layers.check(self.structure, each_attends=not is_compared)
        note_masks(self.masks, self.rules, seen, model=type(self.model).__name__)
        self._intercept = self._new_intercept(rules=self.rules) if self.rules.is_needed else None
        self.layers.intercept = self._intercept

    def _traced(self, forwards: list[Callable[[], Any]]) -> tuple[list[ForwardCalls], StateBetweenCalls]:
        """The calls of some forwards, and the state of before."""
        self._constants, seen, state = list(self.structure.constants()), [], StateBetweenCalls(self.model)
        for forward in forwards:
            seen.append(ForwardCalls())
            self._intercept = self.layers.intercept = self._new_intercept(seen[-1])
            forward()
            self.layers.end()
            self.tables.note_forward()
        return seen, state

    def grow_tables(self, shard: shards.PackShard, call: CompletedCall) -> None:
        """Let the model make its tables as long as it needs them for a call."""
        if self._intercept is None or not self.tables.may_grow() or self.layers.gather is not None:
            return

        def forward(without: WithoutAttention, num_slots: int) -> None:
            args, kwargs = call.stretched(shard.num_slots, num_slots)
            with self.plain(), self._caches.off(), intercepting(without):
                self._forward(*args, **kwargs)

        self.own_state |= self.tables.grow(shard, self._imported, forward)
        self._constants = list(self.structure.constants())
        self._intercept.use_constants(self._constants)

    def _new_intercept(self, calls: ForwardCalls | None = None, rules: CallRules | None = None) -> InterceptCalls:
        return InterceptCalls(self._constants, imported=self._imported, calls=calls, rules=rules, masks=self.masks)

    def _learn_masks(self, shard: shards.PackShard) -> None:
        """Record masks for the lengths of this micro-batch."""
        if self.masks and shard.alone is not None:
            self.masks.use(self.structure.precision(autocast_dtype(shard.device)))
            new = partial(self._new_intercept, rules=self.rules)
            with self._caches.off():
                learn_masks(self.masks, shard, self.layers, new, self.inputs_of, self._forward)

    def inputs_of(self, micro_batch: MicroBatch) -> dict[str, Any]:
        """The arguments of the forward for a micro-batch."""
        return self._inputs.of(micro_batch)

    @property
    def uses_labels(self) -> bool:
        """Whether this is a transformers model that computes a loss of its own from ``labels``, given here."""
        return self.structure.is_hugging_face and self.make_inputs is None

    def stock_inputs_of(self, micro_batch: MicroBatch) -> dict[str, Any]:
        """The arguments of a stock call on one sequence: tokens and labels, positions only if it needs them."""
        return self._inputs.of_stock_call(micro_batch)

    def loss_of(self, output: Any, micro_batch: MicroBatch) -> Tensor:
        """Return the loss from the output of the forward."""
        if self._loss is not None:
            with user_function(LOSS, micro_batch.shard.device):
                loss = computed(self._loss(output, micro_batch))
            return checked_loss(loss)
        if (loss := loss_in(output)) is not None:
            return cast(Tensor, computed(loss))
        raise InputError(
            f"{type(self.model).__name__} returns no loss; say how to make one: "
            "prepare(..., loss=lambda output, micro_batch: F.cross_entropy(output[0], micro_batch.targets))"
        )

    @errors_spelt(as_option)
    def _forward_micro_batch(self, *args: Any, **kwargs: Any) -> Any:
        if self._plain:
            if self.layers.gather is not None:
                self.layers.begin()
            return self._forward(*args, **kwargs)
        shard = shards.current()
        num_slots = 0 if self.make_inputs is not None else shard.num_slots
        check_arguments(type(self.model).__name__, args, kwargs, num_slots)
        if self._is_frozen:
            check_constant(type(self.model).__name__, args, kwargs)
        shard.gathers.clear()
        shard.counts, shard.dtype = shards.CallCounts(forward=len(shard.passes)), autocast_dtype(shard.device)
        if self.late_changes is not None:
            self.late_changes.check(shard.step)
        with torch.no_grad() if self._is_frozen else nullcontext():
            call = self._inputs.completed(
                shard, args, kwargs, is_frozen=self._is_frozen, is_compared=self.late_changes is not None
            )
            self.layers.begin()
            try:
                return self._pass(shard, call)
            finally:
                self.layers.forget_output()

    def _pass(self, shard: shards.PackShard, call: CompletedCall) -> Any:
        script = shard.script or self.script
        if not torch.is_grad_enabled():
            script = ExchangeScript(calls=script.calls)  # no backward
        forward = shards.ForwardPass(
            script=script, begun=shard.num_exchanges, num_other_targets=call.num_targets,
            num_made_targets=call.num_made_targets,
            is_mean_of_pack=self.by_sequence is None and self.is_mean is not None,
        )  # fmt: skip
        shard.passes.append(forward)
        shard.around_second_forward = self.checkpointing.left_out
        try:
            if not shard.has_failed:
                self.grow_tables(shard, call)
                self._learn_masks(shard)
            if shard.stage_pass is not None:
                shard.stage_pass.begin(self.model, call.kwargs)
                if not shard.stage_pass.is_only:
                    self.layers.late_hooks.check()
            output = None if shard.has_failed else self._compute(shard, call.args, call.kwargs)
        except StageEndError:
            forward.ended = shard.num_exchanges
            return self._outputs.not_computed(shard.num_slots, shard.device)
        except Exception as error:
            if not is_out_of_memory(error):
                frozen, at_once = type(self.model).__name__ if self._is_frozen else "", self.by_sequence is None
                check_frozen(error, frozen, shard.num_slots, len(shard.ids) if at_once else 0)
                raise
            shard.note_out_of_memory(error)
        if shard.has_failed:  # and not before: the error holds on to what was computed
            if self.layers.gather is not None:
                self.layers.gather.abandon_round()
            finish_forward(shard, forward)
            return self._outputs.not_computed(shard.num_slots, shard.device)
        forward.ended, forward.roots = shard.num_exchanges, roots_of([output, shard.gathers], self.layers.last_output)
        self._outputs.note(output, shard.num_slots)
        guard_losses(output, shard, self, is_gathered=self.layers.gather is not None)
        if not self._is_frozen:
            loss = None if self.has_own_loss else loss_in(output)
            forward.noted = NotedLoss(loss, output if self.has_own_loss and self.keeps_output else None)
        return output

    def _compute(self, shard: shards.PackShard, args: Any, kwargs: Any) -> Any:
        with self._caches.off():
            if self.by_sequence is not None:
                return self.by_sequence(shard, args, kwargs)
            with self._balancing.by_sequence(shard):
                return self._call(shard, args, kwargs)

    def _call(self, shard: shards.PackShard, args: Any, kwargs: Any) -> Any:
        if self.uses_labels and self.labels.shifts and not self.labels.takes_shifted:
            targets = kwargs.pop("labels", None)
            output = self._compute_shard(shard, args, kwargs)
            if targets is None:
                return output
            if isinstance(output, tuple):  # return_dict=False
                return loss_of_logits(output[0], targets), *output
            output["loss"] = loss_of_logits(output.logits, targets)
            return output
        return self._compute_shard(shard, args, kwargs)

    def _compute_shard(self, shard: shards.PackShard, args: Any, kwargs: Any) -> Any:
        if (intercept := self._intercept) is not None:
            intercept.shard = shard
        with splitting(shard), intercepting(intercept):
            output = self._forward(*args, **kwargs)
        if intercept is not None:
            intercept.check_complete()
        return output
