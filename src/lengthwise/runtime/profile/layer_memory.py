"""What layers keep for their backward, and what is there beside that at moments that may be the peak of a micro-batch.

On a GPU the allocator is asked at each: in the loss, in its backward, in that of a layer and of the embedding. A CPU
has no allocator that knows; there it is what the forward saves, and a layer in full where one is recomputed.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from math import ceil
from typing import NamedTuple

from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.profile.layer_kinds import MeasuredLayers
from lengthwise.runtime.profile.trial import MemoryResult, Trial, measure_memory


class CountedBytes(NamedTuple):
    """The bytes of a row of a profile: of the mean layer, and of all but layers."""

    saved: int
    """What a layer saves beside its input."""
    inputs: int
    constant: int
    """Beside what layers keep, in the loss; on a CPU all that is saved outside of layers."""
    alive: int
    """What a recomputed layer adds in its backward."""
    loss_backward: int
    """Beside what layers keep, in the backward of the loss; 0 on a CPU."""
    backward: int
    """Beside what layers keep, in the backward of one; 0 on a CPU."""
    embedding_backward: int
    """In the backward of what comes before the layers, or in the forward to the end of the first; 0 on a CPU."""

    @classmethod
    def none(cls) -> "CountedBytes":
        """Nothing was counted."""
        return cls(0, 0, 0, 0, 0, 0, 0)

    @property
    def fields(self) -> dict[str, int]:
        """These, as fields of a :class:`~lengthwise.core.layer_profile.LayerRow`."""
        return {
            "kept_bytes": self.saved, "input_bytes": self.inputs, "constant_bytes": self.constant,
            "alive_bytes": self.alive, "loss_backward_bytes": self.loss_backward, "backward_bytes": self.backward,
            "embedding_backward_bytes": self.embedding_backward,
        }  # fmt: skip


def measure_bytes(run: PreparedModel, trial: Trial, layers: MeasuredLayers) -> tuple[CountedBytes, Trial]:
    """Measure the bytes of a trial; also returns the trial with its attention calls.

    Where it keeps attention: what this gave instead of what a layer saves, and what the second forward adds to that.
    Where its backward is split: what that keeps of a layer instead of what the forward saved.
    """
    if trial.keep_attention:
        return _measure_kept_attention(run, trial, layers)
    if trial.split_backward:
        return _measure_waiting(run, trial, layers)
    masks, num_lengths = run.wrapped_model.masks, run.wrapped_model.masks.num_lengths
    plain = measure_memory(run, trial)
    if masks.num_lengths > num_lengths:  # a forward of one sequence alone, no part of a micro-batch, came first
        plain = measure_memory(run, trial)
    trial = replace(trial, attended=plain.attended)
    saved = sum(layers.filled(plain.layers))
    if run.world.device.type != "cuda":
        inputs, layer = layers.mean(plain.inputs), layers.mean(plain.layers)
        alive = layers.largest([saved - of_input for saved, of_input in zip(plain.layers, plain.inputs)])
        return _rounded(layer - inputs, inputs, plain.num_bytes - saved, max(1.0, alive)), trial
    recomputed = measure_memory(run, replace(trial, recompute=(True,) * run.wrapped_model.structure.num_layers))
    layer, inputs = layers.mean(plain.layers), layers.mean(recomputed.layers)
    if not plain.backward_bytes:  # no layer has a backward that could be seen: one moment stands for all
        constant = plain.num_bytes - saved
        alive = recomputed.num_bytes - sum(layers.filled(recomputed.layers)) - constant
        return _rounded(layer - inputs, inputs, constant, alive), trial
    backward = _beside_layers(plain, layers)
    alive = _beside_layers(recomputed, layers) - backward
    loss, loss_backward = plain.loss_bytes - saved, plain.loss_backward_bytes - saved
    embedding = plain.embedding_backward_bytes
    return _rounded(layer - inputs, inputs, loss, alive, loss_backward, max(1.0, backward), embedding), trial


def _measure_waiting(run: PreparedModel, trial: Trial, layers: MeasuredLayers) -> tuple[CountedBytes, Trial]:
    plain, asked = measure_bytes(run, replace(trial, split_backward=False), layers)
    trial = replace(trial, attended=asked.attended)
    return plain._replace(saved=max(1, ceil(layers.mean(measure_memory(run, trial).waiting)))), trial


def _measure_kept_attention(run: PreparedModel, trial: Trial, layers: MeasuredLayers) -> tuple[CountedBytes, Trial]:
    plain, asked = measure_bytes(run, replace(trial, recompute=(), keep_attention=False), layers)
    trial = replace(trial, attended=asked.attended)
    selective = measure_memory(run, trial)
    attention = layers.mean(selective.attention)
    if run.world.device.type != "cuda":
        return plain._replace(saved=max(1, ceil(attention)), alive=ceil(max(1.0, plain.alive - attention))), trial
    attention = max(0.0, layers.mean(selective.layers) - plain.inputs) if attention else 0.0
    if selective.backward_bytes:
        alive = _beside_layers(selective, layers) - plain.backward
    else:
        alive = selective.num_bytes - sum(layers.filled(selective.layers)) - plain.constant
    return plain._replace(saved=max(1, ceil(attention)), alive=ceil(max(0.0, alive))), trial


def _beside_layers(result: MemoryResult, layers: MeasuredLayers) -> float:
    """The most that is there in the backward of a layer beside what it and those before it keep."""
    saved = accumulate(layers.filled(result.layers))
    return layers.largest([peak - of_layers for peak, of_layers in zip(result.backward_bytes, saved)])


def _rounded(saved: float, *others: float) -> CountedBytes:
    numbers: Sequence[float] = (max(1.0, saved), *others)
    return CountedBytes(*(ceil(max(0.0, number)) for number in (*numbers, *(0.0,) * (7 - len(numbers)))))
