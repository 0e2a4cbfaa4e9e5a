"""A step of a prepared model on the ranks of a pool, and the same step by the loop its user had before."""

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from itertools import accumulate, pairwise, zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lengthwise.config.optimizer_settings import OptimizerSettings
from lengthwise.core.batch import NEXT_TOKEN, GlobalBatch, Pack
from lengthwise.core.pipeline_config import HEAD_GROUP_METHODS, Method, uniform_scheme
from lengthwise.core.planned_micro_batch import PlannedSlice
from lengthwise.core.step_plan import Pipeline, StepPlan
from lengthwise.core.step_plan import PlannedMicroBatch as Planned
from lengthwise.runtime.comm.group import Group
from lengthwise.runtime.comm.world import DistContext
from lengthwise.runtime.loop.run import Run
from lengthwise.runtime.models.targets import TokenMasking
from lengthwise.runtime.train.micro_batch_tensors import feed
from lengthwise.runtime.verify.gradient_check import check_exact
from lengthwise.runtime.verify.stage_check import check_stages
from lengthwise.runtime.wrap.collator import PackCollator
from lengthwise.runtime.wrap.context import PackShard, active
from lengthwise.runtime.wrap.micro_batch import MicroBatch
from lengthwise.runtime.wrap.wrapped_model import WrappedModel
from tests.runtime.harness import COMPARES, where_asked
from tests.runtime.loop.memory_runs import run_of
from tests.runtime.train.runs import local_world

os.environ["HF_HUB_OFFLINE"] = "1"
EXACT = 1e-10
"""float64: sums in another order differ by rounding alone."""
VOCAB = 37
LENGTHS = (13, 5, 21, 1, 8, 30, 2, 9, 3, 17)
"""Ragged; one token; fewer tokens than the degree."""
DENSE = OptimizerSettings(name="sgd", momentum=0.0, weight_decay=0.0)


@dataclass(frozen=True, kw_only=True)
class Packs:
    """Packs of one group of ranks, and which layers recompute."""

    ranks: tuple[int, ...]
    packs: tuple[tuple[int, ...], ...]
    recompute: tuple[bool, ...] = ()
    """Of all packs but the first."""
    phase: int = 0
    method: Method | None = None
    """How the ranks share sequences; None: by Ulysses."""
    stage_layers: tuple[int, ...] = ()
    """Layers of each stage; none: one stage."""
    shards_gradients: bool = False
    """Whether the ranks of a stage keep shares of gradients, if there are several."""
    keeps_attention: bool = False
    """Whether layers that recompute keep what attention gave."""
    head_groups: int = 1
    """Groups of heads that attention computes in turn, where the method can."""
    splits: bool = False
    """Whether stages split their backwards, if there are several."""
    slice_sizes: tuple[tuple[int, ...], ...] = ()
    """Tokens of the slices of each pack, none for one that is not cut; none at all: no pack is cut."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A user's model and loop: ``build`` and the losses are functions of a module, so that ranks can be sent them."""

    build: Callable[[], nn.Module]
    sum_of_losses: Callable[[nn.Module, np.ndarray, Tensor], Tensor]
    """Of one sequence alone: the model as it was, the sequence as the corpus has it, and its targets."""
    loss: Callable[[Any, MicroBatch], Tensor] | None = None
    inputs: Callable[[MicroBatch], dict[str, Any]] | None = None
    objective: str = NEXT_TOKEN
    masking: TokenMasking | None = None
    collator: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    sequences: "Source | None" = None


class Source:
    """Sequences of tokens that depend on the sequence alone."""

    def __init__(self, lengths: tuple[int, ...] = LENGTHS, vocab_size: int = VOCAB) -> None:
        self.lengths, self._vocab_size = lengths, vocab_size

    def tokens(self, sequence: int) -> np.ndarray:
        return np.random.default_rng(sequence).integers(0, self._vocab_size, self.lengths[sequence])


class Frames(Source):
    """Sequences of frames, ``[frames, places, channels]``; lengths count places."""

    def __init__(self, num_frames: tuple[int, ...], places: int, channels: int) -> None:
        super().__init__(tuple(number * places for number in num_frames))
        self._places, self._channels = places, channels

    def tokens(self, sequence: int) -> np.ndarray:
        shape = (self.lengths[sequence] // self._places, self._places, self._channels)
        return np.random.default_rng(sequence).standard_normal(shape)


def randomised(model: nn.Module, seed: int = 0) -> nn.Module:
    """In float64, its parameters large enough that every part of it matters."""
    model.double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model


@contextmanager
def in_double() -> Iterator[None]:
    """Nothing is cast to float32.

    Transformers computes norms and rotations in float32 whatever a model's dtype: a difference of 1e-16 that crosses a
    rounding of float32 would become one of 1e-8.
    """
    to, softmax = Tensor.to, F.softmax

    @wraps(to)
    def to_double(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in kwargs.items()}
        return to(self, *(torch.float64 if each is torch.float32 else each for each in args), **kwargs)

    @wraps(softmax)
    def softmax_in_double(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = x.dtype
        return softmax(x, *args, **kwargs)

    Tensor.to, Tensor.float = to_double, Tensor.double  # type: ignore[method-assign]
    F.softmax = softmax_in_double
    try:
        yield
    finally:
        del Tensor.to, Tensor.float
        F.softmax = softmax


def cross_entropy(output: Any, micro_batch: MicroBatch) -> Tensor:
    """In the dtype of the model, where transformers would take float32."""
    return F.cross_entropy(output.logits[0], micro_batch.targets)


def plan_of(batch: GlobalBatch, groups: tuple[Packs, ...], num_layers: int) -> StepPlan:
    pipelines = []
    for group in groups:
        degree = len(group.ranks) // max(1, len(group.stage_layers))
        splits = group.splits and len(group.stage_layers) > 1
        packs = [Pack(ids=ids, lengths=tuple(batch.lengths[i] for i in ids)) for ids in group.packs]
        recompute = (*group.recompute, *[False] * num_layers)[:num_layers]
        offload = tuple(layer % 2 == 0 for layer in range(num_layers))  # of every other pack
        planned = [
            Planned(
                pack=pack, time_s=1.0, peak_bytes=0, recompute=recompute if number else None,
                offload=offload if number % 2 and not splits else None,
                weights_s=(0.0, 0.3, 0.1)[number % 3] if splits else 0.0,
                slices=tuple(PlannedSlice(size, float(size)) for size in sizes),
            )
            for number, (pack, sizes) in enumerate(zip_longest(packs, group.slice_sizes, fillvalue=()))
        ]  # fmt: skip
        method = Method.DENSE if degree == 1 else group.method or Method.ULYSSES
        scheme = uniform_scheme(num_layers, degree=degree, method=method, recomputed=min(1, num_layers))
        scheme = replace(scheme, stage_layers=group.stage_layers or scheme.stage_layers)
        shards_gradients = group.shards_gradients and degree > 1
        scheme = replace(
            scheme, shard_gradients=shards_gradients and not splits, zero_bubble=splits,
            keep_attention=group.keeps_attention, head_groups=group.head_groups if method in HEAD_GROUP_METHODS else 1,
        )  # fmt: skip
        pipelines.append(
            Pipeline(ranks=group.ranks, phase=group.phase, scheme=scheme, micro_batches=tuple(planned))
        )  # fmt: skip
    return StepPlan(
        step=batch.step, policy="by hand", pipelines=tuple(pipelines), loss_normaliser=batch.num_targets, update_s=0.0,
        time_s=1.0, lower_bound_s=1.0,
    )  # fmt: skip


@dataclass(kw_only=True)
class Stream:
    """The same sequences in every step."""

    case: Case
    step: int = 0

    def __next__(self) -> GlobalBatch:
        lengths = source_of(self.case).lengths
        batch = GlobalBatch(
            step=self.step, ids=tuple(range(len(lengths))), lengths=lengths, objective=self.case.objective
        )
        self.step += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {}


def source_of(case: Case) -> Source:
    return case.sequences or Source()


def prepared(
    case: Case,
    groups: tuple[Packs, ...],
    world: DistContext,
    *,
    num_steps: int = 1,
    seed: int = 0,
    by_layer: bool = False,
    num_kept: int = 0,
    compares_stages: bool = True,
) -> Run:
    """The run of a case, its model learned, and compared with the stock one under ``with_check`` as by ``prepare``.

    ``compares_stages``: also elsewhere, a plan's stages are compared with the model before they are computed.
    """
    model = case.build()
    wrapped_model = WrappedModel(model, objective=case.objective, loss=case.loss, inputs=case.inputs, **case.options)
    run = run_of(
        wrapped_model, world, stream=Stream(case=case),
        planner=lambda batch: plan_of(batch, groups, wrapped_model.structure.num_layers),
        collator=PackCollator(source=source_of(case), objective=case.objective, masking=case.masking, **case.collator),
        optimizer=DENSE, lr=lambda step: 1.0, clip_norm=0.0, num_steps=num_steps, seed=seed,
        by_layer=by_layer,
    )  # fmt: skip
    run.check_stages = partial(check_stages, run) if compares_stages else partial(where_asked, check_stages, run)
    run.wrapped_model.layers.may_keep_attention |= any(group.keeps_attention for group in groups)
    if COMPARES:
        methods = tuple(dict.fromkeys([Method.ULYSSES, *(group.method for group in groups if group.method)]))
        check_exact(run, methods=methods, longest=max(source_of(case).lengths) // run.collator.slot_tokens)
    if by_layer:
        run.keep_layers = lambda plan: num_kept
    return run


def step_on_ranks(case: Case, groups: tuple[Packs, ...], **options: Any) -> Any:
    """Losses, and the change of every weight, after steps of the user's own loop on a prepared model.

    ``options``: see :func:`prepared`.
    """
    with in_double():
        return _step_on_ranks(case, groups, **options)


def _step_on_ranks(case: Case, groups: tuple[Packs, ...], **options: Any) -> Any:
    run = prepared(case, groups, local_world(), **options)
    with run.plain():
        before = {name: value.detach().clone() for name, value in run.model.named_parameters()}
    losses = train(run)
    with run.plain():
        changes = {name: value.detach() - before[name] for name, value in run.model.named_parameters()}
    run.close()
    return losses, changes


def train(run: Run) -> list[float]:
    losses = []
    for step in run.steps():
        for micro_batch in step:
            loss = run.wrapped_model.loss_of(run.model(**micro_batch.inputs), micro_batch)
            step.backward(loss)
        losses.append(step.update().loss)
    return losses


def step_alone(case: Case) -> tuple[float, dict[str, Tensor]]:
    """The same of one process, one sequence at a time, with the model as it was."""
    with in_double():
        model, source = case.build(), source_of(case)
    batch = next(Stream(case=case))
    total = 0.0
    for sequence, length in zip(batch.ids, batch.lengths):
        pack = Pack(ids=(sequence,), lengths=(length,))
        if source.tokens(sequence).ndim == 1:
            fed = feed(source, pack, torch.device("cpu"), masking=case.masking)
            tokens, targets = fed.tokens_T.numpy(), fed.targets_T
        else:
            tokens, targets = source.tokens(sequence), torch.empty(0)
        with in_double():
            loss = case.sum_of_losses(model, tokens, targets)
        loss.backward()
        total += loss.item()
    none = torch.zeros(())
    grads = {name: (p.grad if p.grad is not None else none) / batch.num_targets for name, p in model.named_parameters()}
    return total / batch.num_targets, {name: -grad for name, grad in grads.items()}


def alone(case: Case) -> tuple[float, dict[str, Tensor]]:
    """:func:`step_alone`, once for all ranks and tests of a case."""
    for other, result in _ALONE:
        if other is case:
            return result
    _ALONE.append((case, step_alone(case)))
    return _ALONE[-1][1]


_ALONE: deque[tuple[Case, tuple[float, dict[str, Tensor]]]] = deque(maxlen=16)


def assert_exact(case: Case, found: tuple[list[float], dict[str, Tensor]], what: str = "") -> None:
    """``found`` is what the user's own loop gives."""
    expected, changes = alone(case)
    (loss, *_), got = found
    assert abs(loss - expected) <= EXACT * max(1.0, abs(expected)), (what, loss, expected)
    largest = max(float(change.abs().max()) for change in changes.values())
    assert largest > 1e-3, f"{what} learns nothing"
    for name, change in changes.items():
        error = float((got[name] - change).abs().max())
        assert error <= EXACT * max(1.0, largest), f"{what}: {name} is {error:.1e} off, largest change {largest:.1e}"


def shard_of(lengths: tuple[int, ...], *, rank: int = 0, degree: int = 1, **options: Any) -> PackShard:
    """Of one rank of a group that cannot talk: for what needs no other rank."""
    given = {"step": 0, "seed": 0, "ids": tuple(range(len(lengths))), **options}
    group = Group(rank=rank, ranks=tuple(range(degree)))
    return PackShard(cu_seqlens=(0, *accumulate(lengths)), group=group, device=torch.device("cpu"), **given)


def micro_batch_of(lengths: tuple[int, ...], **options: Any) -> MicroBatch:
    """The micro-batch of :func:`shard_of`, with tokens of the corpus."""
    shard = shard_of(lengths, **options)
    by_id = dict(zip(shard.ids, lengths))
    source = Source(tuple(by_id.get(sequence, 0) for sequence in range(max(by_id) + 1)))
    collator = PackCollator(source=source, objective=NEXT_TOKEN)
    return MicroBatch(shard, Pack(ids=shard.ids, lengths=lengths), collator, make_inputs=lambda micro_batch: {})


def packed(model: nn.Module, shard: PackShard, **options: Any) -> Any:
    """The forward of a prepared model on the sequences of a shard of degree 1."""
    lengths = [end - start for start, end in pairwise(shard.cu_seqlens)]
    tokens = np.concatenate([np.random.default_rng(i).integers(0, VOCAB, n) for i, n in zip(shard.ids, lengths)])
    with active(shard):
        if hasattr(model, "config"):
            options = {"position_ids": shard.positions[None], "use_cache": False, **options}
        return model(torch.from_numpy(tokens)[None], **options)


def learned(model: nn.Module, **options: Any) -> WrappedModel:
    """Prepared as far as one process can."""
    wrapped_model = WrappedModel(model, **options)
    wrapped_model.learn([lambda: packed(model, shard_of((11,))), lambda: packed(model, shard_of((7,)))], (11, 7))
    return wrapped_model
