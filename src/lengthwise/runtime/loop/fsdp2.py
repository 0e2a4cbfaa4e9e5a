"""Models that are wrapped with FSDP2 (``torch.distributed.fsdp.fully_shard``): its shards, our uneven accumulation.

FSDP2 gathers parameters in the forward and reduces gradients in the backward, each a collective of all ranks, but here
ranks have different numbers of micro-batches, or none. That is safe where parameters stay whole between micro-batches:
they are gathered once when a step begins, gradients add up unreduced, and one forward and backward of a few tokens with
weight 0, the same on every rank, reduces them when it ends. A model that frees its parameters after each forward is
refused: it would gather them a different number of times on every rank.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lengthwise.config.optimizer_settings import OptimizerSettings
from lengthwise.core.errors import InputError
from lengthwise.runtime.comm.world import DistContext
from lengthwise.runtime.state.optimizer import make_optimizer


def fsdp_modules(model: nn.Module) -> list[Any]:
    """Those that ``fully_shard`` was called on, the model itself last of all, if it was."""
    from torch.distributed.fsdp import FSDPModule

    return [module for module in reversed(list(model.modules())) if isinstance(module, FSDPModule)]


class Fsdp2State:
    """Weights, gradients and optimizer of a model that FSDP2 holds. What a :class:`Run` asks of a state."""

    def __init__(
        self, model: nn.Module, world: DistContext, settings: OptimizerSettings, *, close: Callable[[], Tensor]
    ) -> None:
        """``close``: the loss of a few tokens on this rank alone, times 0.

        Raises:
            InputError: parameters are freed between micro-batches, or not all of them are sharded.
        """
        self.world, self.settings, self._close = world, settings, close
        self._modules = fsdp_modules(model)
        _check(model, self._modules)
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.compute_dtype = self.master_dtype = self._parameters[0].dtype
        self.optimizer = make_optimizer(
            settings,
            decaying=[parameter for parameter in self._parameters if parameter.dim() > 1],
            others=[parameter for parameter in self._parameters if parameter.dim() <= 1],
        )
        for module in self._modules:
            # The gradient is the sum over ranks: every token has its weight already.
            set_factor = getattr(module, "set_gradient_divide_factor", None) or module.set_reduce_scatter_divide_factor
            set_factor(1.0)
            if hasattr(module, "set_force_sum_reduction_for_comms"):  # else by a reduction that Gloo does not have
                module.set_force_sum_reduction_for_comms(True)

    def materialize_all(self) -> None:
        """Every rank the whole model until the next push."""
        for module in self._modules:
            module.set_reshard_after_backward(False, recurse=False)
            module.set_requires_gradient_sync(False, recurse=False)
            module.unshard()

    def clear_gradient(self) -> None:
        """Begin a step."""
        for parameter in self._parameters:
            parameter.grad = None

    def discard_gradient(self) -> None:
        """Forget what backwards added since the last push: by a push whose result is thrown away."""
        self.finish_push()
        self.clear_gradient()
        self.materialize_all()

    def take_gradient(self) -> Tensor:
        """This rank's share of what was added since the last push, summed over ranks; and forget it."""
        self.finish_push()
        pieces = [_local(parameter.grad) for parameter in self._parameters if parameter.grad is not None]
        gradient = torch.cat([piece.to(torch.float64).flatten() for piece in pieces])
        self.clear_gradient()
        self.materialize_all()
        return gradient

    def detached_gradient(self) -> str | None:
        """None: FSDP2 keeps gradients itself."""
        return None

    @property
    def gradient_version(self) -> int:
        """Always the same: FSDP2 keeps gradients itself."""
        return 0

    def finish_push(self) -> None:
        """Reduce what all micro-batches added, through a backward that adds nothing."""
        for module in self._modules:
            module.set_requires_gradient_sync(True, recurse=False)
            module.set_reshard_after_backward(True, recurse=False)
        self._close().backward()

    def global_norm(self, loss: Tensor) -> tuple[float, float]:
        """Norm of the gradient over all ranks; the loss as it is."""
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        norm: Any = torch.nn.utils.get_total_norm(gradients)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm), float(loss)

    def step(self, *, lr: float, clip: float) -> None:
        """Scale the gradient by ``clip`` and update this rank's shards."""
        assert self.optimizer is not None, "every rank has shards of every parameter"
        if clip != 1.0:
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(clip)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.clear_gradient()

    def release_params(self) -> None:
        """The model as FSDP2 leaves it between steps."""
        for module in self._modules:
            module.set_reshard_after_backward(True, recurse=False)
            module.set_requires_gradient_sync(True, recurse=False)
            module.reshard()


def _local(x: Any) -> Tensor:
    local: Tensor = x.to_local() if hasattr(x, "to_local") else x
    return local


def _check(model: nn.Module, modules: list[Any]) -> None:
    from torch.distributed.tensor import DTensor

    if not modules or modules[-1] is not model:
        raise InputError(
            f"parts of {type(model).__name__} are wrapped with fully_shard; wrap the model itself last of all"
        )
    whole = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    if whole:
        raise InputError(
            f"{whole[0]} of {type(model).__name__} is not sharded; call fully_shard without ignored_params"
        )
    freed = [type(module).__name__ for module in modules[:-1] if _is_freed(module)]
    if freed:
        raise InputError(
            f"{freed[0]} is wrapped so that FSDP2 frees its parameters after every forward: ranks with different "
            "numbers of micro-batches would wait for each other's gathers for ever. Wrap it with "
            "fully_shard(..., reshard_after_forward=False), or leave FSDP2 out: the optimizer is sharded anyway"
        )


def _is_freed(module: Any) -> bool:
    return any(group.post_forward_mesh_info is not None for group in _groups(module))


def _groups(module: Any) -> Iterator[Any]:
    """Parameter groups of a wrapped module, one or several with the version of torch."""
    state = module._get_fsdp_state()
    found = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    yield from (group for group in found if group is not None)
