"""Attention of ``ulysses`` and ``ring`` beside public implementations, on the same ranks with the same kernel.

    pip install --no-deps --no-build-isolation --target DIR deepspeed==0.19.8 yunchang==0.6.4 ring-flash-attn==0.1.8 \\
        einops==0.8.2 hjson==3.1.0 py-cpuinfo==9.0.0 msgpack==1.2.4 ninja==1.13.2

DeepSpeed's runs as it is. The rings of long-context-attention (yunchang) call FlashAttention, which has no CPU build;
the kernel that ours calls is put in its place, and nothing else is changed. Who does not run is reported with why.
"""

import os
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist
from method_balance import LAYOUTS, ring_of
from method_ranks import RankError, Ranks, group
from pages import Section, at_most
from torch import Tensor
from torch.nn import functional as F

from lengthwise.runtime.models.attention_view import in_order
from lengthwise.runtime.models.varlen_attention import attend
from lengthwise.runtime.parallel.attention_blocks import attend_block, attend_block_backward
from lengthwise.runtime.parallel.head_exchange import UlyssesShards, ulysses_attention
from lengthwise.runtime.parallel.ring_attention import ring_attention
from lengthwise.runtime.parallel.tokens import TokenShards

HEADS, HEAD_SIZE = 8, 32
EXACT = 1e-4
"""float32: outputs and gradients of order one, sums of up to 512 terms in another order."""
AFTER = (
    "yunchang's rings give wrong gradients in float32, of queries always, of keys and values now and then: "
    "`dq_buffer.to(torch.float32)` is then no copy, and the next step overwrites the buffer, also while it is on its "
    "way. In half precision, all that FlashAttention takes, it is one. Not run as published: "
)
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries, keys and values of this rank, each [t, N, H], to its outputs."""


def section(ranks: Mapping[int, Ranks], folder: Path | None, rounds: Mapping[int, int]) -> Section:
    """Ratios within a round; ``rounds``: how often each length."""
    sides, refused = _sides(ranks, folder)
    rows, slower, wrong = [], [], 0.0
    for degree in sorted(set(ranks) - {1}):
        apart = {
            side: [max(both) for both in zip(*ranks[degree].run(apart_from_one_device, side, folder))] for side in sides
        }
        wrong = max(wrong, *(max(apart[side]) for side in sides if side.startswith("ours")))
        for length, count in rounds.items():
            times = [
                {side: max(ranks[degree].run(seconds, side, length, folder)) for side in sides}
                for _ in range(count + 1)
            ][1:]
            for side in sides:
                ours = "ours: ulysses" if "ulysses" in side.lower() else "ours: ring"
                over = median(row[side] / row[ours] for row in times)
                slower += [1 / over] if side != ours and "contiguous" not in side else []
                took = f"{median(row[side] for row in times) * 1e3:,.1f}"
                rows.append(
                    [degree, f"{length:,}", count, side, took, f"{over:.2f}", *(f"{off:.0e}" for off in apart[side])]
                )
    return Section(
        title="Peers: attention over shards",
        text=f"Forward and backward of causal attention alone, {HEADS} heads of {HEAD_SIZE}, float32, one sequence; "
        "median of rounds. *Over ours*: of the same kind, above 1 is slower than ours. *Off*: largest difference from "
        "one device on 512 tokens. All call the same CPU flash kernel; yunchang's rings had theirs replaced by it, "
        "their loops and messages are untouched. Ours also puts zigzag shards into order for `ulysses`; DeepSpeed's "
        "shards are contiguous.",
        head=("ranks", "tokens", "rounds", "side", "ms", "over ours", "outputs off", "gradients off"),
        rows=rows,
        goals=(
            at_most(
                "attention, our time over a balanced peer's, median of lengths and degrees", _median(slower), 1.1, "x"
            ),
            at_most("attention, our difference from one device, float32", wrong, EXACT, ""),
        ),
        after=AFTER + "; ".join(f"**{name}**: {why}" for name, why in refused.items()) + ".",
    )


def _median(values: list[float]) -> float | None:
    return median(values) if values else None


def _sides(ranks: Mapping[int, Ranks], folder: Path | None) -> tuple[list[str], dict[str, str]]:
    """Those that run, and why the others do not."""
    sides, refused = [name for name in SIDES if name.startswith("ours")], {}
    for name in [*SIDES, *AS_PUBLISHED]:
        if name in sides:
            continue
        if folder is None and name != TORCH:
            refused[name] = "no folder of peers given (--peers)"
            continue
        apart = Ranks(2)  # a failure ends them
        try:
            apart.run(apart_from_one_device, name, folder)
            sides.append(name)
        except RankError as error:
            refused[name] = f"`{_short(str(error))}`"
        finally:
            apart.close()
    return sorted(sides, key=lambda name: "ring" in name), refused


def _short(error: str) -> str:
    return error if len(error) <= 200 else f"{error[:200]}..."


def seconds(side: str, num_tokens: int, folder: Path | None) -> float:
    """Forward and backward."""
    attention = _attention(side, num_tokens, folder)
    qkv = [x.requires_grad_() for x in _whole(num_tokens // group().size)]
    dist.barrier()
    start_s = perf_counter()
    out = attention(*qkv)
    out.backward(torch.ones_like(out))
    return perf_counter() - start_s


def apart_from_one_device(side: str, folder: Path | None, num_tokens: int = 512) -> tuple[float, float]:
    """The largest differences of this rank's outputs, and of its gradients."""
    attention = _attention(side, num_tokens, folder)
    places = torch.from_numpy(_shards(side, num_tokens).places[group().rank])
    whole, mine = _whole(num_tokens), [x[places] for x in _whole(num_tokens)]
    outs = []
    for qkv, attend_all in ((whole, lambda q, k, v: attend(q, k, v, (0, num_tokens))), (mine, attention)):
        qkv = [x.requires_grad_() for x in qkv]
        out = attend_all(*qkv)
        out.square().sum().backward()
        outs.append([out, *(x.grad for x in qkv)])
    off, *grads_off = (float((one[places] - other).detach().abs().max()) for one, other in zip(*outs))
    return off, max(grads_off)


def _whole(num_tokens: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(num_tokens, HEADS, HEAD_SIZE, generator=generator) for _ in range(3)]


def _shards(side: str, num_tokens: int) -> TokenShards:
    contiguous = not side.startswith("ours") and "zigzag" not in side
    return LAYOUTS["runs of the pack" if contiguous else "zigzag"]((0, num_tokens), group().size)


@cache
def _attention(side: str, num_tokens: int, folder: Path | None) -> Attention:
    if folder is not None and str(folder) not in sys.path:
        sys.path.append(str(folder))
    return {**SIDES, **AS_PUBLISHED}[side](_shards(side, num_tokens), num_tokens)


def _our_ulysses(shards: TokenShards, num_tokens: int) -> Attention:
    view = in_order((0, num_tokens), causal=True)
    into = shards.into(view)
    order = None if into is None else torch.from_numpy(into)
    back = None if order is None else torch.argsort(order)
    exchange = UlyssesShards(group=group(), sizes=shards.sizes, view=view, into=order, back=back)
    return lambda q, k, v: ulysses_attention(q, k, v, exchange)


def _our_ring(shards: TokenShards, num_tokens: int) -> Attention:
    ring = ring_of((0, num_tokens), shards)
    return lambda q, k, v: ring_attention(q, k, v, ring)


def _deepspeed(shards: TokenShards, num_tokens: int) -> Attention:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed.comm
    from deepspeed.sequence.layer import DistributedAttention

    if not deepspeed.comm.is_initialized():
        deepspeed.comm.init_distributed("gloo", verbose=False)

    def local(*qkv: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in qkv), is_causal=True).transpose(1, 2)

    module = DistributedAttention(local, dist.group.WORLD, scatter_idx=2, gather_idx=1)
    return lambda q, k, v: module(q[None], k[None], v[None], 0)[0]


def _yunchang(layout: str, *, kernel: str) -> Callable[[TokenShards, int], Attention]:
    def make(shards: TokenShards, num_tokens: int) -> Attention:
        from importlib import import_module

        from yunchang.kernels import AttnType

        name = "zigzag_ring_flash_attn" if layout == "zigzag" else "ring_flash_attn"
        module = import_module(f"yunchang.ring.{name}")
        if kernel == "ours":
            module.select_flash_attn_impl = _our_kernel
        kind = AttnType.TORCH_FLASH if kernel == "torch" else AttnType.FA
        function = getattr(module, f"{name}_func")
        return lambda q, k, v: function(q[None], k[None], v[None], causal=True, group=None, attn_type=kind)[0]

    return make


def _our_kernel(attn_type: object, stage: str, **options: object) -> Callable:
    """In the place of FlashAttention: ``[B, S, N, H]``, log-sum-exps ``[B, N, S]``."""

    def forward(q: Tensor, k: Tensor, v: Tensor, *rest: object, causal: bool, **options: object) -> tuple:
        out, lse = attend_block(q, k, v, causal=causal)
        return out, lse.transpose(1, 2)

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
        dropout: float, scale: float, causal: bool, *rest: object, **options: object,
    ) -> None:  # fmt: skip
        found = attend_block_backward(dout, (q, k, v), out, lse.transpose(1, 2), causal=causal)
        for into, grad in zip((dq, dk, dv), found):
            into.copy_(grad)

    return forward if stage == "fwd-only" else backward


def _zhuzilin(shards: TokenShards, num_tokens: int) -> Attention:
    import ring_flash_attn

    return lambda q, k, v: ring_flash_attn.zigzag_ring_flash_attn_func(q[None], k[None], v[None], causal=True)[0]


def _torch_context_parallel(shards: TokenShards, num_tokens: int) -> Attention:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cpu", (group().size,))

    def run(*qkv: Tensor) -> Tensor:
        buffers = [x.detach().transpose(0, 1)[None].contiguous() for x in qkv]
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2, 2, 2]):
            return F.scaled_dot_product_attention(*buffers, is_causal=True)[0].transpose(0, 1)

    return run


TORCH = "torch context_parallel"
SIDES: dict[str, Callable[[TokenShards, int], Attention]] = {
    "ours: ulysses": _our_ulysses,
    "DeepSpeed DistributedAttention (Ulysses)": _deepspeed,
    "ours: ring": _our_ring,
    "yunchang zigzag ring, our kernel": _yunchang("zigzag", kernel="ours"),
    "yunchang contiguous ring, our kernel": _yunchang("contiguous", kernel="ours"),
}
AS_PUBLISHED: dict[str, Callable[[TokenShards, int], Attention]] = {
    "yunchang zigzag ring, FlashAttention": _yunchang("zigzag", kernel="flash"),
    "yunchang zigzag ring, torch's flash": _yunchang("zigzag", kernel="torch"),
    "ring-flash-attention zigzag": _zhuzilin,
    TORCH: _torch_context_parallel,
}
"""Who is not expected to run on a CPU; tried all the same."""
