"""Preserve a model's buffers and all random states while it is prepared."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy


@contextmanager
def preserve_state(model: nn.Module) -> Iterator[None]:
    """Restore buffers, and the random states of torch, NumPy and Python, whatever happens within."""
    is_model = isinstance(model, nn.Module)  # whatever else was given is refused inside
    named = [(name, buffer) for name, buffer in (model.named_buffers() if is_model else ()) if not is_lazy(buffer)]
    buffers = {name: buffer.detach().clone() for name, buffer in named}
    python, numpy, on_host = random.getstate(), np.random.get_state(), torch.get_rng_state()
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(on_host)
        if on_gpus is not None:
            torch.cuda.set_rng_state_all(on_gpus)
        with torch.no_grad():
            for name, buffer in model.named_buffers() if is_model else ():
                if name in buffers and buffers[name].shape == buffer.shape:
                    buffer.copy_(buffers[name])
