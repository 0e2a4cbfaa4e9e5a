"""A callback for those who keep transformers' Trainer: what its batches cost, and what dealing them by length would."""

import inspect
import logging
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from transformers.trainer_callback import CallbackHandler

from lengthwise.core.batch import GlobalBatch
from lengthwise.integrations.load_balance import EQUAL_AT, deal, work_of

_log = logging.getLogger("lengthwise")


class TrainerCallback(transformers.TrainerCallback):
    """Adds to the logs of transformers' Trainer, over the steps since the log before:

    * ``lengthwise/padding``: share of computed tokens that are padding;
    * ``lengthwise/imbalance``: work of the busiest rank over the mean of all, the mean over steps;
    * ``lengthwise/gain``: time of these steps over that of the same sequences packed without padding and dealt to the
      ranks by length: what can be won without sharing a sequence, if work is as the model of work says.

    Work of a row of l computed tokens is l + l^2 / ``equal_at``. Changes nothing; sees the rows of ``input_ids`` in the
    forward's arguments, and their padding in ``attention_mask``.

    It goes before all other callbacks, so that trackers (``report_to``) get what it adds: transformers puts them before
    those of a user.
    """

    def __init__(self, *, equal_at: int = EQUAL_AT) -> None:
        """``equal_at``: length of a sequence whose attention takes as long as all else; 12 times the hidden size."""
        self._equal_at = equal_at
        self._hook: Any = None
        self._seen: list[tuple[torch.Tensor | int, int, int]] = []
        """Of each forward of the step: lengths, or the number of rows without padding; rows; their computed length."""
        self._sums = np.zeros(4)
        """Computed tokens, padding, work of the busiest rank, work of the busiest one if sequences were dealt."""
        self._ratios: list[float] = []

    def on_init_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Go before the trackers."""
        self._go_first()

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        """Watch the model's forward."""
        self._go_first()  # it may have been added since
        self._hook = model.register_forward_pre_hook(self._note, with_kwargs=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Take stock of the step. Every rank calls this."""
        if not self._seen:
            return
        rows = [(length, width) for lengths, count, width in self._seen for length in _lengths(lengths, count, width)]
        self._seen = []
        ranks = _gathered(np.array(rows, dtype=np.int64), args.device)
        lengths = np.concatenate([rank[:, 0] for rank in ranks])
        busy = np.array([work_of(rank[:, 1], equal_at=self._equal_at).sum() for rank in ranks])
        batch = GlobalBatch(step=0, ids=tuple(range(len(lengths))), lengths=tuple(np.maximum(1, lengths).tolist()))
        dealt = deal(batch, len(ranks), max_tokens=int(lengths.max()), equal_at=self._equal_at)
        best = max(sum(work_of(lengths[list(ids)], equal_at=self._equal_at).sum() for ids in rows) for rows in dealt)
        computed = sum(int(rank[:, 1].sum()) for rank in ranks)
        self._sums += computed, computed - int(lengths.sum()), busy.max(), best
        self._ratios.append(float(busy.max() / busy.mean()))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        """Add what was found since the log before."""
        computed, padding, busiest, best = self._sums.tolist()
        if not computed or logs is None or "loss" not in logs:
            return
        figures = {
            "lengthwise/padding": round(padding / computed, 4),
            "lengthwise/imbalance": round(float(np.mean(self._ratios)), 4),
            "lengthwise/gain": round(busiest / best, 4),
        }
        self._sums, self._ratios = np.zeros(4), []
        logs.update(figures)
        if state.log_history:
            state.log_history[-1].update(figures)

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Leave the model."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _go_first(self) -> None:
        """Move to the front of the callbacks whose handler calls this one."""
        handler = _caller_of(self)
        if handler is not None and handler.callbacks[0] is not self:
            handler.callbacks.remove(self)  # while the handler iterates: all that come after keep their places
            handler.callbacks.insert(0, self)

    def _note(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        if not module.training or not isinstance(ids, torch.Tensor) or ids.dim() != 2:
            return
        mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
        if isinstance(mask, torch.Tensor) and mask.dim() == 2:
            self._seen.append((mask.detach().sum(1), *ids.shape))
        elif len(ids) == 1 and isinstance(positions, torch.Tensor):  # sequences laid end to end
            for length in np.diff([*np.flatnonzero(positions[0].cpu().numpy() == 0), ids.shape[1]]).tolist():
                self._seen.append((1, 1, length))
        else:
            self._seen.append((len(ids), *ids.shape))


def _caller_of(callback: transformers.TrainerCallback) -> Any:
    """The handler that is calling ``callback``, to which events give no other way; None: something else does."""
    frame = inspect.currentframe()
    while frame is not None:
        handler = frame.f_locals.get("self")
        if isinstance(handler, CallbackHandler) and callback in handler.callbacks:
            return handler
        frame = frame.f_back
    return None


def _lengths(lengths: torch.Tensor | int, count: int, width: int) -> list[int]:
    return lengths.tolist() if isinstance(lengths, torch.Tensor) else [width] * count


def _gathered(rows: np.ndarray, device: torch.device) -> list[np.ndarray]:
    """Rows of every rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [rows]
    count = torch.tensor([len(rows)], device=device)
    counts = [torch.zeros_like(count) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, count)
    max_rows = int(torch.stack(counts).max())
    padded = torch.zeros(max_rows, 2, dtype=torch.int64, device=device)
    padded[: len(rows)] = torch.from_numpy(rows)
    gathered = [torch.zeros_like(padded) for _ in counts]
    dist.all_gather(gathered, padded)
    return [table[: int(number)].cpu().numpy() for table, number in zip(gathered, counts)]
