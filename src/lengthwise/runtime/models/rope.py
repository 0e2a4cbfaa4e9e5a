"""Rotary position embeddings (Su et al. 2021) that start again at every sequence of a pack.

T tokens, K key/value heads, G query heads per key/value head, N = K G, H head size. Hugging Face's convention:
dimension i of a head turns with dimension i + H/2. Scaling types ``default``, ``linear`` and ``llama3`` (Llama 3.1).
"""

import math

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from lengthwise.core.specs import ModelSpec
from lengthwise.models.hf_config import ROPE_PARAMETERS, check_rope
from lengthwise.runtime.models.first_derivative import first_derivative_only
from lengthwise.runtime.models.host_copies import to_device


def inverse_frequencies(spec: ModelSpec) -> Tensor:
    """Radians per token of each pair of dimensions: ``[H / 2]``, in float32 as checkpoints were trained with.

    Raises:
        InputError: the rope type is not in ``ROPE_PARAMETERS``, lacks a parameter, or the head size is odd.
    """
    kind, scaling = check_rope(spec), dict(spec.rope_scaling)
    exponents = torch.arange(0, spec.head_size, 2, dtype=torch.int64).float() / spec.head_size
    frequencies = 1.0 / (spec.rope_theta**exponents)
    values = {key: float(scaling[key]) for key in ROPE_PARAMETERS[kind]}
    if kind == "linear":
        return frequencies / values["factor"]
    return _llama3_frequencies(frequencies, values) if kind == "llama3" else frequencies


def _llama3_frequencies(frequencies: Tensor, values: dict[str, float]) -> Tensor:
    """Long wavelengths slowed by ``factor``, short ones kept, those between blended (transformers' llama3 rule)."""
    factor, low, high = values["factor"], values["low_freq_factor"], values["high_freq_factor"]
    context = values["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / frequencies
    slowed = torch.where(wavelengths > context / low, frequencies / factor, frequencies)
    blend = (context / wavelengths - low) / (high - low)
    blended = (1 - blend) * slowed / factor + blend * slowed
    between = ~(wavelengths < context / high) & ~(wavelengths > context / low)
    return torch.where(between, blended, slowed)


def rotary_tables(
    spec: ModelSpec, offsets: np.ndarray, *, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angles of tokens at ``offsets`` [t] of their sequences, each ``[t, H / 2]``."""
    positions = torch.arange(int(offsets.max(initial=-1)) + 1, dtype=torch.float64, device=device)
    # In float32 the angle of token 1,000,000 would be off by up to 0.03 radians.
    angles = torch.outer(positions, to_device(inverse_frequencies(spec).double(), device))
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    if np.array_equal(offsets, np.arange(len(positions))):
        return cos, sin
    index = to_device(offsets, device)
    return cos[index], sin[index]


def split(qkv_TKGH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries ``[T, K G, H]``, keys and values ``[T, K, H]`` without rotation; see :func:`split_and_rotate`."""
    if torch.compiler.is_compiling():
        return _parts(qkv_TKGH)
    out: tuple[Tensor, Tensor, Tensor] = _Split.apply(qkv_TKGH)
    return out


def _parts(qkv_TKGH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q_TKGH, k_TKH, v_TKH = qkv_TKGH[:, :, :-2], qkv_TKGH[:, :, -2], qkv_TKGH[:, :, -1]
    if q_TKGH.shape[2] == 1:
        return q_TKGH.squeeze(2), k_TKH, v_TKH
    return q_TKGH.flatten(1, 2), k_TKH.contiguous(), v_TKH.contiguous()  # copies, or the projection would stay too


class _Split(torch.autograd.Function):
    """Slices whose backward writes their gradients side by side, where torch adds up three as large as the whole."""

    @staticmethod
    def forward(ctx: FunctionCtx, qkv_TKGH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return _parts(qkv_TKGH)

    @staticmethod
    @first_derivative_only("the rotary embedding of a model of this library")
    def backward(ctx: FunctionCtx, dq_TNH: Tensor, dk_TKH: Tensor, dv_TKH: Tensor) -> Tensor:
        dq_TKGH = dq_TNH.unflatten(1, (dk_TKH.shape[1], -1))
        return torch.cat([dq_TKGH, dk_TKH.unsqueeze(2), dv_TKH.unsqueeze(2)], dim=2)


def split_and_rotate(qkv_TKGH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries ``[T, K G, H]`` and keys ``[T, K, H]``, both rotated, and values ``[T, K, H]``.

    Args:
        qkv_TKGH: ``[T, K, G + 2, H]``: for each key/value head its G queries, its key and its value.
        cos_TH: ``[T, H / 2]``, as :func:`rotary_tables` makes.
        sin_TH: ``[T, H / 2]``.
    """
    if torch.compiler.is_compiling():  # which fuses and chooses what to keep by itself, and writes no views
        return _rotated(qkv_TKGH, cos_TH, sin_TH)
    out: tuple[Tensor, Tensor, Tensor] = _SplitAndRotate.apply(qkv_TKGH, cos_TH, sin_TH)
    return out


def _rotated(qkv_TKGH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    cos, sin = cos_TH[:, None, None], sin_TH[:, None, None]
    x1, x2 = qkv_TKGH[:, :, :-1].chunk(2, dim=-1)
    qk_TKGH = torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1)
    return qk_TKGH[:, :, :-1].flatten(1, 2), qk_TKGH[:, :, -1].contiguous(), qkv_TKGH[:, :, -1].contiguous()


class _SplitAndRotate(torch.autograd.Function):
    """One pass over the projection each way: rotates into fresh tensors, and keeps none of its inputs."""

    @staticmethod
    def forward(ctx: FunctionCtx, qkv_TKGH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos_TH, sin_TH)
        tokens, kv_heads, rows, head_size = qkv_TKGH.shape
        q_TKGH = qkv_TKGH.new_empty(tokens, kv_heads, rows - 2, head_size)
        k_TKH = qkv_TKGH.new_empty(tokens, kv_heads, 1, head_size)
        rotate_(q_TKGH, qkv_TKGH[:, :, :-2], cos_TH, sin_TH)
        rotate_(k_TKH, qkv_TKGH[:, :, -2:-1], cos_TH, sin_TH)
        return q_TKGH.flatten(1, 2), k_TKH.squeeze(2), qkv_TKGH[:, :, -1].contiguous()

    @staticmethod
    @first_derivative_only("the rotary embedding of a model of this library")
    def backward(ctx, dq_TNH: Tensor, dk_TKH: Tensor, dv_TKH: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
        cos_TH, sin_TH = ctx.saved_tensors
        tokens, kv_heads, head_size = dk_TKH.shape
        group_size = dq_TNH.shape[1] // kv_heads
        dqkv_TKGH = dq_TNH.new_empty(tokens, kv_heads, group_size + 2, head_size)
        # The inverse of a rotation is the rotation by the negative angle.
        rotate_(dqkv_TKGH[:, :, :-2], dq_TNH.unflatten(1, (kv_heads, group_size)), cos_TH, -sin_TH)
        rotate_(dqkv_TKGH[:, :, -2:-1], dk_TKH.unsqueeze(2), cos_TH, -sin_TH)
        dqkv_TKGH[:, :, -1] = dv_TKH
        return dqkv_TKGH, None, None


def rotate_(out_TKGH: Tensor, x_TKGH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> None:
    """Write the rotated ``x`` into ``out``; both ``[T, K, G, H]`` with any strides."""
    cos, sin = cos_TH[:, None, None], sin_TH[:, None, None]
    half = x_TKGH.shape[-1] // 2
    x1, x2 = x_TKGH[..., :half], x_TKGH[..., half:]
    out1, out2 = out_TKGH[..., :half], out_TKGH[..., half:]
    torch.mul(x1, cos, out=out1).addcmul_(x2, sin, value=-1)
    torch.mul(x2, cos, out=out2).addcmul_(x1, sin)
