"""The files of one training run: the runtime writes them, the report reads them, a resumed run goes on with them.

config.yaml     the resolved configuration      status.json      how the run ended
corpus.json     length statistics of the data   ledger.json      what became of it, token by token
plans.jsonl     one StepPlan a line             metrics.jsonl    one step a line
samples.jsonl   one sample of text a line
timeline/       one file a rank, a step a line  checkpoints/     step_00000100/, latest
tensorboard/    event files                     trace.json.gz, report.html
compiler/       what train.compile compiled
model/          configuration and tokenizer of the model, for `lengthwise export`
provenance.json where its numbers come from: version, commit, date, machine and command line of each start
stop            asks the run to save and end
launcher.lock, ranks.lock   who is training into it at the moment
"""

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lengthwise.core.atomic_write import reason, shell_word, shown, write_text
from lengthwise.core.errors import InputError
from lengthwise.core.json_lines import drop_steps_from, read_jsonl
from lengthwise.core.lock import FolderLock, InUseError
from lengthwise.core.read_file import brief, read_json
from lengthwise.core.specs import MAX_DEVICES, ModelSpec
from lengthwise.core.step_plan import StepPlan
from lengthwise.core.timeline import MemorySample, Span, SpanKind, Timeline, merge
from lengthwise.core.typed_json import from_document
from lengthwise.core.wording import whole_number

PROVENANCE = "provenance.json"
STATUS = "status.json"
LAUNCHER_LOCK, RANKS_LOCK = "launcher", "ranks"
"""Who holds a run's folder: the process that starts ranks, and the first rank."""
MAX_NUMBER = 1e18
"""Above any time in seconds and any size in bytes of a timeline."""


@dataclass(frozen=True)
class RunFolder:
    """Paths and formats of a run's files."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved configuration, YAML."""
        return self.path / "config.yaml"

    @property
    def stop(self) -> Path:
        """A file whose presence asks the run to save and end after the step in flight."""
        return self.path / "stop"

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def compiler(self) -> Path:
        """Folder of compiled code; a resumed run loads it."""
        return self.path / "compiler"

    @property
    def model_files(self) -> Path:
        """Folder of the model's configuration and tokenizer."""
        return self.path / "model"

    @property
    def tensorboard(self) -> Path:
        """Folder of event files."""
        return self.path / "tensorboard"

    @property
    def trace(self) -> Path:
        """Chrome trace, gzip."""
        return self.path / "trace.json.gz"

    @property
    def report(self) -> Path:
        """The HTML report."""
        return self.path / "report.html"

    @property
    def metrics(self) -> Path:
        """One JSON object per step."""
        return self.path / "metrics.jsonl"

    @property
    def plans(self) -> Path:
        """One plan per step."""
        return self.path / "plans.jsonl"

    @property
    def samples(self) -> Path:
        """One sample of text a line."""
        return self.path / "samples.jsonl"

    def timeline(self, rank: int) -> Path:
        """What ``rank`` recorded, one step a line."""
        return self.path / "timeline" / f"rank_{rank:05d}.jsonl"

    def lock(self, holder: str) -> FolderLock:
        """The lock of ``holder``."""
        return FolderLock(
            self.path / f"{holder}.lock",
            user="a run",
            way_out="wait for it to end, stop it, or name another run_folder",
        )

    def check_unused(self) -> None:
        """Raise ``InUseError`` if a run is going on in the folder."""
        for holder in (LAUNCHER_LOCK, RANKS_LOCK):
            with suppress(OSError):  # a folder that cannot be written is refused when it is claimed
                self.lock(holder).check_free()

    def check(self) -> None:
        """Raise ``InputError`` unless this is the folder of a run."""
        try:
            has_config = self.config.is_file()
            self._check_folders()
        except OSError as error:  # such as a name that is too long
            raise InputError(f"{shown(self.path)} is not a run folder ({reason(error)})") from None
        if not has_config:
            raise InputError(f"{shown(self.path)} {self._no_run()}")

    def _no_run(self) -> str:
        """What this is instead of the folder of a run, and what to give or to do."""
        return self._beginning() or f"is not a run folder: {self._instead()}"

    def _beginning(self) -> str:
        """What is said of a run that has not written its settings, and starts here or did; empty if there is none."""
        traces = (self.path / STATUS, *(self.lock(holder).file for holder in (LAUNCHER_LOCK, RANKS_LOCK)))
        if not any(map(os.path.isfile, traces)) or self._left_of_a_run():
            return ""
        try:
            self.check_unused()
        except InUseError:
            return "has no config.yaml yet: a run is starting in it; try again in a moment"
        return "has no config.yaml: the run in it ended before it began; the same command as before starts it anew"

    def _instead(self) -> str:
        if not self.path.exists():
            return "there is nothing of that name; give the folder that train printed, such as outputs/demo/DATE-TIME"
        if not self.path.is_dir():
            beside = self.path.resolve().parent
            folder = shown(beside) if (beside / self.config.name).is_file() else "the folder that train printed"
            return f"it is a file; give {folder}"
        with suppress(OSError):
            configs = [*self.path.glob(f"*/{self.config.name}"), *self.path.glob(f"*/*/{self.config.name}")]
            if configs:
                return f"it has no config.yaml, but {shown(max(configs).parent)} has; name that, or another run in it"
        return "it has no config.yaml; give the folder that train printed"

    def check_new(self) -> None:
        """Raise ``InputError`` if the folder holds a run already."""
        try:
            has_config, contents = self.config.exists(), self._left_of_a_run()
            self._check_folders()
        except OSError as error:
            raise InputError(f"run_folder={shown(self.path)} cannot be used ({reason(error)}); name another") from None
        if has_config:
            raise InputError(
                f"{shown(self.path)} already holds a run; go on with --resume {shell_word(self.path)} if it has a "
                "checkpoint, else remove it or name another run_folder"
            )
        if contents:
            raise InputError(
                f"{shown(self.path)} holds {contents} of a run whose config.yaml is gone, so its settings are unknown; "
                "put config.yaml back, remove the folder, or name another run_folder"
            )

    def check_records(self) -> None:
        """Raise ``InputError`` if a line of metrics, plans or timelines is damaged: no run adds to it unnoticed.

        The last line may be cut off, as by a kill.
        """
        for path in (self.metrics, self.plans, self.samples, *self._timelines()):
            try:
                for number, row in enumerate(read_jsonl(path), 1):
                    step = row.get("step")
                    if type(step) is not int or step < 0:
                        raise InputError(
                            f"{path}:{number} is damaged: its step is {brief(step)}, no whole number from 0"
                        )
            except InputError as error:
                raise InputError(
                    f"{error}; restore the file, or delete that line, whose record is lost then, and resume again"
                ) from None

    def drop_steps_from(self, step: int, *, rank: int, num_ranks: int) -> None:
        """Remove the rows of ``step`` and later ones, which a run that goes on before ``step`` has left behind.

        Each rank calls this before it appends rows: it cleans its own timeline, and the first one also metrics, plans,
        samples and the timelines of ranks that the run had before. A last line that a kill cut off goes, too.

        Args:
            step: the next one that the run trains, from 0.
            rank: of this process.
            num_ranks: of the run from now on.

        Raises:
            OSError: a file cannot be read or written; all of its earlier rows are still there.
        """
        paths = [self.timeline(rank)]
        if rank == 0:
            others = {*self._timelines()} - {self.timeline(number) for number in range(num_ranks)}
            paths += [self.metrics, self.plans, self.samples, *sorted(others)]
        for path in paths:
            drop_steps_from(path, step)

    def _timelines(self) -> list[Path]:
        return sorted((self.path / "timeline").glob("rank_*.jsonl"))

    def _check_folders(self) -> None:
        """Raise ``InputError`` if something else has the name of a folder that a run writes to, perhaps hours later."""
        for path in (self.checkpoints, self.path / "timeline", self.tensorboard, self.compiler, self.model_files):
            if os.path.lexists(path) and not path.is_dir():
                raise InputError(f"{shown(path)} is a file, or a link to nothing, where a run has a folder; remove it")

    def _left_of_a_run(self) -> str:
        """A file that only a run writes, if there is one."""
        if self.checkpoints.is_dir() and any(self.checkpoints.glob("step_*")):
            return "checkpoints"
        return next((path.name for path in (self.metrics, self.plans) if path.exists()), "")

    def write_json(self, name: str, document: dict[str, Any]) -> None:
        """Write ``name`` whole or not at all."""
        write_text(self.path / name, json.dumps(document, indent=1) + "\n")

    def read_json(self, name: str) -> dict[str, Any]:
        """The JSON object in ``name``; empty when there is none.

        Raises:
            InputError: it is damaged, or cannot be read.
        """
        path = self.path / name
        if not path.is_file():
            return {}
        document = read_json(path, what="a JSON object of a run")
        if not isinstance(document, dict):
            raise InputError(f"{shown(path)} is damaged (no JSON object); restore it, or start the run anew")
        return document

    def read_spec(self) -> ModelSpec:
        """The sizes of the model that was trained.

        Raises:
            InputError: there are none.
        """
        document = self.read_json("model.json")
        if not document:
            raise InputError(f"{self.path} has no model.json: this run never began to train")
        if "num_layers" not in document and "architecture" in document:
            raise InputError(
                f"{self.path} trained a {document['architecture']}, whose family has no cost model; name a model of "
                "another family"
            )
        values = {name: document[name] for name in ModelSpec.__dataclass_fields__ if name in document}
        try:
            return from_document(ModelSpec, values)
        except ValueError as error:
            raise InputError(f"{shown(self.path / 'model.json')} is damaged ({error}); restore it") from None

    def read_metrics(self) -> list[dict[str, Any]]:
        """Metrics of all steps, in order; a step trained again after a resume counts once, the last time."""
        rows = {_step_of(row, self.metrics): row for row in read_jsonl(self.metrics)}
        return [row for _, row in sorted(rows.items())]

    def read_samples(self) -> list[dict[str, Any]]:
        """Samples of text in the order of steps; a step trained again after a resume counts once, the last time."""
        rows = {(_step_of(row, self.samples), str(row.get("prompt"))): row for row in read_jsonl(self.samples)}
        return [row for (_, _), row in sorted(rows.items(), key=lambda item: item[0][0])]

    def read_plans(self) -> dict[int, StepPlan]:
        """Plans by step."""
        plans = map(StepPlan.from_json, read_jsonl(self.plans))
        return {plan.step: plan for plan in plans}

    def read_timelines(self) -> dict[int, Timeline]:
        """Measured timelines by step, merged over ranks, waits marked; steps that some rank lacks are left out.

        Of a step trained again after a resume, perhaps on another number of ranks, those of the last time count.
        """
        steps: dict[int, dict[int, Timeline]] = {}
        for path in self._timelines():
            rank = whole_number(path.stem.removeprefix("rank_"))
            if rank is None:
                raise InputError(f"{path} is damaged: its name does not end in the number of a rank")
            for row in read_jsonl(path):
                try:
                    timeline = timeline_from_row(row, rank)
                except ValueError as error:
                    raise InputError(f"{path} is damaged: {error}") from None
                steps.setdefault(timeline.step, {})[rank] = timeline
        merged: dict[int, Timeline] = {}
        for step, of_ranks in sorted(steps.items()):
            num_ranks = of_ranks[0].num_ranks if 0 in of_ranks else 0  # the first rank trained the step each time
            parts = [part for part in of_ranks.values() if part.num_ranks == num_ranks]
            if parts and len(parts) == num_ranks:
                merged[step] = merge(parts).with_waits()
        return merged


def timeline_to_row(timeline: Timeline) -> dict[str, Any]:
    """One line of a rank's timeline file."""
    return {
        "step": timeline.step,
        "num_ranks": timeline.num_ranks,
        "spans": [[round(s.start_s, 6), round(s.end_s, 6), str(s.kind), s.name] for s in timeline.spans],
        "memory": [[round(m.time_s, 6), m.num_bytes] for m in timeline.memory],
    }


def timeline_from_row(row: dict[str, Any], rank: int) -> Timeline:
    """What :func:`timeline_to_row` wrote for ``rank``.

    Raises:
        ValueError: a number is not one, or out of bounds; the message names it.
    """
    step, num_ranks, spans, memory = row.get("step"), row.get("num_ranks"), row.get("spans", ()), row.get("memory", ())
    if type(step) is not int or type(num_ranks) is not int or not 0 <= rank < num_ranks <= MAX_DEVICES:
        raise ValueError(f"step {brief(step)} of rank {rank} of {brief(num_ranks)} ranks")
    for name, items, width in (("spans", spans, 4), ("memory", memory, 2)):
        if not isinstance(items, list) or any(not isinstance(item, list) or len(item) != width for item in items):
            raise ValueError(f"step {step}: {name} must be lists of {width}")
    numbers = [value for span in spans for value in span[:2]] + [value for sample in memory for value in sample]
    if wrong := [value for value in numbers if type(value) not in (int, float) or not abs(value) < MAX_NUMBER]:
        raise ValueError(f"step {step}: {brief(wrong[0])} is no time or size")
    return Timeline(
        step=step,
        num_ranks=num_ranks,
        spans=tuple(
            Span(start_s=start, end_s=end, rank=rank, kind=SpanKind(kind), name=str(name))
            for start, end, kind, name in spans
        ),
        memory=tuple(MemorySample(time_s=time, rank=rank, num_bytes=size) for time, size in memory),
    )


def _step_of(row: dict[str, Any], path: Path) -> int:
    step = row.get("step")
    if type(step) is not int or not 0 <= step < 1 << 62:
        raise InputError(f"{path} has a row whose step is {brief(step)}, not a whole number from 0")
    return step
