"""Labels of whole sequences, each stored at one slot of its sequence and given to the model alone."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from lengthwise.runtime.models.targets import IGNORE


def with_label_of_sequence(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the forward of a sequence classifier to take labels [B, L], of which one a row is not ignored."""

    @wraps(forward)
    def call(*args: Any, labels: Any = None, **kwargs: Any) -> Any:
        if isinstance(labels, Tensor) and labels.dim() == 2 and not labels.is_floating_point():
            labels = torch.cat([row[row != IGNORE][:1] for row in labels])
        return forward(*args, **kwargs) if labels is None else forward(*args, labels=labels, **kwargs)

    return call
