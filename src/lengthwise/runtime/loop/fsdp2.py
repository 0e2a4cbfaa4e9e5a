"""Support for models wrapped with FSDP2 (``fully_shard``), whose ranks accumulate different numbers of micro-batches.

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
from lengthwise.runtime.state.loss_scaler import LossScaler
from lengthwise.runtime.state.optimizer import make_optimizer
from lengthwise.runtime.state.parameter_groups import set_learning_rate
from lengthwise.runtime.state.unused_parameters import UnusedParameters


def fsdp_modules(model: nn.Module) -> list[Any]:
    """The modules that ``fully_shard`` was called on, in reverse order of definition: the model itself comes last."""
    from torch.distributed.fsdp import FSDPModule

    return [module for module in reversed(list(model.modules())) if isinstance(module, FSDPModule)]


class Fsdp2State:
    """Weights, gradients and optimizer of a model that FSDP2 shards, with the interface of ``ShardedState``."""

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
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        """Sharded; those of modules are whole until a reduce-scatter."""
        self.compute_dtype = self.coarsest_dtype = self.master_dtype = self.parameters[0].dtype
        self.loss_scaler = LossScaler.of(settings, self.compute_dtype)
        self.unused = UnusedParameters({})
        """None is left out: FSDP2 reduces gradients of all."""
        self.optimizer = make_optimizer(
            settings,
            decaying=[parameter for parameter in self.parameters if parameter.dim() > 1],
            others=[parameter for parameter in self.parameters if parameter.dim() <= 1],
        )
        for module in self._modules:
            # The gradient is the sum over ranks: every token has its weight already.
            set_factor = getattr(module, "set_gradient_divide_factor", None) or module.set_reduce_scatter_divide_factor
            set_factor(1.0)
            if hasattr(module, "set_force_sum_reduction_for_comms"):  # else by a reduction that Gloo does not have
                module.set_force_sum_reduction_for_comms(True)

    def materialize_all(self) -> None:
        """All-gather all parameters and keep them unsharded until the next gradient reduce-scatter."""
        for module in self._modules:
            module.set_reshard_after_backward(False, recurse=False)
            module.set_requires_gradient_sync(False, recurse=False)
            module.unshard()

    def begin_step(self) -> None:
        """Begin a step: nothing has a gradient."""
        self.clear_gradient()

    def forget_left(self) -> bool:
        """Forget gradients of parameters that are whole, which a backward left between steps; whether there were any.

        To be called where weights are materialized.
        """
        are_left = False
        for shards in self._shards():
            left = [shards.unsharded_param.grad, shards.unsharded_accumulated_grad]
            are_left |= any(bool(gradient.any()) for gradient in left if gradient is not None)
            shards.unsharded_param.grad = shards.unsharded_accumulated_grad = None
        return are_left

    def _shards(self) -> Iterator[Any]:
        """What FSDP2 keeps of each parameter."""
        for group in (group for module in self._modules for group in _groups(module)):
            yield from group.fsdp_params

    def clear_gradient(self) -> None:
        """Remove all gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def discard_gradient(self) -> None:
        """Discard the gradients added since the last push, by a reduce-scatter whose result is dropped."""
        self.finish_push()
        self.clear_gradient()
        self.materialize_all()

    def take_gradient(self) -> Tensor:
        """Return this rank's share of the gradient added since the last push, summed over ranks, and clear it."""
        self.finish_push()
        pieces = [local_shard(parameter.grad) for parameter in self.parameters if parameter.grad is not None]
        gradient = torch.cat([piece.to(torch.float64).flatten() for piece in pieces])
        self.clear_gradient()
        self.materialize_all()
        return gradient

    def finish_push(self) -> None:
        """Reduce-scatter the accumulated gradients, through a backward whose loss is zero."""
        for module in self._modules:
            module.set_requires_gradient_sync(True, recurse=False)
            module.set_reshard_after_backward(True, recurse=False)
        for shards in self._shards():  # what this rank has not used it would leave out, and others wait for it
            parameter = shards.unsharded_param
            has_gradient = parameter.grad is not None or shards.unsharded_accumulated_grad is not None
            if parameter.requires_grad and not has_gradient:
                parameter.grad = torch.zeros_like(parameter)
        self._close().backward()

    def global_norm(self, loss: Tensor) -> tuple[float, float]:
        """The norm of the gradient over all ranks, and ``loss`` unchanged."""
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        norm: Any = torch.nn.utils.get_total_norm(gradients)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm), float(loss)

    def step(self, *, lr: float, clip: float) -> None:
        """Scale the gradient by ``clip`` and update this rank's shards."""
        assert self.optimizer is not None, "every rank has shards of every parameter"
        if clip != 1.0:
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(clip)
        set_learning_rate(self.optimizer, lr)
        self.optimizer.step()
        self.clear_gradient()

    def release_params(self) -> None:
        """Reshard all parameters, as FSDP2 leaves them between steps."""
        for module in self._modules:
            module.set_reshard_after_backward(True, recurse=False)
            module.set_requires_gradient_sync(True, recurse=False)
            module.reshard()


def local_shard(x: Any) -> Tensor:
    """This rank's shard of a tensor; a view of it."""
    local: Tensor = x.to_local() if hasattr(x, "to_local") else x
    return local


def _check(model: nn.Module, modules: list[Any]) -> None:
    from torch.distributed.tensor import DTensor

    if not modules or modules[-1] is not model:
        raise InputError(
            f"parts of {type(model).__name__} are wrapped with fully_shard; wrap the model itself last of all"
        )
    unsharded = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    if unsharded:
        raise InputError(
            f"{unsharded[0]} of {type(model).__name__} is not sharded; call fully_shard without ignored_params"
        )
    names = {parameter.dtype: name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if len(names) > 1:
        listed = ", ".join(f"{name} is {str(dtype).removeprefix('torch.')}" for dtype, name in names.items())
        raise InputError(
            f"{type(model).__name__} has trained parameters of several dtypes, which cannot be under fully_shard: "
            f"{listed}. Cast it with model.to(dtype), or leave FSDP2 out: weights and optimizer are sharded anyway"
        )
    resharded = [type(module).__name__ for module in modules[:-1] if _is_freed(module)]
    if resharded:
        raise InputError(
            f"{resharded[0]} is wrapped so that FSDP2 frees its parameters after every forward: ranks with different "
            "numbers of micro-batches would wait for each other's gathers for ever. Wrap it with "
            "fully_shard(..., reshard_after_forward=False), or leave FSDP2 out: the optimizer is sharded anyway"
        )


def _is_freed(module: Any) -> bool:
    return any(group.post_forward_mesh_info is not None for group in _groups(module))


def _groups(module: Any) -> Iterator[Any]:
    """Parameter groups of a wrapped module, one or several with the version of torch."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    yield from (group for group in groups if group is not None)
