"""The settings in which a prepared model is compared with the stock model before training: what plans may compute."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import accumulate
from typing import Any

from torch import nn

from lengthwise.core.head_split import shared_by
from lengthwise.core.pipeline_config import Method
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.loop.synthetic_batches import LENGTHS, has_kinds, traced_lengths
from lengthwise.runtime.wrap.collator import PackCollator
from lengthwise.runtime.wrap.context import ALMOST_ONE

_log = logging.getLogger("lengthwise")

FEW = 2
"""Slots of the first sequence of the short pack, fewer than many degrees."""
LONG = 2048
"""Most slots of a long sequence whose gradients are compared."""
WORK = {"cpu": 5e9, "cuda": 5e12}
"""Parameters times slots up to which a long sequence is compared by gradients: seconds on either device."""
SEEN_FORWARD = 1 << 15
"""Slots up to which the loss of a sequence is compared that crosses a length named in the model's config."""
RECOMPUTE = ("none", "all", "alternate")


class Slots(Enum):
    """Which slots of the corpus sequences are made of."""

    FEW = auto()
    """Those of the first sequence, or of several where they differ."""
    ALL_KINDS = auto()
    """All that differ."""
    ENDS = auto()
    """The first and the last ones of sequences."""


@dataclass(frozen=True, kw_only=True)
class ComputeSetting:
    """One way in which a plan may compute a pack: lengths, degree, recompute and offload."""

    lengths: tuple[int, ...]
    degree: int
    method: Method = Method.ULYSSES
    recompute: str = "none"
    offload: bool = False
    """Whether what layers save is in host memory until their backward."""
    scalar: float = ALMOST_ONE
    gradients: bool = True
    head_groups: int = 1
    """Groups of heads that attention computes one after the other."""
    slots: Slots = Slots.FEW

    def __str__(self) -> str:
        lengths = ", ".join(f"{length:,}" for length in self.lengths)
        layers = {
            "none": "no layer", "all": "every layer", "alternate": "every other layer",
            "selective": "every layer but for its attention",
        }[self.recompute]  # fmt: skip
        shared = "" if self.degree == 1 or self.method is Method.ULYSSES else f" by {self.method}"
        offloaded = ", what layers save in host memory" if self.offload else ""
        groups = "" if self.head_groups == 1 else f", attention in {self.head_groups} groups of heads"
        sequences = f"sequences of {lengths} slots in one pack, degree {self.degree}{shared}{groups}"
        return f"{sequences}, {layers} recomputed{offloaded}"


def short_lengths(collator: PackCollator, max_degree: int = 1) -> tuple[int, ...]:
    """Slots of the sequences of the short pack: ragged, one of them long or several, so that all ranks have slots.

    The first is not the longest, whose positions would be the indices of the pack's slots as far as any sequence goes.
    """
    lengths = collator.compared_lengths or (FEW, *traced_lengths(collator))
    if max_degree <= sum(lengths):
        return lengths
    longest = max_degree if collator.longest is None else max(*lengths, min(collator.longest, max_degree))
    return (*lengths, *[longest] * -(-max_degree // longest))


def settings_of(
    run: PreparedModel,
    *,
    degrees: Sequence[int],
    methods: Sequence[Method] = (Method.ULYSSES,),
    recompute: Sequence[str],
    longest: int | None,
) -> list[ComputeSetting]:
    """List the settings that are compared, short packs first.

    Of degrees between one rank and all, and of methods after the first, only layers of both kinds: the last setting.
    Layers of both kinds are offloaded.
    """
    max_degree = max(degrees)
    lengths = short_lengths(run.collator, max_degree)
    settings = [
        ComputeSetting(
            lengths=lengths, degree=degree, method=method, recompute=name,
            offload=name == recompute[-1] and len(recompute) > 1,
        )
        for degree in degrees
        for method in (methods[:1] if degree == 1 else shared_by(degree, methods))
        for name in (recompute if degree in (1, max_degree) and method is methods[0] else recompute[-1:])
    ]  # fmt: skip
    if len(recompute) == 1:
        settings.append(ComputeSetting(lengths=lengths, degree=1, recompute=recompute[0], offload=True))
    if run.wrapped_model.rules.scalars:
        settings.append(ComputeSetting(lengths=lengths, degree=1, recompute=recompute[0], scalar=0.0))
    if longest is None:
        return settings
    settings += _of_corpus(run, longest, max_degree=max_degree, method=methods[0], recompute=recompute[-1])
    if longest <= max(lengths) or run.collator.compared_lengths:
        return settings
    long = slots_with_gradients(run, longest)
    settings += [
        ComputeSetting(lengths=(5, long), degree=degree, method=method, recompute=recompute[-1])
        for degree in sorted({1, max_degree})
        for method in (methods[:1] if degree == 1 else shared_by(degree, methods))
    ]
    beyond = {min(longest, limit + limit // 8 + 1) for limit in length_limits(run.model) if long <= limit < longest}
    for length in sorted(beyond):
        if length > SEEN_FORWARD:
            _log.warning(
                "sequences of more than %s slots are not compared with the stock model, which computes otherwise "
                "beyond a length that its config names; the corpus has up to %s", f"{SEEN_FORWARD:,}", f"{longest:,}",
            )  # fmt: skip
            break
        settings.append(
            ComputeSetting(lengths=(5, length), degree=max_degree, method=methods[0], recompute="none", gradients=False)
        )
    return settings


def _of_corpus(
    run: PreparedModel, longest: int, *, max_degree: int, method: Method, recompute: str
) -> list[ComputeSetting]:
    """Settings of packs with all slots of the corpus that differ, and with what sequences begin and end with."""
    work, settings = WORK.get(run.world.device.type, WORK["cuda"]), list[ComputeSetting]()
    if kinds := _lengths_of_kinds(run, longest, int(work / max(1, run.num_params))):
        settings += [
            ComputeSetting(lengths=kinds, degree=degree, method=method, recompute=recompute, slots=Slots.ALL_KINDS)
            for degree in sorted({1, max_degree})
            if sum(kinds) >= degree
        ]
    if ends := _lengths_of_borders(run, longest):
        settings.append(ComputeSetting(lengths=ends, degree=1, recompute=recompute, slots=Slots.ENDS))
    return settings


def slots_with_gradients(run: PreparedModel, longest: int) -> int:
    """Slots of the longest sequence whose gradients are compared, of a corpus whose longest has ``longest``."""
    work = WORK.get(run.world.device.type, WORK["cuda"])
    return min(longest, LONG, max(4 * max(LENGTHS), int(work / max(1, run.num_params))))


def _lengths_of_kinds(run: PreparedModel, longest: int, max_slots: int) -> tuple[int, ...]:
    """Lengths of ragged sequences that hold all kinds of slots of the corpus, as far as they can be computed."""
    num_kinds = len(run.collator.kinds.get("tokens", ()))
    if run.wrapped_model.by_sequence is not None or num_kinds < 2 or not has_kinds(run.collator):
        return ()
    lengths, short = [], short_lengths(run.collator)
    left, limit = max(2 * sum(short), min(2 * num_kinds, max_slots)), max(longest, *short)
    while left > 0:
        lengths.append(min(limit, max(2, left - left // 2)))
        left -= lengths[-1]
    return tuple(lengths)


def _lengths_of_borders(run: PreparedModel, longest: int) -> tuple[int, ...]:
    """Lengths of the sequences that meet as those of the corpus may, as many as fit into one pack."""
    lengths = [len(border["tokens"]) for border in run.collator.borders]
    are_compared_whole = run.wrapped_model.by_sequence is not None or bool(run.collator.compared_lengths)
    if are_compared_whole or max(lengths, default=0) > longest:
        return ()
    most_slots = run.wrapped_model.most_slots
    fitting = [most_slots is None or end <= most_slots for end in accumulate(lengths)]
    return tuple(lengths[: sum(fitting)]) if sum(fitting) > 1 else ()


def within(most_slots: int | None, lengths: tuple[int, ...]) -> tuple[int, ...]:
    """The lengths of a pack without those that are too much for it, of which the longest go first; in order."""
    if most_slots is None:
        return lengths
    fitting: set[int] = set()
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        if sum(lengths[other] for other in fitting) + lengths[number] <= most_slots:
            fitting.add(number)
    return tuple(lengths[number] for number in sorted(fitting))


_LIMITS = ("position", "window", "chunk", "block", "local", "span", "max_length", "seq_len", "n_ctx")


def length_limits(model: nn.Module) -> list[int]:
    """Lengths in a model's config beyond which it may compute differently, such as the size of a window."""
    config = getattr(model, "config", None)
    to_dict = getattr(config, "to_dict", None)
    values: dict[str, Any] = to_dict() if callable(to_dict) else {}
    return sorted({value for value in _limits_in(values) if value > max(LENGTHS)})


def _limits_in(values: dict[str, Any]) -> Iterator[int]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _limits_in(value)
        elif type(value) is int and any(part in name for part in _LIMITS):
            yield value
