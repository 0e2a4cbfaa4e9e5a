"""Vocabulary-parallel embedding and cross-entropy: every rank holds some rows of embedding and head.

T tokens of the pack, t of this rank, D hidden size, V vocabulary, v rows of it on this rank, C tokens of one chunk, p
ranks. Tokens are whole on every rank, they are only integers; so ranks know without asking who needs which row, and
whose target is whose.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lengthwise.runtime.comm.group import Group
from lengthwise.runtime.models.chunked_loss import chunk_tokens, scaled_as
from lengthwise.runtime.models.first_derivative import first_derivative_only
from lengthwise.runtime.models.host_copies import to_device
from lengthwise.runtime.models.targets import IGNORE


def sharded_lookup(table_vD: Tensor, tokens: Sequence[np.ndarray], bounds: Sequence[int], group: Group) -> Tensor:
    """Rows of this rank's tokens, ``[t, D]``: an all-to-all of t D numbers forward, and back with their gradients.

    Args:
        table_vD: this rank's rows.
        tokens: of each rank.
        bounds: rank r holds rows ``bounds[r]`` to ``bounds[r + 1]``.
        group: the ranks.
    """
    owners = [np.searchsorted(bounds, ids, side="right") - 1 for ids in tokens]
    wanted = np.concatenate([ids[owner == group.rank] for ids, owner in zip(tokens, owners)]) - bounds[group.rank]
    send = [int((owner == group.rank).sum()) for owner in owners]
    mine = owners[group.rank]
    receive = np.bincount(mine, minlength=group.size).tolist()
    index = to_device(wanted, table_vD.device)
    places = to_device(np.argsort(np.argsort(mine, kind="stable"), kind="stable"), table_vD.device)
    rows: Tensor = _ExchangeRows.apply(table_vD[index], tuple(send), tuple(receive), group)
    return rows[places]


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, send, receive, group):  # type: ignore[no-untyped-def]
        ctx.send, ctx.receive, ctx.group = send, receive, group
        out = group.all_to_all(x, send, receive)
        return out.view_as(out)

    @staticmethod
    @first_derivative_only("an embedding that ranks share")
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return ctx.group.all_to_all(grad.contiguous(), ctx.receive, ctx.send), None, None, None


def sharded_cross_entropy(
    hidden_tD: Tensor,
    head_vD: Tensor,
    bias_v: Tensor | None,
    targets: Sequence[np.ndarray],
    bounds: Sequence[int],
    group: Group,
) -> Tensor:
    """Sum over this rank's targets of the loss, the vocabulary split over the ranks (Shoeybi et al. 2019): a scalar.

    Chunk by chunk: the hidden states of all ranks are gathered, each rank makes the logits of its rows, maxima and sums
    of exponentials are reduced, and the gradients of hidden states are reduce-scattered. As in
    :func:`~lengthwise.runtime.models.chunked_loss.chunked_cross_entropy` gradients are made with the loss.

    Args:
        hidden_tD: of this rank's tokens.
        head_vD: this rank's rows.
        bias_v: this rank's, added to the logits.
        targets: of each rank's tokens; ``IGNORE`` where there is none, which costs nothing.
        bounds: rank r holds rows ``bounds[r]`` to ``bounds[r + 1]``.
        group: the ranks.
    """
    grad = torch.is_grad_enabled()
    loss: Tensor = _ShardedCrossEntropy.apply(hidden_tD, head_vD, bias_v, targets, bounds, group, grad)
    return loss


class _ShardedCrossEntropy(torch.autograd.Function):
    """The algebra of ``model.loss``: the gradient of the logits is E / Z - onehot(target)."""

    @staticmethod
    def forward(ctx, hidden_tD, head_vD, bias_v, targets, bounds, group, needs_grad):  # type: ignore[no-untyped-def]
        wide = torch.promote_types(hidden_tD.dtype, torch.float32)
        loss = hidden_tD.new_zeros((), dtype=wide)
        dhidden_tD = torch.zeros_like(hidden_tD)
        dhead_vD = torch.zeros_like(head_vD, dtype=wide)
        dbias_v = None if bias_v is None else torch.zeros_like(bias_v, dtype=wide)
        at_once = max(1, chunk_tokens(len(head_vD), hidden_tD.device) // group.size)
        rows = [np.flatnonzero(values != IGNORE) for values in targets]
        gradients = (dhidden_tD, dhead_vD, dbias_v) if needs_grad else None
        for start in range(0, max(map(len, rows)), at_once):
            chunk = [values[start : start + at_once] for values in rows]
            wanted = np.concatenate([values[index] for values, index in zip(targets, chunk)])
            loss += _add_chunk(chunk, wanted - bounds[group.rank], hidden_tD, head_vD, bias_v, gradients, group)
        ctx.save_for_backward(dhidden_tD, dhead_vD, dbias_v)
        ctx.head_dtype, ctx.group = head_vD.dtype, group
        return loss

    @staticmethod
    @first_derivative_only("a head that ranks share")
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        dhidden_tD, dhead_vD, dbias_v = ctx.saved_tensors
        dbias_v = None if dbias_v is None else (dbias_v * grad).to(ctx.head_dtype)
        dhead_vD = scaled_as(dhead_vD, grad, ctx.head_dtype)
        return scaled_as(dhidden_tD, grad, dhidden_tD.dtype), dhead_vD, dbias_v, None, None, None, None


def _add_chunk(
    chunk: Sequence[np.ndarray],
    wanted: np.ndarray,
    hidden_tD: Tensor,
    head_vD: Tensor,
    bias_v: Tensor | None,
    gradients: tuple[Tensor, Tensor, Tensor | None] | None,
    group: Group,
) -> Tensor:
    """Add the gradients of a chunk of every rank's tokens; return the loss of this rank's.

    ``wanted``: the targets of all of them, counted from this rank's first row.
    """
    wide, sizes = torch.promote_types(hidden_tD.dtype, torch.float32), [len(values) for values in chunk]
    own_rows = to_device(chunk[group.rank], hidden_tD.device)
    is_mine = (wanted >= 0) & (wanted < len(head_vD))
    mine = to_device(np.flatnonzero(is_mine), hidden_tD.device)
    target = to_device(wanted[is_mine], hidden_tD.device)
    hidden_CD = group.gather(hidden_tD[own_rows], sizes).wait()
    exps_Cv, sums_C, losses_C = _softmax(hidden_CD, head_vD, bias_v, mine, target, group)
    if gradients is not None:
        dhidden_tD, dhead_vD, dbias_v = gradients
        if dbias_v is not None:
            dbias_v += (exps_Cv / sums_C[:, None]).sum(0)
            dbias_v.index_add_(0, target, torch.ones_like(target, dtype=wide), alpha=-1)
        exps_Cv = exps_Cv.to(head_vD.dtype)
        scaled_CD = (hidden_CD.to(wide) / sums_C[:, None]).to(exps_Cv.dtype)
        dhead_vD += exps_Cv.T @ scaled_CD
        del scaled_CD
        dhead_vD.index_add_(0, target, hidden_CD[mine].to(wide), alpha=-1)
        del hidden_CD
        dhidden_CD = (exps_Cv @ head_vD).to(wide).div_(sums_C[:, None])
        dhidden_CD.index_add_(0, mine, head_vD[target].to(wide), alpha=-1)
        dhidden_tD[own_rows] = group.reduce_scatter(dhidden_CD.to(hidden_tD.dtype), sizes).wait()
    return losses_C.split(sizes)[group.rank].sum()


def _softmax(
    hidden_CD: Tensor, head_vD: Tensor, bias_v: Tensor | None, mine: Tensor, target: Tensor, group: Group
) -> tuple[Tensor, Tensor, Tensor]:
    """Exponentials of this rank's logits below the maximum [C, v], their sums over all ranks and the losses [C].

    ``mine``: the tokens whose target is a row of this rank, ``target``: that row. Two all-reduces of C and 2 C numbers.
    """
    wide = torch.promote_types(hidden_CD.dtype, torch.float32)
    logits_Cv = (hidden_CD @ head_vD.T).to(wide)
    if bias_v is not None:
        logits_Cv += bias_v
    has_rows = logits_Cv.shape[1] > 0
    own_C = logits_Cv.amax(1) if has_rows else logits_Cv.new_full((len(logits_Cv),), -torch.inf)
    highest_C = group.all_reduce(own_C, dist.ReduceOp.MAX)
    logits_Cv -= highest_C[:, None]
    both = logits_Cv.new_zeros(2, len(logits_Cv))
    both[1, mine] = logits_Cv[mine, target]
    exps_Cv = logits_Cv.exp_()
    both[0] = exps_Cv.sum(1)
    sums_C, target_logits_C = group.all_reduce(both, dist.ReduceOp.SUM)
    return exps_Cv, sums_C, sums_C.log() - target_logits_C
