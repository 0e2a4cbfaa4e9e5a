"""`lengthwise.train`: train what a configuration says, as ranks of this machine or as one rank under torchrun."""

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from lengthwise.cli.claim import claimed, claimed_with_free_name
from lengthwise.cli.ending import ask_to_stop, error_of, way_on
from lengthwise.cli.failures import failures_of_run
from lengthwise.cli.launch import (
    RUN_FOLDER_VARIABLE,
    LaunchOutcome,
    check_nproc,
    check_rank_options,
    check_torch,
    is_rank,
    prefer_expandable_segments,
    torchrun,
)
from lengthwise.cli.refused_resume import EarlierStatus, check_paths, check_settings
from lengthwise.cli.restart import CRASHED, DONE, OVER, PREEMPTED, RUNNING, read_status, write_status
from lengthwise.config.run_config import Config, load, load_saved
from lengthwise.core.arguments import arguments_checked, as_names, check_arguments
from lengthwise.core.atomic_write import shell_word, shown
from lengthwise.core.errors import INTERRUPTED, InputError, Preempted, missing_package
from lengthwise.core.run_folder import RunFolder
from lengthwise.runtime.state.checkpoint_files import latest
from lengthwise.session.console import stderr


@arguments_checked
def train(
    config: Config | str | Path | None = None,
    overrides: str | Sequence[str] = (),
    *,
    nproc: int = 1,
    resume: str | Path | None = None,
    fall_back: bool = False,
    max_restarts: int = 0,
    quiet: bool = False,
) -> Path:
    """Train as `lengthwise train` does: start ranks on this machine and wait for them; under torchrun, be one rank.

        run_folder = lengthwise.train("run.yaml", ["train.steps=100", "plan.policy=auto"], nproc=2)

    Ranks print their progress, and the first Ctrl-C or SIGTERM makes them save and end. Under torchrun a rank that
    fails ends its process with the exit code of the command, as the other ranks may wait for it.

    Args:
        config: a YAML file, or a checked `Config`; by default, the default settings.
        overrides: settings that replace those of `config`, such as "train.steps=100".
        nproc: ranks on this machine; under torchrun 1, or as many as it started here.
        resume: the folder of a run that goes on from its latest checkpoint; then there is no `config`.
        fall_back: where the latest checkpoint is damaged, go on from the one before it.
        max_restarts: how many times all ranks are started again after one has died; 0 under torchrun.
        quiet: print warnings, errors and the last line alone.

    Returns:
        The folder of the run: its settings, metrics, plans and checkpoints.

    Raises:
        InputError: a setting is wrong or contradicts the data, or another run uses the folder.
        LengthwiseError: with the message and exit code of the rank that failed; `Preempted` if SIGTERM stopped it.
        KeyboardInterrupt: Ctrl-C stopped it.
    """
    check_rank_options(nproc, max_restarts=max_restarts)
    if not isinstance(config, Config):
        check_arguments({"config": str | Path | None}, {"config": config})
    resumed = None if resume is None else Path(resume)
    overrides = as_names(overrides)
    with ExitStack() as stack:
        path = None if config is None or isinstance(config, Config) else Path(config)
        if isinstance(config, Config):
            path = Path(stack.enter_context(TemporaryDirectory(prefix="lengthwise-"))) / "config.yaml"
            config.save(path)
            overrides = [f"plan.policy={config.plan.policy}", *overrides]  # a policy that a file alone names is refused
        if resumed is not None:
            _check_resumed(resumed, path)
            stack.enter_context(failures_of_run(resumed))
        resolved = load(path, list(overrides)) if resumed is None else _load_of(resumed, overrides)
        if is_rank():
            return _train_as_rank(resolved, resumed, fall_back=fall_back, quiet=quiet)
        check_torch()
        folder = _folder_of(resolved, resumed, fall_back=fall_back)
        _check(resolved, nproc=nproc, resumed=folder if resumed is not None else None)
        arguments = ["--resume", str(resumed)] if resumed else [str(path)] if path else []
        arguments += [*overrides, *(["--fall-back"] if fall_back else []), *(["--quiet"] if quiet else [])]
        claim = claimed_with_free_name(_by_time(resolved)) if folder is None else claimed(folder, is_new=not resumed)
        run_folder = stack.enter_context(claim)
        launch(run_folder, arguments, nproc=nproc, max_restarts=max_restarts)
    return run_folder.path


def _check_resumed(folder: Path, config: Path | None) -> None:
    if config is not None:
        raise InputError(f"--resume goes on with {folder}/config.yaml; give overrides, not another config ({config})")
    run = RunFolder(folder)
    if run.path.is_dir() and not is_rank():  # ranks are of the run that uses it
        run.check_unused()  # before it is looked into: a run that starts has not written its settings yet
    run.check()


def _load_of(folder: Path, overrides: Sequence[str]) -> Config:
    """The configuration of a run that is resumed, changed by ``overrides``.

    Raises:
        InputError: an override is wrong, or names another place or name for the run, which has its folder; or a path
            leads nowhere from this folder.
    """
    config, saved = load(folder / "config.yaml", list(overrides)), load_saved(folder / "config.yaml")
    for key in {override.partition("=")[0].strip() for override in overrides} & {"run_folder", "output", "name"}:
        value = getattr(config, key)
        is_kept = Path(value).resolve() == folder.resolve() if key == "run_folder" else value == getattr(saved, key)
        if not is_kept:
            raise InputError(
                f"{key}={value}: --resume goes on in {shown(folder)}, whose place and name stay; leave {key} out, "
                f"or go on in a copy: cp -r {shell_word(folder)} COPY; lengthwise train --resume COPY"
            )
    check_paths(config, RunFolder(folder))
    return config


def _folder_of(config: Config, resume: Path | None, *, fall_back: bool) -> RunFolder | None:
    """The folder that the run is to have, checked; None: a new one, named by the time."""
    if resume is None:
        if not config.run_folder:
            return None
        folder = RunFolder(Path(config.run_folder))
        folder.check_new()
        return folder
    folder = RunFolder(resume)
    folder.check_unused()
    folder.check_records()
    if not fall_back:
        latest(folder.checkpoints)
    return folder


def _check(config: Config, *, nproc: int, resumed: RunFolder | None) -> None:
    """Refuse here, before ranks are started and a folder is made, what can be without them; ``resumed``: a run."""
    from lengthwise.cli.plan_checks import check_plans_are_for, check_plans_of_run
    from lengthwise.cli.verify import verify_corpus
    from lengthwise.core.specs import ModelSpec
    from lengthwise.data.corpus import open_corpus
    from lengthwise.session.measured_profile import MeasuredProfile
    from lengthwise.session.method_choice import check_degree
    from lengthwise.session.planning import check_num_ranks, make_sampler, open_plans, with_steps
    from lengthwise.session.sample_prompts import text_sampling
    from lengthwise.session.trained_model import trained_model
    from lengthwise.session.validation_set import validation_corpus

    check_nproc(nproc)
    check_trackers(config)
    corpus = open_corpus(config.data)
    corpus.check_tokens()
    sampler = make_sampler(config, corpus)
    config = with_steps(config, sampler)
    model = trained_model(config, corpus)
    validation = validation_corpus(config, model)
    text_sampling(config, corpus, model)
    check_num_ranks(config, nproc)
    if isinstance(model, ModelSpec):
        check_degree(config.plan, nproc)
    if config.plan.profile and isinstance(model, ModelSpec):
        MeasuredProfile.open(config.plan.profile, dtype=config.train.dtype, recompute=config.plan.recompute)
    for checked in (corpus, validation):
        if checked is not None:
            verify_corpus(config, checked)
    if resumed is not None:
        check_settings(config, sampler, resumed)
    if config.plan.file:
        plans = open_plans(config, show_progress=True)
        if isinstance(model, ModelSpec):
            check_plans_are_for(plans, model, nproc)
        if resumed is None:
            check_plans_of_run(config, plans, corpus)


def check_trackers(config: Config) -> None:
    """Raise ``MissingPackage`` if that of a tracker which is asked for is not installed."""
    for name in ("tensorboard", "wandb", "trackio", "mlflow"):
        if getattr(config.train, name) and find_spec(name) is None:
            raise missing_package(f"train.{name}", name)


def _train_as_rank(config: Config, resume: Path | None, *, fall_back: bool, quiet: bool) -> Path:
    from lengthwise.cli.restart import earlier_end

    prefer_expandable_segments()
    named = os.environ.get(RUN_FOLDER_VARIABLE) or str(resume or config.run_folder)
    if not named:
        raise InputError("under torchrun set run_folder=DIR, so that all ranks write to the same place")
    folder = RunFolder(Path(named))
    if (exit_code := earlier_end(folder)) is not None:
        sys.exit(exit_code)  # what failed for good is not tried again
    from lengthwise.cli.verify import verify_as_rank
    from lengthwise.cli.worker import run_worker

    check_trackers(config)
    verify_as_rank(config)
    run_worker(config, folder, resume=resume is not None, fall_back=fall_back, quiet=quiet)
    return folder.path


def launch(
    folder: RunFolder, arguments: list[str], *, nproc: int, max_restarts: int = 0, shows_next: bool = True
) -> None:
    """Train into ``folder`` with ``nproc`` ranks, started again up to ``max_restarts`` times after one has died.

    ``shows_next``: whether it says in the end what can be done with the run.

    Raises:
        LengthwiseError: with the message and exit code of the rank that failed; 75 if SIGTERM stopped it and it saved.
        KeyboardInterrupt: SIGINT stopped it.
    """
    with failures_of_run(folder.path):
        _launch(folder, arguments, nproc=nproc, max_restarts=max_restarts, shows_next=shows_next)


def _launch(folder: RunFolder, arguments: list[str], *, nproc: int, max_restarts: int, shows_next: bool) -> None:
    log = stderr()
    folder.path.mkdir(parents=True, exist_ok=True)
    earlier = EarlierStatus(folder)
    for stale in (folder.path / "status.json", folder.stop):
        stale.unlink(missing_ok=True)
    if "--quiet" not in arguments:
        log.print(f"run folder: {folder.path}", markup=False, soft_wrap=True)

    def on_stop(number: int) -> None:
        log.print(ask_to_stop(folder, by=number), soft_wrap=True)

    try:
        variables = {RUN_FOLDER_VARIABLE: str(folder.path)}
        ended = torchrun(
            ["train", *arguments], nproc=nproc, variables=variables, on_stop=on_stop, max_restarts=max_restarts
        )
    except KeyboardInterrupt:
        if read_status(folder).get("state") != DONE:  # else it came when nothing was left to do
            _note_interrupted(folder)
            earlier.put_back()
            raise
        ended = LaunchOutcome(well=True, was_asked=True)
    finally:
        with suppress(OSError):
            folder.stop.unlink(missing_ok=True)
    status = read_status(folder)
    if ended and status.get("state") == DONE:
        if not shows_next:
            return
        is_tuned = (folder.model_files / "config.json").is_file()
        log.print(f"done; next: lengthwise report {shell_word(folder.path)}", markup=False, soft_wrap=True)
        if is_tuned:
            way_out = f"for transformers: lengthwise export {shell_word(folder.path)} --out DIR"
            log.print(way_out, markup=False, soft_wrap=True)
        return
    if ended.was_asked and not status:
        earlier.put_back()
        raise Preempted("asked to stop before the ranks had started; start it again")
    if ended.was_asked and ended.is_preempted and status.get("state") == RUNNING:  # before ranks could say so
        words = f"asked to stop before its first step. {way_on(folder)}"
        write_status(folder, PREEMPTED, exit_code=Preempted.exit_code, error=words)
        earlier.put_back()
        raise Preempted(words)
    error = error_of(folder, killed=ended.killed, failed=ended.failed)
    earlier.put_back()
    raise error


def _note_interrupted(folder: RunFolder) -> None:
    """Say in status.json and on stderr how a run ended that Ctrl-C stopped: saved, or killed by the second one."""
    status = read_status(folder)
    if status.get("exit_code") == Preempted.exit_code:
        state, words = PREEMPTED, status.get("error", "")
    elif not status or status.get("state") in OVER:  # the former: ranks have not met, and there is nothing to lose
        return
    else:
        state, words = CRASHED, f"ended at once by a second Ctrl-C, without saving. {way_on(folder)}"
    with suppress(OSError):
        write_status(folder, state, exit_code=INTERRUPTED, error=words)
    stderr().print(words, markup=False, soft_wrap=True)


def _by_time(config: Config) -> Path:
    return Path(config.output) / config.name / datetime.now().strftime("%Y%m%d-%H%M%S")
