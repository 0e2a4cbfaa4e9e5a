"""Bytes of one device of a pipeline stage by kind: model state, what waits for backwards, and what lives briefly."""

from dataclasses import dataclass

Line = tuple[float, float]
"""Bytes at no token, and bytes per token."""


@dataclass(frozen=True, kw_only=True)
class MemoryParts:
    """Bytes at the peak of a micro-batch."""

    weights: float
    gradients: float
    optimizer: float
    """Master weights, their summed gradients and the optimizer's moments."""
    activations: float
    """Saved by forwards for their backwards."""
    temporary: float

    @property
    def total(self) -> float:
        """Bytes of all kinds."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.temporary


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Bytes of a stage as functions of the tokens of its micro-batches."""

    weights: float
    gradients: float
    optimizer: float
    activations: Line
    temporary: Line

    @property
    def line(self) -> Line:
        """Bytes of all kinds."""
        fixed = self.weights + self.gradients + self.optimizer + self.activations[0] + self.temporary[0]
        return fixed, self.activations[1] + self.temporary[1]

    def at(self, num_tokens: int) -> MemoryParts:
        """The parts for micro-batches of ``num_tokens``."""
        activations, temporary = (
            fixed + per_token * num_tokens for fixed, per_token in (self.activations, self.temporary)
        )
        return MemoryParts(
            weights=self.weights,
            gradients=self.gradients,
            optimizer=self.optimizer,
            activations=activations,
            temporary=temporary,
        )
