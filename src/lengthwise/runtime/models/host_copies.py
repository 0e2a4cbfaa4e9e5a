"""Copies of the host's values to a device for which the host does not wait."""

import numpy as np
import torch
from torch import Tensor


def to_device(values: np.ndarray | Tensor, device: torch.device | str) -> Tensor:
    """Copy to ``device``; to a GPU from pinned memory, as the host waits for copies from any other."""
    tensor = values if isinstance(values, Tensor) else torch.from_numpy(values)
    if torch.device(device).type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return (tensor if tensor.is_pinned() else tensor.pin_memory()).to(device, non_blocking=True)
