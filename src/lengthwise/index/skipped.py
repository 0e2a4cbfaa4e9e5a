"""Count what came in and what was left out, so that nothing disappears silently."""

from dataclasses import dataclass, field
from typing import Any

REASONS = ("empty", "binary", "undecodable", "unreadable", "large", "no_loss")
"""Why documents are left out; ``no_loss``: none of their tokens has a loss."""
_MAX_EXAMPLES = 5


@dataclass
class SkippedDocuments:
    """Documents read, and those left out by reason with the first few names of each."""

    documents: int = 0
    left_out: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))
    examples: dict[str, list[str]] = field(default_factory=dict)

    def add(self, reason: str, name: str, *, count: int = 1) -> None:
        """Count ``count`` documents left out for ``reason``, the first of them in the file ``name``."""
        self.left_out[reason] += count
        self._remember(reason, [name])

    def merge(self, document: dict[str, Any]) -> None:
        """Add what another tally's :meth:`to_json` holds."""
        self.documents += document["documents"]
        for reason in REASONS:
            self.left_out[reason] += document.get(reason, 0)  # parts of an earlier version know fewer reasons
        for reason, names in document["examples"].items():
            self._remember(reason, names)

    def to_json(self) -> dict[str, Any]:
        """Plain values of the counts, for JSON."""
        counts = {name: count for name, count in self.left_out.items() if count or name != "no_loss"}
        return {"documents": self.documents, **counts, "examples": self.examples}

    def _remember(self, reason: str, names: list[str]) -> None:
        examples = self.examples.setdefault(reason, [])
        examples += [name for name in dict.fromkeys(names) if name not in examples][: _MAX_EXAMPLES - len(examples)]
