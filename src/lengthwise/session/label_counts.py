"""What labels of items are beside their tokens: the tokens themselves, the next ones, or something else."""

from dataclasses import dataclass

import numpy as np

from lengthwise.runtime.models.targets import IGNORE
from lengthwise.session.item_values import ItemRow


@dataclass
class LabelCounts:
    """Labels of the tokens that have a next one, counted as items are read."""

    num_labels: int = 0
    num_own: int = 0
    """Labels that are those of their tokens."""
    num_next: int = 0
    """Labels that are the next token."""

    def add(self, row: ItemRow, *, ignored: int) -> None:
        """Count the labels of an item, of a unit those of all its members."""
        tokens, labels = row.tokens, row.labels
        if labels is None or tokens.ndim != 1 or tokens.shape != labels.shape or tokens.dtype.kind not in "iu":
            return
        has_loss = ~np.isin(labels[:-1], (IGNORE, ignored))
        has_loss[np.array(row.bounds[1:-1], dtype=np.int64) - 1] = False
        self.num_labels += int(has_loss.sum())
        self.num_own += int((labels[:-1] == tokens[:-1])[has_loss].sum())
        self.num_next += int((labels[:-1] == tokens[1:])[has_loss].sum())
