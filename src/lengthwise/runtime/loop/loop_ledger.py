"""What a loop has learned from: sequences and tokens of its steps, through stops and resumes."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lengthwise.core.step_plan import StepPlan
from lengthwise.runtime.wrap.collator import PackCollator

MOST_WITHOUT_LOSS = 10
"""Steps in a row without a loss at which a run ends."""


@dataclass(kw_only=True)
class LoopLedger:
    """Sequences and tokens of all ranks, those of the corpus and those that ranks brought.

    Before an update counts, its ranks have said how many sequences and tokens they ran a backward of, and these are all
    of the step's.
    """

    updates: int = 0
    """Steps whose gradients changed the weights."""
    sequences: int = 0
    """Of these steps; every member of a unit is one."""
    tokens: int = 0
    """Of these sequences, those that several share once for each."""
    repeated_tokens: int = 0
    """Tokens that were computed more than once, because units that share prefixes were cut in parts."""
    skipped_steps: int = 0
    """Steps that ``step.skip()`` left out, whose scaled gradients overflowed, or of which no token has a loss."""
    skipped_sequences: int = 0
    skipped_tokens: int = 0
    without_loss: int = 0
    """The last steps in a row of which no token has a loss."""
    zero_gradients: int = 0
    """Updates whose gradient was exactly 0."""

    def may_go_on(self, *, has_loss: bool) -> bool:
        """Whether training goes on, as not too many steps in a row have no loss; the next step calls this once."""
        self.without_loss = 0 if has_loss else self.without_loss + 1
        return self.without_loss < MOST_WITHOUT_LOSS

    def count(self, plan: StepPlan, collator: PackCollator, *, is_skipped: bool) -> None:
        """Take the sequences of a step that is over, which ``collator`` makes of its packs."""
        packs = [collator.computed(m.pack) for pipeline in plan.pipelines for m in pipeline.micro_batches]
        lengths = [length for pack in packs for length in collator.lengths(pack)]
        sequences, tokens = len(lengths), sum(lengths)
        if is_skipped:
            self.skipped_steps += 1
            self.skipped_sequences += sequences
            self.skipped_tokens += tokens
        else:
            self.updates += 1
            self.sequences += sequences
            self.tokens += tokens
            self.repeated_tokens += collator.repeated_tokens

    def state_dict(self) -> dict[str, int]:
        """The counts by name."""
        return asdict(self)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "LoopLedger":
        """Go on from a checkpoint's; one that was saved without begins at 0."""
        return cls(**{name: int(state.get(name, 0)) for name in asdict(cls())})


def num_planned(plan: StepPlan) -> tuple[int, int]:
    """Sequences and tokens of all micro-batches of a plan."""
    packs = [m.pack for pipeline in plan.pipelines for m in pipeline.micro_batches]
    return sum(len(pack.ids) for pack in packs), sum(sum(pack.lengths) for pack in packs)
