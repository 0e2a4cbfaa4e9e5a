"""Plans made before, by `lengthwise plan --out` or by hand: read from disk when their step comes.

JSON lines, a plan each, are indexed by one pass over the file and parsed one at a time, so that a file may hold more
plans than memory. One JSON document (a plan, a list of plans, or an object with ``plans``, as `lengthwise plan --json`
prints) is read whole.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lengthwise.core.batch import GlobalBatch
from lengthwise.core.errors import CheckError, InputError, LengthwiseError
from lengthwise.core.plan import StepPlan

_STEP = re.compile(rb'"step"\s*:\s*(\d+)')


class PlanFile:
    """A planner that plans nothing: ``plan = plans(batch)`` is the plan that the file has for the batch's step.

    Where a step is there more than once, as in the plans of a run that was resumed, the last one counts.
    """

    def __init__(self, path: Path) -> None:
        """Find the plans of ``path`` by step.

        Raises:
            InputError: there is no such file, no plan in it, or something that is none.
        """
        self.path = path
        self._ends_early = False
        self._offsets: dict[int, int] = {}
        """Of every step: where its line begins."""
        self._documents: dict[int, Any] = {}
        """Of every step, if the file is one document."""
        try:
            self._read_index()
        except OSError as error:
            raise InputError(f"cannot read plans from {path}: {error.strerror}; make some with: {_MAKE}") from None
        if not len(self):
            raise InputError(f"no plans in {path}; make some with: {_MAKE}")

    def __len__(self) -> int:
        """Steps that have a plan."""
        return len(self._offsets) + len(self._documents)

    def __contains__(self, step: int) -> bool:
        return step in self._offsets or step in self._documents

    def check_steps(self, steps: range) -> None:
        """Raise ``InputError`` naming the first of ``steps`` that has no plan."""
        missing = next((step for step in steps if step not in self), None)
        if missing is not None:
            cut = " and a last line that is cut off" if self._ends_early else ""
            fewer = f", or set train.steps={missing}" if missing > steps.start else ""
            raise InputError(
                f"{self.path} has no plan for step {missing}: it has {len(self):,} plans{cut}, the run needs those of "
                f"steps {steps.start} to {steps.stop - 1}. Plan them all with: {_MAKE} --steps {steps.stop}{fewer}"
            )

    def plan(self, step: int) -> StepPlan:
        """The plan for ``step``.

        Raises:
            InputError: the file has none for it, or what it has is no plan.
            CheckError: it is not what its digest says.
        """
        self.check_steps(range(step, step + 1))
        document = self._load(step)
        try:
            plan = StepPlan.from_json(document)
        except LengthwiseError as error:
            raise type(error)(f"{self._where(step)}: {error}") from None
        except (ValueError, TypeError, AttributeError) as error:
            raise InputError(f"{self._where(step)} is not a plan: {error}") from None
        if plan.step != step:
            raise InputError(f"{self.path} has changed: what was the plan for step {step} is for step {plan.step} now")
        return plan

    def __call__(self, batch: GlobalBatch) -> StepPlan:
        """The plan for a batch, which it computes exactly.

        Raises:
            InputError: as :meth:`plan`.
            CheckError: the plan is for other sequences.
        """
        plan = self.plan(batch.step)
        try:
            plan.check_covers(batch)
        except CheckError as error:
            raise CheckError(
                f"{self.path} was made for other batches: {error}. Batches follow from seed, data and what the model "
                f"predicts; run with the settings that the plans were made with, or plan again with: {_MAKE}"
            ) from None
        return plan

    def _read_index(self) -> None:
        with self.path.open("rb") as file:
            first = next((line for line in file if line.strip()), b"")
        if not first or (isinstance(document := _parsed(first), dict) and "plans" not in document):
            self._index_lines()
            return
        try:
            whole = json.loads(self.path.read_bytes())
        except ValueError as error:
            raise InputError(
                f"{self.path} is neither JSON lines, a plan each, nor one JSON document ({error}); plan again"
            ) from None
        for plan in _plans_of(whole):
            step = plan.get("step") if isinstance(plan, dict) else None
            if not isinstance(step, int):
                raise InputError(f"{self.path}: a plan is an object with a step, not {json.dumps(plan)[:80]}")
            self._documents[step] = plan

    def _index_lines(self) -> None:
        for number, offset, line in _lines(self.path):
            found = _STEP.search(line)
            if not line.endswith(b"\n") and _parsed(line) is None:  # cut off by a kill or a full disk
                self._ends_early = True
            elif found is None:
                raise InputError(f'{self.path}:{number} is not a plan: it has no "step"')
            else:
                self._offsets[int(found[1])] = offset

    def _load(self, step: int) -> Any:
        if step in self._documents:
            return self._documents[step]
        try:
            with self.path.open("rb") as file:
                file.seek(self._offsets[step])
                return json.loads(file.readline())
        except (OSError, ValueError) as error:
            raise InputError(
                f"{self._where(step)}, the plan for step {step}, is damaged: {error}; plan again"
            ) from None

    def _where(self, step: int) -> str:
        if step in self._documents:
            return f"{self.path}, step {step}"
        numbers = (number for number, offset, _ in _lines(self.path) if offset == self._offsets[step])
        return f"{self.path}:{next(numbers, '?')}"


_MAKE = "lengthwise plan CONFIG --out FILE"


def _parsed(line: bytes) -> Any:
    """What a line of JSON says; None if it is not JSON by itself."""
    try:
        return json.loads(line)
    except ValueError:
        return None


def _plans_of(document: Any) -> list[Any]:
    if isinstance(document, dict) and "plans" in document:
        document = document["plans"]
    return document if isinstance(document, list) else [document]


def _lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Number, offset and bytes of every line that is not blank."""
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, offset, line
            offset += len(line)
