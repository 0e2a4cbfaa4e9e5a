"""What each rank of `lengthwise train` does; torchrun starts it."""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lengthwise.cli.assemble import (
    RANDOM,
    make_cost,
    make_planner,
    make_sampler,
    resolve_cluster,
    resolve_model,
    shard_degree,
)
from lengthwise.cli.launch import RUN_FOLDER_VARIABLE
from lengthwise.config import Config
from lengthwise.core.errors import InputError, LengthwiseError, Preempted
from lengthwise.core.run_folder import RunFolder
from lengthwise.core.scheme import Method
from lengthwise.core.specs import DEVICES, GIB, ClusterSpec, DeviceSpec, ModelSpec, nearest
from lengthwise.data.corpus import Corpus, open_corpus
from lengthwise.data.stats import histogram
from lengthwise.plan.ahead import PlanAhead
from lengthwise.plan.planner import Planner
from lengthwise.plan.random_methods import RandomMethods

if TYPE_CHECKING:
    from lengthwise.runtime.comm.world import World
    from lengthwise.runtime.model.base import Transformer
    from lengthwise.runtime.train.metrics import Callback, Row


def run_worker(config: Config, folder: RunFolder, *, resume: bool) -> None:
    """Train as one rank, and say in status.json how it ended. Does not return after an error of the user's."""
    from lengthwise.runtime.comm.world import start_world, stop_world

    folder.path.mkdir(parents=True, exist_ok=True)
    if _is_first():
        (folder.path / "status.json").unlink(missing_ok=True)  # of an earlier attempt
    try:
        if _is_first() and not resume:
            folder.check_new()
        world = start_world(config.train.device)
        _train(config, folder, world, resume=resume)
        if world.is_first:
            folder.write_json("status.json", {"state": "done", "exit_code": 0, "error": ""})
        stop_world()
    except LengthwiseError as error:
        _tell(folder, str(error), error.exit_code)
        os._exit(error.exit_code)  # peers may be in a collective this rank will never join
    except Exception as error:
        if _tell(folder, f"{type(error).__name__}: {error}", 1):
            raise
        os._exit(1)  # a rank that failed before has told why; that a collective broke here only follows from it


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _tell(folder: RunFolder, error: str, exit_code: int) -> bool:
    """Record why the run ends and return True, unless another rank has: errors of all ranks are told once."""
    if not _is_first():
        time.sleep(1.0)  # what all ranks meet at once, the first tells
    if folder.read_json("status.json").get("state") in ("failed", "preempted"):
        return False
    state = "preempted" if exit_code == Preempted.exit_code else "failed"
    folder.write_json("status.json", {"state": state, "exit_code": exit_code, "error": error})
    if RUN_FOLDER_VARIABLE not in os.environ:  # else the process that started the ranks reads the file and tells
        sys.stderr.write(f"error: {error}\n")
        sys.stderr.flush()
    return True


def _train(config: Config, folder: RunFolder, world: "World", *, resume: bool) -> None:
    from lengthwise.runtime.state import checkpoint
    from lengthwise.runtime.train.trainer import Trainer

    corpus = open_corpus(config.data)
    if not corpus.store.has_tokens:
        raise InputError(f"{config.data.index} holds lengths alone; training needs an index with tokens")
    spec = resolve_model(config, corpus)
    cluster = find_cluster(config, world)
    planner = make_planner(
        config,
        make_cost(config, spec, cluster),
        spec=spec,
        cluster=cluster,
        lengths=corpus.lengths,
        methods=(Method.ULYSSES, Method.RING),  # weights stay whole, whatever a plan does
    )
    is_random = config.plan.method == RANDOM and (config.plan.degree or 1) > 1
    finish = partial(RandomMethods, seed=config.seed) if is_random else _as_it_is
    if world.is_first:
        _describe(folder, config, corpus, spec, cluster)
    is_gpu = world.device.type == "cuda"
    workers = int(is_gpu) if config.plan.workers is None else config.plan.workers
    ahead = PlanAhead(
        make_sampler(config, corpus.lengths),
        finish(planner=planner),
        fallback=finish(planner=replace(planner, policy="static")),
        workers=workers,
        depth=config.plan.look_ahead,
        warn=world.is_first,
    )
    trainer = Trainer(
        config=config,
        spec=spec,
        model=build(config, spec, world),
        source=corpus,
        stream=ahead,
        planner=ahead,
        folder=folder,
        world=world,
        shard_degree=shard_degree(config),
        peak_flops_per_s=cluster.device.flops_per_s if is_gpu else None,
        callbacks=_callbacks(config, folder, cluster) if world.is_first else (),
    )
    try:
        if resume:
            trainer.resume(checkpoint.latest(folder.checkpoints))
        trainer.fit()
    finally:
        ahead.close()


def _as_it_is(planner: Planner) -> Planner:
    return planner


def build(config: Config, spec: ModelSpec, world: "World") -> "Transformer":
    """The model with its first weights: from ``model.hf``, or drawn from the seed."""
    import torch

    from lengthwise.runtime.model.build import build_model
    from lengthwise.runtime.model.hf import load_weights

    model = build_model(spec, dtype=getattr(torch, config.train.dtype), device=world.device, seed=config.seed)
    if config.model.hf:
        load_weights(model, Path(config.model.hf))
    return model


def find_cluster(config: Config, world: "World") -> ClusterSpec:
    """The named cluster, which must have as many devices as there are ranks, or the devices the ranks run on."""
    if config.cluster.name:
        cluster = resolve_cluster(config)
        if cluster.num_devices != world.size:
            raise InputError(
                f"cluster.name={config.cluster.name} has {cluster.num_devices} devices, the run has {world.size} ranks"
            )
        return cluster
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = _found_device(world, local)
    if config.cluster.memory_gib:
        device = replace(device, memory_bytes=int(config.cluster.memory_gib * GIB))
    return ClusterSpec(num_nodes=world.size // local, devices_per_node=local, device=device)


def _found_device(world: "World", local_ranks: int) -> DeviceSpec:
    import torch

    if world.device.type == "cpu":
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return replace(DEVICES["cpu"], memory_bytes=int(0.8 * total / local_ranks))
    found = torch.cuda.get_device_name(world.device)
    memory = torch.cuda.get_device_properties(world.device).total_memory
    known = [spec for spec in DEVICES.values() if spec.name.split("-")[0] in found]
    if not known:
        raise InputError(f"no speeds known for GPU {found!r}; set cluster.name ({nearest(found, DEVICES)})")
    return replace(known[0], memory_bytes=int(0.92 * memory))  # the context and fragmentation take the rest


def _describe(folder: RunFolder, config: Config, corpus: Corpus, spec: ModelSpec, cluster: ClusterSpec) -> None:
    config.save(folder.config)
    folder.write_json("ledger.json", corpus.ledger.to_json())
    folder.write_json("model.json", {**asdict(spec), "num_params": spec.num_params, "digest": spec.digest})
    folder.write_json(
        "corpus.json",
        {
            "index": config.data.index,
            "digest": corpus.digest,
            "num_sequences": len(corpus.lengths),
            "num_tokens": corpus.lengths.num_tokens,
            "max_length": corpus.lengths.max_length,
            "eos_id": corpus.store.eos_id,
            "histogram": [
                asdict(bin)
                for bin in histogram(corpus.lengths.lengths, edges=_octaves(corpus.lengths.max_length))
                if bin.num_sequences
            ],
            "cluster": cluster.name,
        },
    )
    folder.write_json("status.json", {"state": "running", "exit_code": None, "error": ""})


def _octaves(longest: int) -> tuple[int, ...]:
    return tuple(2**power for power in range(longest.bit_length()))


def _callbacks(config: Config, folder: RunFolder, cluster: ClusterSpec) -> list["Callback"]:
    from lengthwise.runtime.train.metrics import TensorBoard, log_line

    device_gib = cluster.device.memory_bytes / GIB
    callbacks: list[Callback] = [
        ConsoleLog(config, lambda row: log_line(row, num_steps=config.train.steps, device_gib=device_gib))
    ]
    if config.train.tensorboard:
        callbacks.append(TensorBoard(folder.tensorboard))
    return callbacks


class ConsoleLog:
    """The log line of every ``train.log_every`` steps on stderr, above a progress bar on a terminal."""

    def __init__(self, config: Config, line: Callable[["Row"], str]) -> None:
        from lengthwise.cli.console import progress

        self._every = config.train.log_every
        self._line = line
        self._progress = progress()
        self._task = self._progress.add_task("train", total=config.train.steps)
        self._progress.start()

    def on_step(self, row: "Row") -> None:
        """Print the step and move the bar."""
        self._progress.update(self._task, completed=row["step"] + 1)
        if (row["step"] + 1) % self._every == 0:
            self._progress.console.print(self._line(row), soft_wrap=True)

    def close(self) -> None:
        """Take the bar away."""
        self._progress.stop()
