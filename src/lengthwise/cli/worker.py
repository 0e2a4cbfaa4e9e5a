"""What each rank of `lengthwise train` does; torchrun starts it."""

import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from lengthwise.cli.advice import CheckpointAdvice, space_warning
from lengthwise.cli.claim import RanksClaim, check_seen_by_all
from lengthwise.cli.compiler_cache import set_aside_foreign
from lengthwise.cli.plan_checks import check_plans_fit, check_plans_of_run
from lengthwise.cli.rank_errors import is_first
from lengthwise.cli.restart import (
    DONE,
    RUNNING,
    STATUS,
    ResumePoint,
    end_with_parent,
    num_restarts,
    of_disk_in_words,
    reason_of,
    report_error,
    settings_of,
    write_status,
)
from lengthwise.cli.same_start import run_to_compare, settings_to_compare
from lengthwise.cli.step_log import StepLog
from lengthwise.config.run_config import Config
from lengthwise.core.atomic_write import make_folder
from lengthwise.core.batch import GlobalBatch
from lengthwise.core.errors import CommunicationError, LengthwiseError, Preempted
from lengthwise.core.lock import InUseError
from lengthwise.core.processes import num_cores
from lengthwise.core.run_folder import RunFolder
from lengthwise.core.specs import ClusterSpec, ModelSpec
from lengthwise.core.step_plan import StepPlan
from lengthwise.data.corpus import Corpus, open_corpus
from lengthwise.data.length_stats import histogram
from lengthwise.data.order import SHUFFLED
from lengthwise.data.run_ledger import RunLedger
from lengthwise.plan.plan_file import PlanFile
from lengthwise.plan.prefetch import PlanAhead
from lengthwise.runtime.train.stop import StopRequest
from lengthwise.session.compile_sizes import compiled_layers, sizes_of, tell_sizes
from lengthwise.session.console import stderr
from lengthwise.session.model_files import keep_model_files
from lengthwise.session.planning import (
    check_num_ranks,
    make_cost,
    make_planner,
    make_sampler,
    open_plans,
    resolve_cluster,
    resolve_model,
    with_draws,
    with_steps,
)
from lengthwise.session.provenance import add_start
from lengthwise.session.sample_prompts import text_sampling
from lengthwise.session.sampling_report import sampling_report, training_warnings
from lengthwise.session.validation_set import validation_corpus, validation_plans

if TYPE_CHECKING:
    from lengthwise.core.batch import BatchStream
    from lengthwise.runtime.comm.world import DistContext
    from lengthwise.runtime.train.step_metrics import StepCallback
    from lengthwise.runtime.train.validation import Validation


WORKERS_PER_CORE = 2
"""Planning processes that a machine runs."""


def run_worker(
    config: Config, folder: RunFolder, *, resume: bool, fall_back: bool = False, quiet: bool = False
) -> None:
    """Train as one rank, and say in status.json how it ended. Does not return after an error.

    Started again, or with the same settings in the same folder, it goes on from the newest checkpoint.
    """
    from lengthwise.runtime.comm.consensus import require_equal
    from lengthwise.runtime.comm.world import start_world, stop_world

    claim = RanksClaim(folder)
    end_with_parent()
    stop = StopRequest(folder.stop, end_start=partial(_end_start, folder, claim))
    try:
        if is_first():
            make_folder(folder.path, setting="run_folder")
            claim.take(is_restarted=num_restarts() > 0)
            (folder.path / STATUS).unlink(missing_ok=True)  # of an earlier attempt
            if config.train.compile and (aside := set_aside_foreign(folder.compiler)):
                stderr().print(
                    f"warning: compiled code that this user did not make is not used: {aside}", soft_wrap=True
                )
        config = settings_of(config, folder, resume=resume)
        world = start_world(config.train.device, timeout_s=config.train.timeout_s)
        require_equal(world, settings_to_compare(config, resume=resume, fall_back=fall_back))
        check_seen_by_all(folder, world)
        if world.is_first:
            write_status(folder, RUNNING)
        _train(config, world, ResumePoint(folder=folder, resume=resume, fall_back=fall_back), stop, quiet=quiet)
        if world.is_first:
            write_status(folder, DONE, exit_code=0)
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


def _end_start(folder: RunFolder, claim: RanksClaim) -> NoReturn:
    """End a rank that is asked to stop while it starts; there is nothing to save."""
    if is_first() and not claim.is_taken:
        os._exit(Preempted.exit_code)  # the folder may be another run's
    has_checkpoints = folder.checkpoints.is_dir() and any(folder.checkpoints.iterdir())
    way = f"lengthwise train --resume {folder.path}" if has_checkpoints else "the same command"
    report_error(
        folder, Preempted(f"asked to stop before the first step, which left everything as it was. Go on with: {way}")
    )
    claim.release()
    os._exit(Preempted.exit_code)


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


def _train(config: Config, world: "DistContext", start: ResumePoint, stop: StopRequest, *, quiet: bool) -> None:
    from lengthwise.runtime.comm.activity import ACTIVITY
    from lengthwise.runtime.comm.consensus import require_equal
    from lengthwise.runtime.train.trainer import TrainingLoop
    from lengthwise.session.run_model import build

    corpus = open_corpus(config.data)
    corpus.check_tokens()
    saved, config = config, with_steps(config, make_sampler(config, corpus))
    spec = resolve_model(config, corpus)
    validation = validation_corpus(config, spec)
    cluster = find_cluster(config, world)
    is_gpu = world.device.type == "cuda"
    ACTIVITY.begin("building the model")
    model = build(config, spec, world)
    require_equal(world, run_to_compare(config, corpus, spec=spec, cluster=cluster, model=model, validation=validation))
    stream, planner, sizes = _plans(config, corpus, spec, cluster, world, quiet=quiet)
    try:
        callbacks = _callbacks(config, start.folder, quiet=quiet) if world.is_first else []
        on_size = next((callback.on_compiled for callback in callbacks if isinstance(callback, StepLog)), None)
        trainer = TrainingLoop(
            config=config,
            spec=spec,
            model=model,
            source=corpus,
            stream=stream,
            planner=planner,
            folder=start.folder,
            stop=stop,
            world=world,
            peak_flops_per_s=cluster.device.flops_per_s if is_gpu else None,
            callbacks=callbacks,
            validation=_validation(config, validation, spec=spec, cluster=cluster),
            samples=text_sampling(config, corpus, spec),
            compiled=compiled_layers(sizes, world, start.folder, on_size),
            peek=planner.peek if isinstance(planner, PlanAhead) else None,
            ledger=RunLedger(corpus, partial(make_sampler, config, corpus), seed=config.seed),
        )
        ACTIVITY.begin("reading a checkpoint")
        start.restore(trainer, world)
        require_equal(world, {"start": {"step": trainer.next_step, "sampler": stream.state_dict()}})
        if isinstance(planner, PlanFile):
            check_plans_fit(planner, config, spec, cluster)
            check_plans_of_run(config, planner, corpus, first_step=trainer.next_step)
        if world.is_first:
            num_bytes = trainer.checkpoint_bytes
            if warning := space_warning(start.folder, num_bytes=num_bytes, keep=config.train.keep_checkpoints):
                stderr().print(warning, soft_wrap=True)
            _describe(start.folder, saved, corpus, spec, cluster)  # not before: a refused run leaves a folder as it was
        trainer.fit()
    finally:
        if isinstance(planner, PlanAhead):
            planner.close()


def _plans(
    config: Config, corpus: Corpus, spec: ModelSpec, cluster: ClusterSpec, world: "DistContext", *, quiet: bool
) -> "tuple[BatchStream, Callable[[GlobalBatch], StepPlan], tuple[int, ...]]":
    """The stream of batches, what plans them (the file of plans, or the policy, ahead of training), and for which sizes
    layers are compiled.
    """
    sampler = make_sampler(config, corpus)
    if config.plan.file:
        plans = open_plans(config)
        return sampler, plans, sizes_of(config, plans)
    planner = make_planner(config, make_cost(config, spec, cluster), spec=spec, cluster=cluster, corpus=corpus)
    if world.is_first and not quiet:
        tell_sizes(planner)
    workers = int(world.device.type == "cuda") if config.plan.workers is None else _workers(config, world)
    ahead = PlanAhead(
        sampler,
        with_draws(config, planner),
        fallback=with_draws(config, replace(planner, policy="static")),
        workers=workers,
        depth=config.plan.look_ahead,
        patience_s=world.timeout_s / 2,  # so that this rank can still plan before others give it up
        warn=world.is_first,
    )
    return ahead, ahead, sizes_of(config, planner)


def _validation(config: Config, corpus: Corpus | None, *, spec: ModelSpec, cluster: ClusterSpec) -> "Validation | None":
    from lengthwise.runtime.train.validation import Validation

    if corpus is None:
        return None
    plans = validation_plans(config, corpus, spec=spec, cluster=cluster)
    return Validation(plans=plans, source=corpus, every=config.train.validate_every, patience=config.train.patience)


def _workers(config: Config, world: "DistContext") -> int:
    """``plan.workers``, but no more than ``WORKERS_PER_CORE`` for each core over all ranks of this machine."""
    from lengthwise.runtime.comm.devices import local_size

    asked = config.plan.workers or 0
    max_workers = max(1, WORKERS_PER_CORE * num_cores() // local_size())
    if asked > max_workers and world.is_first:
        sys.stderr.write(
            f"warning: plan.workers={asked} for each of {local_size()} ranks is more than the {num_cores()} cores of "
            f"this machine can run; {max_workers} for each are used, and make the same plans\n"
        )
    return min(asked, max_workers)


def find_cluster(config: Config, world: "DistContext") -> ClusterSpec:
    """The named cluster, which must have as many devices as there are ranks, or the devices the ranks run on."""
    from lengthwise.runtime.comm.devices import find_device, local_size, with_memory_of_gpu

    if config.cluster.name:
        check_num_ranks(config, world.size)
        cluster = resolve_cluster(config)
        if config.cluster.memory_gib is not None:
            return cluster
        return replace(cluster, device=with_memory_of_gpu(cluster.device, world, margin=config.plan.memory_margin))
    local = local_size()
    device = find_device(world, margin=config.plan.memory_margin)
    if config.cluster.memory_gib:
        device = device.with_memory(config.cluster.memory_gib)
    return ClusterSpec(num_nodes=world.size // local, devices_per_node=local, device=device)


def _describe(folder: RunFolder, config: Config, corpus: Corpus, spec: ModelSpec, cluster: ClusterSpec) -> None:
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
    folder.write_json("model.json", {**asdict(spec), "num_params": spec.num_params, "digest": spec.digest})
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
                for bin in histogram(corpus.lengths.lengths, edges=_octaves(corpus.lengths.max_length))
                if bin.num_sequences
            ],
            "cluster": cluster.name,
        },
    )


def _octaves(longest: int) -> tuple[int, ...]:
    return tuple(2**power for power in range(longest.bit_length()))


def _callbacks(config: Config, folder: RunFolder, *, quiet: bool) -> list["StepCallback"]:
    from lengthwise.runtime.train.trackers import TensorBoard, WeightsAndBiases

    train = config.train
    callbacks: list[StepCallback] = []
    if not quiet:
        has_profile = bool(config.plan.profile or config.plan.file)
        callbacks.append(StepLog(num_steps=train.num_steps, log_every=train.log_every, has_profile=has_profile))
    callbacks.append(CheckpointAdvice(train, lambda words: stderr().print(words, soft_wrap=True)))
    if train.tensorboard:
        callbacks.append(TensorBoard(folder.tensorboard))
    if train.wandb:
        callbacks.append(WeightsAndBiases(folder.path, config))
    return callbacks
