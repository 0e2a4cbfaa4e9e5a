"""Everything a run folder says about its run, read once and checked."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lengthwise.core.errors import CheckError, InputError, LengthwiseError
from lengthwise.core.plan import StepPlan
from lengthwise.core.run_folder import RunFolder
from lengthwise.core.timeline import Timeline
from lengthwise.report.histogram import LengthBin


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
        """Lengths of the corpus; empty when the run did not write them."""
        names = ("low", "high", "num_sequences", "num_tokens")
        return [LengthBin(**{name: row[name] for name in names}) for row in self.corpus.get("histogram", [])]

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
        config = yaml.safe_load(run.config.read_text()) or {}
        if not isinstance(config, dict):
            raise TypeError("not a tree of settings")
    with _reading(run.metrics):
        rows = run.read_metrics()
    if not rows:
        raise InputError(f"{run.path} has no finished step yet: nothing to report; wait for the first, or train again")
    with _reading(run.plans):
        plans = run.read_plans()
    with _reading(run.path / "timeline"):
        timelines = run.read_timelines()
    documents: dict[str, dict[str, Any]] = {}
    for name in ("model", "corpus", "ledger", "sampling", "status"):
        with _reading(run.path / f"{name}.json"):
            documents[name] = dict(run.read_json(f"{name}.json"))
    record = RunRecord(folder=run, config=config, rows=rows, plans=plans, timelines=timelines, **documents)
    with _reading(run.path / "corpus.json"):
        _ = record.length_bins
    return record


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
    except (ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise InputError(f"{path} is damaged ({type(error).__name__}: {error}); {way_out}") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
