"""Options of a simulation: jitter, stragglers, transfer time between stages, overlap of the update."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from lengthwise.core.arguments import check_arguments
from lengthwise.core.errors import InputError

MAX_JITTER, MAX_TRANSFER_S, MAX_FACTOR = 3.0, 1e6, 1e6
"""Beyond these, simulated times say nothing."""


@dataclass(frozen=True, kw_only=True)
class SimOptions:
    """The defaults execute a plan exactly as its costs predict it.

    Raises:
        InputError: a value outside its range.
    """

    jitter: float = 0.0
    """Sigma of a lognormal factor of mean 1, drawn for every micro-batch on every stage."""
    stragglers: Mapping[int, float] = field(default_factory=dict)
    """Rank -> how many times slower it computes, at least 1; its whole stage waits for it."""
    seed: int = 0
    """Seed of the jitter. Equal seed, step and plan give equal times."""
    transfer_s: float = 0.0
    """Seconds from the end of a forward or backward until the neighbouring stage has its result."""
    overlap: float | None = None
    """Share of the update that passes hide (:func:`lengthwise.core.one_f_one_b.exposed_update_s`); None: as the plan
    says."""

    def __post_init__(self) -> None:
        for name in ("jitter", "transfer_s"):
            value = getattr(self, name)
            maximum = MAX_JITTER if name == "jitter" else MAX_TRANSFER_S
            if not 0 <= value <= maximum:
                raise InputError(f"{name} must be finite and at least 0, not {value}; the most is {maximum:g}")
        if self.overlap is not None and not 0 <= self.overlap <= 1:
            raise InputError(f"overlap is a share of the update between 0 and 1, not {self.overlap}")
        if not 0 <= self.seed < 1 << 64:
            raise InputError(f"seed must be between 0 and 2^64 - 1, not {self.seed}")
        for rank, factor in self.stragglers.items():
            check_arguments({"rank": int, "factor": float}, {"rank": rank, "factor": factor})
            if not 1 <= factor <= MAX_FACTOR:
                raise InputError(
                    f"straggler {rank} must be slower by a finite factor of at least 1, not {factor}; the most is "
                    f"{MAX_FACTOR:g}"
                )

    @property
    def in_words(self) -> str:
        """What differs from an execution as predicted, such as "jitter 0.1 · rank 1 slower by 2x"; empty: nothing."""
        words = [f"jitter {self.jitter:g}"] if self.jitter else []
        words += [] if self.overlap is None else [f"{self.overlap:.0%} of the update hidden beneath computation"]
        return " · ".join([*words, *(f"rank {rank} slower by {factor:g}x" for rank, factor in self.stragglers.items())])


EXACT = SimOptions()
"""Executes a plan exactly as its costs predict it."""
