"""A model under any methods on the ranks of a pool, and on one device: the two sides of every equality here."""

from functools import cache
from itertools import accumulate

import torch
import torch.distributed as dist

from lengthwise.core.scheme import WEIGHTS_OF, Method, Weights
from lengthwise.core.specs import ModelSpec
from lengthwise.runtime.comm.group import Group, Groups
from lengthwise.runtime.model.build import build_model
from lengthwise.runtime.model.targets import IGNORE
from lengthwise.runtime.parallel.execution import StageExecution
from lengthwise.runtime.parallel.shards import keep_own_rows, row_bounds

SHARDED = tuple(method for method, weights in WEIGHTS_OF.items() if weights is Weights.SHARDED)
WHOLE = (Method.ULYSSES, Method.RING)
PACKS = {
    "one sequence": (24,),
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
    return Groups(dist.get_rank())


def whole_group() -> Group:
    group = groups().of(tuple(range(dist.get_world_size())))
    group.sent.clear()
    return group


def on_one_device(spec, lengths, *, dtype=torch.float64, scale=5.0):
    """Loss and every gradient of the whole pack."""
    model = model_of(spec, dtype=dtype, scale=scale)
    tokens_T, targets_T, cu_seqlens = pack_of(lengths, spec)
    loss = model(tokens_T, cu_seqlens, targets_T)
    loss.backward()
    return loss.detach(), {name: weight.grad for name, weight in model.named_parameters()}


def on_ranks(spec, lengths, methods, *, recompute=(), dtype=torch.float64, scale=5.0):
    """The same on the ranks of a pool: what rank 0 has after summing what each rank holds. Other ranks: nothing."""
    group = whole_group()
    weights = WEIGHTS_OF.get(methods[0], Weights.WHOLE)
    model = model_of(spec, dtype=dtype, scale=scale)
    if weights is Weights.SHARDED:
        keep_own_rows(model, spec, rank=group.rank, degree=group.size)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    loss = run(model, group, lengths, methods, weights, recompute=recompute)
    for name, weight in model.named_parameters():
        assert torch.equal(weight, before[name]), f"{name} was changed by forward or backward"
    dist.all_reduce(total := loss.detach().clone())
    return total, {
        name: whole_gradient(name, weight, spec, group, weights) for name, weight in model.named_parameters()
    }


def run(model, group, lengths, methods, weights, *, recompute=()):
    tokens_T, targets_T, cu_seqlens = pack_of(lengths, model.spec)
    execution = StageExecution(
        model, group, tokens_T=tokens_T, targets_T=targets_T, cu_seqlens=cu_seqlens, methods=methods, weights=weights,
        recompute=recompute,
    )  # fmt: skip
    loss = model.run(execution)
    loss.backward()
    return loss


def whole_gradient(name, weight, spec, group, weights):
    """Summed over the ranks that hold the same rows, all rows together."""
    bounds = row_bounds(name, spec, degree=group.size) if weights is Weights.SHARDED else None
    grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
    if bounds is None or group.size == 1:
        grad = grad.clone()
    else:
        whole = grad.new_zeros(bounds[-1], *grad.shape[1:])
        whole[bounds[group.rank] : bounds[group.rank + 1]] = grad
        grad = whole
    dist.all_reduce(grad)
    return grad
