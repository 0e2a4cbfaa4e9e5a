"""What a rank owns as the optimizer sees it: segments of parameters that are treated alike, and their update."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lengthwise.config.optimizer_settings import OptimizerSettings
from lengthwise.core.errors import InputError
from lengthwise.core.layout import Interval
from lengthwise.core.wording import counted
from lengthwise.runtime.state.absent_parameter import AbsentParameter
from lengthwise.runtime.state.borrowed_parameters import borrowed
from lengthwise.runtime.state.optimizer import make_optimizer, step_once
from lengthwise.runtime.state.parameter_groups import note_rates, set_learning_rate
from lengthwise.runtime.state.sharded_weights import ShardedWeights
from lengthwise.runtime.state.table import ParameterTable


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Contiguous elements of this rank's share that the optimizer treats alike."""

    name: str
    """Of the unit, or of the parameter where parameters are not cut."""
    unit: int
    parameter: nn.Parameter
    """What the optimizer has: a view of ``master``, whose gradient is ``pushed`` where that has the same dtype. An
    optimizer of the user's has the model's own parameter, which borrows the two while it is made and steps."""
    master: Tensor
    """A view of the master weights."""
    pushed: Tensor
    """A view of the state's."""
    decays: bool
    is_outer: bool
    """Whether it is of a parameter outside of all layers, where parameters are not cut."""
    only: str = ""
    """The parameter that it is of; an empty string: it may be of several."""


class _Run(NamedTuple):
    """Where a segment lies in what the rank owns."""

    name: str
    unit: int
    first: int
    last: int
    shape: tuple[int, ...]
    decays: bool
    only: str


def segments_of(
    table: ParameterTable,
    owned: Sequence[Interval],
    *,
    master: Tensor,
    pushed: Tensor,
    by_parameter: bool,
    apart: Collection[str] = (),
    named: Mapping[str, nn.Parameter] | None = None,
) -> list[Segment]:
    """Whole parameters, or runs within each unit that decay alike. Matrices decay, vectors do not.

    ``owned``: the intervals that ``master`` and ``pushed`` are laid out as. ``apart``: parameters that share no run.
    ``named``: the model's parameters, if the optimizer is to have these; they are whole.
    """
    runs: list[_Run] = []
    position = 0
    for start, end in owned:
        for slot in table.slots.values():
            size = min(end, slot.interval[1]) - max(start, slot.interval[0])
            if size <= 0:
                continue
            last, decays, only = position + size, len(slot.shape) > 1, slot.name if slot.name in apart else ""
            run = _Run(str(slot.unit), slot.unit, position, last, (size,), decays, only)
            if by_parameter:
                runs.append(run._replace(name=slot.name, shape=slot.shape, only=slot.name))
            elif runs and (runs[-1].unit, runs[-1].decays, runs[-1].only) == (slot.unit, decays, only):
                runs[-1] = runs[-1]._replace(last=last, shape=(last - runs[-1].first,))
            else:
                runs.append(run)
            position = last
    segments = []
    for run in runs:
        values, pushed_part = (flat[run.first : run.last].view(run.shape) for flat in (master, pushed))
        parameter = nn.Parameter(values) if named is None else named[run.name]
        if pushed.dtype == master.dtype and named is None:
            parameter.grad = pushed_part
        is_outer = by_parameter and run.unit in (0, table.num_units - 1)
        segments.append(
            Segment(
                name=run.name, unit=run.unit, parameter=parameter, master=values, pushed=pushed_part,
                decays=run.decays, is_outer=is_outer, only=run.only,
            )
        )  # fmt: skip
    return segments


NORM_CHUNK = 1 << 24
"""Numbers whose norm is taken at a time."""


def square_sum(values: Tensor) -> Tensor:
    """The sum of the squares of ``values`` in float64, on their device.

    By pieces: of a whole buffer torch 2.11 makes a float64 copy on a GPU, 8 bytes a number.
    """
    norms = torch._foreach_norm(list(values.split(NORM_CHUNK)), 2, dtype=torch.float64)
    return torch.stack(norms).square().sum()


def update_at_once(optimizer: torch.optim.Optimizer, segments: Sequence[Segment], clip: float) -> None:
    """Scale the pushed gradient by ``clip``, and update all segments.

    Of a gradient that is narrower than the weights, one segment at a time has it as precise as these.
    """
    if all(segment.parameter.grad is not None for segment in segments):
        _scale(segments, clip)
        optimizer.step()
        return
    for segment in segments:  # the optimizer leaves out parameters without a gradient
        segment.parameter.grad = segment.pushed.to(segment.parameter.dtype).mul_(clip)
        optimizer.step()
        segment.parameter.grad = None


def update_by_unit(
    optimizer: torch.optim.Optimizer | None, segments: Sequence[Segment], clip: float, num_units: int
) -> Iterator[int]:
    """Scale the pushed gradient by ``clip``, and update one unit after another; gives the number of each."""
    with _without_gradients(segments) as gradients:
        for unit in range(num_units):
            mine = {place: segment for place, segment in enumerate(segments) if segment.unit == unit}
            if optimizer is not None and mine:
                for place, segment in mine.items():
                    segment.parameter.grad = gradients[place]
                update_at_once(optimizer, list(mine.values()), clip)
                for segment in mine.values():
                    segment.parameter.grad = None
            yield unit


def _scale(segments: Sequence[Segment], clip: float) -> None:
    if clip != 1.0:
        for segment in segments:
            segment.pushed.mul_(clip)


class OwnedSegments:
    """The segments of a rank's share with their optimizer."""

    def __init__(self, weights: ShardedWeights, settings: OptimizerSettings, *, pushed: Tensor) -> None:
        """``pushed``: summed gradients, laid out as this rank's share of ``weights``."""
        self._table, self._owned = weights.table, weights.owned_layout.intervals[weights.world.rank]
        self._master, self._pushed, self._settings = weights.master, pushed, settings
        self._apart = frozenset[str]()
        self._named = None if settings.make is None else weights.named
        self.all = self._cut()
        self.optimizer = self._of_model(weights.named) if settings.make is not None else make_optimizer(
            settings,
            decaying=[segment.parameter for segment in self.all if segment.decays],
            others=[segment.parameter for segment in self.all if not segment.decays],
            outer=[segment.parameter for segment in self.all if segment.is_outer],
            on_host=weights.on_host,
        )  # fmt: skip

    def _of_model(self, named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer | None:
        """The user's optimizer, made of all parameters of the model, on every rank alike, as its groups are to be the
        same. It forgets those that others update, which have no values while it is made.
        """
        masters = {segment.name: segment.master for segment in self.all}
        nothing = torch.zeros((), dtype=self._master.dtype, device=self._master.device)
        slots = self._table.slots.values()
        values = [masters[slot.name] if slot.name in masters else nothing.expand(slot.shape) for slot in slots]
        with borrowed([named[slot.name] for slot in slots], values):
            return make_optimizer(
                self._settings,
                decaying=[named[slot.name] for slot in slots if len(slot.shape) > 1],
                others=[named[slot.name] for slot in slots if len(slot.shape) <= 1],
                outer=[named[slot.name] for slot in slots if slot.unit in (0, self._table.num_units - 1)],
                leave_out={id(named[slot.name]) for slot in slots if slot.name not in masters},
            )

    def _cut(self) -> list[Segment]:
        return segments_of(
            self._table, self._owned, master=self._master, pushed=self._pushed, apart=self._apart,
            by_parameter=self._settings.needs_whole_parameters, named=self._named,
        )  # fmt: skip

    def separate(self, names: Collection[str]) -> None:
        """Give parameters segments, and so counts of updates, of their own; what the optimizer keeps stays as it is."""
        if self._settings.needs_whole_parameters or self._apart.issuperset(names):
            return
        self._apart |= frozenset(names)
        cut = iter(self._cut())
        segments: list[Segment] = []
        for segment in self.all:
            parts = [next(cut)]
            while sum(part.parameter.numel() for part in parts) < segment.parameter.numel():
                parts.append(next(cut))
            if is_new := any(part.only != segment.only for part in parts):
                self._replace(segment, parts)
            segments += parts if is_new else [segment]
        self.all = segments

    def _replace(self, segment: Segment, parts: Sequence[Segment]) -> None:
        """Let the optimizer have the parts of a segment in its place."""
        assert self.optimizer is not None, "it has parameters"
        for group in self.optimizer.param_groups:
            position = next((place for place, x in enumerate(group["params"]) if x is segment.parameter), None)
            if position is not None:
                group["params"][position : position + 1] = [part.parameter for part in parts]
        state: dict[str, Any] | None = self.optimizer.state.pop(segment.parameter, None)
        first = 0
        for part in parts:
            end = first + part.parameter.numel()
            if state is not None:
                self.optimizer.state[part.parameter] = {
                    name: value[first:end] if value.dim() else value.clone() for name, value in state.items()
                }
            first = end

    def update(self, *, lr: float, clip: float, left_out: Collection[str]) -> Iterator[int]:
        """Scale the pushed gradient by ``clip``, and update what is owned but for the parameters ``left_out``.

        One unit after another; gives the number of each. An optimizer of the user's updates all at once.
        """
        self.separate(left_out)
        if self.optimizer is not None:
            set_learning_rate(self.optimizer, lr)
        left = [segment for segment in self.all if segment.only and segment.only in left_out]
        if self._named is not None:
            self._update_of_model(clip, left_out)
        else:
            segments = [segment for segment in self.all if not segment.only or segment.only not in left_out]
            with _without_gradients(left):
                yield from update_by_unit(self.optimizer, segments, clip, self._table.num_units)
        note_rates(self.optimizer)

    def _update_of_model(self, clip: float, left_out: Collection[str]) -> None:
        """Let the user's optimizer update the model's parameters, which have gradients meanwhile."""
        if self.optimizer is None:
            return
        with self.lent_to_optimizer():
            _scale(self.all, clip)
            for segment in self.all:
                segment.parameter.grad = None if segment.only in left_out else segment.pushed
            try:
                step_once(self.optimizer, self._settings)
            except (AttributeError, TypeError) as error:
                if not left_out:
                    raise
                raise self._without_gradient(error, left_out) from error

    @contextmanager
    def lent_to_optimizer(self) -> Iterator[None]:
        """Within, the model's parameters have master weights, which change with them, and no gradient.

        Those that other ranks update keep their values; where they are not on this rank, reading them is an error.
        """
        assert self._named is not None, "the optimizer has the model's parameters"
        masters = {id(segment.parameter): segment.master for segment in self.all}
        here = [x for x in self._named.values() if id(x) in masters or not isinstance(x, AbsentParameter)]
        with borrowed(here, [masters.get(id(parameter)) for parameter in here]):
            yield
            for segment in self.all:
                if segment.parameter.data_ptr() != segment.master.data_ptr():  # its data were replaced, as by p.data =
                    segment.master.copy_(segment.parameter.detach())

    def _without_gradient(self, error: Exception, left_out: Collection[str]) -> InputError:
        """The error to raise where an optimizer of the user's fails with ``error``."""
        return InputError(
            f"optimizer={self._settings.name} fails ({type(error).__name__}: {error}) in a step that does not use "
            f"{counted(len(left_out), 'parameter')}, such as {sorted(left_out)[0]}, whose grad is None then, as in "
            "torch; let its step() leave out a parameter whose grad is None"
        )


@contextmanager
def _without_gradients(segments: Sequence[Segment]) -> Iterator[list[Tensor | None]]:
    """Within, an optimizer leaves segments out; gives the gradients that they have again after it."""
    gradients = [segment.parameter.grad for segment in segments]
    for segment in segments:
        segment.parameter.grad = None
    try:
        yield gradients
    finally:
        for segment, gradient in zip(segments, gradients):
            segment.parameter.grad = gradient
