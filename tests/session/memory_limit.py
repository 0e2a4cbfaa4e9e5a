"""Training under a memory model that lies, and under a limit of the allocator that does not."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import lengthwise
from lengthwise.core.specs import ClusterSpec, cluster_preset, model_preset
from lengthwise.cost.separable import SeparableCost
from lengthwise.session.online_calibration import OnlineCalibration
from tests.runtime.loop.memory_runs import LAYERS, Model

NUMBERS_PER_TOKEN = 32 * 1024
"""Of float64: a layer keeps 256 KiB of each token."""


class Kept(torch.autograd.Function):
    """Does nothing to its argument, and keeps much of each token until the backward."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(torch.zeros(x.shape[1], NUMBERS_PER_TOKEN, dtype=torch.float64))
        return x.clone()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return grad + ctx.saved_tensors[0][0, 0]


class Hungry(nn.Module):
    """A layer that needs much memory."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return Kept.apply(self.layer(x))


class Lying(SeparableCost):
    """Believes that a token takes a byte."""

    def __init__(self, cluster: ClusterSpec) -> None:
        super().__init__(model=model_preset("llama-tiny"), cluster=cluster, dtype="float64")

    def sequence_times_s(self, lengths, scheme):  # type: ignore[no-untyped-def]
        work = 1 + scheme.num_recomputed / scheme.num_layers / 3
        return (1e-3 * lengths + 1e-6 * lengths**2) * work * (1 + 0.2 * (scheme.degree - 1)) / scheme.degree

    def overhead_s(self, scheme):  # type: ignore[no-untyped-def]
        return 1e-2

    def update_s(self, strategy):  # type: ignore[no-untyped-def]
        return 1e-2

    def _bytes(self, tokens, scheme, *, num_devices):  # type: ignore[no-untyped-def]
        kept = 1 - 0.9 * scheme.num_recomputed / scheme.num_layers
        return tokens * kept / scheme.degree


def corpus() -> list[np.ndarray]:
    """Twelve sequences of 8 to 62 tokens."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, 61, length) for length in (62, 8, 30, 41, 17, 9, 55, 12, 23, 38, 10, 60)]


@contextmanager
def limited(mib: int | None) -> Iterator[None]:
    """This process gets so much more memory, and no more."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    if mib is not None:
        in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use + mib * 2**20, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def train(limit_mib: int | None) -> tuple[list[float], list[str], Tensor]:
    """An epoch on every rank; losses, what was noted, and the weights."""
    torch.manual_seed(0)
    model = Model().double()
    model.layers = nn.ModuleList(Hungry(layer) for layer in model.layers)
    run = lengthwise.prepare(
        model, corpus(), policy="dcp-intra", cost=Lying(cluster_preset("2xcpu", memory_gib=1 / 1024)), device="cpu",
        sequences_per_step=6, lr=0.1, optimizer="sgd", memory_gib=1 / 1024, verbose=False,
        check=False,  # what a check has freed, the allocator would give out again beyond the limit
    )  # fmt: skip
    refiner = run.on_oom.__self__  # type: ignore[union-attr]
    assert isinstance(refiner, OnlineCalibration) and len(model.layers) == LAYERS
    losses = []
    for step in run.steps():
        for micro_batch in step:
            with limited(limit_mib):
                step.backward(model(**micro_batch.inputs)[1])
        result = step.update()
        if result is not None:
            losses.append(result.loss)
    run.close()
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return losses, [event["event"] for event in refiner.events], weights
