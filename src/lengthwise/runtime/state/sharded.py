"""Optimization layout apart from compute layout: every rank computes with whole weights and updates only its shard.

All parameters lie in one flat buffer, in the order the model names them. Rank r owns the r-th interval of
``core.layout.fully_sharded``: its master weights and optimizer moments exist nowhere else. *Push* sums gradients into
the owners (reduce-scatter), *pull* spreads updated weights (all-gather): the two cases to which
``core.layout.transfers`` comes down where one side is whole.

    weights   [padded]  compute dtype, whole; the model's parameters are views of it
    gradients [padded]  master dtype, whole; parameter gradients accumulate in it
    master    [shard]   master dtype; a view of ``weights`` where both dtypes are one
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from lengthwise.core.layout import Interval, fully_sharded, shard_size
from lengthwise.runtime.comm.collectives import all_gather, reduce_scatter, sum_over_ranks
from lengthwise.runtime.comm.world import World


class ShardedState:
    """Weights, gradients and AdamW of one model over all ranks. Turns the model's parameters into views."""

    def __init__(
        self, model: nn.Module, world: World, *, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> None:
        named = list(model.named_parameters())
        self.world = world
        self.compute_dtype = named[0][1].dtype
        self.master_dtype = torch.promote_types(self.compute_dtype, torch.float32)
        self.slices = _slices(named)
        self.num_elements = sum(parameter.numel() for _, parameter in named)
        size = shard_size(self.num_elements, world.size)
        self._own = slice(world.rank * size, (world.rank + 1) * size)
        held = fully_sharded(self.num_elements, world.size).intervals[world.rank]
        self.interval: Interval = held[0] if held else (0, 0)

        self.weights = torch.zeros(size * world.size, dtype=self.compute_dtype, device=world.device)
        self.gradients = torch.zeros(size * world.size, dtype=self.master_dtype, device=world.device)
        with torch.no_grad():
            for name, parameter in named:
                start, end = self.slices[name]
                self.weights[start:end] = parameter.flatten()
        self._shares_master = self.compute_dtype == self.master_dtype
        own = self.weights[self._own]
        self.master = own if self._shares_master else own.to(self.master_dtype)
        self._attach(named)
        self._pushed = torch.zeros(size, dtype=self.master_dtype, device=world.device)
        self._segments = list(self._make_segments(named))
        groups = [
            {"params": [s for s, decays in self._segments if decays == flag], "weight_decay": weight_decay * flag}
            for flag in (True, False)
        ]
        groups = [group for group in groups if group["params"]]
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=eps) if groups else None

    def _attach(self, named: list[tuple[str, nn.Parameter]]) -> None:
        """Make every parameter a view of ``weights`` whose gradient lands in ``gradients``."""
        for name, parameter in named:
            start, end = self.slices[name]
            parameter.data = self.weights[start:end].view(parameter.shape)
            gradient = self.gradients[start:end].view(parameter.shape)
            if self._shares_master:
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
        """Sum every rank's gradients into their owners. One reduce-scatter of all elements at master precision."""
        reduce_scatter(self._pushed, self.gradients)
        self.gradients.zero_()

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
        """Spread the owners' master weights to every rank in the compute dtype. One all-gather of all elements."""
        own = self.weights[self._own]
        if not self._shares_master:
            own.copy_(self.master)
        all_gather(self.weights, own)

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
