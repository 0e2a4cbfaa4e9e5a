"""Seconds and bytes of the two parts of a layer, attention and feed-forward, forward and backward.

t tokens of this rank, D hidden size.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from lengthwise.core.cost import LayerParts
from lengthwise.runtime.comm.collectives import gather_rows
from lengthwise.runtime.comm.world import DistContext
from lengthwise.runtime.models.base import Transformer
from lengthwise.runtime.models.execution import Execution
from lengthwise.runtime.profile.probes import SavedTensorCounter

Seen = TypeVar("Seen")
PartSeconds = tuple[float, float]
"""Seconds of attention and of the feed-forward."""


class LayerProbe:
    """Runs one layer on this rank's share of a pack, on random inputs and gradients."""

    def __init__(self, model: Transformer, execution: Execution, layer: int, world: DistContext) -> None:
        self._model, self._world = model, world
        self._layer, self._operators = model.layers[layer], execution.operators(layer)
        weight = next(model.parameters())
        shape = len(execution.offsets()), model.spec.hidden_size
        self._x_tD = torch.randn(shape, dtype=weight.dtype, device=weight.device)

    def seconds(self) -> PartSeconds:
        """Time both parts once, forward and backward."""

        def look() -> float:
            self._world.synchronize()
            return time.perf_counter()

        gather_rows(torch.zeros(1, device=self._world.device))  # all ranks begin together
        times = self._run(look)
        return times[1] - times[0] + times[4] - times[3], times[3] - times[1]

    def num_bytes(self) -> tuple[int, int]:
        """Bytes of both parts: the allocator's peak on a GPU, what the forward saves on a CPU."""
        device = self._world.device
        if device.type != "cuda":
            with SavedTensorCounter([list(self._model.parameters())]) as counter:
                saved = self._run(lambda: counter.num_bytes)
            return saved[1] - saved[0], saved[2] - saved[1]

        def look() -> tuple[int, int]:
            torch.cuda.synchronize(device)
            peak = torch.cuda.max_memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
            return torch.cuda.memory_allocated(device), peak

        allocated, peaks = zip(*self._run(look))
        return max(peaks[1], peaks[4]) - allocated[0], max(peaks[2], peaks[3]) - allocated[1]

    def _run(self, look: Callable[[], Seen]) -> list[Seen]:
        """What ``look`` returns before, between the parts and after the forward; between and after in the backward."""
        x_tD, grad_tD = self._x_tD.requires_grad_(), torch.ones_like(self._x_tD)
        layer: Any = self._layer
        seen = [look()]
        attended_tD = self._operators.attention(layer.pre_attention(x_tD), layer.attention_weights)
        seen.append(look())
        attended_tD.register_hook(lambda gradient: seen.append(look()))
        out_tD: Tensor = layer.post_attention(x_tD, attended_tD, self._operators.ffn)
        del attended_tD
        seen.append(look())
        out_tD.backward(grad_tD)
        seen.append(look())
        x_tD.grad = None
        return seen


def mean_seconds(probes: Sequence[LayerProbe]) -> PartSeconds:
    """Seconds of the parts of one layer, the mean over layers that differ."""
    attention_s, ffn_s = zip(*(probe.seconds() for probe in probes))
    return sum(attention_s) / len(probes), sum(ffn_s) / len(probes)


def parts_of(probes: Sequence[LayerProbe], seconds: Sequence[PartSeconds], world: DistContext) -> LayerParts:
    """The parts of one layer: medians of ``seconds`` over all ranks, bytes of the fullest one."""
    times = gather_rows(torch.tensor(seconds, dtype=torch.float64, device=world.device).flatten()).view(-1, 2).cpu()
    sizes = torch.tensor([probe.num_bytes() for probe in probes], device=world.device).amax(0)
    attention_bytes, ffn_bytes = gather_rows(sizes).amax(0).tolist()
    attention_s, ffn_s = times.quantile(0.5, dim=0).tolist()
    return LayerParts(attention_s=attention_s, ffn_s=ffn_s, attention_bytes=attention_bytes, ffn_bytes=ffn_bytes)
