"""The layers of one stage of a profiled model: their seconds and bytes by the curves of one of them, with recompute and
offload.
"""

from typing import NamedTuple

import numpy as np

from lengthwise.cost.profiled.degree_fit import DegreeFit, LinearBytes


class StageLayers(NamedTuple):
    """The layers of one stage that share their sequences by one method, with curves of one of them."""

    fit: DegreeFit
    num_layers: int
    recomputed: int
    rest: float
    """The share of T_C and M_C that is counted with them."""
    offloaded: int
    """Layers of which all that they keep is on the host, their input included."""
    inputs_offloaded: int
    """Recomputed layers whose input is on the host."""
    copied_per_s: float
    """Bytes per second of copies to or from the host."""
    selective: DegreeFit | None = None
    """Of a recomputed layer that keeps what attention gave, its second forward in its backward; None: none keeps it."""
    split: LinearBytes | None = None
    """What the split backward of a layer keeps; None: backwards are whole."""

    def times_s(self, length: np.ndarray) -> np.ndarray:
        """Seconds that each sequence adds, forward and backward."""
        forward_s, backward_s = self.fit.forward.of_sequences(length), self.fit.backward.of_sequences(length)
        if self.selective is None:
            times_s: np.ndarray = (self.num_layers + self.recomputed) * forward_s + self.num_layers * backward_s
        else:
            times_s = (self.num_layers - self.recomputed) * (forward_s + backward_s)
            for curve in (self.selective.forward, self.selective.backward):
                times_s += self.recomputed * curve.of_sequences(length)
        times_s += self.rest * self.fit.constant.of_sequences(length)
        return times_s + self.exposed_s(length) if self.copied_per_s else times_s

    @property
    def fixed_s(self) -> float:
        """Seconds whatever the tokens."""
        return self._summed("c_s") + self.fixed_copy_s

    @property
    def launch_s(self) -> float:
        """Seconds in which a micro-batch's kernels are launched."""
        return self._summed("launch_s")

    def _summed(self, name: str) -> float:
        """Seconds of all layers, forward and backward, and of the rest, by a coefficient of their curves."""
        forward_s, backward_s, rest_s = (
            float(getattr(curve, name)) for curve in (self.fit.forward, self.fit.backward, self.fit.constant)
        )
        if self.selective is None:
            layers_s = (self.num_layers + self.recomputed) * forward_s + self.num_layers * backward_s
        else:
            again_s = sum(float(getattr(curve, name)) for curve in (self.selective.forward, self.selective.backward))
            layers_s = (self.num_layers - self.recomputed) * (forward_s + backward_s) + self.recomputed * again_s
        return layers_s + self.rest * rest_s

    @property
    def kept(self) -> list[tuple[float, LinearBytes]]:
        """What layers keep on the device between the passes of a micro-batch."""
        num_here = self.num_layers - self.offloaded
        lines = [(num_here - self.recomputed, self.fit.kept_layer), (num_here - self.inputs_offloaded, self.fit.inputs)]
        if self.selective is not None:
            lines.append((self.recomputed, self.selective.kept_layer))
        return [(float(count), line) for count, line in lines]

    def waiting(self, count: int) -> list[tuple[float, LinearBytes]]:
        """What split backwards of ``count`` micro-batches keep for their gradients of weights, and that of one more
        beyond what its forward saved.
        """
        if self.split is None:
            return []
        num_layers = self.num_layers - self.recomputed
        return [(float(count * num_layers), self.split), (float(num_layers), _beyond(self.split, self.fit))]

    @property
    def alive(self) -> LinearBytes:
        """What a recomputed layer adds in its backward."""
        return (self.selective or self.fit).alive

    def exposed_s(self, length: np.ndarray) -> np.ndarray:
        """Seconds of each sequence in copies that passes do not hide: out beneath a forward, back beneath a backward.

        The backward of a recomputed layer runs its forward first.
        """
        fit, exposed_s = self.fit, np.zeros_like(length)
        inputs = fit.inputs.per_token
        all_bytes = fit.kept_layer.per_token + inputs
        for count, per_token, again in ((self.offloaded, all_bytes, 0), (self.inputs_offloaded, inputs, 1)):
            if count:
                copy_s, forward_s = per_token / self.copied_per_s * length, fit.forward.of_sequences(length)
                backward_s = again * forward_s + fit.backward.of_sequences(length)
                exposed_s += count * (np.maximum(copy_s - forward_s, 0.0) + np.maximum(copy_s - backward_s, 0.0))
        return exposed_s

    @property
    def fixed_copy_s(self) -> float:
        """Seconds of the copies of bytes that are there whatever the tokens."""
        num_bytes = self.offloaded * self.fit.kept_layer.fixed
        num_bytes += (self.offloaded + self.inputs_offloaded) * self.fit.inputs.fixed
        return 2 * num_bytes / self.copied_per_s if num_bytes else 0.0

    def moving(self, number: int) -> list[tuple[float, LinearBytes]]:
        """What ``number`` of the offloaded layers have on the device, of those that keep the most, if there are.

        In a backward two: its own, and the one that comes; in the loss the last layer, which goes.
        """
        num_whole = min(number, self.offloaded)
        num_inputs = num_whole + min(number - num_whole, self.inputs_offloaded)
        return [(num_whole, self.fit.kept_layer), (num_inputs, self.fit.inputs)]


def _beyond(waiting: LinearBytes, fit: DegreeFit) -> LinearBytes:
    """What a split backward keeps of a layer beyond what its forward saved."""
    fixed = waiting.fixed - fit.kept_layer.fixed - fit.inputs.fixed
    per_token = waiting.per_token - fit.kept_layer.per_token - fit.inputs.per_token
    return LinearBytes(fixed=max(0.0, fixed), per_token=max(0.0, per_token), residuals=())
