"""One micro-batch of a plan: its pack, what it is predicted to cost, and how it differs from its pipeline's scheme."""

from dataclasses import dataclass
from typing import NamedTuple

from lengthwise.core.batch import Pack
from lengthwise.core.errors import InputError
from lengthwise.core.pipeline_config import Method
from lengthwise.core.token_placement import Placement

OVERRIDES = ("methods", "recompute", "offload", "tile_tokens", "head_groups", "keep_attention")
"""What a micro-batch may have of its own in place of its scheme's."""


class PlannedSlice(NamedTuple):
    """Consecutive tokens of a pack that are computed by passes of their own."""

    num_tokens: int
    time_s: float
    """Predicted seconds of forward and backward on one stage."""


@dataclass(frozen=True, kw_only=True)
class PlannedMicroBatch:
    """One pack on one pipeline, with what it is predicted to cost per stage."""

    pack: Pack
    time_s: float
    """Predicted seconds of forward and backward on one stage."""
    peak_bytes: int
    """Predicted peak bytes per device, model state included."""
    methods: tuple[Method, ...] | None = None
    """One per layer; None: those of the scheme."""
    recompute: tuple[bool, ...] | None = None
    """One per layer; None: those of the scheme."""
    comm_s: float = 0.0
    """Seconds of ``time_s`` in communication that computation does not hide."""
    offload: tuple[bool, ...] | None = None
    """One per layer, empty for no layer; None: those of the scheme."""
    tile_tokens: int | None = None
    """Tokens of a feed-forward's tile, 0 for all at once; None: those of the scheme."""
    head_groups: int | None = None
    """Groups of heads that are attended with in turn; None: those of the scheme."""
    weights_s: float = 0.0
    """Seconds of ``time_s`` in gradients of weights that may wait, where backwards are split."""
    keep_attention: bool | None = None
    """Whether recomputed layers keep what attention gave; None: as the scheme says."""
    slices: tuple[PlannedSlice, ...] = ()
    """What the pack's tokens are cut into, in order; empty: they are computed all at once."""
    placement: Placement = ()
    """Which ranks of a stage hold which tokens of each sequence; empty: all share every sequence in equal parts."""

    def __post_init__(self) -> None:
        for name, seconds in (("time_s", self.time_s), ("comm_s", self.comm_s), ("weights_s", self.weights_s)):
            if not seconds >= 0:
                raise InputError(f"{name} of a planned micro-batch is {seconds}; seconds are at least 0")
