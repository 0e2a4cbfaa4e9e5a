"""The device that plans are made for is the same on all ranks."""

import os

from lengthwise.runtime.comm.devices import CPU_SHARE, find_device
from lengthwise.runtime.comm.world import start_world


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
