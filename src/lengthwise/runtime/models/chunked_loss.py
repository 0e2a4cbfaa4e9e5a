"""Chunked cross-entropy, which never materializes the logits of a whole pack.

T tokens, D hidden size, V vocabulary; C tokens of one chunk. The idea of computing the gradient with the loss, chunk by
chunk, is Liger Kernel's fused linear cross-entropy (Hsu et al. 2024).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lengthwise.runtime.models.first_derivative import first_derivative_only
from lengthwise.runtime.models.targets import rows_with_target

# Logits of one chunk. A CPU's cache wants it small (measured: 8 MiB of float32, but at least 128 tokens per product), a
# GPU wants large products.
_CHUNK_LOGITS = {"cpu": 2**21, "cuda": 2**27}
_MIN_CHUNK_TOKENS = 128


def chunk_tokens(vocab_size: int, device: torch.device) -> int:
    """Number of tokens whose logits are materialized at once on ``device``."""
    return max(_MIN_CHUNK_TOKENS, _CHUNK_LOGITS.get(device.type, _CHUNK_LOGITS["cuda"]) // max(1, vocab_size))


@dataclass(eq=False)
class HeadGradients:
    """Gradients of the head that the slices of a micro-batch sum in their forwards, as one of them gives to all."""

    head_VD: Tensor | None = None
    bias_V: Tensor | None = None

    def of(self, head_VD: Tensor, bias_V: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """The sums so far; zeros at first."""
        if self.head_VD is None:
            self.head_VD = torch.zeros_like(head_VD, dtype=dtype)
            self.bias_V = None if bias_V is None else torch.zeros_like(bias_V, dtype=dtype)
        return self.head_VD, self.bias_V

    def take(self) -> tuple[Tensor | None, Tensor | None]:
        """The sums, which are not kept any longer."""
        taken, self.head_VD, self.bias_V = (self.head_VD, self.bias_V), None, None
        return taken


class HeadShare(NamedTuple):
    """What a slice of a micro-batch has to do with the gradients of the head."""

    summed: HeadGradients
    gives: bool
    """Whether its backward, the last of all slices', gives the sum; each is scaled alike."""


def chunked_cross_entropy(
    hidden_TD: Tensor,
    head_VD: Tensor,
    targets_T: Tensor,
    *,
    chunk_tokens: int,
    bias_V: Tensor | None = None,
    rows_R: Tensor | None = None,
    share: HeadShare | None = None,
) -> Tensor:
    """Sum over the tokens that have a target of ``-log softmax(hidden @ head.T + bias)[target]``: a scalar.

    At most ``chunk_tokens`` rows of logits exist at a time. The gradients of ``hidden`` and ``head`` are made in the
    forward, so the backward only scales them: no logits are computed twice, and [T, D] + [V, D] numbers are kept.
    Tokens without a target cost nothing. The loss is float32, or float64 for float64 inputs.

    Args:
        hidden_TD: final hidden states.
        head_VD: output embeddings; its gradient is accumulated in the dtype of the loss.
        targets_T: int64, ``IGNORE`` where there is none.
        chunk_tokens: rows of logits held at once.
        bias_V: added to the logits.
        rows_R: places of the tokens that have a target; without it they are looked for, which makes the host wait for
            a GPU.
        share: where the gradients of the head are summed, of a slice of a micro-batch; None: they are its own.
    """
    if rows_R is None:
        rows_R = rows_with_target(targets_T)
    grad = torch.is_grad_enabled()
    needs = (grad and hidden_TD.requires_grad, grad and head_VD.requires_grad)
    loss: Tensor = _ChunkedCrossEntropy.apply(
        hidden_TD, head_VD, bias_V, targets_T, rows_R, chunk_tokens, needs, share
    )  # fmt: skip
    return loss


class _ChunkedCrossEntropy(torch.autograd.Function):
    """With E = exp(logits - max) and Z its row sums, the gradient of the logits is E / Z - onehot(target).

    Neither the division nor the subtraction touches a [C, V] matrix: Z divides the [C, D] side of both products, and
    the one-hot part is a row gathered from the head and a row added to its gradient.
    """

    @staticmethod
    def forward(ctx, hidden_TD, head_VD, bias_V, targets_T, rows_R, chunk_tokens, needs, share):  # type: ignore[no-untyped-def]
        wide = torch.promote_types(hidden_TD.dtype, torch.float32)
        loss = hidden_TD.new_zeros((), dtype=wide)
        dhidden_TD = torch.zeros_like(hidden_TD) if needs[0] else None
        summed = HeadGradients() if share is None else share.summed
        dhead_VD, dbias_V = summed.of(head_VD, bias_V, wide) if needs[1] else (None, None)
        for rows_C in rows_R.split(chunk_tokens):
            loss += _add_chunk(rows_C, hidden_TD, head_VD, bias_V, targets_T, (dhidden_TD, dhead_VD, dbias_V))
        ctx.summed = summed if share is not None and share.gives else None
        ctx.save_for_backward(dhidden_TD, *((dhead_VD, dbias_V) if share is None else (None, None)))
        ctx.head_dtype = head_VD.dtype
        return loss

    @staticmethod
    @first_derivative_only(
        "a cross-entropy whose logits are never whole", "make it of logits.whole(), or with reduction='none'"
    )
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        dhidden_TD, dhead_VD, dbias_V = ctx.saved_tensors
        if ctx.summed is not None:
            dhead_VD, dbias_V = ctx.summed.take()
        return (
            None if dhidden_TD is None else scaled_as(dhidden_TD, grad, dhidden_TD.dtype),
            None if dhead_VD is None else scaled_as(dhead_VD, grad, ctx.head_dtype),
            None if dbias_V is None else (dbias_V * grad).to(ctx.head_dtype),
            *(None,) * 5,
        )


def _add_chunk(
    rows_C: Tensor,
    hidden_TD: Tensor,
    head_VD: Tensor,
    bias_V: Tensor | None,
    targets_T: Tensor,
    gradients: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> Tensor:
    """Add the gradients of a chunk of tokens, and return its loss. Its logits are freed on return."""
    dhidden_TD, dhead_VD, dbias_V = gradients
    hidden_CD, targets_C = hidden_TD[rows_C], targets_T[rows_C]
    wide = torch.promote_types(hidden_TD.dtype, torch.float32)
    logits_CV = (hidden_CD @ head_VD.T).to(wide)
    if bias_V is not None:
        logits_CV += bias_V
    logits_CV -= logits_CV.amax(dim=1, keepdim=True)
    target_logits_C = logits_CV.gather(1, targets_C[:, None]).squeeze(1)
    logits_CV.exp_()
    sums_C1 = logits_CV.sum(dim=1, keepdim=True)
    if dbias_V is not None:
        dbias_V += (logits_CV / sums_C1).sum(0)
        dbias_V.index_add_(0, targets_C, torch.ones_like(target_logits_C), alpha=-1)
    exps_CV = logits_CV.to(head_VD.dtype)
    del logits_CV
    if dhidden_TD is not None:
        expected_CD = (exps_CV @ head_VD).to(wide).div_(sums_C1).sub_(head_VD[targets_C])
        dhidden_TD[rows_C] = expected_CD.to(hidden_TD.dtype)
        del expected_CD
    if dhead_VD is not None:
        _accumulate(dhead_VD, exps_CV, hidden_CD.to(wide) / sums_C1)
        dhead_VD.index_add_(0, targets_C, hidden_CD.to(wide), alpha=-1)
    return (sums_C1.squeeze(1).log() - target_logits_C).sum()


def scaled_as(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """``(x * factor).to(dtype)``, of what a forward saved: in place of ``x``, unless its graph is kept for another.

    The product is one in the wider dtype of ``x`` and ``factor`` that is never stored in it.
    """
    if x.dtype == dtype and not _keeps_graph():
        return x.mul_(factor)
    return torch.mul(x, factor.reshape(1), out=x.new_empty(x.shape, dtype=dtype))


def _keeps_graph() -> bool:
    """Whether the backward that runs was told to keep its graph, or cannot say."""
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return ask is None or bool(ask())


def _accumulate(dhead_VD: Tensor, exps_CV: Tensor, scaled_CD: Tensor) -> None:
    """``dhead += exps.T @ scaled``, the product in the dtype of ``exps``, the sum in the dtype of ``dhead``."""
    if exps_CV.dtype == dhead_VD.dtype:
        dhead_VD.addmm_(exps_CV.T, scaled_CD)
    else:
        dhead_VD += exps_CV.T @ scaled_CD.to(exps_CV.dtype)
