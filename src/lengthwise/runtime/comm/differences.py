"""Trees of values compared over ranks: keys that differ, with the values on which ranks. Needs no torch."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

MOST_TOLD = 8
"""Keys that a message lists."""
MOST_WEIGHTS = 3
"""Names of tensors that a message lists."""
OF_WEIGHTS = tuple(f"model.{kind}." for kind in ("parameters", "buffers", "weights"))
"""Beginnings of the keys of a model's tensors."""
MOST_CHARACTERS = 80
"""Of a value in a message."""
NOT_SET = "not set"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A key whose values are not the same on all ranks."""

    key: str
    ranks_by_value: Mapping[str, tuple[int, ...]]
    """The values as JSON, in the order of the first rank that has each."""

    def __str__(self) -> str:
        values = (f"{_shortened(value)} on {ranks_text(ranks)}" for value, ranks in self.ranks_by_value.items())
        return f"{self.key} is {', '.join(values)}"


def differences(values: Mapping[int, Mapping[str, Any]]) -> list[Difference]:
    """The keys whose values differ, sorted; ``values[r]`` is the tree of rank r. Keys of inner trees follow a dot."""
    flat = {rank: dict(_leaves(tree)) for rank, tree in sorted(values.items())}
    differing = []
    for key in sorted({key for leaves in flat.values() for key in leaves}):
        ranks_by_value: dict[str, tuple[int, ...]] = {}
        for rank, leaves in flat.items():
            value = leaves.get(key, NOT_SET)
            ranks_by_value[value] = (*ranks_by_value.get(value, ()), rank)
        if len(ranks_by_value) > 1:
            differing.append(Difference(key=key, ranks_by_value=ranks_by_value))
    return differing


def digest_of(values: Mapping[str, Any]) -> str:
    """Thirty-two hex digits, equal for trees that do not differ."""
    text = json.dumps(sorted(_leaves(values)))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def message_of(differing: Sequence[Difference]) -> str:
    """One sentence on what differs, and the way out."""
    if all(map(_is_drawn, differing)):
        names = [difference.key.split(".", 2)[2] for difference in differing[:MOST_WEIGHTS]]
        others = {
            rank for difference in differing for ranks in [*difference.ranks_by_value.values()][1:] for rank in ranks
        }
        more = f" and {len(differing) - len(names):,} more" if len(differing) > len(names) else ""
        return (
            "the weights of the model are not the same on all ranks: seed them (torch.manual_seed(0) before it is "
            f"made), or load them from the same file. Others on {ranks_text(others)}: {', '.join(names)}{more}"
        )
    listed = "; ".join(map(str, differing[:MOST_TOLD]))
    more = f"; and {len(differing) - MOST_TOLD} more" if len(differing) > MOST_TOLD else ""
    way_out = "Start all ranks with the same configuration, data, weights and versions"
    return f"the ranks do not agree: {listed}{more}. {way_out}"


def _is_drawn(difference: Difference) -> bool:
    """Whether a tensor of the model differs in its values alone, as random weights do that each rank draws itself."""
    described = {value.rpartition(", checksum ")[0] for value in difference.ranks_by_value}
    return difference.key.startswith(OF_WEIGHTS) and len(described) == 1 and NOT_SET not in difference.ranks_by_value


def ranks_text(ranks: Iterable[int]) -> str:
    """Ranks in words: ``rank 3``, ``ranks 0 and 2-5``."""
    ranks = sorted(ranks)
    starts = [ranks[0], *(second for first, second in pairwise(ranks) if second != first + 1)]
    ends = [*(first for first, second in pairwise(ranks) if second != first + 1), ranks[-1]]
    spans = [str(start) if start == end else f"{start}-{end}" for start, end in zip(starts, ends)]
    listed = spans[0] if len(spans) == 1 else f"{', '.join(spans[:-1])} and {spans[-1]}"
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys with their values as JSON."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{key}.")
        else:
            yield key, json.dumps(value, sort_keys=True, default=str)


def _shortened(value: str) -> str:
    return value if len(value) <= MOST_CHARACTERS else f"{value[: MOST_CHARACTERS - 3]}..."
