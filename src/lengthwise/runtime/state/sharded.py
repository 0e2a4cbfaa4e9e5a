"""Optimization layout apart from compute layout: every rank updates its shard alone, whatever it computes with.

All parameters lie in one flat buffer, in the order the model names them. Rank r owns the r-th interval of
``core.layout.fully_sharded``: its master weights and optimizer moments exist nowhere else. *Push* sums gradients into
the owners, *pull* spreads updated weights, in whatever layout ranks compute with
(:mod:`lengthwise.runtime.state.propagation`).

    weights   [held]   compute dtype; the model's parameters are views of it
    gradients [held]   master dtype; parameter gradients accumulate in it
    master    [shard]  master dtype; a view of ``weights`` where every rank holds everything and both dtypes are one
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from lengthwise.core.layout import Interval, Layout, fully_sharded, shard_size
from lengthwise.runtime.comm.collectives import sum_over_ranks
from lengthwise.runtime.comm.world import World
from lengthwise.runtime.state.propagation import Propagation, SlicedPropagation, WholePropagation

RowBounds = Callable[[str], Sequence[int] | None]
"""Of a parameter by name: rank r of a stage computes with rows ``bounds[r]`` to ``bounds[r + 1]``; None: with all."""


class ShardedState:
    """Weights, gradients and AdamW of one model over all ranks. Turns the model's parameters into views."""

    def __init__(
        self,
        model: nn.Module,
        world: World,
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        degree: int = 1,
        row_bounds: RowBounds | None = None,
    ) -> None:
        """``row_bounds``: ranks compute with shards, in stages of ``degree`` neighbours; None: with everything."""
        named = list(model.named_parameters())
        self.world = world
        self.degree = degree if row_bounds else 1
        """Ranks that hold a model together."""
        self.compute_dtype = named[0][1].dtype
        self.master_dtype = torch.promote_types(self.compute_dtype, torch.float32)
        self.slices = _slices(named)
        self.num_elements = sum(parameter.numel() for _, parameter in named)
        size = shard_size(self.num_elements, world.size)
        self._own = slice(world.rank * size, (world.rank + 1) * size)
        held = fully_sharded(self.num_elements, world.size).intervals[world.rank]
        self.interval: Interval = held[0] if held else (0, 0)

        flat = torch.zeros(size * world.size, dtype=self.compute_dtype, device=world.device)
        with torch.no_grad():
            for name, parameter in named:
                flat[slice(*self.slices[name])] = parameter.flatten()
        self.propagation = self._make_propagation(named, row_bounds)
        self._shares_master = self.compute_dtype == self.master_dtype and self.degree == 1
        if self.degree == 1:
            self.weights.copy_(flat)
        own = (self.weights if self.degree == 1 else flat)[self._own]
        self.master = own if self._shares_master else own.to(self.master_dtype, copy=True)
        self._attach(named, row_bounds)
        del flat
        self._pushed = torch.zeros(size, dtype=self.master_dtype, device=world.device)
        self._segments = list(self._make_segments(named))
        groups = [
            {"params": [s for s, decays in self._segments if decays == flag], "weight_decay": weight_decay * flag}
            for flag in (True, False)
        ]
        groups = [group for group in groups if group["params"]]
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=eps) if groups else None
        if self.degree > 1:
            self.pull()

    @property
    def weights(self) -> Tensor:
        """[held] what this rank computes with."""
        return self.propagation.weights

    @property
    def gradients(self) -> Tensor:
        """[held] where this rank's gradients accumulate."""
        return self.propagation.gradients

    def _make_propagation(self, named: list[tuple[str, nn.Parameter]], row_bounds: RowBounds | None) -> Propagation:
        dtypes = {"compute": self.compute_dtype, "master": self.master_dtype}
        if self.degree == 1:
            return WholePropagation(self.num_elements, self.world, **dtypes)
        intervals = []
        for rank in range(self.world.size):
            rows = [self._rows(name, p, row_bounds, rank % self.degree) for name, p in named]
            intervals.append(tuple(interval for interval, _ in rows if interval[0] < interval[1]))
        layout = Layout(num_elements=self.num_elements, intervals=tuple(intervals))
        return SlicedPropagation(layout, self.world, **dtypes)

    def _rows(
        self, name: str, parameter: nn.Parameter, row_bounds: RowBounds | None, place: int
    ) -> tuple[Interval, torch.Size]:
        """What the rank at ``place`` of its stage holds of a parameter: interval of the flat buffer, and shape."""
        start, end = self.slices[name]
        bounds = row_bounds(name) if row_bounds else None
        if bounds is None:
            return (start, end), parameter.shape
        width = parameter.shape[1:].numel()
        shape = torch.Size([bounds[place + 1] - bounds[place], *parameter.shape[1:]])
        return (start + bounds[place] * width, start + bounds[place + 1] * width), shape

    def _attach(self, named: list[tuple[str, nn.Parameter]], row_bounds: RowBounds | None) -> None:
        """Make every parameter a view of ``weights`` whose gradient lands in ``gradients``."""
        for name, parameter in named:
            interval, shape = self._rows(name, parameter, row_bounds, self.world.rank % self.degree)
            at = self.propagation.place(interval) if interval[0] < interval[1] else slice(0, 0)
            parameter.data = self.weights[at].view(shape)
            gradient = self.gradients[at].view(shape)
            if self.compute_dtype == self.master_dtype:
                parameter.grad = gradient  # autograd adds to an existing gradient in place
            else:
                parameter.register_post_accumulate_grad_hook(_adds_to(gradient))

    def _make_segments(self, named: list[tuple[str, nn.Parameter]]) -> Iterator[tuple[nn.Parameter, bool]]:
        """Runs of this rank's interval that decay alike, for the optimizer. Matrices decay, vectors do not."""
        runs: list[tuple[int, int, bool]] = []
        for name, parameter in named:
            start, end = self.slices[name]
            start, end = max(start, self.interval[0]), min(end, self.interval[1])
            if start >= end:
                continue
            if runs and runs[-1][2] == (parameter.ndim > 1):
                runs[-1] = (runs[-1][0], end, runs[-1][2])
            else:
                runs.append((start, end, parameter.ndim > 1))
        for start, end, decays in runs:
            inside = slice(start - self._own.start, end - self._own.start)
            segment = nn.Parameter(self.master[inside], requires_grad=True)
            segment.grad = self._pushed[inside]
            yield segment, decays

    def push(self) -> None:
        """Sum every rank's gradients into their owners, at master precision."""
        self.propagation.push(self._pushed)

    def global_norm(self, loss: Tensor) -> tuple[float, float]:
        """Norm of the pushed gradient over all ranks, and ``loss`` summed over them: one collective for both.

        A loss or a gradient that is not finite anywhere makes one of the two not finite on every rank.
        """
        square = torch.linalg.vector_norm(self._pushed, dtype=torch.float64).square()
        total = sum_over_ranks(torch.stack([square, loss.to(torch.float64)])).tolist()
        return total[0] ** 0.5, total[1]

    def step(self, *, lr: float, clip: float) -> None:
        """Scale the pushed gradient by ``clip`` and let the optimizer update this rank's master weights."""
        if self.optimizer is None:
            return
        if clip != 1.0:
            self._pushed.mul_(clip)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()

    def pull(self) -> None:
        """Spread the owners' master weights to every rank that computes with them, in the compute dtype."""
        if self._shares_master:
            self.propagation.pull(self.weights[self._own])
        else:
            self.propagation.pull(self.master.to(self.compute_dtype))

    def owned(self) -> dict[str, Tensor]:
        """This rank's elements of the master weights and the moments, without padding; copies of the moments."""
        length = self.interval[1] - self.interval[0]
        moments = {name: torch.zeros(length, dtype=self.master_dtype) for name in ("exp_avg", "exp_avg_sq")}
        at = 0
        for segment, _ in self._segments:
            assert self.optimizer is not None
            for name, whole in moments.items():
                if name in self.optimizer.state[segment]:
                    whole[at : at + segment.numel()] = self.optimizer.state[segment][name]
            at += segment.numel()
        return {"master": self.master[:length].detach(), **moments}

    def restore(self, owned: dict[str, Tensor], num_steps: int) -> None:
        """Take back what :meth:`owned` returned after ``num_steps`` optimizer steps, and pull."""
        length = self.interval[1] - self.interval[0]
        with torch.no_grad():
            self.master[:length] = owned["master"]
        at = 0
        for segment, _ in self._segments:
            assert self.optimizer is not None
            here = slice(at, at + segment.numel())
            self.optimizer.state[segment] = {
                "step": torch.tensor(float(num_steps)),
                "exp_avg": owned["exp_avg"][here].to(segment.device).clone(),
                "exp_avg_sq": owned["exp_avg_sq"][here].to(segment.device).clone(),
            }
            at += segment.numel()
        self.pull()


def _slices(named: list[tuple[str, nn.Parameter]]) -> dict[str, Interval]:
    slices, start = {}, 0
    for name, parameter in named:
        slices[name] = (start, start + parameter.numel())
        start += parameter.numel()
    return slices


def _adds_to(gradient: Tensor) -> Callable[[Tensor], None]:
    """A hook that moves a parameter's finished gradient into the buffer of higher precision."""

    def add(parameter: Tensor) -> None:
        assert parameter.grad is not None
        gradient.add_(parameter.grad)
        parameter.grad = None

    return add
