"""DCP's equations 4 to 6, as printed: what :class:`DualLayerCost` is compared with."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LayerProfile:
    """What one layer and all else cost for one micro-batch shape on one number of devices."""

    forward_s: float
    """t_f."""
    backward_s: float
    """t_b."""
    constant_s: float
    """T_C: embedding, loss and whatever else happens once."""
    kept_bytes: float
    """m: what a layer keeps for its backward beside its input."""
    input_bytes: float
    """m_inp."""
    constant_bytes: float
    """M_C: model state and buffers."""

    def time_s(self, num_layers: int, recomputed: int) -> float:
        """Equations 4 and 5: L (t_f + t_b) + r t_f + T_C."""
        once_s = num_layers * (self.forward_s + self.backward_s)
        return once_s + recomputed * self.forward_s + self.constant_s

    def peak_bytes(self, num_layers: int, recomputed: int) -> float:
        """Equation 6, and the layer it leaves out: (L - r) m + L m_inp + M_C, + m while one of the r is alive again.

        So recomputing one layer saves nothing.
        """
        alive = num_layers - recomputed + (recomputed > 0)
        return alive * self.kept_bytes + num_layers * self.input_bytes + self.constant_bytes
