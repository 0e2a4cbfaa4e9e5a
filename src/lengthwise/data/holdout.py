"""Held-out documents: a share of an index that is validated on and never trained on."""

from dataclasses import replace

import numpy as np

from lengthwise.core.errors import InputError, Setting
from lengthwise.core.lengths import LengthIndex
from lengthwise.data.max_length import CorpusView
from lengthwise.data.rng import epoch_order

_SEED = 0x76616C  # of no run: whatever a run's seed, the same documents are held out


def hold_out(view: CorpusView, share: float) -> tuple[CorpusView, CorpusView]:
    """Split a view into the sequences to train on and those of ``share`` of its documents, to validate on.

    All pieces of a split document are on the same side.

    Raises:
        InputError: a side would be empty.
    """
    documents = np.unique(view.base_ids)
    if len(documents) < 2:
        raise InputError(
            f"{Setting.VALIDATION_SHARE}={share:g} of {len(documents)} document leaves nothing to train on; index "
            f"more, or name other documents in {Setting.VALIDATION}"
        )
    count = min(max(1, round(share * len(documents))), len(documents) - 1)
    chosen = documents[epoch_order(len(documents), seed=_SEED, epoch=0)[:count]]
    is_held_out = np.isin(view.base_ids, chosen)
    return _part(view, ~is_held_out, f"all but {share:g}"), _part(view, is_held_out, f"{share:g}")


def _part(view: CorpusView, selected: np.ndarray, name: str) -> CorpusView:
    mark, numbers = f"{view.lengths.digest}/{name}", view.base_ids[selected]
    lengths = LengthIndex(lengths=view.lengths.lengths[selected], corpus_digest=mark, numbers=numbers)
    ledger = replace(
        view.ledger,
        held_out=int((~selected).sum()),
        tokens_held_out=view.lengths.num_tokens - lengths.num_tokens,
        sequences_out=len(lengths),
        tokens_out=lengths.num_tokens,
    )
    return CorpusView(lengths=lengths, base_ids=view.base_ids[selected], starts=view.starts[selected], ledger=ledger)
