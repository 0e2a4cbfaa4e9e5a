"""Everything a run folder says about its run, read once and checked."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from lengthwise.config.limits import MAX_CONFIG_BYTES
from lengthwise.core.errors import CheckError, InputError, LengthwiseError
from lengthwise.core.read_file import brief, read_text
from lengthwise.core.read_yaml import parse_yaml
from lengthwise.core.run_folder import MAX_NUMBER, PROVENANCE, RunFolder
from lengthwise.core.step_plan import StepPlan
from lengthwise.core.timeline import Timeline
from lengthwise.report.charts.histogram import LengthBin


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The contents of one run folder. What the run did not write is empty."""

    folder: RunFolder
    config: dict[str, Any]
    rows: list[dict[str, Any]]
    """Metrics, one row a finished step, in order; never empty."""
    plans: dict[int, StepPlan]
    timelines: dict[int, Timeline]
    """Measured, by step."""
    model: dict[str, Any]
    corpus: dict[str, Any]
    ledger: dict[str, Any]
    sampling: dict[str, Any]
    """What the order does to sampling; empty if it is shuffled."""
    status: dict[str, Any]
    provenance: dict[str, Any]
    """Date, version, machine and command line of each start."""
    samples: list[dict[str, Any]]
    """Samples of text, in the order of steps; empty if none were asked for."""

    @property
    def starts(self) -> list[dict[str, Any]]:
        """Each start of the run, as provenance.json has it; empty when the run did not write it."""
        starts = self.provenance.get("starts", [])
        if not isinstance(starts, list) or any(not isinstance(start, dict) for start in starts):
            raise ValueError(f"its starts are {brief(starts)}")
        return starts

    @property
    def device_memory_bytes(self) -> int | None:
        """Memory of one device; None on a CPU, and when the run did not write it."""
        num_bytes = self.starts[-1].get("device_memory_bytes") if self.starts else None
        if num_bytes is not None and (type(num_bytes) is not int or not 0 < num_bytes < MAX_NUMBER):
            raise ValueError(f"device_memory_bytes is {brief(num_bytes)}")
        return num_bytes

    @property
    def name(self) -> str:
        """What the user called the run; its folder's name otherwise."""
        return str(self.config.get("name") or self.folder.path.resolve().name)

    @property
    def config_text(self) -> str:
        """The resolved configuration, as it was saved."""
        return self.folder.config.read_text()

    @property
    def length_bins(self) -> list[LengthBin]:
        """Lengths of the first epoch; empty when the run did not write them."""
        names = ("low", "high", "num_sequences", "num_tokens")
        bins = [LengthBin(**{name: row[name] for name in names}) for row in self.corpus.get("histogram", [])]
        for bin in bins:
            counts = (bin.low, 0 if bin.high is None else bin.high, bin.num_sequences, bin.num_tokens)
            if any(type(count) is not int or not 0 <= count < 1 << 62 for count in counts):
                raise ValueError(f"a bin of its histogram is {brief(bin)}")
        return bins

    @cached_property
    def moments(self) -> dict[float, str]:
        """Step -> hours, minutes and seconds after the first step, in words; steps without a timestamp are missing."""
        ends_s: dict[int, float] = {}
        for row in self.rows:
            with suppress(ValueError, OverflowError):
                ends_s[row["step"]] = datetime.fromisoformat(str(row.get("timestamp"))).timestamp()
        first_s = min(ends_s.values(), default=0.0)
        return {step: f"after {timedelta(seconds=round(end_s - first_s))}" for step, end_s in ends_s.items()}

    @cached_property
    def missing_steps(self) -> tuple[tuple[int, int], ...]:
        """The steps without a row that others follow, or that have a plan, as first and last of each stretch."""
        steps = [row["step"] for row in self.rows]
        is_done = self.status.get("state") == "done"
        planned = [step for step in self.plans if step < steps[0] or (is_done and step > steps[-1])]
        missing = [(step, step) for step in planned]
        missing += [(before + 1, after - 1) for before, after in pairwise(steps) if after > before + 1]
        joined: list[tuple[int, int]] = []
        for first, last in sorted(missing):
            if joined and first == joined[-1][1] + 1:
                first = joined.pop()[0]
            joined.append((first, last))
        return tuple(joined)

    def setting(self, section: str, key: str) -> Any:
        """A value of the configuration; None when it has none."""
        part = self.config.get(section)
        return part.get(key) if isinstance(part, dict) else None


def read_record(run: RunFolder) -> RunRecord:
    """Read and check a run folder.

    Raises:
        InputError: not a run folder, no finished step, or a file that cannot be read as what it should be.
        CheckError: a plan that was changed after it was written.
    """
    run.check()
    with _reading(run.config):
        config = parse_yaml(read_text(run.config, what="a configuration", max_bytes=MAX_CONFIG_BYTES)) or {}
        if not isinstance(config, dict):
            raise ValueError("it is not a tree of settings")
    with _reading(run.metrics):
        rows = run.read_metrics()
        for row in rows:
            _check_row(row)
    if not rows:
        raise InputError(f"{run.path} has no finished step yet: nothing to report; wait for the first, or train again")
    with _reading(run.plans):
        plans = run.read_plans()
    with _reading(run.path / "timeline"):
        timelines = run.read_timelines()
    with _reading(run.samples):
        samples = run.read_samples()
    documents: dict[str, dict[str, Any]] = {}
    for name in ("model", "corpus", "ledger", "sampling", "status", "provenance"):
        with _reading(run.path / f"{name}.json"):
            documents[name] = dict(run.read_json(f"{name}.json"))
    record = RunRecord(
        folder=run, config=config, rows=rows, plans=plans, timelines=timelines, samples=samples, **documents
    )
    with _reading(run.path / "corpus.json"):
        _ = record.length_bins
    with _reading(run.path / PROVENANCE):
        _ = record.device_memory_bytes
    return record


def _check_row(row: dict[str, Any]) -> None:
    """Raise ``ValueError`` naming a figure of a step that is no number, or neither finite nor a loss."""
    for name, value in row.items():
        if name not in _FIGURES or value is None:
            continue
        is_number = type(value) in (int, float)
        if not is_number or (name not in _MAY_DIVERGE and not abs(value) < MAX_NUMBER):
            raise ValueError(f"step {row['step']}: {name} is {brief(value)}")
        if name in _NOT_NEGATIVE and value < 0:
            raise ValueError(f"step {row['step']}: {name} is {brief(value)}, below 0")


_NOT_NEGATIVE = (
    "data/num_tokens", "data/num_sequences", "data/max_len", "data/pad_frac", "perf/step_time_s", "time/data_wait_s",
    "plan/lower_bound_s", "plan/pred_time_s", "balance/time_max_over_mean", "lr_factor", "lr", "perf/tokens_per_s",
    "memory/max_reserved_gib",
)  # fmt: skip
_MAY_DIVERGE = ("loss/avg", "val/loss", "grad_norm")
_FIGURES = (*_NOT_NEGATIVE, *_MAY_DIVERGE)
"""Columns of metrics.jsonl that reports compute with."""


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Name the file in every error that its content causes."""
    way_out = "restore it, or remove the damaged lines and report again"
    try:
        yield
    except CheckError as error:
        raise CheckError(f"{path}: {error}") from None
    except LengthwiseError as error:
        raise InputError(str(error) if str(path) in str(error) else f"{path}: {error}") from None
    except ValueError as error:
        raise InputError(f"{path} is damaged ({error}); {way_out}") from None
    except (KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError):
        raise InputError(f"{path} is damaged (it does not hold what a run writes there); {way_out}") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
