"""What each rank of `lengthwise train` does; torchrun starts it."""

import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from lengthwise.cli.advice import CheckpointAdvice, space_warning
from lengthwise.cli.claim import RanksClaim, check_seen_by_all
from lengthwise.cli.compiler_cache import set_aside_foreign
from lengthwise.cli.launch import LAUNCHER_VARIABLE
from lengthwise.cli.plan_checks import check_plans_fit, check_plans_of_run
from lengthwise.cli.rank_errors import is_first
from lengthwise.cli.restart import (
    DONE,
    RUNNING,
    ResumePoint,
    early_stop,
    end_with_parent,
    note_begun,
    num_restarts,
    of_disk_in_words,
    read_status,
    reason_of,
    report_error,
    settings_of,
    write_status,
)
from lengthwise.cli.same_start import run_to_compare, settings_to_compare
from lengthwise.cli.signals import STOPPED_BY_TORCHRUN
from lengthwise.cli.step_log import StepLog
from lengthwise.config.run_config import Config
from lengthwise.core.atomic_write import make_folder, shell_word
from lengthwise.core.errors import CommunicationError, LengthwiseError, Preempted
from lengthwise.core.lock import InUseError
from lengthwise.core.run_folder import STATUS, RunFolder
from lengthwise.core.specs import ClusterSpec, ModelSpec
from lengthwise.data.corpus import Corpus, open_corpus
from lengthwise.data.length_stats import histogram
from lengthwise.data.order import SHUFFLED
from lengthwise.data.run_ledger import RunLedger
from lengthwise.plan.plan_file import PlanFile
from lengthwise.runtime.train.stop import StopCause, StopRequest
from lengthwise.session.console import stderr
from lengthwise.session.model_files import keep_model_files
from lengthwise.session.planning import (
    check_num_ranks,
    make_sampler,
    resolve_cluster,
    with_steps,
)
from lengthwise.session.provenance import add_start
from lengthwise.session.sample_prompts import text_sampling
from lengthwise.session.sampling_report import sampling_report, training_warnings
from lengthwise.session.trained_model import trained_model
from lengthwise.session.validation_set import validation_corpus

if TYPE_CHECKING:
    from lengthwise.runtime.comm.world import DistContext
    from lengthwise.runtime.train.step_metrics import StepCallback
    from lengthwise.runtime.train.trainer import TrainingLoop

ASKED_WITHIN_S = 1.0
"""How much sooner than the launcher a rank may get the signal that asks both to stop."""


def run_worker(
    config: Config, folder: RunFolder, *, resume: bool, fall_back: bool = False, quiet: bool = False
) -> None:
    """Train as one rank, and say in status.json how it ended. Does not return after an error.

    Started again, or with the same settings in the same folder, it goes on from the newest checkpoint.
    """
    from lengthwise.runtime.comm.consensus import require_equal
    from lengthwise.runtime.comm.world import start_world, stop_world

    claim, last_error = RanksClaim(folder), ""
    stop = StopRequest(
        folder.stop,
        end_start=partial(_end_start, folder, claim),
        on_begin=partial(note_begun, folder),
        on_end=partial(note_begun, folder, has_trained=True),
    )
    stop.heed_launcher(end_with_parent(stop.look))
    try:
        if is_first():
            make_folder(folder.path, setting="run_folder")
            claim.take(is_restarted=num_restarts() > 0)
            last_error = str(read_status(folder).get("error", "")) if num_restarts() else ""
            (folder.path / STATUS).unlink(missing_ok=True)  # of an earlier attempt
            if config.train.compile and (aside := set_aside_foreign(folder.compiler)):
                stderr().print(
                    f"warning: compiled code that this user did not make is not used: {aside}", soft_wrap=True
                )
        config = settings_of(config, folder, resume=resume)
        world = start_world(config.train.device, timeout_s=config.train.timeout_s)
        require_equal(world, settings_to_compare(config, resume=resume, fall_back=fall_back))
        check_seen_by_all(folder, world)
        claim.share(world)
        if world.is_first:
            write_status(folder, RUNNING)
        start = ResumePoint(folder=folder, resume=resume, fall_back=fall_back, last_error=last_error)
        stopped_early = early_stop(_train(config, world, start, stop, check_folder=claim.check, quiet=quiet))
        if world.is_first:
            _say("" if quiet else stopped_early)
            write_status(folder, DONE, exit_code=0, stopped_early=stopped_early)
        stop_world(world)
        claim.release()
    except InUseError as error:
        sys.stderr.write(f"error: {error}\n")  # its files, and so status.json, are another run's
        sys.stderr.flush()
        os._exit(error.exit_code)
    except SystemExit as leave:
        _end(folder, claim, LengthwiseError(f"a rank left with sys.exit({leave.code}) before the run was done"))
    except Exception as error:
        _end(folder, claim, error)
    finally:
        stop.close()


def _end_start(folder: RunFolder, claim: RanksClaim, cause: StopCause) -> NoReturn:
    """End a rank that is to stop while it starts; there is nothing to save.

    The launcher passes a request on by the file alone. Under it, a signal without one is torchrun's, which ends all
    ranks where one is gone: the launcher names that one, or starts all of them again.
    """
    if cause is StopCause.SIGNAL and LAUNCHER_VARIABLE in os.environ:
        if not _is_stop_asked(folder):
            claim.release()
            os._exit(LengthwiseError.exit_code)
        cause = StopCause.FILE
    if is_first() and not claim.is_taken:
        os._exit(Preempted.exit_code)  # the folder may be another run's
    has_checkpoints = folder.checkpoints.is_dir() and any(folder.checkpoints.iterdir())
    way = f"lengthwise train --resume {shell_word(folder.path)}" if has_checkpoints else "the same command"
    before = f"before the first step, which left everything as it was. Go on with: {way}"
    error: LengthwiseError = Preempted(f"asked to stop {before}")
    if cause is StopCause.SIGNAL:
        error = Preempted(f"{STOPPED_BY_TORCHRUN} {before}", by_signal=True)
    if cause is StopCause.LAUNCHER_GONE:
        error = CommunicationError(f"the process that started this rank is gone {before}")
    report_error(folder, error)
    claim.release()
    os._exit(error.exit_code)


def _is_stop_asked(folder: RunFolder) -> bool:
    """Whether the launcher was asked to stop the run; a scheduler may signal ranks a moment before it."""
    end_s = time.monotonic() + ASKED_WITHIN_S
    while not folder.stop.exists():
        if time.monotonic() > end_s:
            return False
        time.sleep(ASKED_WITHIN_S / 20)
    return True


def _end(folder: RunFolder, claim: RanksClaim, error: Exception) -> NoReturn:
    """Say to other ranks and to the user why this rank ends, and end it.

    At once: peers may be in a collective this rank will never join, and threads that write a checkpoint may wait for
    ranks that are gone.
    """
    from lengthwise.runtime.comm.activity import ACTIVITY, explained, is_lost

    if is_lost(error):
        error = explained("a collective of torch", error)
    error = of_disk_in_words(error, folder)
    if ACTIVITY.peers is not None and not isinstance(error, CommunicationError):
        ACTIVITY.peers.say_failed(reason_of(error))
    if report_error(folder, error) and not isinstance(error, LengthwiseError):
        traceback.print_exception(error)
        sys.stderr.flush()
    claim.release()
    os._exit(error.exit_code if isinstance(error, LengthwiseError) else LengthwiseError.exit_code)


def _train(
    config: Config, world: "DistContext", start: ResumePoint, stop: StopRequest, *, check_folder: Callable[[], None],
    quiet: bool,
) -> "TrainingLoop":  # fmt: skip
    from lengthwise.runtime.comm.activity import ACTIVITY
    from lengthwise.runtime.comm.consensus import require_equal
    from lengthwise.runtime.train.trainer import TrainingLoop
    from lengthwise.session.make_parts import make_parts
    from lengthwise.session.run_parts import RunInputs, model_document

    corpus = open_corpus(config.data)
    corpus.check_tokens()
    saved, config = config, with_steps(config, make_sampler(config, corpus))
    spec = trained_model(config, corpus)
    validation = validation_corpus(config, spec)
    cluster = find_cluster(config, world)
    callbacks: list[StepCallback] = []
    inputs = RunInputs(
        config=config, corpus=corpus, validation=validation, cluster=cluster, world=world, folder=start.folder,
        quiet=quiet, on_size=partial(_show_compiled, callbacks),
    )  # fmt: skip
    compare = partial(run_to_compare, config, corpus, spec=spec, cluster=cluster, validation=validation)
    parts = make_parts(inputs, spec, on_built=lambda model: require_equal(world, compare(model=model)))
    try:
        if world.is_first:
            callbacks += _callbacks(config, is_measured=parts.is_measured, quiet=quiet)
        trainer = TrainingLoop(
            config=config,
            engine=parts.engine,
            spec=parts.spec,
            stream=parts.stream,
            planner=parts.planner,
            folder=start.folder,
            check_folder=check_folder,
            stop=stop,
            world=world,
            peak_flops_per_s=cluster.device.flops_per_s if world.device.type == "cuda" else None,
            callbacks=callbacks,
            on_validation=next((log.on_validation for log in callbacks if isinstance(log, StepLog)), None),
            validation=parts.validation,
            samples=text_sampling(config, corpus, spec),
            peek=parts.peek,
            ledger=RunLedger(corpus, partial(make_sampler, config, corpus), seed=config.seed),
        )
        ACTIVITY.begin("reading a checkpoint")
        start.restore(trainer, world)
        require_equal(world, {"start": {"step": trainer.next_step, "sampler": parts.stream.state_dict()}})
        if isinstance(parts.planner, PlanFile):
            if isinstance(spec, ModelSpec):
                check_plans_fit(parts.planner, config, spec, cluster)
            check_plans_of_run(config, parts.planner, corpus, first_step=trainer.next_step)
        if world.is_first and not trainer.is_complete:  # which leaves the folder as it was, as one that is refused does
            callbacks += _trackers(config, start.folder)
            _say(space_warning(trainer))
            _describe(start.folder, saved, corpus, model_document(spec, parts), cluster)
        trainer.fit()
        return trainer
    finally:
        parts.close()


def _say(words: str | None) -> None:
    if words:
        stderr().print(words, soft_wrap=True)


def _show_compiled(callbacks: "list[StepCallback]", done: int, total: int) -> None:
    for callback in callbacks:
        if isinstance(callback, StepLog):
            callback.on_compiled(done, total)


def find_cluster(config: Config, world: "DistContext") -> ClusterSpec:
    """The named cluster, which must have as many devices as there are ranks, or the devices the ranks run on."""
    from lengthwise.runtime.comm.devices import find_device, with_memory_of_gpu

    if config.cluster.name:
        check_num_ranks(config, world.size)
        cluster = resolve_cluster(config)
        if config.cluster.memory_gib is not None:
            return cluster
        return replace(cluster, device=with_memory_of_gpu(cluster.device, world, margin=config.plan.memory_margin))
    device = find_device(world, margin=config.plan.memory_margin)
    if config.cluster.memory_gib:
        device = device.with_memory(config.cluster.memory_gib)
    if config.cluster.host_memory_gib is not None:
        device = device.with_host_memory(config.cluster.host_memory_gib)
    return world.cluster_of(device)


def _describe(folder: RunFolder, config: Config, corpus: Corpus, model: dict[str, Any], cluster: ClusterSpec) -> None:
    config.save(folder.config)  # before anything else that a run leaves: ranks started again read it
    add_start(folder, cluster)
    if config.data.order != SHUFFLED:
        sampling = sampling_report(config, corpus)
        folder.write_json("sampling.json", sampling.to_json())
        for warning in sampling.warnings:
            stderr().print(f"sampling: {warning}", soft_wrap=True)
    for words in training_warnings(config, corpus):
        stderr().print(f"warning: {words}", soft_wrap=True)
    for name in keep_model_files(folder, config.model.hf, corpus.parts[0].store):
        stderr().print(f"warning: {config.model.hf}/{name} is too large to be exported with the model", soft_wrap=True)
    folder.write_json("model.json", model)
    folder.write_json(
        "corpus.json",
        {
            "indexes": {part.name: str(part.store.path) for part in corpus.parts},
            "repeats": {part.name: float(part.repeat) for part in corpus.parts},
            "digest": corpus.digest,
            "num_sequences": len(corpus.lengths),
            "num_tokens": corpus.lengths.num_tokens,
            "max_length": corpus.lengths.max_length,
            "eos_id": corpus.eos_id,
            "histogram": [
                asdict(bin)
                for bin in histogram(
                    corpus.epoch_lengths(config.seed).lengths, edges=_octaves(corpus.lengths.max_length)
                )
                if bin.num_sequences
            ],
            "cluster": cluster.name,
        },
    )


def _octaves(longest: int) -> tuple[int, ...]:
    return tuple(2**power for power in range(longest.bit_length()))


def _warn(words: str) -> None:
    stderr().print(words, soft_wrap=True)


def _callbacks(config: Config, *, is_measured: bool, quiet: bool) -> list["StepCallback"]:
    """What is told of every step on the terminal."""
    train, log = config.train, list["StepCallback"]()
    if not quiet:
        log.append(StepLog(num_steps=train.num_steps, log_every=train.log_every, has_profile=is_measured))
    return [*log, CheckpointAdvice(train, _warn)]


def _trackers(config: Config, folder: RunFolder) -> list["StepCallback"]:
    """The experiment trackers that are asked for; each begins a session."""
    from lengthwise.runtime.train import trackers

    chosen = list["StepCallback"]()
    begins: dict[str, Callable[[], StepCallback]] = {
        "tensorboard": partial(trackers.TensorBoard, folder.tensorboard),
        "wandb": partial(trackers.WeightsAndBiases, folder.path, config),
        "trackio": partial(trackers.Trackio, folder.path, config),
        "mlflow": partial(trackers.MLflow, folder.path, config),
    }
    is_new = num_restarts() == 0  # else the tracker began before, and a run that has come so far goes on without it
    for name, begin in begins.items():
        if getattr(config.train, name):
            chosen.append(trackers.LastingTracker(f"train.{name}", begin, warn=_warn, must_begin=is_new))
    return chosen
