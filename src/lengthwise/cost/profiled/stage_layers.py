"""The layers of a pipeline stage that share their sequences alike, of which one was measured."""

from typing import NamedTuple

import numpy as np

from lengthwise.cost.profiled.degree_fit import DegreeFit, LinearBytes


class StageLayers(NamedTuple):
    """The layers of one stage that share their sequences by one method."""

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
