"""Which micro-batch a span of a timeline computes, according to the step's plan."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lengthwise.core.planned_micro_batch import PlannedMicroBatch
from lengthwise.core.step_plan import Pipeline, StepPlan
from lengthwise.core.timeline import Span, Timeline

_NAME = re.compile(r"(forward|backward|weights|micro-batch|data) (\d+)(?:\.(\d+))?")


@dataclass(frozen=True, kw_only=True)
class PlannedPass:
    """A pass of one micro-batch on one rank."""

    position: int
    """Which pipeline of the plan it is."""
    pipeline: Pipeline
    number: int
    """Which micro-batch of the pipeline it is."""
    part: int | None
    """Which slice of the micro-batch, where it is cut."""
    stage: int
    place: int
    """Where the rank stands among those of its stage."""
    is_backward: bool
    gives_weights: bool
    """Whether it is what is left of a split backward."""
    scheme: str
    """Name of the micro-batch's scheme."""

    @property
    def micro_batch(self) -> PlannedMicroBatch:
        """The micro-batch with its pack and its predicted cost."""
        return self.pipeline.micro_batches[self.number]

    @property
    def name(self) -> str:
        """The number of the micro-batch and, where it is cut, that of its slice."""
        return str(self.number) if self.part is None else f"{self.number}.{self.part}"

    @property
    def details(self) -> dict[str, Any]:
        """Size, scheme and predicted memory of the micro-batch, as arguments of a slice."""
        pack = self.micro_batch.pack
        return {
            "micro-batch": self.number,
            **({} if self.part is None else {"slice": self.part}),
            "pipeline": self.position,
            "stage": self.stage,
            "tokens": pack.num_tokens if self.part is None else self.micro_batch.slices[self.part].num_tokens,
            "sequences": len(pack.ids),
            "longest": max(pack.lengths),
            "scheme": self.scheme,
            "bytes": self.micro_batch.peak_bytes,
        }

    def next_rank(self) -> int | None:
        """The rank that receives what this pass makes; None where nobody does."""
        target = self.stage - 1 if self.is_backward else self.stage + 1
        if self.gives_weights or not 0 <= target < self.pipeline.scheme.num_stages:
            return None
        return self.pipeline.ranks_of(target)[self.place]


def planned_passes(timeline: Timeline, plan: StepPlan | None) -> Iterator[tuple[Span, PlannedPass | None]]:
    """Yield every span, rank by rank in the order of time, with its pass; None: it computes no micro-batch.

    A rank that is in a pipeline of each phase computes them one after another: micro-batch 0 after the backward of
    another micro-batch 0 is that of the next phase.
    """
    spans_of: dict[int, list[Span]] = {}
    for span in sorted(timeline.spans):
        spans_of.setdefault(span.rank, []).append(span)
    roles = _roles(plan)
    schemes: dict[tuple[int, int], str] = {}
    for rank, spans in sorted(spans_of.items()):
        remaining, has_gone_back = roles.get(rank, []), False
        for span in spans:
            match = _NAME.fullmatch(span.name)
            if match is None or not remaining:
                yield span, None
                continue
            word, number, part = match[1], int(match[2]), None if match[3] is None else int(match[3])
            if number == 0 and has_gone_back and word in ("forward", "data"):
                remaining, has_gone_back = remaining[1:] or remaining, False
            has_gone_back |= number == 0 and word == "backward"
            position, pipeline, stage, place = remaining[0]
            if number >= len(pipeline.micro_batches) or (part or 0) > len(pipeline.micro_batches[number].slices):
                yield span, None
                continue
            if (position, number) not in schemes:
                schemes[position, number] = pipeline.scheme_of(pipeline.micro_batches[number]).name
            yield span, PlannedPass(
                position=position, pipeline=pipeline, number=number, part=part, stage=stage, place=place,
                is_backward=word == "backward", gives_weights=word == "weights", scheme=schemes[position, number],
            )  # fmt: skip


def _roles(plan: StepPlan | None) -> dict[int, list[tuple[int, Pipeline, int, int]]]:
    """Rank -> the pipelines in which it computes, phase by phase: position, pipeline, stage and place in the stage."""
    roles: dict[int, list[tuple[int, Pipeline, int, int]]] = {}
    pipelines = enumerate(plan.pipelines if plan else ())
    for position, pipeline in sorted(pipelines, key=lambda item: item[1].phase):
        for stage in range(pipeline.scheme.num_stages if pipeline.micro_batches else 0):
            for place, rank in enumerate(pipeline.ranks_of(stage)):
                roles.setdefault(rank, []).append((position, pipeline, stage, place))
    return roles
