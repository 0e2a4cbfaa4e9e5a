"""The device that a rank runs on, as the deciding half knows devices."""

import os
from dataclasses import replace

import torch
import torch.distributed as dist

from lengthwise.core.device_spec import DEVICES, DeviceSpec, device_of_gpu
from lengthwise.core.errors import InputError, Setting
from lengthwise.core.wording import nearest
from lengthwise.runtime.comm.collectives import all_reduce
from lengthwise.runtime.comm.world import DistContext

CPU_SHARE = 0.8
"""Of the machine's memory, the part that ranks may fill; the system takes the rest."""


def local_size() -> int:
    """Number of ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def find_device(world: DistContext, *, margin: float | None = None) -> DeviceSpec:
    """Speeds of the device's kind, and the memory that the smallest of all has for a rank; every rank calls this.

    ``margin``: see :meth:`~lengthwise.core.device_spec.DeviceSpec.with_margin`.

    Raises:
        InputError: it is a GPU whose speeds are not known.
    """
    if world.device.type == "cpu":
        return replace(DEVICES["cpu"], memory_bytes=_host_memory_bytes(world)).with_margin(margin)
    gpu_name = torch.cuda.get_device_name(world.device)
    spec = device_of_gpu(gpu_name)
    if spec is None:
        raise InputError(f"no speeds known for GPU {gpu_name!r}; set {Setting.CLUSTER} ({nearest(gpu_name, DEVICES)})")
    return with_memory_of_gpu(spec, world, margin=margin)


def with_memory_of_gpu(spec: DeviceSpec, world: DistContext, *, margin: float | None = None) -> DeviceSpec:
    """``spec`` with at most the memory that plans may fill of the smallest GPU, and host, of all ranks, which all call
    this.

    What is in use and not torch's, such as the context and communicators, is left to whoever uses it. On a CPU
    ``spec`` stays as it is.
    """
    if world.device.type == "cpu":
        return spec
    free, total = torch.cuda.mem_get_info(world.device)
    context_bytes = -_smallest(free + torch.cuda.memory_reserved(world.device) - total, world)
    measured = replace(spec, memory_bytes=_smallest(total, world)).with_margin(margin, context_bytes=context_bytes)
    smaller = min(spec, measured, key=lambda device: device.memory_bytes)
    return replace(smaller, host_memory_bytes=min(spec.host_memory_bytes, _host_memory_bytes(world)))


def _host_memory_bytes(world: DistContext) -> int:
    """A rank's share of the memory of the smallest machine."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return _smallest(int(CPU_SHARE * total / local_size()), world)


def _smallest(num_bytes: int, world: DistContext) -> int:
    """Minimum over ranks: machines of one kind differ by a little, and plans must not."""
    smallest = torch.tensor([num_bytes], device=world.device)
    return int(all_reduce(smallest, dist.ReduceOp.MIN)) if world.size > 1 else num_bytes
