"""The batch of the step that is next or being computed: where it is from, and how often it was planned."""

from typing import Any

from lengthwise.core.batch import BatchStream, GlobalBatch
from lengthwise.core.cut_plan import CutPlan
from lengthwise.core.errors import CheckError
from lengthwise.runtime.comm.out_of_memory import MOST_ATTEMPTS
from lengthwise.runtime.loop.brought_items import BroughtBatch, ItemExchange, PlanUnits, cut_units
from lengthwise.runtime.wrap.collator import PackCollator, with_units


class PendingBatch:
    """The global batch of the step that is not done, of the corpus or of what ranks brought."""

    def __init__(self, stream: BatchStream) -> None:
        """``stream``: the batches of the corpus."""
        self._stream, self._state_before = stream, dict[str, Any]()
        self.batch: GlobalBatch | None = None
        """None: the next step has not begun."""
        self.brought: BroughtBatch | None = None
        """The items of the batch; None: they are of the corpus."""
        self.attempt = 0
        """How often the step was given up before."""

    @property
    def stream_state(self) -> dict[str, Any]:
        """The state of the stream before the batch."""
        return self._stream.state_dict() if self.batch is None else self._state_before

    @property
    def epoch(self) -> Any:
        """The epoch that the batch is of, as far as the stream of the corpus says."""
        return self._state_before.get("stream", self._state_before).get("epoch")

    def num_steps_from(self, step: int, num_steps: int) -> int:
        """The number of steps of a run that goes on with ``step``; ``num_steps``: unless batches are formed anew."""
        num_left = getattr(self._stream, "num_left", None)
        left = None if num_left is None else num_left()
        return num_steps if left is None else step + left

    def draw(self) -> None:
        """Take the next batch of the corpus, or again that of a step that was given up."""
        if self.batch is None:
            self._state_before, self.attempt = self._stream.state_dict(), -1
            self.batch = next(self._stream)

    def bring(self, brought: BroughtBatch) -> None:
        """Take the batch that ranks brought, which may be that of a step that was given up."""
        if self.batch is None or brought.batch != self.batch:
            self._state_before, self.attempt = self._stream.state_dict(), -1
        self.batch, self.brought = brought.batch, brought

    def count_attempt(self, step: int, reason: str) -> None:
        """Count one more plan of the step; the first is attempt 0. ``reason``: why it was given up last.

        Raises:
            CheckError: it was given up too often.
        """
        if self.attempt >= MOST_ATTEMPTS:
            raise CheckError(
                f"step {step} was given up {self.attempt + 1} times, the last time because of this: {reason}. Leave it "
                "out with step.skip() on every rank, or mend the cause"
            )
        self.attempt += 1

    def clear(self) -> None:
        """Forget the batch of a step that is done, or was before a checkpoint."""
        self.batch, self.brought = None, None

    def plan(self, plan_units: PlanUnits, collator: PackCollator) -> CutPlan:
        """Plan the batch, whose units have prefix trees where they share prefixes; ``collator``: of the corpus."""
        assert self.batch is not None, "there is a batch"
        trees, shared = self.brought.trees if self.brought is not None else None, collator.shared

        def tree_of(unit: int) -> Any:
            assert shared is not None, "units that share prefixes have trees"
            return shared.tree(unit) if trees is None else trees[unit]

        return plan_units(self.batch, tree_of)

    def collator(self, cut: CutPlan, items: ItemExchange | None, collator: PackCollator) -> PackCollator:
        """The collator of what a plan computes, from that of the corpus; every rank calls this."""
        if self.brought is not None:
            assert items is not None, "they brought the batch"
            return items.collator(self.brought, cut)
        if not cut.parts:
            return collator
        assert collator.units is not None, "units are cut"
        return with_units(collator, cut_units(collator.units, cut))
