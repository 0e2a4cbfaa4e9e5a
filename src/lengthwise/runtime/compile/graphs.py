"""Settings and counters of torch.compile: its mode, whether it can work here, how many graphs it made."""

import shutil

import torch
import torch._dynamo

from lengthwise.core.errors import InputError, Setting

INDUCTOR = "inductor"
MOST_LIVE = 32
"""Shapes whose compiled code is kept at a time.

What is kept grows with the number of shapes alone, neither with layers, which share their graphs, nor with steps. On a
CPU it is a few MiB of a library and of guards each; kernels on a GPU are smaller.
"""


def check_compiler(device: torch.device, backend: str) -> None:
    """Raise ``InputError`` if there is no such backend, or compiling for a CPU would fail without a C++ compiler."""
    if backend not in (backends := torch._dynamo.list_backends(None)):
        raise InputError(f"compile_backend={backend!r}: torch has the backends {', '.join(backends)}")
    if backend != INDUCTOR or device.type != "cpu":
        return
    from torch._inductor import config

    named = config.cpp.cxx
    wanted = [name for name in ((named,) if isinstance(named, str) else named) if name]
    if not any(map(shutil.which, wanted)):
        raise InputError(
            f"compiling for a CPU needs a C++ compiler, and there is no {' and no '.join(wanted)} here; install g++ "
            f"(Debian, Ubuntu: apt-get install g++), name one in CXX, or train without {Setting.COMPILE}"
        )


def mode_of(device: torch.device, *, cuda_graphs: bool) -> str | None:
    """The mode of ``torch.compile``: tuned kernels on a GPU, with CUDA graphs if asked; on a CPU the default.

    CUDA graphs replay at fixed addresses. That suits a whole model on one GPU. It does not suit several: collectives of
    other ranks wait while a graph is captured. Nor single layers, whose weights are arguments that each replay would
    copy, and of which several micro-batches are in flight.
    """
    if device.type != "cuda":
        return None
    return "max-autotune" if cuda_graphs else "max-autotune-no-cudagraphs"


class GraphCount:
    """Counts the graphs that this process compiles."""

    def __init__(self) -> None:
        self._seen = _num_graphs()

    def new(self) -> int:
        """Graphs compiled since this was last asked, or made."""
        before, self._seen = self._seen, _num_graphs()
        return self._seen - before


def _num_graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def allow_shapes(count: int) -> None:
    """Let one function have a graph for each of ``count`` shapes: beyond PyTorch's limit it would run uncompiled."""
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, 2 * count)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 64 * count)
