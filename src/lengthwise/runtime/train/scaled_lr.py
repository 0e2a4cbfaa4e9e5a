"""Learning rates scaled by batch size, on top of any scheduler of torch.

scheduler = lw.ScaledLR(CosineAnnealingLR(optimizer, 1000), rule="linear", reference=64, by="sequences")
for batch in loader:
    model(batch).loss.backward()
    scheduler.size = len(batch)          # of the step, over all ranks and micro-batches; not with sampler=
    optimizer.step()                     # with the scheduled rate times the factor of this batch
    scheduler.step()                     # as ever; the schedule never sees the factor
"""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lengthwise.core.batch import GlobalBatch
from lengthwise.core.errors import CheckError, InputError
from lengthwise.core.lr_scaling import LrScaling


class BatchSource(Protocol):
    """Knows which global batch is being computed; :class:`lengthwise.BatchSampler` is one."""

    @property
    def batch(self) -> GlobalBatch:
        """The global batch of the moment."""
        ...


class ScaledLR(LRScheduler):
    """Scales the learning-rate of each optimizer step by the batch that it optimises.

    The rates in the optimizer are those of the base schedule, except within ``optimizer.step()``. So the base schedule
    may be any (SequentialLR, OneCycleLR, ReduceLROnPlateau, ...), is advanced by its own rules and never reset, and a
    step that is skipped, a resume or the end of an epoch cannot shift factors against batches.
    """

    def __init__(
        self,
        scheduler: LRScheduler,
        *,
        reference: float,
        rule: str = "linear",
        by: str = "tokens",
        clamp: tuple[float, float] | None = None,
        sampler: BatchSource | None = None,
    ) -> None:
        """Wrap ``scheduler``.

        Args:
            scheduler: the base schedule.
            reference: size of the batch that its rates are for.
            rule: linear, sqrt or none.
            by: what sizes count, tokens, sequences or targets.
            clamp: least and most that a rate is multiplied by.
            sampler: knows the batch of every step; None: ``size`` is set before each.

        Raises:
            InputError: a rule, a ``by``, a reference or a clamp that is not valid.
        """
        self.base = scheduler
        self.scaling = LrScaling(rule=rule, by=by, reference=reference, clamp=clamp)
        self._sampler, self._size = sampler, None if sampler is None else 0.0
        self._unscaled: list[float | Tensor] = []
        self._last_lr = [_number(group["lr"]) for group in self.optimizer.param_groups]
        self._hooks = (
            self.optimizer.register_step_pre_hook(self._before),
            self.optimizer.register_step_post_hook(self._after),
        )

    @property
    def optimizer(self) -> Optimizer:  # type: ignore[override]
        """The optimizer of the base schedule."""
        return self.base.optimizer

    @property
    def size(self) -> float | None:
        """Size of the batch that the next optimizer step is for; None: not set yet."""
        return self._size

    @size.setter
    def size(self, size: float) -> None:
        if self._sampler is not None:
            raise InputError("the sampler tells the size of every batch; leave either it or scheduler.size out")
        self.scaling.factor(size)  # raises where it is none
        self._size = size

    @property
    def factor(self) -> float:
        """Factor by which the learning rate of the current batch is multiplied.

        Raises:
            CheckError: its size is not known.
        """
        if self._sampler is not None:
            return self.scaling.of(self._sampler.batch)
        if self._size is None:
            raise CheckError(
                "the size of the batch is not known: set scheduler.size before each optimizer.step(), or give sampler="
            )
        return self.scaling.factor(self._size)

    def step(self, *args: Any, **options: Any) -> None:
        """Advance the base schedule, which takes the same arguments."""
        self._restore()
        self.base.step(*args, **options)

    def get_last_lr(self) -> list[float | Tensor]:
        """The rates that the last optimizer step used, one a parameter group; before it, those of the schedule."""
        return list(self._last_lr)

    def state_dict(self) -> dict[str, Any]:
        """State of the base schedule; factors follow from the batches."""
        return {"base": self.base.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the base schedule."""
        self.base.load_state_dict(state_dict["base"])

    def close(self) -> None:
        """Scale no further step."""
        for hook in self._hooks:
            hook.remove()

    def _before(self, optimizer: Optimizer, args: Any, options: Any) -> None:
        self._restore()
        factor = self.factor
        for group in optimizer.param_groups:
            rate = group["lr"]
            if isinstance(rate, Tensor):  # in place: what is compiled or captured holds on to it
                self._unscaled.append(rate.clone())
                rate.mul_(factor)
            else:
                self._unscaled.append(rate)
                group["lr"] = rate * factor
        self._last_lr = [_number(group["lr"]) for group in optimizer.param_groups]

    def _after(self, optimizer: Optimizer, args: Any, options: Any) -> None:
        self._restore()
        if self._sampler is None:
            self._size = None  # told anew for each step, or a wrong one would go unnoticed

    def _restore(self) -> None:
        """Undo the scaling, also of an optimizer step that failed."""
        for group, rate in zip(self.optimizer.param_groups, self._unscaled):
            if isinstance(rate, Tensor):
                group["lr"].copy_(rate)
            else:
                group["lr"] = rate
        self._unscaled = []


def _number(rate: float | Tensor) -> float:
    return float(rate.detach()) if isinstance(rate, torch.Tensor) else rate
