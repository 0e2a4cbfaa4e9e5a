"""The device that a rank runs on, as the deciding half knows devices."""

import os
from dataclasses import replace

import torch

from lengthwise.core.errors import InputError
from lengthwise.core.specs import DEVICES, DeviceSpec, nearest
from lengthwise.runtime.comm.world import World

CPU_SHARE, GPU_SHARE = 0.8, 0.92
"""Of what there is; the system, or the context and fragmentation, take the rest."""


def local_size() -> int:
    """Ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def find_device(world: World) -> DeviceSpec:
    """Speeds of the device's kind, and the memory that this one has for a rank.

    Raises:
        InputError: it is a GPU whose speeds are not known.
    """
    if world.device.type == "cpu":
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return replace(DEVICES["cpu"], memory_bytes=int(CPU_SHARE * total / local_size()))
    found = torch.cuda.get_device_name(world.device)
    memory = torch.cuda.get_device_properties(world.device).total_memory
    known = [spec for spec in DEVICES.values() if spec.name.split("-")[0] in found]
    if not known:
        raise InputError(f"no speeds known for GPU {found!r}; set cluster.name ({nearest(found, DEVICES)})")
    return replace(known[0], memory_bytes=int(GPU_SHARE * memory))
