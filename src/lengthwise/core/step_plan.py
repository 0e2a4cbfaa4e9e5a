"""The plan of one optimizer step: which ranks compute which sequences, and how; all that runtime and simulator get."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from lengthwise.core.batch import GlobalBatch
from lengthwise.core.errors import CheckError, InputError
from lengthwise.core.pipeline_config import (
    GradientShare,
    Method,
    PipelineConfig,
    Strategy,
    WeightShard,
    check_methods,
)
from lengthwise.core.plan_json import micro_batch_from_json, micro_batch_to_json, scheme_from_json, scheme_to_json
from lengthwise.core.plan_values import check_contradictions, check_plan_values
from lengthwise.core.planned_micro_batch import OVERRIDES, PlannedMicroBatch
from lengthwise.core.read_file import brief
from lengthwise.core.token_placement import check_placement

PLAN_SCHEMA_VERSION = 2


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """The devices of one scheme and the micro-batches they run, in issue order; there may be none."""

    ranks: tuple[int, ...]
    scheme: PipelineConfig
    micro_batches: tuple[PlannedMicroBatch, ...]
    phase: int = 0
    """Phases run one after another; within one, pipelines run side by side."""
    state_bytes: int = 0
    """Predicted bytes per device before any token: weights, gradients, optimizer shard."""

    def __post_init__(self) -> None:
        for micro_batch in self.micro_batches:
            for name in ("methods", "recompute", "offload"):
                override = getattr(micro_batch, name)
                if override is not None and (override or name != "offload") and len(override) != self.scheme.num_layers:
                    raise InputError(
                        f"a micro-batch has {len(override)} {name} for {self.scheme.num_layers} layers; give one each"
                    )
            if micro_batch.methods is not None:
                check_methods(micro_batch.methods, self.scheme.degree, self.scheme.weights)
            if self.scheme.zero_bubble or micro_batch.slices:
                self.scheme_of(micro_batch)  # refuses what cannot be split
            if (
                micro_batch.slices
                and (num := sum(s.num_tokens for s in micro_batch.slices)) != micro_batch.pack.num_tokens
            ):
                raise InputError(
                    f"the slices of a micro-batch have {num:,} tokens in all, its pack has "
                    f"{micro_batch.pack.num_tokens:,}; slices cover every token once"
                )
            if micro_batch.placement:
                if micro_batch.slices or micro_batch.pack.padded_to:
                    kind = "in slices" if micro_batch.slices else "of padded sequences"
                    raise InputError(f"a micro-batch {kind} has no placement: ranks share its tokens in equal parts")
                check_placement(micro_batch.pack.computed_lengths, micro_batch.placement, self.scheme.degree)

    def ranks_of(self, stage: int) -> tuple[int, ...]:
        """The ranks that compute ``stage`` together, ascending; their order is that of their shares of tokens."""
        degree = self.scheme.degree
        return tuple(sorted(self.ranks[stage * degree : (stage + 1) * degree]))

    def methods_of(self, micro_batch: PlannedMicroBatch) -> tuple[Method, ...]:
        """One per layer."""
        return self.scheme.methods if micro_batch.methods is None else micro_batch.methods

    def recompute_of(self, micro_batch: PlannedMicroBatch) -> tuple[bool, ...]:
        """One per layer."""
        return self.scheme.recompute if micro_batch.recompute is None else micro_batch.recompute

    def scheme_of(self, micro_batch: PlannedMicroBatch) -> PipelineConfig:
        """The scheme with the micro-batch's own methods, recompute and offload flags, tiles and slices."""
        overrides = {name: value for name in OVERRIDES if (value := getattr(micro_batch, name)) is not None}
        if (slices := max(1, len(micro_batch.slices))) != self.scheme.slices:
            overrides["slices"] = slices
        return replace(self.scheme, **overrides) if overrides else self.scheme


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The decision for one optimizer step."""

    step: int
    policy: str
    pipelines: tuple[Pipeline, ...]
    loss_normaliser: int
    """Target tokens of the whole step: every target's loss weighs one over this, whoever computes it."""
    update_s: float
    """Predicted seconds of push, clip, optimizer and pull that nothing hides."""
    time_s: float
    """Predicted seconds of the whole step."""
    lower_bound_s: float
    """No plan for this batch on this cluster is faster under the same cost model and the same schemes."""
    lr_factor: float = 1.0
    """Multiplies the scheduled learning-rate of this step."""
    switch_s: float = 0.0
    """Predicted seconds between phases, all of them together."""
    hidden_update_s: float = 0.0
    """Predicted seconds of the update that run beneath forwards and backwards."""
    num_devices: int = 0
    """Ranks of the cluster; 0 stands for those that the pipelines of each phase tile. Of more, the last are idle."""

    def __post_init__(self) -> None:
        if self.loss_normaliser < 1:
            raise InputError(f"step {self.step}: loss normaliser must be at least 1, not {self.loss_normaliser}")
        phases = sorted({pipeline.phase for pipeline in self.pipelines})
        if phases != list(range(len(phases))) or not phases:
            raise InputError(f"step {self.step}: phases must count from 0 without gaps; they are {phases}")
        used = {sum(len(p.ranks) for p in self.pipelines_of(phase)) for phase in phases}
        if not self.num_devices:
            if len(used) > 1:
                raise InputError(f"step {self.step}: every phase must tile the same ranks")
            object.__setattr__(self, "num_devices", max(used))
        assert self.strategies, "makes and so checks the strategy of each phase"

    @cached_property
    def strategies(self) -> tuple[Strategy, ...]:
        """The schemes and ranks of the pipelines of each phase."""
        pipelines_of_phase: dict[int, list[Pipeline]] = {}
        for pipeline in self.pipelines:
            pipelines_of_phase.setdefault(pipeline.phase, []).append(pipeline)
        return tuple(
            Strategy(
                schemes=tuple(p.scheme for p in pipelines_of_phase[phase]),
                ranks=tuple(p.ranks for p in pipelines_of_phase[phase]),
                num_idle=self.num_devices - sum(len(p.ranks) for p in pipelines_of_phase[phase]),
            )
            for phase in sorted(pipelines_of_phase)
        )

    @property
    def num_phases(self) -> int:
        """Phases of the step; 1 unless the strategy changes within it."""
        return len(self.strategies)

    @property
    def strategy_words(self) -> str:
        """The pipelines in words, phase by phase: ``1 x <16,1> ulysses r40 + 6 x <8,1> ulysses``; and idle devices."""
        phases = []
        for strategy in self.strategies:
            names = [scheme.name for scheme in strategy.schemes]
            words = " + ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
            used = strategy.num_devices - strategy.num_idle
            phases.append(words + f" on {used:,} of {strategy.num_devices:,} devices" * bool(strategy.num_idle))
        return ", then ".join(phases)

    @property
    def num_used(self) -> int:
        """Ranks that are in a pipeline in some phase; the others are idle throughout."""
        return self.num_devices - min(strategy.num_idle for strategy in self.strategies)

    @property
    def gap(self) -> float:
        """How far the predicted time is above the proven lower bound, as a share of the bound."""
        return self.time_s / self.lower_bound_s - 1.0 if self.lower_bound_s else 0.0

    @property
    def num_computed_tokens(self) -> int:
        """Tokens that the forwards compute, padding included."""
        return sum(m.pack.num_tokens for pipeline in self.pipelines for m in pipeline.micro_batches)

    @property
    def padding_fraction(self) -> float:
        """Share of the computed tokens that is padding."""
        real = sum(sum(m.pack.lengths) for pipeline in self.pipelines for m in pipeline.micro_batches)
        return 1.0 - real / self.num_computed_tokens if self.num_computed_tokens else 0.0

    def pipelines_of(self, phase: int) -> tuple[Pipeline, ...]:
        """Pipelines that run side by side in ``phase``."""
        return tuple(pipeline for pipeline in self.pipelines if pipeline.phase == phase)

    def holdings(self, phase: int) -> tuple[WeightShard | None, ...]:
        """The weights that each rank computes with in ``phase``; None: its pipeline has no micro-batch."""
        shards: list[WeightShard | None] = [None] * self.num_devices
        for pipeline in self.pipelines_of(phase):
            for stage in range(pipeline.scheme.num_stages if pipeline.micro_batches else 0):
                for place, rank in enumerate(pipeline.ranks_of(stage)):
                    shards[rank] = pipeline.scheme.holding(stage, place)
        return tuple(shards)

    def gradient_shares(self, phase: int) -> tuple[GradientShare | None, ...]:
        """What each rank keeps of the gradients of the weights that it computes with in ``phase``; None: all."""
        shares: list[GradientShare | None] = [None] * self.num_devices
        for pipeline in self.pipelines_of(phase):
            for stage in range(pipeline.scheme.num_stages if pipeline.micro_batches else 0):
                for place, rank in enumerate(pipeline.ranks_of(stage)):
                    shares[rank] = pipeline.scheme.gradient_share(place)
        return tuple(shares)

    def check_covers(self, batch: GlobalBatch) -> None:
        """Raise ``CheckError`` unless the plan computes every sequence of ``batch`` exactly once, at its length."""
        planned = Counter(
            item
            for pipeline in self.pipelines
            for m in pipeline.micro_batches
            for item in zip(m.pack.ids, m.pack.lengths)
        )
        wanted = Counter(zip(batch.ids, batch.lengths))
        if not dict.__eq__(planned, wanted):  # no count is 0; Counter compares one by one in Python
            lost, extra = sorted((wanted - planned).elements()), sorted((planned - wanted).elements())
            raise CheckError(f"plan for step {self.step} loses {lost[:5]} and adds {extra[:5]} (id, length)")
        if self.loss_normaliser != max(1, batch.num_targets):
            raise CheckError(
                f"plan for step {self.step} divides the loss by {self.loss_normaliser}; "
                f"the batch has {batch.num_targets} targets"
            )

    @cached_property
    def digest(self) -> str:
        """Sixteen hex digits over the whole plan; equal on every rank, or the ranks must not run it."""
        state = hashlib.blake2b(repr([_plain(getattr(self, name)) for name in _PLAIN_FIELDS]).encode(), digest_size=8)
        names: dict[Any, str] = {}  # schemes and overrides repeat: their many words are written once

        def name(value: Any) -> str:
            if value not in names:
                names[value] = repr(value)
            return names[value]

        for p in self.pipelines:
            slices = f"c{p.scheme.slices}" if p.scheme.slices > 1 else ""
            state.update(f"{p.ranks}{p.phase}/{p.state_bytes}{name(p.scheme)}{slices}".encode())
            for m in p.micro_batches:
                pack, sizes = m.pack, (_plain(m.time_s), _plain(m.comm_s), _plain(m.peak_bytes))
                overrides = name(m.methods) + name(m.recompute) if m.methods or m.recompute else ""
                if m.offload is not None or m.tile_tokens is not None:
                    overrides += f"{name(m.offload)}{m.tile_tokens}"
                overrides += "" if m.head_groups is None else f"g{m.head_groups}"
                overrides += f"w{_plain(m.weights_s)!r}" if m.weights_s else ""
                if p.scheme.keep_attention or m.keep_attention is not None:
                    overrides += f"a{p.scheme.keep_attention}{m.keep_attention}"
                overrides += "".join(f"c{tokens}@{_plain(time_s)!r}" for tokens, time_s in m.slices)
                overrides += f"p{[[tuple(piece) for piece in pieces] for pieces in m.placement]}" if m.placement else ""
                shape = f"{pack.padded_to}x{pack.rows}" if pack.rows else pack.padded_to
                filler = f"+{pack.filler}" if pack.filler else ""
                state.update(f"{pack.ids}{pack.lengths}{shape}{filler}{sizes}{overrides}".encode())
        if self._has_idle:
            state.update(f"of {self.num_devices}".encode())
        return state.hexdigest()

    def to_json(self) -> dict[str, Any]:
        """A JSON document that :meth:`from_json` turns back into an equal plan."""
        return {"schema_version": PLAN_SCHEMA_VERSION, "digest": self.digest, **self._document()}

    @property
    def _has_idle(self) -> bool:
        return any(strategy.num_idle for strategy in self.strategies)

    def _document(self) -> dict[str, Any]:
        schemes = list(dict.fromkeys(pipeline.scheme for pipeline in self.pipelines))
        return {
            **{name: getattr(self, name) for name in _PLAIN_FIELDS},
            **({"num_devices": self.num_devices} if self._has_idle else {}),
            **({"hidden_update_s": float(self.hidden_update_s)} if self.hidden_update_s else {}),
            "schemes": [scheme_to_json(scheme) for scheme in schemes],
            "pipelines": [
                {
                    "ranks": list(pipeline.ranks),
                    "phase": pipeline.phase,
                    "scheme": schemes.index(pipeline.scheme),
                    "state_bytes": pipeline.state_bytes,
                    "micro_batches": [micro_batch_to_json(m) for m in pipeline.micro_batches],
                }
                for pipeline in self.pipelines
            ],
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> "StepPlan":
        """The plan that :meth:`to_json` wrote, or one written by hand, which needs no digest.

        Raises:
            InputError: another schema version, a missing or a wrong field.
            CheckError: the content does not match its digest.
        """
        if not isinstance(document, dict):
            raise InputError(f"a plan is an object, not {brief(document)}")
        if (version := document.get("schema_version")) != PLAN_SCHEMA_VERSION:
            raise InputError(f"plan schema {brief(version)}, this version reads {PLAN_SCHEMA_VERSION}; plan again")
        try:
            check_plan_values(document)
            if "digest" not in document:
                check_contradictions(document)
        except InputError as error:
            raise InputError(f"not a plan: {error}") from None
        try:
            schemes = [scheme_from_json(scheme) for scheme in document["schemes"]]
            plan = cls(
                pipelines=tuple(
                    Pipeline(
                        ranks=tuple(pipeline["ranks"]),
                        phase=pipeline["phase"],
                        scheme=schemes[pipeline["scheme"]],
                        state_bytes=pipeline["state_bytes"],
                        micro_batches=tuple(map(micro_batch_from_json, pipeline["micro_batches"])),
                    )
                    for pipeline in document["pipelines"]
                ),
                num_devices=document.get("num_devices", 0),
                hidden_update_s=document.get("hidden_update_s", 0.0),
                **{name: document[name] for name in _PLAIN_FIELDS},
            )
        except (KeyError, TypeError, IndexError) as error:
            raise InputError(f"not a plan: {type(error).__name__} {error}") from None
        if (written := document.get("digest", plan.digest)) != plan.digest:
            raise CheckError(
                f"plan for step {plan.step} has digest {plan.digest}, its file says {brief(written)[1:-1]}: the file "
                "was changed after it was written; plan again, or take the digest out if the change is meant"
            )
        return plan


_PLAIN_FIELDS = ("step", "policy", "loss_normaliser", "update_s", "time_s", "lower_bound_s", "lr_factor", "switch_s")


def _plain(value: Any) -> Any:
    """A NumPy float as Python's, which is spelt as the one that comes back from a file."""
    return float(value) if isinstance(value, float) else value


def most_devices(plans: Sequence[StepPlan]) -> int:
    """The most devices of any plan: a run that went on with other ranks has plans of several numbers."""
    return max(plan.num_devices for plan in plans)


def step_with_other_devices(plans: Sequence[StepPlan]) -> int | None:
    """The first step that is of another number of devices than the step before it; None: all have the same."""
    pairs = pairwise(plans)
    return next((plan.step for before, plan in pairs if plan.num_devices != before.num_devices), None)


def check_layers(plans: Iterable[StepPlan], num_layers: int, *, model: str) -> None:
    """Raise ``InputError`` if plans share out another number of layers than ``model`` has."""
    for plan in plans:
        if (shared := plan.pipelines[0].scheme.num_layers) != num_layers:
            raise InputError(
                f"the plans share out {shared} layers, model {model} has {num_layers}; name the model that they were "
                "made for: one of other sizes than its preset by a folder that holds a config.json with them"
            )
