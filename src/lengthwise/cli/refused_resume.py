"""What a resume that is refused leaves of a run: everything, and status.json says how the run ended before."""

from contextlib import suppress
from pathlib import Path

from lengthwise.cli.claim import another_run_holds
from lengthwise.cli.other_batches import named_settings
from lengthwise.cli.restart import FAILED, read_status
from lengthwise.config.run_config import Config
from lengthwise.core.atomic_write import shell_word
from lengthwise.core.errors import InputError
from lengthwise.core.run_folder import PROVENANCE, STATUS, RunFolder
from lengthwise.data.sampler import OtherBatchesError, Sampler
from lengthwise.runtime.state.checkpoint_files import (
    candidates,
    check_optimizer,
    check_precision,
    latest,
    read_state,
)


def check_settings(config: Config, sampler: Sampler, folder: RunFolder) -> None:
    """Raise ``InputError`` if the latest checkpoint is of another optimizer, other batches or more precise weights.

    Ranks would refuse it, too, when they have started. What only they find, such as damage, is left to them.
    """
    try:
        checkpoint = latest(folder.checkpoints)
        document = read_state(checkpoint)
    except InputError:
        return
    check_optimizer(checkpoint, document["optimizer"], config.optim.name)
    master_dtype = "float64" if config.train.dtype == "float64" else "float32"
    check_precision(checkpoint, document["master_dtype"], master_dtype)
    state = document["sampler"]
    forms_batches = "held" in state
    if forms_batches == config.plan.form_batches:
        try:
            sampler.load_state_dict(state["stream"] if forms_batches else state)
        except OtherBatchesError as error:
            raise named_settings(error, config, folder) from None


def check_paths(config: Config, folder: RunFolder) -> None:
    """Raise ``InputError`` if a relative path of a run's settings leads nowhere here, and did where it was started.

    A run whose last start took down no folder is let pass: what is missing is named when it is opened.
    """
    data, model, plan = config.data, config.model, config.plan
    paths = {
        "data.index": data.index, "data.validation": data.validation, "model.hf": model.hf, "plan.file": plan.file,
        "plan.profile": plan.profile, **{f"part {part.index} of data.mixture": part.index for part in data.mixture},
    }  # fmt: skip
    try:
        started_in = Path(folder.read_json(PROVENANCE)["starts"][-1]["folder"])
    except (ValueError, LookupError, TypeError, InputError):
        return
    for name, path in paths.items():
        if path and not Path(path).exists() and (started_in / path).exists():
            way_out = "" if name.startswith("part ") else f", or give {name}={shell_word(started_in / path)}"
            raise InputError(
                f"{name}: no {path} in the current folder, {Path.cwd()}; the run was started in {started_in}, which "
                f"has it: go there (cd {shell_word(started_in)}){way_out}"
            )


class EarlierStatus:
    """status.json of a run before it is resumed, to be put back where the resume changed nothing else."""

    def __init__(self, folder: RunFolder) -> None:
        """Take down what there is; ``folder``: of the run, or of a new one, which has none."""
        self._folder, self._file = folder, folder.path / STATUS
        self._content = self._file.read_bytes() if self._file.is_file() else None
        self._record = self._found()

    def put_back(self) -> None:
        """Write it again if the ranks refused to go on, or did not get to say anything, and nothing was trained."""
        state = read_status(self._folder).get("state")
        if self._content is None or state not in (FAILED, None) or self._record != self._found():
            return
        with suppress(OSError):
            if not another_run_holds(self._folder):
                self._file.write_bytes(self._content)

    def _found(self) -> list[object]:
        """What a run that goes on changes: its settings, starts, records and checkpoints."""
        paths = [self._folder.path / PROVENANCE, self._folder.config, self._folder.metrics, self._folder.plans]
        stamps = []
        for path in paths:
            with suppress(OSError):
                stamps.append((path.name, path.stat().st_mtime_ns, path.stat().st_size))
        return [*stamps, *candidates(self._folder.checkpoints)]
