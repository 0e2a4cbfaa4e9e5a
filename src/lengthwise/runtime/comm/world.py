"""The ranks of a run: started once, handed to whoever needs them; nothing else reads torchrun's environment."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, partial
from threading import Event, Thread
from typing import Any

import torch
import torch.distributed as dist

from lengthwise.core.errors import InputError
from lengthwise.runtime.comm.group import Groups

TIMEOUT = timedelta(minutes=30)
"""A collective that some rank never joins fails after this long instead of hanging."""
LEAVING_S = 2.0
"""Threads of Gloo that have nothing to do are gone within milliseconds."""


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among all ranks, and the device it computes on."""

    rank: int
    size: int
    device: torch.device

    @cached_property
    def groups(self) -> Groups:
        """Groups of some of the ranks."""
        return Groups(self.rank, TIMEOUT)

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
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def start_world(device: str = "auto") -> World:
    """Join the other ranks: Gloo on CPU, NCCL on GPUs. Without torchrun this process is the only rank.

    Raises:
        InputError: CUDA is asked for and not there, or there are more local ranks than GPUs.
    """
    kind = _device_kind(device)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if kind == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise InputError(
                f"local rank {local_rank} has no GPU: the node has {torch.cuda.device_count()}; lower --nproc"
            )
        torch.cuda.set_device(local_rank)
    if not dist.is_initialized():
        backend = "nccl" if kind == "cuda" else "gloo"
        if under_torchrun():
            dist.init_process_group(backend, timeout=TIMEOUT, **_meeting_place())
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=TIMEOUT)
    return World(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        device=torch.device(kind, local_rank) if kind == "cuda" else torch.device("cpu"),
    )


def _meeting_place() -> dict[str, Any]:
    """Where ranks find each other: by default in a store that torchrun keeps when it starts them again.

    Then the addresses in it are those of dead ranks, and so this start writes to a part of its own. Every machine
    counts its restarts, so that this holds for one of them; on several, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 does it.
    """
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    is_kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if restart == "0" or not is_kept or os.environ.get("LOCAL_WORLD_SIZE") != os.environ["WORLD_SIZE"]:
        return {}
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, timeout=TIMEOUT)
    return {
        "store": dist.PrefixStore(f"restart_{restart}", store),
        "rank": int(os.environ["RANK"]),
        "world_size": int(os.environ["WORLD_SIZE"]),
    }


def stop_world(world: World | None = None) -> None:
    """Leave the other ranks, and the groups of ``world``; waits for collectives that are under way.

    Threads of Gloo free tensors, which aborts a process whose interpreter is ending, and they live as long as anything
    refers to their group. So all groups are let go.
    """
    if world is not None:
        world.groups.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def leaving(world: World) -> Callable[[], None]:
    """:func:`stop_world` for the end of a process, which may come while others never join what is under way.

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
        raise InputError("train.device=cuda, but this torch finds no CUDA device; set train.device=cpu or auto")
    return device
