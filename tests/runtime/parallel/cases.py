"""A model under any methods on the ranks of a pool, and on one device: the two sides of every equality here."""

import gc
import time
from functools import cache, lru_cache
from itertools import accumulate

import torch
import torch.distributed as dist

from lengthwise.core.layout import row_bounds
from lengthwise.core.pipeline_config import WEIGHTS_OF, Method, WeightPlacement
from lengthwise.core.specs import ModelSpec
from lengthwise.runtime.comm.activation_offload import HostOffload
from lengthwise.runtime.comm.group import Group
from lengthwise.runtime.comm.groups import GroupRegistry
from lengthwise.runtime.models.execution import ActivationPlan
from lengthwise.runtime.models.operators import Dense
from lengthwise.runtime.models.registry import build_model
from lengthwise.runtime.models.targets import IGNORE
from lengthwise.runtime.parallel.sharded_execution import StageExecution
from lengthwise.runtime.parallel.shards import keep_own_rows

SHARDED = tuple(method for method, weights in WEIGHTS_OF.items() if weights is WeightPlacement.SHARDED)
WHOLE = (Method.ULYSSES, Method.RING, Method.ULYSSES_RING, Method.ALL_GATHER)
LOOKS = 8
"""At the memory of a process."""
PACKS = {
    "one sequence": (23,),
    "ragged": (7, 1, 12, 5, 2, 5),
    "shorter than p": (2, 1),
    "one token": (1,),
}


def small(**sizes):
    """Unequal sizes everywhere; heads that neither 2 nor 3 nor 4 ranks share evenly, unless told otherwise."""
    return ModelSpec(
        **{
            "name": "small", "num_layers": 2, "hidden_size": 20, "ffn_size": 30, "num_heads": 10, "num_kv_heads": 5,
            "head_size": 4, "vocab_size": 23, "qkv_bias": True, **sizes,
        }
    )  # fmt: skip


def model_of(spec, *, dtype=torch.float64, scale=5.0):
    """A model in which every weight matters: norms and biases are random too."""
    model = build_model(spec, dtype=torch.float64, seed=3)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("norm", "bias")):
                weight += 0.3 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
            else:
                weight *= scale
    return model.to(dtype)


def pack_of(lengths, spec):
    """Tokens, targets and boundaries; some tokens have no target."""
    cu_seqlens = tuple(accumulate(lengths, initial=0))
    generator = torch.Generator().manual_seed(sum(lengths))
    tokens_T, targets_T = torch.randint(spec.vocab_size, (2, cu_seqlens[-1]), generator=generator)
    targets_T[torch.rand(len(targets_T), generator=generator) < 0.2] = IGNORE
    return tokens_T, targets_T, cu_seqlens


@cache
def groups():
    """Of this process; the pool's ranks all ask for the same."""
    return GroupRegistry(dist.get_rank())


def whole_group() -> Group:
    group = groups().of(tuple(range(dist.get_world_size())))
    group.sent.clear()
    return group


def on_one_device(spec, lengths, *, dtype=torch.float64, scale=5.0):
    """Loss and every gradient of the whole pack, computed once for methods that follow one another."""
    return _on_one_device(spec, tuple(lengths), dtype, scale)


@lru_cache(maxsize=8)
def _on_one_device(spec, lengths, dtype, scale):
    model = model_of(spec, dtype=dtype, scale=scale)
    tokens_T, targets_T, cu_seqlens = pack_of(lengths, spec)
    loss = model(tokens_T, cu_seqlens, targets_T)
    loss.backward()
    return loss.detach(), {name: weight.grad for name, weight in model.named_parameters()}


def on_ranks(spec, lengths, methods, *, dtype=torch.float64, scale=5.0, **planned):
    """The same on the ranks of a pool: what rank 0 has after summing what each rank holds. Other ranks: nothing."""
    group = whole_group()
    weights = WEIGHTS_OF.get(methods[0], WeightPlacement.WHOLE)
    model = model_of(spec, dtype=dtype, scale=scale)
    if weights is WeightPlacement.SHARDED:
        keep_own_rows(model, spec, rank=group.rank, degree=group.size)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    loss = run(model, group, lengths, methods, weights, **planned)
    for name, weight in model.named_parameters():
        assert torch.equal(weight, before[name]), f"{name} was changed by forward or backward"
    dist.all_reduce(total := loss.detach().clone())
    grads = {name: in_all_rows(name, weight, spec, group, weights) for name, weight in model.named_parameters()}
    return total, summed(grads)


def able(methods, spec, degree):
    """Those that can share the model among ``degree`` ranks."""
    return [method for method in methods if method is not Method.MEGATRON_TS or degree <= spec.num_kv_heads]


def operation_on_one_device(spec, lengths, operation):
    """Output and gradients, of input and weights, of the last layer's attention or feed-forward alone."""
    model, (_, _, cu_seqlens) = model_of(spec), pack_of(lengths, spec)
    views = model.views(cu_seqlens)
    view = views[(spec.num_layers - 1) % len(views)]
    return _operation(model, operation, Dense(view, model.tables(view.offsets)), input_of(lengths, spec))


def operation_on_ranks(spec, lengths, method, operation):
    """The same from all ranks' shares."""
    group, weights = whole_group(), WEIGHTS_OF[method]
    model = model_of(spec)
    if weights is WeightPlacement.SHARDED:
        keep_own_rows(model, spec, rank=group.rank, degree=group.size)
    execution = execution_of(model, group, lengths, (method,) * spec.num_layers, weights)
    places = torch.from_numpy(execution._places[group.rank])
    found = _operation(
        model, operation, execution.operators(spec.num_layers - 1), input_of(lengths, spec)[places], places=places
    )
    names = {name.rpartition(".")[2]: weight for name, weight in model.layers[-1].named_parameters()}
    whole = {}
    for name, value in found.items():
        if name in names:
            whole[name] = in_all_rows(name, names[name], spec, group, weights)
        else:
            whole[name] = torch.zeros(sum(lengths), spec.hidden_size, dtype=value.dtype)
            whole[name][places] = value
    return summed(whole)


def input_of(lengths, spec):
    generator = torch.Generator().manual_seed(5)
    return torch.randn(sum(lengths), spec.hidden_size, generator=generator, dtype=torch.float64)


def _operation(model, operation, operators, x_tD, places=slice(None)):
    layer = model.layers[-1]
    x_tD = x_tD.clone().requires_grad_()
    bundle = layer.attention_weights if operation == "attention" else layer.ffn_weights
    out_tD = getattr(operators, operation)(x_tD, bundle)
    generator = torch.Generator().manual_seed(6)
    grad_TD = torch.randn(64, out_tD.shape[1], generator=generator, dtype=torch.float64)  # no pack here is longer
    out_tD.backward(grad_TD[places][: len(x_tD)])
    gradients = {name: weight.grad for name, weight in bundle.tensors.items()}
    return {"output": out_tD.detach(), "input": x_tD.grad, **gradients}


def execution_of(model, group, lengths, methods, weights, *, device="cpu", placement=(), **planned):
    """``planned``: of the activations, as :class:`ActivationPlan` has it."""
    tokens_T, targets_T, cu_seqlens = pack_of(lengths, model.spec)
    tokens_T, targets_T = tokens_T.to(device), targets_T.to(device)
    return StageExecution(
        model, group, tokens_T=tokens_T, targets_T=targets_T, cu_seqlens=cu_seqlens, methods=methods, weights=weights,
        activations=activations_of(model.spec, **planned), placement=placement,
    )  # fmt: skip


def activations_of(spec, *, offload=(), **planned):
    """``offload``: flags of layers, or True for all."""
    flags = (True,) * spec.num_layers if offload is True else offload
    return ActivationPlan(offload=flags, host=HostOffload("cpu").micro_batch() if any(flags) else None, **planned)


def run(model, group, lengths, methods, weights, **planned):
    loss = model.run(execution_of(model, group, lengths, methods, weights, **planned))
    loss.backward()
    return loss


def in_all_rows(name, weight, spec, group, weights):
    """The gradient of this rank's rows of a weight among zeros for all others."""
    bounds = row_bounds(name, spec, degree=group.size) if weights is WeightPlacement.SHARDED else None
    grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
    if bounds is None or group.size == 1:
        return grad
    whole = grad.new_zeros(bounds[-1], *grad.shape[1:])
    whole[bounds[group.rank] : bounds[group.rank + 1]] = grad
    return whole


def summed(tensors):
    """Each summed over the ranks, all in one exchange."""
    dist.all_reduce(flat := torch.cat([tensor.flatten() for tensor in tensors.values()]))
    pieces = flat.split([tensor.numel() for tensor in tensors.values()])
    return {name: piece.view_as(tensor) for (name, tensor), piece in zip(tensors.items(), pieces)}


def live_bytes():
    """Of all plain tensors of this process (a compiler's have no storage), what several share counted once.

    Every rank asks at once: what is sent is held until the other rank has it, and by a thread of Gloo until that gets
    its turn. So the least of several looks counts.
    """
    dist.barrier()
    found = []
    for _ in range(LOOKS):
        time.sleep(0.02)
        found.append(_tensor_bytes())
    return min(found)


def _tensor_bytes():
    gc.collect()
    tensors = [item for item in gc.get_objects() if type(item) in (torch.Tensor, torch.nn.Parameter)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
