"""Attention within each sequence of a pack: one function over ``cu_seqlens``.

T tokens of the pack, N query heads, K key/value heads, H head size; B sequences of one length L.

CUDA in half precision runs PyTorch's varlen flash kernel, one launch for the whole pack. Everything else, and the
reference of every test, is scaled-dot-product attention per run of equally long sequences: 4-D inputs reach the flash
kernel on CPU in every dtype (3-D ones fall to the unfused path, 3x slower).
"""

from functools import lru_cache
from inspect import signature
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lengthwise.core.errors import InputError
from lengthwise.runtime.models.host_copies import to_device

_VARLEN_DTYPES = (torch.float16, torch.bfloat16)
_LARGEST_HEAD, _HEAD_STEP = 256, 8
"""Of the flash kernel: the largest head, and what sizes of heads are multiples of."""
_CAUSAL_WINDOW, _FULL_WINDOW = (-1, 0), (-1, -1)


def attend(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, cu_seqlens: tuple[int, ...], *, causal: bool = True) -> Tensor:
    """Softmax attention of every token over its own sequence; returns ``[T, N, H]``.

    Args:
        q_TNH: queries; head n reads key/value head ``n // (N // K)`` (grouped-query attention, Ainslie et al. 2023).
        k_TKH: keys.
        v_TKH: values.
        cu_seqlens: offsets of the sequence boundaries, from 0 to T.
        causal: no token sees a later one.
    """
    if uses_varlen(q_TNH):
        return attend_varlen(q_TNH, k_TKH, v_TKH, cu_seqlens, causal=causal)
    return attend_by_run(q_TNH, k_TKH, v_TKH, cu_seqlens, causal=causal)


def uses_varlen(q_TNH: Tensor) -> bool:
    """Whether the varlen flash kernel takes these queries."""
    is_for_kernel = q_TNH.is_cuda and q_TNH.dtype in _VARLEN_DTYPES and q_TNH.shape[-1] <= _LARGEST_HEAD
    return is_for_kernel and bool(_varlen_parameters())


def takes_windows(q_TNH: Tensor) -> bool:
    """Whether the varlen flash kernel takes these queries, each of which sees a window of its sequence."""
    return uses_varlen(q_TNH) and "window_size" in _varlen_parameters()


def attend_by_run(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, cu_seqlens: tuple[int, ...], *, causal: bool = True
) -> Tensor:
    """Attention on any device and in any dtype: one call per run of neighbouring sequences of equal length."""
    runs = equal_runs(cu_seqlens)
    # split and cat, not slices: the backward of a slice fills a whole pack with zeros, once per sequence.
    tokens = [num_sequences * length for num_sequences, length in runs]
    q_runs, k_runs, v_runs = (x.split(tokens) for x in (q_TNH, k_TKH, v_TKH))
    outs = []
    for (num_sequences, length), *qkv in zip(runs, q_runs, k_runs, v_runs):
        q_BNLH, k_BKLH, v_BKLH = (x.unflatten(0, (num_sequences, length)).transpose(1, 2) for x in qkv)
        out_BNLH = _attend_equal(q_BNLH, k_BKLH, v_BKLH, causal=causal)
        outs.append(out_BNLH.transpose(1, 2).flatten(0, 1))
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _attend_equal(q_BNLH: Tensor, k_BKLH: Tensor, v_BKLH: Tensor, *, causal: bool) -> Tensor:
    """Attention of sequences of equal length; no logits [L, L] are kept in float32 on GPUs, either.

    There torch makes them where key/value heads are fewer: its memory-efficient kernel takes as many as query heads.
    """
    num_groups = q_BNLH.shape[1] // k_BKLH.shape[1]
    if not (q_BNLH.is_cuda and q_BNLH.dtype == torch.float32 and q_BNLH.shape[-1] % 8 == 0):
        return F.scaled_dot_product_attention(q_BNLH, k_BKLH, v_BKLH, is_causal=causal, enable_gqa=num_groups > 1)
    k_BNLH, v_BNLH = (x if num_groups == 1 else x.repeat_interleave(num_groups, dim=1) for x in (k_BKLH, v_BKLH))
    out_BNLH: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        q_BNLH, k_BNLH, v_BNLH, None, torch.is_grad_enabled(), 0.0, causal
    )[0]
    return out_BNLH


def attend_varlen(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    cu_seqlens: tuple[int, ...],
    *,
    causal: bool = True,
    window: tuple[int, int] | None = None,
) -> Tensor:
    """Attention by ``torch.nn.attention.varlen``: CUDA, float16 or bfloat16, one kernel for the whole pack.

    ``window``: how many tokens before and after its own each token sees, where :func:`takes_windows`; None: all. Heads
    get zeros behind until their size is one that the kernel takes.

    Raises:
        InputError: this PyTorch has no varlen attention.
    """
    accepted = _varlen_parameters()
    if not accepted:
        raise InputError(f"torch {torch.__version__} has no torch.nn.attention.varlen; torch 2.10 or later has")
    options: dict[str, Any] = {}
    longest = max(end - start for start, end in pairwise(cu_seqlens))
    if window is not None:
        before, after = (size if size < longest else -1 for size in window)
        options["window_size"] = (before, 0 if causal else after)
    elif "window_size" in accepted:
        # Causality is recognised by comparing with the tuple (-1, 0); a list would not be.
        options["window_size"] = _CAUSAL_WINDOW if causal else _FULL_WINDOW
    else:
        options["is_causal"] = causal
    if q_TNH.shape[1] != k_TKH.shape[1]:
        if "enable_gqa" in accepted:
            options["enable_gqa"] = True
        else:
            group_size = q_TNH.shape[1] // k_TKH.shape[1]
            k_TKH, v_TKH = (x.repeat_interleave(group_size, dim=1) for x in (k_TKH, v_TKH))
    from torch.nn.attention.varlen import varlen_attn

    offsets, size = device_offsets(cu_seqlens, q_TNH.device), q_TNH.shape[-1]
    if missing := -size % _HEAD_STEP:
        q_TNH = q_TNH * ((size + missing) / size) ** 0.5  # the kernel divides by the root of the larger size
        q_TNH, k_TKH, v_TKH = (F.pad(x, (0, missing)) for x in (q_TNH, k_TKH, v_TKH))
    q_TNH, k_TKH, v_TKH = (x.contiguous() for x in (q_TNH, k_TKH, v_TKH))
    out = varlen_attn(q_TNH, k_TKH, v_TKH, offsets, offsets, longest, longest, **options)
    assert isinstance(out, Tensor)  # a pair only where auxiliary outputs are asked for
    return out[..., :size] if missing else out


def equal_runs(cu_seqlens: tuple[int, ...]) -> list[tuple[int, int]]:
    """Neighbouring sequences of equal length as ``(num_sequences, length)``; empty sequences vanish."""
    lengths = (end - start for start, end in pairwise(cu_seqlens))
    return [(len(list(run)), length) for length, run in groupby(lengths) if length]


@lru_cache(maxsize=1)
def _varlen_parameters() -> frozenset[str]:
    """Parameter names of this PyTorch's ``varlen_attn`` (2.10: ``is_causal``; 2.13: ``window_size, enable_gqa``)."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(signature(varlen_attn).parameters)


@lru_cache(maxsize=256)
def device_offsets(cu_seqlens: tuple[int, ...], device: torch.device) -> Tensor:
    """``cu_seqlens`` as the int32 tensor the kernel reads, copied to the device once for all layers."""
    with torch.inference_mode(False):  # what an evaluation caches, training must be able to keep for its backward
        return to_device(torch.tensor(cu_seqlens, dtype=torch.int32), device)
