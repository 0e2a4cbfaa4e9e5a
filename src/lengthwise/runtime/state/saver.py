"""Writes the checkpoints of a run while training goes on.

The step loop waits only while this rank's share is copied to host memory. A thread of each rank then writes it, one
checkpoint at a time. The threads agree over a Gloo group of their own, so their messages never meet training's, and the
first rank's gives the checkpoint its name when all have finished.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Thread
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import DeviceMesh
from torch.futures import Future

from lengthwise.core.atomic_write import full_disk_behind, reason, shown, space_left
from lengthwise.core.errors import LengthwiseError, Setting
from lengthwise.core.lock import FolderLock
from lengthwise.core.version import __version__
from lengthwise.runtime.comm.activity import Activity, CollectiveWait, explained, is_lost
from lengthwise.runtime.comm.objects import broadcast_value, gather_values
from lengthwise.runtime.comm.world import DistContext
from lengthwise.runtime.state import checkpoint_files as files
from lengthwise.runtime.state.contents import MASTER, ShardContent, contents, described_state
from lengthwise.runtime.state.optimizer_values import merged
from lengthwise.runtime.state.parameter_groups import changed_values
from lengthwise.runtime.state.sharded import ShardedState
from lengthwise.runtime.state.shared_folder import check_shared

_log = logging.getLogger(__name__)


class HostGroup:
    """Gloo group of all ranks for messages about checkpoints, whatever they compute on. All make it at once."""

    def __init__(self, timeout: timedelta) -> None:
        self._activity = Activity(name="checkpoint")  # the threads' own: the step loop has another
        with CollectiveWait("making the group of checkpoints"):
            self.handle = dist.new_group(backend="gloo", timeout=timeout)
        self.mesh = DeviceMesh.from_group(self.handle, "cpu")

    def gather(self, value: Any) -> list[Any]:
        """Gather plain values of every rank, by rank."""
        size, device = self.handle.size(), torch.device("cpu")
        return gather_values(value, size=size, device=device, group=self.handle, activity=self._activity)

    def broadcast(self, value: Any, *, is_source: bool) -> Any:
        """The first rank's ``value``, on every rank."""
        device = torch.device("cpu")
        return broadcast_value(value, is_source=is_source, device=device, group=self.handle, activity=self._activity)

    def close(self) -> None:
        """End it; no rank may use it any more."""
        dist.destroy_process_group(self.handle)


class _PresentFolders(FileSystem):
    """Makes no parents of a folder: where somebody removed that of a run, nothing is written in its place."""

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Make a folder, unless it is there."""
        Path(path).mkdir(exist_ok=True)


class _Writer(dcp.FileSystemWriter):
    """Checkpoint writer that raises the disk's error, where torch's error hides it behind file positions."""

    def __init__(self, path: Path) -> None:
        """``path``: the folder that the files come to."""
        super().__init__(path, per_thread_copy_ahead=0)  # everything is in host memory already
        self.fs = _PresentFolders()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors."""
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            raise full_disk_behind(error) or error from None


class NotSavedError(LengthwiseError):
    """A checkpoint that was not made: why, what is safe, and what to do before going on.

    Attributes:
        problem: why.
        advice: what to do.
    """

    def __init__(self, problem: str, *, safe: str, advice: str = "") -> None:
        super().__init__(f"{problem}; {safe}{advice}")
        self.problem, self.advice = problem, advice


class CheckpointSaver:
    """Writes checkpoints in a background thread; every rank has one and makes the same calls at the same step."""

    def __init__(
        self,
        folder: Path,
        state: ShardedState,
        *,
        keep: int,
        makes_parents: bool = False,
        check_folder: Callable[[], None] = lambda: None,
    ) -> None:
        """``folder``: of all the run's checkpoints; the ``keep`` newest stay in it.

        Without ``makes_parents`` it is an error that its parent is not there: then somebody has removed the run.
        ``check_folder`` is called on the first rank before it makes, names or removes a checkpoint.
        """
        self._folder, self._state, self._keep, self._makes_parents = folder, state, keep, makes_parents
        self._check_folder = check_folder
        self.good_step: int | None = None
        """The loss was finite with the weights after so many steps; None: it is not known of any."""
        self._group: HostGroup | None = None
        self._thread: Thread | None = None
        self._error: BaseException | None = None
        self._num_bytes = 0
        """Of the tensors of the newest checkpoint begun, on all ranks."""
        self.step: int | None = None
        """That of the newest checkpoint begun, or of the one that the run goes on from."""

    @property
    def has_failed(self) -> bool:
        """Whether a checkpoint could not be written; :meth:`wait` says why."""
        return self._error is not None

    def connect(self) -> HostGroup:
        """Make the group by which ranks agree, unless there is one; early, it needs no launcher later on."""
        self._group = self._group or HostGroup(self._state.world.timeout)
        return self._group

    def save(
        self, extra: dict[str, Any], *, wait: bool, beside: Mapping[str, ShardContent] = MappingProxyType({})
    ) -> None:
        """Begin a checkpoint after ``extra["step"]`` steps, when the one before is complete; ``wait``: until this is.

        ``beside``: this rank's part of what the checkpoint has beside the state, by name.

        Raises:
            LengthwiseError: as :meth:`wait`.
        """
        self.wait()
        group = self.connect()
        self.step = extra["step"]
        shares, document = {**contents(self._state), **beside}, {**_description(self._state), **extra}
        described = described_state(self._state)
        state_of_optimizer = described.document, described.problem
        self._thread = Thread(
            target=self._run, args=(group, shares, document, state_of_optimizer), name="checkpoint", daemon=True
        )
        self._thread.start()
        if wait:
            self.wait()

    def wait(self) -> None:
        """Return when no checkpoint is being written.

        Raises:
            LengthwiseError: one could not be written. Complete ones are as they were. Its ``__cause__`` is an
                ``OSError`` if a file was the reason.
            CommunicationError: a rank is gone.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if isinstance(error, LengthwiseError):
            raise error
        if error is not None:
            cause, why = _reason(error)
            if is_lost(cause):  # no file is to blame
                raise explained(f"the checkpoint of step {self.step}", cause) from cause
            raise NotSavedError(
                f"the checkpoint of step {self.step} could not be written to {shown(self._folder)} ({why})"
                + space_left(self._folder, why, needed_bytes=self._num_bytes),
                safe=files.outlook(self._folder, is_of_run=not self._makes_parents),
            ) from cause

    def close(self) -> None:
        """Let the checkpoint that is being written end, and leave the group."""
        try:
            self.wait()
        except LengthwiseError as error:  # something else ends the run, or it has been told before
            if self._state.world.is_first:
                _log.warning("%s", error)
        if self._group is not None:
            self._group.close()
            self._group = None

    def _run(
        self,
        group: HostGroup,
        shares: dict[str, ShardContent],
        document: dict[str, Any],
        state_of_optimizer: tuple[dict[str, Any], str],
    ) -> None:
        world, step = self._state.world, document["step"]
        lock = files.lock_of_save(self._folder)
        try:
            safe = files.outlook(self._folder, is_of_run=not self._makes_parents)
            self._num_bytes = _check_finite(shares, group, step=step, safe=safe)
            document = _with_groups_of_all(document, group)
            if self._state.settings.make is not None:
                document = _with_state_of_all(document, state_of_optimizer, group, safe=safe)
            place, saved_steps = self._folder.resolve(), self._state.saved_steps
            keep = files.RetentionPolicy(newest=self._keep, good_step=self.good_step, steps=saved_steps.get(place))
            if self._makes_parents:
                _first_does([partial(_make_and_lock, self._folder, lock)], group, world)
            _write(self._folder, shares, document, group=group, world=world, keep=keep, check_folder=self._check_folder)
            if place in saved_steps:
                saved_steps[place] |= {step}
        except BaseException as error:  # torch's CheckpointException is no Exception
            if world.is_first and (lock.token or not self._makes_parents):
                self._check_folder()
                files.discard(self._folder, files.step_name(step))
            self._error = error
        finally:
            lock.release()


def _write(
    folder: Path,
    shares: dict[str, ShardContent],
    document: dict[str, Any],
    *,
    group: HostGroup,
    world: DistContext,
    keep: files.RetentionPolicy,
    check_folder: Callable[[], None],
) -> None:
    """Write one checkpoint, from the empty folder to its name, on every rank; an error on one is raised on all."""
    name = files.step_name(document["step"])
    unfinished = folder / f"{name}.partial"
    _first_does([check_folder, partial(files.begin, folder, name)], group, world)
    check_shared(unfinished, group.gather, is_first=world.is_first)
    tensors = {key: content.on(group.mesh) for key, content in shares.items()}
    dcp.save(tensors, storage_writer=_Writer(unfinished), process_group=group.handle)
    outcomes = group.gather(_tried(lambda: _digests(unfinished, world)))
    document = {**document, "files": _joined(outcomes)}
    neighbour = outcomes[(world.rank + 1) % world.size][0] if world.size > 1 else {}
    _joined(group.gather(_tried(lambda: files.check_files(unfinished, neighbour))))  # another machine sees them as well
    _first_does([check_folder, partial(files.publish, unfinished, document, keep=keep)], group, world)


def _check_finite(shares: dict[str, ShardContent], group: HostGroup, *, step: int, safe: str) -> int:
    """Return the bytes of all ranks' shares.

    Raises:
        LengthwiseError: on all ranks, if a weight on any rank is not a finite number.
    """
    wrong = next((name for name, content in shares.items() if _is_broken(name, content)), None)
    names_and_sizes = group.gather((wrong, sum(content.local.nbytes for content in shares.values())))
    for rank, (name, _) in enumerate(names_and_sizes):
        if name is not None:
            raise NotSavedError(
                f"the weights after step {step} are not finite ({name} on rank {rank}), so no checkpoint was made of "
                "them",
                safe=safe,
                advice=f". Lower {Setting.LR} or set {Setting.CLIP_NORM} before going on",
            )
    return sum(num_bytes for _, num_bytes in names_and_sizes)


def _is_broken(name: str, content: ShardContent) -> bool:
    return name.startswith(f"{MASTER}/") and not bool(torch.isfinite(content.local).all())


def _with_groups_of_all(document: dict[str, Any], group: HostGroup) -> dict[str, Any]:
    """The document with what changed in the optimizer's parameter groups of all ranks: one may have none of a group."""
    optimizer = dict(document["optimizer"])
    by_rank: list[list[dict[str, Any]]] = group.gather([optimizer["groups"], optimizer.pop("empty_groups", {})])
    by_weight = [*(empty for _, empty in reversed(by_rank)), *(groups for groups, _ in reversed(by_rank))]
    groups = {position: values for groups in by_weight for position, values in groups.items()}
    return {**document, "optimizer": {**optimizer, "groups": groups}}


def _with_state_of_all(
    document: dict[str, Any], own_state: tuple[dict[str, Any], str], group: HostGroup, *, safe: str
) -> dict[str, Any]:
    """The document with what the optimizer of the user's holds on all ranks; ``own_state``: on this one, and a problem.

    Raises:
        NotSavedError: on all ranks, if something of it cannot be saved.
    """
    by_rank: list[tuple[dict[str, Any], str]] = group.gather(own_state)
    optimizer, (values, differ) = document["optimizer"], merged([described for described, _ in by_rank])
    if problem := next((problem for _, problem in by_rank if problem), differ):
        raise NotSavedError(
            f"after step {document['step']}, optimizer={optimizer['name']} {problem}; no checkpoint was made", safe=safe
        )
    return {**document, "optimizer": {**optimizer, "state": values}}


def _make_and_lock(folder: Path, lock: FolderLock) -> None:
    """Make and lock a folder of checkpoints outside of a run folder, which is locked as a whole."""
    folder.mkdir(parents=True, exist_ok=True)
    lock.acquire()


def _digests(unfinished: Path, world: DistContext) -> dict[str, Any]:
    """Digests of the files that this rank wrote."""
    own_files = sorted(unfinished.glob(f"__{world.rank}_*"))
    own_files += [unfinished / ".metadata"] if world.is_first else []
    return {file.name: files.digest_of(file) for file in own_files}


def _joined(outcomes: list[tuple[dict[str, Any], str]]) -> dict[str, Any]:
    """Merge the outcomes of all ranks into one."""
    for rank, (_, error) in enumerate(outcomes):
        if error:
            raise OSError(f"rank {rank}: {error}")
    return {name: value for result, _ in outcomes for name, value in (result or {}).items()}


def _first_does(acts: Sequence[Callable[[], object]], group: HostGroup, world: DistContext) -> None:
    """Run ``acts`` on the first rank alone; the others wait for it, and its error is raised on all."""
    error = _tried(lambda: [act() for act in acts])[1] if world.is_first else ""
    error = group.broadcast(error, is_source=world.is_first)
    if error:
        raise OSError(f"rank 0: {error}")


def _tried(act: Callable[[], Any]) -> tuple[Any, str]:
    """Return what ``act`` returns, or why it failed."""
    try:
        return act(), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def _description(state: ShardedState) -> dict[str, Any]:
    """Description of the saved state that a checkpoint carries for its readers."""
    table, settings = state.table, state.settings
    return {
        "schema_version": files.CHECKPOINT_SCHEMA_VERSION,
        "lengthwise_version": __version__,
        "torch_version": torch.__version__,
        "num_ranks": state.world.size,
        "model_digest": table.digest,
        "master_dtype": str(state.master_dtype).removeprefix("torch."),
        "optimizer": {
            "name": settings.name,
            "tensors": list(settings.state_names),
            "groups": changed_values(state.optimizer),
            "empty_groups": changed_values(state.optimizer, of_empty=True),
        },
        "unused_parameters": state.unused.state_dict(),
        "loss_scale": None if state.loss_scaler is None else state.loss_scaler.state_dict(),
        "has_whole_parameters": settings.needs_whole_parameters,
        "unit_bounds": list(table.bounds),
        "parameters": {name: {"start": slot.start, "shape": list(slot.shape)} for name, slot in table.slots.items()},
    }


def _reason(error: BaseException) -> tuple[BaseException, str]:
    """The error that a rank met, and in words, without the stack that torch prints of every rank."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (cause, _) = next(iter(error.failures.items()))
        return cause, f"rank {rank}: {type(cause).__name__}: {cause}"
    return error, reason(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
