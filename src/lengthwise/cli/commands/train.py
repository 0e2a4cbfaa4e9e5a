"""`lengthwise train`: torchrun on one machine; under torchrun, one rank."""

import os
import sys
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lengthwise.cli.claim import check_unused, claimed, claimed_with_free_name
from lengthwise.cli.ending import ask_to_stop, error_of, way_on
from lengthwise.cli.launch import RUN_FOLDER_VARIABLE, check_nproc, is_rank, split_arguments, torchrun
from lengthwise.cli.restart import CRASHED, OVER, PREEMPTED, read_status, write_status
from lengthwise.core.errors import INTERRUPTED, InputError, Preempted
from lengthwise.core.run_folder import RunFolder
from lengthwise.runtime.state.checkpoint_files import latest
from lengthwise.session.console import emit_json, stderr

if TYPE_CHECKING:
    from lengthwise.config.run_config import Config


def run(
    config: Annotated[Path | None, typer.Argument(help="YAML; print one with: lengthwise config")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value ...")] = None,
    nproc: Annotated[int, typer.Option(min=1, max=1024, help="ranks on this machine")] = 1,
    method: Annotated[
        str | None, typer.Option("--method", "--methods", help="how ranks share a layer, or random; plan.method")
    ] = None,
    degree: Annotated[int | None, typer.Option(min=1, help="ranks that share a layer; plan.degree")] = None,
    plan: Annotated[
        Path | None, typer.Option(help="plans to execute, made by `lengthwise plan --out` or by hand; plan.file")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="a run folder: go on from its latest checkpoint")] = None,
    fall_back: Annotated[
        bool, typer.Option("--fall-back", help="where the latest checkpoint is damaged, go on from the one before")
    ] = False,
    max_restarts: Annotated[
        int, typer.Option(min=0, max=1_000_000, help="times that all ranks are started again after one has died")
    ] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", help="only warnings, errors and the last line")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON document on stdout")] = False,
) -> None:
    """Train. For several machines use torchrun itself: torchrun ARGS -m lengthwise train CONFIG [OVERRIDES]."""
    from lengthwise.config.run_config import load

    path, changes = split_arguments(config, overrides)
    options = (("method", method), ("degree", degree), ("file", plan))
    changes += [f"plan.{name}={value}" for name, value in options if value is not None]
    if resume is not None:
        if path is not None:
            raise InputError(f"--resume goes on with {resume}/config.yaml; give overrides, not another config ({path})")
        RunFolder(resume).check()
        path = resume / "config.yaml"
    resolved = load(path, changes)
    if is_rank():
        _train_as_rank(resolved, resume, fall_back=fall_back, quiet=quiet)
        return
    check_nproc(nproc)
    folder = RunFolder(resume or Path(resolved.run_folder)) if resume or resolved.run_folder else None
    if folder is not None and resume is None:
        folder.check_new()
    elif folder is not None:
        check_unused(folder)
        folder.check_records()
        if not fall_back:
            latest(folder.checkpoints)
    _check(resolved, nproc=nproc, is_resumed=resume is not None)
    arguments = ["--resume", str(resume), *changes] if resume else [*([str(path)] if path else []), *changes]
    arguments += [*(["--fall-back"] if fall_back else []), *(["--quiet"] if quiet else [])]
    with claimed(folder, is_new=resume is None) if folder else claimed_with_free_name(_by_time(resolved)) as run_folder:
        launch(run_folder, arguments, nproc=nproc, max_restarts=max_restarts)
    if as_json:
        emit_json({"run_folder": str(run_folder.path), "status": run_folder.read_json("status.json")})


def _check(config: "Config", *, nproc: int, is_resumed: bool) -> None:
    """Refuse here, before ranks are started and a folder is made, what can be without them."""
    from lengthwise.cli.plan_checks import check_plans_of_run
    from lengthwise.cli.verify import verify_corpus
    from lengthwise.data.corpus import open_corpus
    from lengthwise.session.planning import check_num_ranks, make_sampler, open_plans, open_profile, resolve_model

    corpus = open_corpus(config.data)
    corpus.check_tokens()
    make_sampler(config, corpus)
    resolve_model(config, corpus)
    check_num_ranks(config, nproc)
    if config.plan.profile:
        open_profile(config)
    verify_corpus(config, corpus)
    if config.plan.file:
        plans = open_plans(config, show_progress=True)
        if not is_resumed:
            check_plans_of_run(config, plans, corpus)


def _train_as_rank(config: "Config", resume: Path | None, *, fall_back: bool, quiet: bool) -> None:
    from lengthwise.cli.restart import earlier_end

    named = os.environ.get(RUN_FOLDER_VARIABLE) or str(resume or config.run_folder)
    if not named:
        raise InputError("under torchrun set run_folder=DIR, so that all ranks write to the same place")
    folder = RunFolder(Path(named))
    if (exit_code := earlier_end(folder)) is not None:
        sys.exit(exit_code)  # what failed for good is not tried again
    from lengthwise.cli.verify import verify_as_rank
    from lengthwise.cli.worker import run_worker

    verify_as_rank(config)
    run_worker(config, folder, resume=resume is not None, fall_back=fall_back, quiet=quiet)


def launch(folder: RunFolder, arguments: list[str], *, nproc: int, max_restarts: int = 0) -> None:
    """Train into ``folder`` with ``nproc`` ranks, started again up to ``max_restarts`` times after one has died.

    Raises:
        LengthwiseError: with the message and exit code of the rank that failed; 75 if SIGTERM stopped it and it saved.
        KeyboardInterrupt: SIGINT stopped it.
    """
    log = stderr()
    folder.path.mkdir(parents=True, exist_ok=True)
    for stale in (folder.path / "status.json", folder.stop):
        stale.unlink(missing_ok=True)
    if "--quiet" not in arguments:
        log.print(f"run folder: {folder.path}", soft_wrap=True)

    def on_stop() -> None:
        log.print(ask_to_stop(folder), soft_wrap=True)

    try:
        variables = {RUN_FOLDER_VARIABLE: str(folder.path)}
        ended = torchrun(
            ["train", *arguments], nproc=nproc, variables=variables, on_stop=on_stop, max_restarts=max_restarts
        )
    except KeyboardInterrupt:
        _note_interrupted(folder)
        raise
    finally:
        with suppress(OSError):
            folder.stop.unlink(missing_ok=True)
    status = read_status(folder)
    if ended and status.get("state") == "done":
        log.print(f"done; next: lengthwise report {folder.path}", soft_wrap=True)
        return
    if ended.was_asked and not status:
        raise Preempted("asked to stop before the ranks had started; start it again")
    raise error_of(folder, ended.killed)


def _note_interrupted(folder: RunFolder) -> None:
    """Say in status.json and on stderr how a run ended that Ctrl-C stopped: saved, or killed by the second one."""
    status = read_status(folder)
    if status.get("exit_code") == Preempted.exit_code:
        state, words = PREEMPTED, status.get("error", "")
    elif status.get("state") in OVER:
        return
    else:
        state, words = CRASHED, f"ended at once by a second Ctrl-C, without saving. {way_on(folder)}"
    with suppress(OSError):
        write_status(folder, state, exit_code=INTERRUPTED, error=words)
    stderr().print(words, markup=False, soft_wrap=True)


def _by_time(config: "Config") -> Path:
    return Path(config.output) / config.name / datetime.now().strftime("%Y%m%d-%H%M%S")
