"""The operators of one device at LLaMA-7B's width on a GPU, beside plain scaled-dot-product attention, with MFU."""

from collections.abc import Callable
from statistics import median

import torch
from pages import Section
from torch.nn import functional as F

from lengthwise.core.pipeline_config import Method, WeightPlacement
from lengthwise.core.specs import model_preset
from lengthwise.cost.analytic.volume import layer_volume
from lengthwise.runtime.comm.group import Group
from lengthwise.runtime.models.registry import build_model
from lengthwise.runtime.parallel.sharded_execution import StageExecution

PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "A800": 312e12}
"""bfloat16 FLOP/s without sparsity."""


def section(*, lengths: tuple[int, ...] = (4096, 16_384, 32_768)) -> Section:
    """One layer and its attention, degree 1; nothing but a line where there is no CUDA device."""
    if not torch.cuda.is_available():
        return Section(title="One GPU", text="Skipped: torch finds no CUDA device.", head=(), rows=[])
    from dataclasses import replace

    spec, name = replace(model_preset("llama-7b"), num_layers=1), torch.cuda.get_device_name()
    model, peak = build_model(spec, dtype=torch.bfloat16, device="cuda"), [PEAKS[k] for k in PEAKS if k in name]
    volume, rows = layer_volume(spec, Method.DENSE, degree=1, dtype="bfloat16"), []
    for length in lengths:
        shape = (1, spec.num_heads, length, spec.head_size)
        qkv = [torch.randn(shape, dtype=torch.bfloat16, device="cuda", requires_grad=True) for _ in range(3)]
        x = torch.randn(length, spec.hidden_size, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        attention = (volume.forward.attention_flops + volume.backward.attention_flops) * length**2
        products = (volume.forward.matmul_flops + volume.backward.matmul_flops) * length
        plain_s = _seconds(lambda qkv=qkv: F.scaled_dot_product_attention(*qkv, is_causal=True))
        rows.append([f"{length:,}", "SDPA alone", *_cells(plain_s, plain_s, attention, peak)])
        for method in (Method.DENSE, Method.RING):
            tokens = torch.zeros(length, dtype=torch.int64, device="cuda")
            execution = StageExecution(
                model, Group(rank=0), tokens_T=tokens, targets_T=tokens, cu_seqlens=(0, length), methods=(method,),
                weights=WeightPlacement.WHOLE,
            )  # fmt: skip
            took_s = _seconds(lambda x=x, run=execution: model.layers[0](x, run.operators(0)))
            rows.append([f"{length:,}", f"layer, {method}", *_cells(took_s, plain_s, attention + products, peak)])
    text = f"{name}, bfloat16, {spec.name}, forward and backward; FLOPs are model FLOPs: nothing computed twice counts."
    return Section(title="One GPU", text=text, head=("tokens", "what", "ms", "over SDPA alone", "MFU"), rows=rows)


def _cells(took_s: float, plain_s: float, flops: float, peak: list[float]) -> list[str]:
    return [f"{took_s * 1e3:.2f}", f"{took_s / plain_s:.2f}", f"{flops / took_s / peak[0]:.1%}" if peak else ""]


def _seconds(forward: Callable[[], torch.Tensor], repeats: int = 10) -> float:
    times = []
    for _ in range(repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        out = forward()
        out.backward(torch.ones_like(out))
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return median(times[2:])
