"""The device that plans are made for is the same on all ranks."""

import os
from dataclasses import replace

import torch

from lengthwise.core.device_spec import DEVICES
from lengthwise.core.wording import GIB
from lengthwise.runtime.comm import devices
from lengthwise.runtime.comm.devices import CPU_SHARE, find_device
from lengthwise.runtime.comm.world import DistContext, start_world


def test_machines_whose_memory_differs_a_little_plan_for_the_smallest(ranks):
    page, pages = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PHYS_PAGES")
    for device in ranks(3).run(_find_device_of_another_size):
        assert device.memory_bytes == int(CPU_SHARE * page * (pages - 2))


def _find_device_of_another_size():
    world, sysconf = start_world("cpu"), os.sysconf
    try:
        os.sysconf = lambda name: sysconf(name) - (world.rank if name == "SC_PHYS_PAGES" else 0)
        return find_device(world)
    finally:
        os.sysconf = sysconf


def test_a_gpus_margin_is_what_others_use_and_a_share_of_its_memory(monkeypatch):
    world = DistContext(rank=0, size=1, device=torch.device("cuda", 0))
    total, others, ours = 80 * GIB, 3 * GIB, 5 * GIB
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (total - others - ours, total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: ours)
    monkeypatch.setattr(devices, "_smallest", lambda num_bytes, world: num_bytes)
    spec = DEVICES["B200-180GB"]
    measured = devices.with_memory_of_gpu(spec, world)
    assert measured.memory_bytes == total - others - int(0.06 * total)
    assert measured.memory_bytes + measured.margin_bytes == total
    assert devices.with_memory_of_gpu(spec, world, margin=0.25).memory_bytes == 57 * GIB
    smaller = replace(spec, memory_bytes=10 * GIB)
    expected = replace(smaller, host_memory_bytes=min(smaller.host_memory_bytes, devices._host_memory_bytes(world)))
    assert devices.with_memory_of_gpu(smaller, world) == expected, "a cluster of that name may have less"
