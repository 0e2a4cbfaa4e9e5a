"""The ranks of a run: started once, handed to whoever needs them; nothing else reads torchrun's environment."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, partial
from threading import Event, Thread

import torch
import torch.distributed as dist

from lengthwise.core.device_spec import DeviceSpec
from lengthwise.core.errors import CommunicationError, InputError, Setting
from lengthwise.core.launcher_variables import has_rank, rank_and_size
from lengthwise.core.specs import ClusterSpec
from lengthwise.core.version import __version__, source_digest
from lengthwise.runtime.comm.activation_offload import HostOffload
from lengthwise.runtime.comm.activity import ACTIVITY, CollectiveWait, first_line
from lengthwise.runtime.comm.differences import differences, message_of, ranks_text
from lengthwise.runtime.comm.freed_memory import keep_freed_memory
from lengthwise.runtime.comm.groups import GroupRegistry
from lengthwise.runtime.comm.liveness import Liveness
from lengthwise.runtime.comm.nodes import NodeGroups, agreed_ranks_per_node, node_groups

TIMEOUT_S = 1800.0
"""Unless said otherwise, a collective that some rank never joins fails after this long instead of hanging."""
_LOOK_EVERY_S = (0.02, 1.0)
"""How often a rank that starts looks for the others: at first, and at last."""
LEAVING_S = 2.0
"""Threads of Gloo that have nothing to do are gone within milliseconds."""


@dataclass(frozen=True, kw_only=True)
class DistContext:
    """This process among all ranks, and the device it computes on."""

    rank: int
    size: int
    device: torch.device
    timeout_s: float = TIMEOUT_S
    """Most seconds that a collective waits for a rank."""
    ranks_per_node: int = 0
    """Ranks on every machine, which follow one another, or on all but the last, which has fewer; 0: all are on one."""

    @cached_property
    def groups(self) -> GroupRegistry:
        """Registry of the groups of some of the ranks."""
        return GroupRegistry(self.rank, self.timeout, device=self.device)

    @cached_property
    def nodes(self) -> NodeGroups | None:
        """Groups by which weights move between machines and within them; None on one machine. All ranks ask for it."""
        if not 1 < self.ranks_per_node < self.size:
            return None
        return node_groups(self.groups, rank=self.rank, num_ranks=self.size, ranks_per_node=self.ranks_per_node)

    def cluster_of(self, device: DeviceSpec) -> ClusterSpec:
        """The devices that the ranks run on, all like ``device``."""
        return ClusterSpec.of_devices(self.size, device, devices_per_node=self.ranks_per_node or self.size)

    @cached_property
    def departures(self) -> list[str]:
        """Why there are no further collectives of these ranks, once one of them has left the others."""
        return []

    @cached_property
    def offload(self) -> HostOffload:
        """Moves saved tensors of this rank's device to host memory and back."""
        return HostOffload(self.device)

    @property
    def timeout(self) -> timedelta:
        """``timeout_s`` as torch takes it."""
        return timedelta(seconds=self.timeout_s)

    @property
    def is_first(self) -> bool:
        """Whether this rank writes what is written once."""
        return self.rank == 0

    def synchronize(self) -> None:
        """Wait until this rank's device has done what it was asked to, so that clocks can be read."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def under_torchrun() -> bool:
    """Whether this process is a rank that torchrun started."""
    return has_rank()


def start_world(device: str = "auto", *, timeout_s: float | None = None) -> DistContext:
    """Join the other ranks: Gloo on CPU, NCCL on GPUs. Without torchrun this process is the only rank.

    ``timeout_s``: most seconds that a rank waits for another, here and in every collective later on; None: 30 minutes,
    or for collectives over all ranks what whoever started torch.distributed before has set.

    Raises:
        InputError: CUDA is asked for and not there, there are more local ranks than GPUs, a launcher's variables
            contradict one another, or ranks were started differently: on other devices, or with other versions of torch
            or this library.
        CommunicationError: some rank did not come within the limit.
    """
    rank_and_size()  # or an error that says what is wrong with the launcher's variables
    kind = _device_kind(device)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if kind == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise InputError(
                f"local rank {local_rank} has no GPU: the node has {torch.cuda.device_count()}; lower --nproc"
            )
        torch.cuda.set_device(local_rank)
    else:
        keep_freed_memory()
    timeout = timedelta(seconds=timeout_s or TIMEOUT_S)
    if not dist.is_initialized():
        _join(kind, timeout)
    elif timeout_s is not None:
        dist.distributed_c10d._set_pg_timeout(timeout)
    if ACTIVITY.peers is None and dist.get_world_size() > 1:
        ACTIVITY.peers = Liveness(
            dist.distributed_c10d._get_default_store(),
            rank=dist.get_rank(),
            size=dist.get_world_size(),
            timeout_s=timeout.total_seconds(),
            keeps_store=dist.get_rank() == 0 and not _is_kept_by_torchrun(),
        )
    used_device = torch.device(kind, local_rank) if kind == "cuda" else torch.device("cpu")
    return DistContext(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        device=used_device,
        timeout_s=timeout.total_seconds(),
        ranks_per_node=agreed_ranks_per_node(used_device) if under_torchrun() else 0,
    )


def _join(kind: str, timeout: timedelta) -> None:
    """Initialize torch.distributed, under torchrun or for one process."""
    backend = "nccl" if kind == "cuda" else "gloo"
    if not under_torchrun():
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    rank, size = rank_and_size()
    store = _meeting_place(timeout)
    started = {"device": kind, "torch": torch.__version__, "lengthwise": __version__, "number of ranks": size}
    if os.environ.get("LOCAL_WORLD_SIZE") != os.environ["WORLD_SIZE"]:  # each machine has an installation of its own
        started["source of lengthwise"] = source_digest()
    with CollectiveWait("meeting of the ranks"):
        rendezvous(store, started, rank=rank, size=size, timeout_s=timeout.total_seconds())
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


def rendezvous(store: dist.Store, started: dict[str, object], *, rank: int, size: int, timeout_s: float) -> None:
    """Wait in ``store`` until all ranks have come, before any of them connects to another.

    Raises:
        InputError: ranks do not agree on ``started``.
        CommunicationError: some did not come within ``timeout_s``.
    """
    keys = [f"lengthwise/start/{other}" for other in range(size)]
    store.set(keys[rank], json.dumps(started))
    end_s, (look_s, longest_s) = time.monotonic() + timeout_s, _LOOK_EVERY_S
    while not store.check(keys) and time.monotonic() < end_s:
        time.sleep(look_s)
        look_s = min(2 * look_s, longest_s)
    come = {other: json.loads(store.get(key)) for other, key in enumerate(keys) if store.check([key])}
    if differing := differences(come):
        raise InputError(message_of(differing))
    if missing := [other for other in range(size) if other not in come]:
        raise CommunicationError(
            f"{ranks_text(missing)} of {size} did not start within {timeout_s:g} s; look at what they say, or raise "
            f"{Setting.TIMEOUT_S} if they are only slow to start"
        )


def _meeting_place(timeout: timedelta) -> dist.Store:
    """The store by which ranks find each other: torchrun keeps it when it starts them again.

    Then the addresses in it are those of dead ranks, and so this start writes to a part of its own. Every machine
    counts its restarts, so that this holds for one of them; on several, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 does it.
    """
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
    except dist.DistError as error:
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise CommunicationError(
            f"the store of the ranks at {place} cannot be reached within {timeout.total_seconds():g} s "
            f"({first_line(error)}); is the first machine up, and MASTER_ADDR right?"
        ) from error
    if restart == "0" or not _is_kept_by_torchrun() or os.environ.get("LOCAL_WORLD_SIZE") != os.environ["WORLD_SIZE"]:
        return store
    return dist.PrefixStore(f"restart_{restart}", store)


def _is_kept_by_torchrun() -> bool:
    """Whether the store by which ranks meet outlives them."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def stop_world(world: DistContext | None = None) -> None:
    """Leave the other ranks, and the groups of ``world``; waits for collectives that are under way.

    Threads of Gloo free tensors, which aborts a process whose interpreter is ending, and they live as long as anything
    refers to their group. So all groups are released.
    """
    if ACTIVITY.peers is not None:
        ACTIVITY.peers.close()
        ACTIVITY.peers = None
    if world is not None:
        world.groups.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def shutdown_at_exit(world: DistContext) -> Callable[[], None]:
    """Make a handler for the end of the process: :func:`stop_world` with a time limit, as others may never join.

    Then the process goes on to its end after ``LEAVING_S``, which ends the others too. On GPUs it is that function.
    """
    if world.device.type == "cuda":  # NCCL has a shutdown of its own, and no such threads
        return partial(stop_world, world)
    asked = Event()

    def leave_when_asked() -> None:
        asked.wait()
        stop_world(world)

    thread = Thread(target=leave_when_asked, name="leaving", daemon=True)  # Python 3.12 starts none at its end
    thread.start()

    def leave() -> None:
        asked.set()
        thread.join(LEAVING_S)

    return leave


def _device_kind(device: str) -> str:
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError(
            f"{Setting.DEVICE}=cuda, but this torch finds no CUDA device; set {Setting.DEVICE}=cpu or auto"
        )
    return device
