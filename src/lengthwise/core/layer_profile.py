"""Layer profiles: measured time and memory of one layer of any model, and of the rest of the model.

DCP, section 3.5: a model of two layers is run, the first warms up, the second is measured.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from lengthwise.core.atomic_write import write_text
from lengthwise.core.cost import LinkSpeed
from lengthwise.core.errors import InputError
from lengthwise.core.read_file import read_json
from lengthwise.core.typed_json import from_document

LAYER_PROFILE_SCHEMA_VERSION = 1
_KIND = "layers"


@dataclass(frozen=True, kw_only=True)
class LayerVariant:
    """How layers of a row computed, where it was not as the model was prepared."""

    tile_tokens: int = 0
    """Slots that feed-forward modules computed at a time; 0: as many as the model was prepared with."""
    keep_attention: bool = False
    """Whether the layer was recomputed but for attention: t_b has its second forward, and m is what attention gave."""
    head_groups: int = 1
    """Groups of heads that attention computed one after the other; 1: all at once."""
    split_backward: bool = False
    """Whether the backward left gradients of weights for later: t_b is without them, m what is kept for them."""


class AttentionSizes(NamedTuple):
    """What one layer attends with, in all of its calls of attention together; of all layers, the most."""

    num_heads: int
    num_kv_heads: int
    head_size: int


AS_PREPARED = LayerVariant()
SPLIT_BACKWARD = LayerVariant(split_backward=True)


@dataclass(frozen=True, kw_only=True)
class LayerRow:
    """One pack on ``degree`` ranks. Seconds are medians over repeats and ranks, bytes those of the fullest rank."""

    lengths: tuple[int, ...]
    """Lengths of the sequences, in tokens."""
    degree: int
    forward_s: float
    """t_f, of one layer."""
    backward_s: float
    """t_b, of one layer that kept all it needs."""
    constant_s: float
    """T_C: all of the micro-batch but its layers."""
    forward_spread_s: float
    """Half the distance between the quartiles of the repeats."""
    backward_spread_s: float
    constant_spread_s: float
    kept_bytes: int
    """m: what a layer keeps for its backward beside its input."""
    input_bytes: int
    """m_inp: what a recomputed layer keeps."""
    constant_bytes: int
    """M_C: what is there beside what layers keep in the loss; where nothing below was measured, all that ever is."""
    alive_bytes: int
    """What a layer that is recomputed adds in its backward: it is there in full again."""
    repeats: int
    method: str = "ulysses"
    """How the ranks shared sequences; of one rank this says nothing."""
    loss_backward_bytes: int = 0
    """What is there beside what layers keep in the backward of the loss; 0: not measured, as on CPUs."""
    backward_bytes: int = 0
    """And in the backward of a layer."""
    embedding_backward_bytes: int = 0
    """And in that of what comes before the layers, when these keep nothing any more."""
    tile_tokens: int = 0
    """As :class:`LayerVariant` has it, like those that follow."""
    keep_attention: bool = False
    head_groups: int = 1
    split_backward: bool = False
    weights_s: float = 0.0
    """Seconds of the gradients of weights that a split backward of one layer left for later."""

    @cached_property
    def variant(self) -> LayerVariant:
        """How the layers computed."""
        return LayerVariant(
            tile_tokens=self.tile_tokens, keep_attention=self.keep_attention, head_groups=self.head_groups,
            split_backward=self.split_backward,
        )  # fmt: skip

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of the pack."""
        return sum(self.lengths)


@dataclass(frozen=True, kw_only=True)
class LinkRow:
    """Speed of an all-to-all among ``degree`` ranks."""

    degree: int
    latency_s: float
    """Seconds of a call that sends next to nothing."""
    bytes_per_s: float
    """Bytes per second that each rank sends."""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """The model, device and software that a profile was taken of; it holds for no others."""

    model_name: str
    model_digest: str
    """Over its modules, the shapes of its parameters and its configuration."""
    device: str
    dtype: str
    """The dtype that the model computes in."""
    num_ranks: int
    """Ranks that measured at the same time, sharing memory bandwidth and links."""
    software: str
    """Versions of the software."""

    @property
    def digest(self) -> str:
        """Sixteen hex digits over everything."""
        return hashlib.blake2b(json.dumps(asdict(self), sort_keys=True).encode(), digest_size=8).hexdigest()

    def differences(self, other: "Identity") -> list[str]:
        """Fields in which ``other`` differs from this, in words."""
        ours, theirs = self._in_words, other._in_words
        return [f"{name} {theirs[name]} instead of {ours[name]}" for name in ours if theirs[name] != ours[name]]

    @property
    def _in_words(self) -> dict[str, object]:
        """The fields by name; of a model's digest the digits alone, and how that model is computed beside them."""
        digits, _, variant = self.model_digest.partition(", ")
        by_name = {name.replace("_", " "): value for name, value in asdict(self).items()}
        return by_name | {"model digest": digits, "model variant": variant or "none"}


@dataclass(frozen=True, kw_only=True)
class LayerTable:
    """Measurements of one model on one kind of device."""

    identity: Identity
    num_layers: int
    num_params: int
    """Parameters that are trained."""
    other_bytes: int
    """Bytes of parameters that are not trained and of buffers."""
    longest: int
    """Tokens of the longest sequence that was asked for; measured is what fitted memory and time."""
    update_s: float
    """Push, clip, optimizer and pull of one step."""
    rows: tuple[LayerRow, ...]
    links: tuple[LinkRow, ...] = ()
    too_large: tuple[tuple[int, int], ...] = ()
    """Degree, and tokens of the first pack that did not fit the memory of some rank."""
    host: LinkSpeed | None = None
    """To and from pinned memory of each rank's host, both at a time and all ranks at once; None of CPUs."""

    def __post_init__(self) -> None:
        if not self.rows:
            raise InputError(f"the profile of {self.identity.model_name} has no rows; not even the shortest pack fits")
        for row in self.rows:
            spreads_s = (row.forward_spread_s, row.backward_spread_s, row.constant_spread_s)
            beside = (row.constant_bytes, row.alive_bytes, row.loss_backward_bytes, row.backward_bytes)
            least_bytes = min(row.kept_bytes - 1, row.input_bytes, row.embedding_backward_bytes, *beside)
            is_sensible = min(row.forward_s, row.backward_s) > 0 and row.constant_s >= 0 and min(spreads_s) >= 0
            if not is_sensible or least_bytes < 0 or row.degree < 1 or not row.lengths or min(row.lengths) < 1:
                raise InputError(f"a layer takes time and keeps something; measured was {row}. Profile again")

    @cached_property
    def degrees(self) -> tuple[int, ...]:
        """Degrees that were measured."""
        return tuple(sorted({row.degree for row in self.rows}))

    @cached_property
    def shared(self) -> tuple[tuple[int, str], ...]:
        """Degrees and methods that were measured; one rank is ``dense``."""
        return tuple(sorted({(row.degree, row.method if row.degree > 1 else "dense") for row in self.rows}))

    @cached_property
    def tile_tokens(self) -> int:
        """Slots of the tiles that were measured too; 0: none."""
        return max(row.tile_tokens for row in self.rows)

    @cached_property
    def keeps_attention(self) -> bool:
        """Whether layers that keep what attention gave were measured too."""
        return any(row.keep_attention for row in self.rows)

    @cached_property
    def variants(self) -> tuple[LayerVariant, ...]:
        """How layers computed that were measured."""
        return tuple(dict.fromkeys(row.variant for row in self.rows))

    def head_groups(self, degree: int) -> tuple[int, ...]:
        """The numbers of groups of heads that were measured at ``degree``, two at least."""
        return tuple(sorted({row.head_groups for row in self.rows if row.degree == degree} - {1}))

    def of_degree(
        self, degree: int, method: str = "dense", *, variant: LayerVariant = AS_PREPARED
    ) -> tuple[LayerRow, ...]:
        """The rows measured at ``degree`` under ``method``, or all of them with ``dense``, of layers that computed as
        ``variant`` says.
        """
        return tuple(
            row
            for row in self.rows
            if row.degree == degree and method in (row.method, "dense") and row.variant == variant
        )

    @property
    def document(self) -> dict[str, object]:
        """The table as a JSON document."""
        return {"schema_version": LAYER_PROFILE_SCHEMA_VERSION, "kind": _KIND, **asdict(self)}

    def save(self, path: Path) -> None:
        """Write as JSON, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(self.document, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> "LayerTable":
        """Read what :meth:`save` wrote.

        Raises:
            InputError: the file is missing, damaged or no profile of layers.
        """
        try:
            document = read_json(path, what="a profile of layers")
            if document["kind"] != _KIND:
                raise ValueError(f"it is a document of kind {document['kind']!r}")
            if document["schema_version"] != LAYER_PROFILE_SCHEMA_VERSION:
                raise ValueError(
                    f"it has schema {document['schema_version']}, this version reads {LAYER_PROFILE_SCHEMA_VERSION}"
                )
            return cls.of_document(document)
        except FileNotFoundError:
            raise InputError(f"no profile at {path}; it is made when a model is prepared") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            defect = f"it has no {error}" if isinstance(error, KeyError) else str(error).removeprefix(f"{path} ")
            raise InputError(
                f"{path} is no profile of layers ({defect}); delete it to have it measured anew, or name another file"
            ) from None

    @classmethod
    def of_document(cls, document: Mapping[str, object]) -> "LayerTable":
        """The table in :attr:`document`."""
        values = {name: value for name, value in document.items() if name not in ("schema_version", "kind")}
        return from_document(cls, values)
