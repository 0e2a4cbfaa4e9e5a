"""Count what came in and what was left out, so that nothing disappears silently."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

REASONS = ("empty", "binary", "undecodable", "unreadable", "large", "no_loss")
"""Why documents are left out; ``no_loss``: none of their tokens has a loss."""
_MAX_EXAMPLES = 5


Place = str | tuple[int, int]
"""Where a document is, in words; or its file among those of a work unit, and its row there."""


@dataclass
class SkippedDocuments:
    """Documents read, and those left out by reason with the first few places of each."""

    documents: int = 0
    left_out: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))
    examples: dict[str, list[Place]] = field(default_factory=dict)

    def add(self, reason: str, places: Sequence[tuple[int, int]]) -> None:
        """Count documents of a work unit that are left out for ``reason``."""
        self.left_out[reason] += len(places)
        self._remember(reason, places)

    def merge(self, document: dict[str, Any], in_words: Callable[[int, int], str]) -> None:
        """Add what another tally's :meth:`to_json` holds; ``in_words`` of its places that are remembered are asked."""
        self.documents += document["documents"]
        for reason in REASONS:
            self.left_out[reason] += document.get(reason, 0)  # parts of an earlier version know fewer reasons
        for reason, places in document["examples"].items():  # in parts of an earlier version, names of files
            places = places[: _MAX_EXAMPLES - len(self.examples.get(reason, ()))]
            self._remember(reason, [place if isinstance(place, str) else in_words(*place) for place in places])

    def to_json(self) -> dict[str, Any]:
        """Plain values of the counts, for JSON."""
        counts = {name: count for name, count in self.left_out.items() if count or name != "no_loss"}
        return {"documents": self.documents, **counts, "examples": self.examples}

    def _remember(self, reason: str, places: Iterable[Place]) -> None:
        examples = self.examples.setdefault(reason, [])
        new = (place for place in dict.fromkeys(places) if place not in examples)
        examples += islice(new, _MAX_EXAMPLES - len(examples))
