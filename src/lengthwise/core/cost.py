"""The interface of cost models, and the measurements that one can be fitted to."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from lengthwise.core.atomic_write import shell_word, write_text
from lengthwise.core.errors import InputError
from lengthwise.core.lengths import MOST_TOKENS
from lengthwise.core.pipeline_config import Method, PipelineConfig, Strategy
from lengthwise.core.read_file import brief, read_json
from lengthwise.core.specs import MAX_DEVICES
from lengthwise.core.typed_json import from_document

PROFILE_SCHEMA_VERSION = 1
LEAST_SECONDS, MOST_SECONDS = 1e-12, 1e9
"""Bounds of the seconds of a measured micro-batch."""
MOST_BYTES = 1 << 60


@dataclass(frozen=True, kw_only=True)
class CostError:
    """How far predicted seconds of micro-batches are from measured ones."""

    of_times: float
    """Relative error that nine of ten predictions stay within."""
    of_ratios: float = 0.0
    """Relative error that half of the ratios of two predictions stay within: what is off alike in both of two plans
    tells nothing about which is faster. 0: not known."""

    @classmethod
    def of(cls, residuals: ArrayLike) -> "CostError":
        """The error of predictions that are off by ``residuals``: predicted over measured seconds, minus one."""
        logs = np.log1p(np.maximum(np.asarray(residuals, dtype=np.float64), -0.99))
        first, second = np.triu_indices(len(logs), 1)
        ratios = float(np.median(np.abs(logs[first] - logs[second]))) if len(first) else 0.0
        return cls(of_times=float(np.quantile(np.abs(np.expm1(logs)), 0.9)), of_ratios=ratios)

    def __str__(self) -> str:
        return self.in_words()

    def in_words(self, measurements: str = "measurements") -> str:
        """The errors; ``measurements``: which ones they are of."""
        words = f"90 % of predictions are within {self.of_times:.0%} of {measurements}"
        return f"{words}, half of the ratios of two within {self.of_ratios:.1%}" if self.of_ratios else words


class CostModel(Protocol):
    """Seconds and bytes of a scheme. Times grow with every length, bytes with the number of tokens.

    Times are separable, so that planners price thousands of sequences at once: a micro-batch costs
    ``overhead_s(scheme) + sum(sequence_times_s(lengths, scheme))``, which is what ``time_s`` returns, unless launching
    its kernels takes longer (``launch_s(scheme)``, of costs that have it): by that plans are priced, not searched.
    """

    def sequence_times_s(self, lengths: np.ndarray, scheme: PipelineConfig) -> np.ndarray:
        """Seconds, forward and backward, that each sequence adds to a micro-batch (one stage of ``scheme``).

        More than 0, and never less for a longer sequence.
        """
        ...

    def overhead_s(self, scheme: PipelineConfig) -> float:
        """Seconds that a micro-batch costs before its first token."""
        ...

    def time_s(self, lengths: Sequence[int], scheme: PipelineConfig) -> float:
        """Seconds of one micro-batch that packs sequences of ``lengths``, forward and backward."""
        ...

    def update_s(self, strategy: Strategy) -> float:
        """Seconds of a step outside its micro-batches: push, clip, optimizer, pull.

        At least what it is under equal pipelines of any one of the strategy's schemes: the slowest rank decides.
        """
        ...

    def comm_times_s(self, lengths: np.ndarray, scheme: PipelineConfig) -> np.ndarray:
        """Seconds of ``sequence_times_s`` in communication that computation does not hide; 0 where unknown."""
        ...

    def switch_s(self, before: Strategy, after: Strategy) -> float:
        """Seconds to move weights and gradients between two phases of one step; 0 where nothing moves."""
        ...

    def peak_bytes(self, num_tokens: ArrayLike, scheme: PipelineConfig, *, num_devices: int) -> np.ndarray:
        """Bytes per device while micro-batches of ``num_tokens`` are computed on a cluster of ``num_devices``.

        The bytes of the model state at 0 tokens. With stages, those of the first one, which keeps the most
        micro-batches: all of them as large as this one. The shape is that of ``num_tokens``.
        """
        ...

    def max_tokens(self, scheme: PipelineConfig, *, num_devices: int) -> int:
        """Most tokens of a micro-batch that fits a device; 0 if not even the model state does."""
        ...

    def util_tokens(self, scheme: PipelineConfig) -> int:
        """Mean tokens of a micro-batch below which more micro-batches are not worth a try; 1 where unknown."""
        ...


def error_of(cost: CostModel) -> CostError | None:
    """The ``error`` of a cost model; None where it has none, as one of your own may."""
    return getattr(cost, "error", None)


@dataclass(frozen=True, kw_only=True)
class LayerParts:
    """One layer of a measured micro-batch, without recompute: seconds of forward and backward, and bytes."""

    attention_s: float
    ffn_s: float
    attention_bytes: int
    """The allocator's peak on a GPU beyond what was there before, what the forward saves on a CPU."""
    ffn_bytes: int

    def __post_init__(self) -> None:
        seconds, sizes = (self.attention_s, self.ffn_s), (self.attention_bytes, self.ffn_bytes)
        if not all(0 <= time_s <= MOST_SECONDS for time_s in seconds) or not all(0 <= n <= MOST_BYTES for n in sizes):
            raise InputError(
                f"the parts of a layer in a profile take {seconds} seconds and {sizes} bytes; a time is from 0 to "
                f"{MOST_SECONDS:g} seconds, a size from 0 to {MOST_BYTES:,} bytes"
            )


@dataclass(frozen=True, kw_only=True)
class ProfileRow:
    """One measured micro-batch."""

    lengths: tuple[int, ...]
    time_s: float
    """Forward and backward: the median over repeats, of the slowest rank."""
    spread_s: float
    """Half the distance between the quartiles of the repeats."""
    kept_bytes: int
    """Bytes that the forward leaves for the backward, or the allocator's peak above the model state."""
    parts: LayerParts | None = None
    """Attention and feed-forward of one layer; None: not measured."""

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1 or max(self.lengths) > MOST_TOKENS:
            raise InputError(
                f"a row of a profile has lengths {brief(self.lengths)}; each is 1 to {MOST_TOKENS:,} tokens"
            )
        if not LEAST_SECONDS <= self.time_s <= MOST_SECONDS or not 0 <= self.spread_s <= MOST_SECONDS:
            raise InputError(
                f"the row of {sum(self.lengths):,} tokens has time_s {self.time_s} and spread_s {self.spread_s}; a "
                f"time is from {LEAST_SECONDS:g} to {MOST_SECONDS:g} seconds"
            )
        if not 1 <= self.kept_bytes <= MOST_BYTES:
            raise InputError(
                f"the row of {sum(self.lengths):,} tokens keeps {self.kept_bytes} bytes; it is 1 to {MOST_BYTES:,}"
            )


@dataclass(frozen=True, kw_only=True)
class SharedRows:
    """Measured micro-batches that ``degree`` ranks shared by one method."""

    degree: int
    method: str
    rows: tuple[ProfileRow, ...]
    update_s: float | None = None
    """Push, clip, optimizer and pull of one step; None: as where each rank computes alone."""

    def __post_init__(self) -> None:
        if self.update_s is not None and not 0 <= self.update_s <= MOST_SECONDS:
            raise InputError(f"update_s is {self.update_s}; a time is from 0 to {MOST_SECONDS:g} seconds")
        if self.degree < 2 or self.method not in list(Method) or not self.rows:
            raise InputError(
                f"shared rows of a profile have degree {self.degree}, method {brief(self.method)} and "
                f"{len(self.rows)} rows; they need a degree of 2 or more, a method, and rows"
            )


@dataclass(frozen=True, kw_only=True)
class LinkSpeed:
    """How fast ranks of a group send to one another."""

    call_s: float
    """Seconds of a collective call that moves next to nothing."""
    bytes_per_s: float
    """Bytes that each rank sends per second."""

    def __post_init__(self) -> None:
        if not 0 <= self.call_s <= MOST_SECONDS or not 1 <= self.bytes_per_s <= MOST_BYTES:
            raise InputError(f"a link of a profile has call_s {self.call_s} and bytes_per_s {self.bytes_per_s:g}")


@dataclass(frozen=True, kw_only=True)
class LinkSpeeds:
    """Measured links; None where there are none."""

    within: LinkSpeed | None
    """Between the ranks of a node."""
    across: LinkSpeed | None
    """Between nodes, each rank through its own port."""
    host: LinkSpeed | None = None
    """To and from pinned memory of each rank's host, both at a time and all ranks at once; None of CPUs."""


@dataclass(frozen=True, kw_only=True)
class ProfileTable:
    """Measurements of one model on one kind of device; what a fitted cost model is fitted to."""

    model_digest: str
    model_name: str
    device: str
    dtype: str
    recompute: bool
    """Whether every layer was recomputed in the backward."""
    num_ranks: int
    """Ranks that measured at the same time, sharing memory bandwidth and links."""
    update_s: float
    """Push, clip, optimizer and pull of one step on ``num_ranks``."""
    rows: tuple[ProfileRow, ...]
    """Of micro-batches that each rank computed alone."""
    shared: tuple[SharedRows, ...] = ()
    """Of micro-batches that ranks shared, where that was measured."""
    links: LinkSpeeds | None = None
    """Between the ranks; None: not measured."""

    @property
    def max_degree(self) -> int:
        """The most ranks that shared a micro-batch."""
        return max((part.degree for part in self.shared), default=1)

    def __post_init__(self) -> None:
        if not 1 <= self.num_ranks <= MAX_DEVICES:
            raise InputError(f"a profile is of 1 to {MAX_DEVICES:,} ranks, not {self.num_ranks:,}")
        if not 0 <= self.update_s <= MOST_SECONDS:
            raise InputError(f"update_s is {self.update_s}; a time is from 0 to {MOST_SECONDS:g} seconds")
        if not self.rows:
            raise InputError("a profile needs at least one row")

    def save(self, path: Path) -> None:
        """Write as JSON, whole or not at all."""
        document = {"schema_version": PROFILE_SCHEMA_VERSION, **asdict(self)}
        write_text(path, json.dumps(document, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> "ProfileTable":
        """Read what :meth:`save` wrote.

        Raises:
            InputError: the file is missing, is not a profile or has another schema version.
        """
        try:
            document = read_json(path, what="a profile")
        except FileNotFoundError:
            raise InputError(
                f"no profile at {path}; make one with: lengthwise profile CONFIG --out {shell_word(path)}"
            ) from None
        version = document.pop("schema_version", None) if isinstance(document, dict) else None
        if version is not None and version != PROFILE_SCHEMA_VERSION:
            raise InputError(
                f"{path} has profile schema {brief(version)}, this version reads {PROFILE_SCHEMA_VERSION}; profile "
                "again"
            )
        try:
            if version is None:
                raise ValueError("it has no schema_version")
            return from_document(cls, document)
        except ValueError as error:
            raise InputError(f"{path} is not a profile ({error}); make one with: lengthwise profile") from None
