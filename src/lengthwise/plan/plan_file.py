"""Plans made before, by `lengthwise plan --out` or by hand: read from disk when their step comes.

JSON lines, a plan each, are checked by one pass over the file when it is opened, every value of every plan, and parsed
again one at a time, so that a file may hold more plans than memory. One JSON document (a plan, a list of plans, or an
object with ``plans``, as `lengthwise plan --json` prints) is read whole.
"""

import hashlib
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lengthwise.core.batch import GlobalBatch
from lengthwise.core.errors import CheckError, InputError, LengthwiseError, Setting
from lengthwise.core.pipeline_config import PipelineConfig
from lengthwise.core.read_file import MAX_DOCUMENT_BYTES, brief, check_regular, parse_json, read_bytes
from lengthwise.core.step_plan import StepPlan

_WHAT = "a file of plans"
_MAKE = "lengthwise plan CONFIG --out FILE"


class PlanFile:
    """A planner that plans nothing: ``plan = plans(batch)`` is the plan that the file has for the batch's step.

    Where a step is there more than once, as in the plans of a run that was resumed, the last one counts.
    """

    def __init__(self, path: Path, *, on_read: Callable[[int, int], None] | None = None) -> None:
        """Check all plans of ``path``.

        Args:
            path: of the file.
            on_read: called with the bytes read so far and all bytes.

        Raises:
            InputError: there is no such file, no plan in it, or a value that no plan can have.
            CheckError: a plan is not what its digest says.
        """
        self.path = path
        self.largest: dict[PipelineConfig, tuple[int, int]] = {}
        """Most tokens of a micro-batch that runs as this scheme, overrides applied, and that micro-batch's step."""
        self._num_devices: dict[int, int] = {}
        """Numbers of ranks that plans are for, and the first step of each."""
        self._ends_early = False
        self._numbers: dict[int, int] = {}
        """By step, the place in the arrays below of its plan."""
        self._line_numbers, self._offsets, self._coverage = array("Q"), array("Q"), array("Q")
        """Of every plan: its line, where that begins, and what it computes. Arrays, as there may be millions."""
        self._documents: dict[int, Any] = {}
        """By step, if the file is one document."""
        self._on_read = on_read or (lambda done, total: None)
        try:
            self._size = check_regular(path, what=_WHAT)
            self._read()
        except OSError as error:
            raise InputError(f"cannot read plans from {path}: {error.strerror}; make some with: {_MAKE}") from None
        if not self._numbers:
            raise InputError(f"no plans in {path}; make some with: {_MAKE}")

    def __len__(self) -> int:
        """Steps that have a plan."""
        return len(self._numbers)

    def __contains__(self, step: int) -> bool:
        return step in self._numbers

    def representatives(self) -> Iterator[StepPlan]:
        """Plans in which every scheme and every number of ranks of the file occurs: what a run can execute of them, it
        can execute of all.
        """
        for step in sorted({step for _, step in self.largest.values()} | set(self._num_devices.values())):
            yield self.plan(step)

    def check_steps(self, steps: range) -> None:
        """Raise ``InputError`` naming the first of ``steps`` that has no plan."""
        missing = next((step for step in steps if step not in self), None)
        if missing is not None:
            cut = " and a last line that is cut off" if self._ends_early else ""
            fewer = f", or set {Setting.STEPS}={missing}" if missing > steps.start else ""
            raise InputError(
                f"{self.path} has no plan for step {missing}: it has {len(self):,} plans{cut}, the run needs those of "
                f"steps {steps.start} to {steps.stop - 1}. Plan them all with: {_MAKE} --steps {steps.stop}{fewer}"
            )

    def check_batches(self, batches: Iterator[GlobalBatch], num_steps: int) -> None:
        """Raise ``CheckError`` naming the first plan that does not compute its batch of the next ``num_steps`` exactly.

        Raises:
            InputError: a step has no plan.
        """
        for _ in range(num_steps):
            batch = next(batches)
            self.check_steps(range(batch.step, batch.step + 1))
            if self._coverage[self._numbers[batch.step]] != _coverage(
                batch.ids, batch.lengths, max(1, batch.num_targets)
            ):
                self(batch)

    def plan(self, step: int) -> StepPlan:
        """The plan for ``step``.

        Raises:
            InputError: the file has none for it, or what it has is no plan.
            CheckError: it is not what its digest says.
        """
        self.check_steps(range(step, step + 1))
        if step in self._documents:
            return self._parsed(self._documents[step], f"{self.path}, step {step}")
        number = self._numbers[step]
        where = f"{self.path}:{self._line_numbers[number]}"
        try:
            with self.path.open("rb") as file:
                file.seek(self._offsets[number])
                document = parse_json(file.readline(MAX_DOCUMENT_BYTES))
        except (OSError, ValueError) as error:
            raise InputError(f"{where}, the plan for step {step}, is damaged: {error}; plan again") from None
        plan = self._parsed(document, where)
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

    def _read(self) -> None:
        first = next((line for _, _, line in _lines(self.path)), b"")
        if not first or (isinstance(document := _parsed_or_none(first), dict) and "plans" not in document):
            self._read_lines()
            return
        try:
            contents = parse_json(read_bytes(self.path, what=_WHAT))
        except InputError:
            raise
        except ValueError as error:
            raise InputError(
                f"{self.path} is neither JSON lines, a plan each, nor one JSON document ({error}); plan again"
            ) from None
        for document in _plans_of(contents):
            step = document.get("step") if isinstance(document, dict) else None
            if type(step) is not int:
                raise InputError(f"{self.path}: a plan is an object with a step, not {brief(document)}")
            self._add(self._parsed(document, f"{self.path}, step {step}"))
            self._documents[step] = document

    def _read_lines(self) -> None:
        for number, offset, line in _lines(self.path):
            self._on_read(offset + len(line), self._size)
            where = f"{self.path}:{number}"
            if len(line) > MAX_DOCUMENT_BYTES:
                raise InputError(f"{where} has more than {MAX_DOCUMENT_BYTES:,} bytes, the limit of a plan")
            try:
                document = parse_json(line.rstrip(b"\r\n"))
            except ValueError as error:
                if not line.endswith(b"\n"):  # cut off by a kill or a full disk
                    self._ends_early = True
                    continue
                raise InputError(f"{where} is damaged: {error}; plan again") from None
            if isinstance(document, dict) and "step" not in document:
                raise InputError(f'{where} is not a plan: it has no "step"')
            self._add(self._parsed(document, where), line=number, offset=offset)

    def _parsed(self, document: Any, where: str) -> StepPlan:
        try:
            return StepPlan.from_json(document)
        except LengthwiseError as error:
            step = document.get("step") if isinstance(document, dict) else None
            named = f", step {step}" if type(step) is int and ", step" not in where else ""
            raise type(error)(f"{where}{named}: {error}") from None

    def _add(self, plan: StepPlan, *, line: int = 0, offset: int = 0) -> None:
        packs = []
        for pipeline in plan.pipelines:
            for micro_batch in pipeline.micro_batches:
                packs.append(micro_batch.pack)
                scheme = pipeline.scheme_of(micro_batch)
                if micro_batch.pack.num_tokens > self.largest.get(scheme, (0, 0))[0]:
                    self.largest[scheme] = (micro_batch.pack.num_tokens, plan.step)
        self._num_devices.setdefault(plan.num_devices, plan.step)
        ids = [id for pack in packs for id in pack.ids]
        lengths = [length for pack in packs for length in pack.lengths]
        self._numbers[plan.step] = len(self._offsets)
        self._line_numbers.append(line)
        self._offsets.append(offset)
        self._coverage.append(_coverage(ids, lengths, plan.loss_normaliser))


def _coverage(ids: "tuple[int, ...] | list[int]", lengths: "tuple[int, ...] | list[int]", normaliser: int) -> int:
    """A number of 64 bits over what a batch holds, or a plan computes, in any order."""
    words = repr((sorted(zip(ids, lengths)), normaliser))
    return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest())


def _parsed_or_none(line: bytes) -> Any:
    """What a line of JSON says; None if it is not JSON by itself."""
    try:
        return parse_json(line)
    except ValueError:
        return None


def _plans_of(document: Any) -> list[Any]:
    if isinstance(document, dict) and "plans" in document:
        document = document["plans"]
    return document if isinstance(document, list) else [document]


def _lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Number, offset and bytes of every line that is not blank; of a line over the limit, its beginning."""
    offset = number = 0
    with path.open("rb") as file:
        while line := file.readline(MAX_DOCUMENT_BYTES + 1):
            number += 1
            if line.strip():
                yield number, offset, line
            offset += len(line)
