"""The active micro-batch of this rank, as attention, positions and RNG need it.

A model that is not ours is called by code that is not ours, so what it needs beyond its arguments lies here. There is
one at a time in a process. *Slots* are what a pack is made of along the axis that is sharded: tokens, or the frames of
a video. T slots of the pack, t of this rank.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from lengthwise.core.errors import InputError
from lengthwise.core.pipeline_config import HEAD_GROUP_METHODS, Method
from lengthwise.core.prefix_tree import PrefixTree
from lengthwise.runtime.comm.group import Group
from lengthwise.runtime.comm.host_blocks import HostMemoryError
from lengthwise.runtime.models.attention_view import in_order
from lengthwise.runtime.models.products import WeightGradients
from lengthwise.runtime.parallel.attention_blocks import block_tasks
from lengthwise.runtime.parallel.attention_sharing import AttentionSharing
from lengthwise.runtime.parallel.group_exchange import HeadGroups
from lengthwise.runtime.parallel.ring import Ring
from lengthwise.runtime.parallel.slice_attention import PackSlice
from lengthwise.runtime.parallel.stage_shard import StageView
from lengthwise.runtime.parallel.tokens import TokenShards, shard_tokens
from lengthwise.runtime.state.update_overlap import WatchedBackward
from lengthwise.runtime.wrap.exchange_script import AttentionExchange, Event, ExchangeScript, SlotGather
from lengthwise.runtime.wrap.loss_check import NotedLoss
from lengthwise.runtime.wrap.offload_layers import LayerOffload
from lengthwise.runtime.wrap.sequence_means import SequenceMean
from lengthwise.runtime.wrap.stage_pass import StagedForward

CALLS = 1 << 40
"""Numbers of calls of a forward, of all kinds."""
ALMOST_ONE = 1.0 - 2.0**-24
"""The largest uniform number in float32: a draw of it leaves out no layer."""
ALMOST_ZERO = 2.0**-24
"""The smallest one but 0, which is as rare, and for which ``torch.rand(1) > 0.0`` would be false."""


@dataclass
class CallCounts:
    """Numbers of calls since the forward began, by kind; a recomputed layer counts again from where it began."""

    attention: int = 0
    registered: int = 0
    """Attention calls through the registry of transformers."""
    positions: int = 0
    known_places: int = 0
    """Calls that make positions, known by their place in the code."""
    noise: int = 0
    products: int = 0
    """Products of two tensors, such as that of queries and keys."""
    layers: int = 0
    """Layers that a model asks to recompute by itself."""
    forward: int = 0
    """The number of this forward in its micro-batch, from 0, of whatever model."""

    def in_micro_batch(self, call: int) -> int:
        """The number of a call of this forward among those of all forwards of the micro-batch, for random draws."""
        return call + self.forward * CALLS

    @property
    def all_attention(self) -> int:
        """The number of attention calls of whatever kind."""
        return self.attention + self.registered

    def copy(self) -> "CallCounts":
        """Return a copy of the present counts."""
        return replace(self)


@dataclass(kw_only=True)
class ForwardPass:
    """The record of one forward of a prepared model in a micro-batch."""

    script: ExchangeScript
    begun: int
    """The group's number of exchanges when the forward began."""
    backward_script: ExchangeScript | None = None
    """What its backward issues, where another micro-batch's may not; None: what ``script`` says."""
    ended: int | None = None
    """The group's number of exchanges when the forward ended; None: it has not, or by an error."""
    noted: NotedLoss | None = None
    """The loss that the forward stands for; None for a frozen model."""
    num_other_targets: int | None = None
    """The number of targets of the labels that the loop gave it, where that is not the micro-batch's."""
    num_made_targets: int | None = None
    """The number of this rank's targets in labels that ``inputs=`` makes, or the loop changed in place; None: they are
    the micro-batch's."""
    roots: tuple[tuple[GradientEdge, Tensor], ...] = ()
    """The outputs at which a backward without a loss begins, and zeros of their shapes."""
    is_mean_of_pack: bool = False
    """Whether its loss was compared before the run, as the mean over the targets of a pack."""
    sequence_means: list[SequenceMean] = field(default_factory=list)
    """The means of numbers that it returned for each sequence, where they are computed one by one."""


@dataclass(eq=False, kw_only=True)
class PackShard:
    """This rank's slots of one pack."""

    step: int
    seed: int
    ids: tuple[int, ...]
    """Ids of the sequences; padding after them has none."""
    cu_seqlens: tuple[int, ...]
    """Offsets of the sequence boundaries in slots."""
    group: Group
    device: torch.device
    tree: PrefixTree | None = None
    """Where items are units whose sequences share what they begin with: the segments of all of them. What is called a
    sequence of the pack is then a unit."""
    recompute: tuple[bool, ...] = ()
    """One flag per layer, or none for no layer."""
    offload: LayerOffload | None = None
    """Moves what layers save to host memory, as the plan says; None: all of it stays on the device."""
    tile_tokens: int | None = None
    """Slots that feed-forward modules compute at once, 0 for all; None: as the model was prepared."""
    keep_attention: bool = False
    """Whether recomputed layers keep what attention gave, where the model was not prepared so anyway."""
    methods: tuple[Method, ...] = ()
    """The parallel method of each layer; none: Ulysses in all of them."""
    head_groups: int = 1
    """Groups of heads that attention computes one after the other, where heads are split or on one rank."""
    is_causal: bool = False
    """Whether the model predicts next tokens, so that a ring's ranks have equal work on zigzag shards alone."""
    counts: CallCounts = field(default_factory=CallCounts)
    dtype: torch.dtype | None = None
    """The dtype of autocast in the forward; None: it is off."""
    layer: int | None = None
    """The layer that is being computed; None before, between and after layers."""
    attended: list[AttentionExchange | SlotGather] = field(default_factory=list)
    """Each attention over slots so far, and what else ranks exchanged."""
    targets_of: Callable[[], tuple[int, ...]] | None = None
    """Gives the number of targets of every sequence of the pack, whoever holds them."""
    events: list[Event] | None = None
    """Each half of an attention as it comes, where that is to be known."""
    script: ExchangeScript | None = None
    """The script that forwards follow, where it is not the one of the whole model."""
    part: PackSlice | None = None
    """The slice of the pack that is computed; None: all of it is."""
    stage_pass: StagedForward | None = None
    """The stage of a pipeline that this rank computes; None: all layers."""
    passes: list[ForwardPass] = field(default_factory=list)
    """Forwards of prepared models so far."""
    backward_begun: int | None = None
    """Exchanges of the group when the backward began."""
    read_digest: int = 0
    """A digest of what was read of the sequences that ranks share."""
    is_finished: bool = False
    """Nobody of the group waits for anything any more."""
    has_noise: bool = True
    """Whether dropout drops and noise is drawn; not where a model is compared with itself."""
    scalar: float = ALMOST_ONE
    """What every draw of a single uniform number gives, on every rank."""
    preserves_rng: bool = False
    """Whether layers draw from torch's own generators, whose states are then kept for layers that recompute."""
    around_second_forward: Callable[[], AbstractContextManager[None]] = nullcontext
    """What a layer that recomputes is computed within in the backward."""
    weight_gradients: WeightGradients | None = None
    """Takes the gradients of weights that the backward leaves for later; None: it leaves none."""
    watched: WatchedBackward | None = None
    """Of the micro-batch whose backward is this rank's last in the step, or whose gradients are reduced to shares."""
    has_failed: bool = False
    """This rank ran out of memory in it."""
    host_bytes: int = 0
    """Host memory that offloaded activations needed at least, where that ran out."""
    gathers: list[Tensor] = field(default_factory=list)
    """What was gathered from all ranks, whose backward is issued even if no loss depends on it."""
    alone: Callable[[int], Any] | None = None
    """Makes a micro-batch of the sequence with this number in the pack, all of it on this rank."""
    micro_batch: Any = field(default=None, repr=False)
    """The micro-batch that was made of it."""
    _stages: dict[bool, StageView] = field(default_factory=dict)
    """The stages of causal and of other attentions."""

    def alone_with(
        self, ids: tuple[int, ...], cu_seqlens: tuple[int, ...], tree: PrefixTree | None = None
    ) -> "PackShard":
        """A shard of sequences of this micro-batch that this rank computes alone."""
        return PackShard(
            step=self.step, seed=self.seed, ids=ids, cu_seqlens=cu_seqlens, group=Group(rank=0), device=self.device,
            tree=tree, dtype=self.dtype, has_noise=self.has_noise, scalar=self.scalar,
        )  # fmt: skip

    @cached_property
    def stage(self) -> StageView:
        """Which rank of the group holds which slots of the pack, or of the slice that is computed."""
        is_zigzag = self.is_causal and any(method is not Method.ULYSSES for method in self.methods)
        computed = self.cu_seqlens if self.part is None else self.part.cu_seqlens
        view = in_order(computed, causal=False, tree=self.tree)
        return StageView(
            view=view,
            shards=shard_tokens(view.cu_seqlens, degree=self.group.size, causal=is_zigzag),
            group=self.group,
            device=self.device,
            make_tables=lambda offsets: None,
        )

    def sharing(
        self, *, num_heads: int, num_kv_heads: int, layer: int | None, causal: bool = False
    ) -> AttentionSharing:
        """How the ranks share an attention of so many heads in ``layer``; outside of layers, as in the first."""
        return self._stage(causal).sharing(self._method(layer), num_heads, num_kv_heads)

    def in_head_groups(
        self, *, num_heads: int, num_kv_heads: int, layer: int | None, causal: bool = False
    ) -> HeadGroups | None:
        """The groups of heads in which attention in ``layer`` is computed; None: all heads are at once."""
        if self.head_groups == 1 or self._method(layer) not in HEAD_GROUP_METHODS:
            return None
        return self._stage(causal).in_head_groups(self.head_groups, num_heads, num_kv_heads)

    def _stage(self, causal: bool) -> StageView:
        if causal not in self._stages:
            self._stages[causal] = replace(self.stage, view=replace(self.stage.view, causal=causal))
        return self._stages[causal]

    def _method(self, layer: int | None) -> Method:
        # Teachers may have more layers than the model that plans are for.
        return self.methods[min(layer or 0, len(self.methods) - 1)] if self.methods else Method.ULYSSES

    @cached_property
    def ring_alone(self) -> Ring:
        """A causal attention of the whole pack on one rank, as tasks: of sequences that share what they begin with."""
        view = replace(self.stage.view, causal=True)
        shards = TokenShards(places=(np.arange(view.num_tokens),))
        tasks = block_tasks(view, shards, rank=0, source=0)
        return Ring(group=Group(rank=0), sizes=shards.sizes, tasks=(tasks,))

    @cached_property
    def places(self) -> np.ndarray:
        """[t] places in the pack of this rank's slots."""
        places = self.stage.shards.places[self.group.rank]
        return places if self.part is None else places + self.part.tokens.start

    @cached_property
    def offsets(self) -> np.ndarray:
        """[T] position in its sequence of each slot of the pack."""
        return in_order(self.cu_seqlens, causal=False, tree=self.tree).offsets

    @property
    def num_slots(self) -> int:
        """The number t of slots on this rank."""
        return len(self.places)

    @cached_property
    def positions(self) -> Tensor:
        """[t] position in its sequence of each slot of this rank."""
        return self._own(self.offsets)

    @property
    def has_sums(self) -> bool:
        """Whether sums over sequences have a backward, in which all ranks of the group exchange their gradients."""
        return any(forward.backward_script is not None for forward in self.passes)

    @property
    def num_exchanges(self) -> int:
        """All exchanges of the group that this rank has taken part in."""
        return self.group.sent.calls["all_to_all"] + self.group.sent.calls["ring"]

    @property
    def lengths(self) -> list[int]:
        """The number of slots of each sequence, without padding."""
        return [end - start for start, end in pairwise(self.cu_seqlens)][: len(self.ids)]

    @cached_property
    def longest(self) -> int:
        """The number of slots of the longest sequence."""
        if self.tree is not None:
            return 1 + int(self.tree.positions.max())
        return max(end - start for start, end in pairwise(self.cu_seqlens))

    @cached_property
    def sequences(self) -> Tensor:
        """[t] id of the sequence of each slot of this rank; -1 for padding."""
        ids = [*self.ids, *[-1] * (len(self.cu_seqlens) - 1 - len(self.ids))]
        return self._own(np.repeat(ids, np.diff(self.cu_seqlens)))

    @cached_property
    def num_unpadded(self) -> int:
        """The number of slots of this rank that are no padding, without waiting for the device."""
        is_padding = np.arange(len(self.cu_seqlens) - 1) >= len(self.ids)
        return int((~np.repeat(is_padding, np.diff(self.cu_seqlens)))[self.places].sum())

    @cached_property
    def num_members(self) -> Tensor:
        """[t] float64: how many sequences each slot of this rank is part of; 0 for padding."""
        if self.tree is None:
            return (self.sequences >= 0).double()
        return self._own(self.tree.summed(np.ones(len(self.tree.leaves))))

    @cached_property
    def inverse_lengths(self) -> Tensor:
        """[t] float64: the sum of 1 / length over the sequences that each slot of this rank is part of."""
        if self.tree is not None:
            return self._own(self.tree.summed(1.0 / self.tree.lengths))
        lengths = np.diff(self.cu_seqlens)
        return self._own(np.repeat(1.0 / np.maximum(lengths, 1), lengths))

    def _own(self, values_T: np.ndarray) -> Tensor:
        """This rank's slots of values of the pack."""
        return torch.from_numpy(values_T[self.places]).to(self.device)

    def note_attention(self, out: Tensor) -> None:
        """Record an attention over slots with output ``out`` among the events, and later its backward."""
        self.note_exchange(out, self.counts.all_attention - 1)

    def note_exchange(self, out: Tensor, number: int) -> None:
        """Record exchange ``number`` of slots with output ``out`` among the events, and later its backward."""
        events = self.events
        if events is not None:
            events.append(("forward", number))
            if out.requires_grad:
                out.register_hook(lambda gradient: events.append(("backward", number)))

    def num_targets(self) -> tuple[int, ...]:
        """The number of targets between each two :attr:`cu_seqlens`; padding has none."""
        assert self.targets_of is not None, "a micro-batch was made of it"
        counts = iter(self.targets_of())
        padded = (*self.ids, *[-1] * (len(self.cu_seqlens) - 1 - len(self.ids)))
        return tuple(next(counts) if sequence >= 0 else 0 for sequence in padded)

    def forget_losses(self) -> None:
        """Let go of the losses of forwards, which were compared with what the loop handed over."""
        for forward in self.passes:
            forward.noted = None
            forward.sequence_means.clear()

    def note_out_of_memory(self, error: Exception) -> None:
        """Record that this rank ran out of memory, of its device or of its host."""
        self.has_failed, self.host_bytes = True, error.num_bytes if isinstance(error, HostMemoryError) else 0

    def is_recomputed(self, layer: int) -> bool:
        """Whether a layer saves only its input and is computed again in the backward."""
        return bool(self.recompute) and self.recompute[layer]


_shards: list[PackShard] = []


def current() -> PackShard:
    """Return the active micro-batch.

    Raises:
        InputError: there is none.
    """
    if not _shards:
        raise InputError(
            "the prepared model was called outside of a micro-batch, where it cannot know whose tokens it has; call it "
            "in `for micro_batch in step`, or as it was before: with run.plain(): model(...)"
        )
    return _shards[-1]


def is_active() -> bool:
    """Whether a micro-batch is active."""
    return bool(_shards)


@contextmanager
def active(shard: PackShard) -> Iterator[PackShard]:
    """Within, ``shard`` is the active micro-batch."""
    _shards.append(shard)
    try:
        yield shard
    finally:
        _shards.remove(shard)
