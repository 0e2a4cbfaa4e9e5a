"""Which steps and ranks a trace shows, from words such as 3-5,8."""

from collections.abc import Sequence
from dataclasses import dataclass

from lengthwise.core.errors import InputError
from lengthwise.core.read_file import brief
from lengthwise.core.wording import whole_number

Ranges = tuple[range, ...]
STEPS_OPTION, RANKS_OPTION = "--trace-steps", "--trace-ranks"


@dataclass(frozen=True, kw_only=True)
class TraceChoice:
    """Ranges of steps and of ranks; None: all."""

    steps: Ranges | None = None
    ranks: Ranges | None = None

    @classmethod
    def parse(cls, steps: str | None, ranks: str | None) -> "TraceChoice":
        """The choice that a user wrote; None where nothing was written.

        Raises:
            InputError: the text is no list of numbers and ranges.
        """
        return cls(
            steps=None if steps is None else parse_ranges(steps, STEPS_OPTION),
            ranks=None if ranks is None else parse_ranges(ranks, RANKS_OPTION),
        )

    def has_step(self, step: int) -> bool:
        """Whether the trace shows ``step``."""
        return self.steps is None or any(step in part for part in self.steps)

    def has_rank(self, rank: int) -> bool:
        """Whether the trace shows ``rank``."""
        return self.ranks is None or any(rank in part for part in self.ranks)

    def ranks_among(self, num_ranks: int) -> list[int]:
        """The chosen ones of ``num_ranks`` ranks."""
        return [rank for rank in range(num_ranks) if self.has_rank(rank)]

    def check(self, *, steps: Sequence[int], num_ranks: int) -> None:
        """Raise ``InputError`` if a chosen range holds none of the steps, or none of the ranks."""
        for part in self.steps or ():
            if not any(step in part for step in steps):
                raise InputError(
                    f"{STEPS_OPTION} {_written(part)}: the steps are {min(steps)} to {max(steps)}; choose among them"
                )
        for part in self.ranks or ():
            if part.start >= num_ranks:
                raise InputError(
                    f"{RANKS_OPTION} {_written(part)}: the ranks are 0 to {num_ranks - 1}; choose among them"
                )


def parse_ranges(text: str, option: str) -> Ranges:
    """Read numbers and ranges joined by commas, both ends included: ``3-5,8``.

    Raises:
        InputError: the text has another form.
    """
    parts = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        low, high = whole_number(first), whole_number(last if dash else first)
        if low is None or high is None or high < low:
            raise InputError(f"{option} {brief(text)[1:-1]} is no list of numbers and ranges such as 3-5,8")
        parts.append(range(low, high + 1))
    return tuple(parts)


def _written(part: range) -> str:
    return str(part.start) if len(part) == 1 else f"{part.start}-{part.stop - 1}"
