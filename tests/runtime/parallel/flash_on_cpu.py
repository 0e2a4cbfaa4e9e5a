"""CPU kernels in place of CUDA's flash attention over packs, so that the code that calls them computes numbers here.

They take and give what ``aten::_flash_attention_forward`` and its backward do in their variable-length form: offsets of
queries and keys, log-sum-exps [heads, queries], causal masks and windows aligned at the last query and the last key.
"""

from contextlib import contextmanager
from itertools import pairwise
from unittest import mock

import torch

from lengthwise.runtime.models import varlen_attention
from lengthwise.runtime.parallel import ring


@contextmanager
def flash_on_cpu():
    """The branch of GPUs on CPU tensors of any dtype and head size; the calls of each kernel are counted."""
    calls = {"forward": 0, "backward": 0}
    aten_overrides = torch.library.Library("aten", "IMPL")
    aten_overrides.impl("_flash_attention_forward", lambda *args, **options: _forward(calls, *args, **options), "CPU")
    aten_overrides.impl("_flash_attention_backward", lambda *args, **options: _backward(calls, *args, **options), "CPU")
    with (
        mock.patch.object(varlen_attention, "uses_varlen", lambda q: True),
        mock.patch.object(ring, "uses_flash", lambda q: True),
    ):
        yield calls
    aten_overrides._destroy()


def _blocks(offsets_q, offsets_k, longest_q, longest_k):
    assert offsets_q.dtype == offsets_k.dtype == torch.int32 and len(offsets_q) == len(offsets_k)
    for (q0, q1), (k0, k1) in zip(pairwise(offsets_q.tolist()), pairwise(offsets_k.tolist())):
        assert q1 - q0 <= longest_q and k1 - k0 <= longest_k
        yield slice(q0, q1), slice(k0, k1)


def _window(is_causal, options):
    """How many keys before and after its own place a query sees, -1: all."""
    before, after = (options.get(f"window_size_{side}") for side in ("left", "right"))
    return -1 if before is None else before, 0 if is_causal else -1 if after is None else after


def _weights(q, k, window):
    """Masked logits of one block, [N, L, S], every key/value head repeated for its queries."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    logits = torch.einsum("lnh,snh->nls", q, k) * q.shape[-1] ** -0.5
    num_queries, num_keys = logits.shape[-2:]
    distance = torch.arange(num_queries)[:, None] + num_keys - num_queries - torch.arange(num_keys)
    before, after = (size if size >= 0 else num_queries + num_keys for size in window)
    return logits.masked_fill((distance > before) | (distance < -after), -torch.inf)


def _forward(calls, q, k, v, offsets_q, offsets_k, longest_q, longest_k, dropout, is_causal, debug, **options):
    calls["forward"] += 1
    assert q.is_contiguous() and k.is_contiguous() and v.is_contiguous() and dropout == 0.0 and not debug
    wide = torch.promote_types(q.dtype, torch.float32)
    out, lse = torch.empty_like(q), q.new_empty(q.shape[1], len(q), dtype=wide)
    for rows, keys in _blocks(offsets_q, offsets_k, longest_q, longest_k):
        logits = _weights(q[rows].to(wide), k[keys].to(wide), _window(is_causal, options))
        lse[:, rows] = logits.logsumexp(-1)
        v_rows = v[keys].to(wide).repeat_interleave(q.shape[1] // v.shape[1], dim=1)
        out[rows] = torch.einsum("nls,snh->lnh", logits.softmax(-1), v_rows).to(q.dtype)
    return out, lse, q.new_zeros(2, dtype=torch.uint64), q.new_empty(0), q.new_empty(0)


def _backward(
    calls, dout, q, k, v, out, lse, offsets_q, offsets_k, longest_q, longest_k, dropout, is_causal, *unused, **options
):  # fmt: skip
    calls["backward"] += 1
    assert all(x.is_contiguous() for x in (dout, q, k, v, out, lse)) and lse.shape == (q.shape[1], len(q))
    wide, group = lse.dtype, q.shape[1] // k.shape[1]
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows, keys in _blocks(offsets_q, offsets_k, longest_q, longest_k):
        q_rows, k_rows, dout_rows = (x.to(wide) for x in (q[rows], k[keys], dout[rows]))
        weights = (_weights(q_rows, k_rows, _window(is_causal, options)) - lse[:, rows, None]).exp()
        v_rows = v[keys].to(wide).repeat_interleave(group, dim=1)
        inner = (dout_rows * out[rows].to(wide)).sum(-1).T[..., None]
        dlogits = weights * (torch.einsum("lnh,snh->nls", dout_rows, v_rows) - inner) * q.shape[-1] ** -0.5
        dq[rows] = torch.einsum("nls,snh->lnh", dlogits, k_rows.repeat_interleave(group, dim=1)).to(q.dtype)
        for dx, parts in (
            (dk, torch.einsum("nls,lnh->snh", dlogits, q_rows)),
            (dv, torch.einsum("nls,lnh->snh", weights, dout_rows)),
        ):
            dx[keys] = parts.unflatten(1, (-1, group)).sum(2).to(dx.dtype)
    return dq, dk, dv
