"""The order of streams in dry runs: nothing reads or writes before what it needs is over, and races are found."""

import json
import subprocess
import sys

import pytest

from lengthwise.runtime.dryrun.stream_order import HOST, KERNELS, Access, StreamOrder

SIDE = ("stream", 1)


def access(start=0, end=8, *, is_write=False, storage=1):
    return Access(storage=storage, start=start, end=end, is_write=is_write)


def test_a_read_of_another_stream_waits_for_its_event_or_is_a_race():
    order = StreamOrder()
    order.issue(SIDE, "copy to the device", [access(is_write=True)], operation="backward 0")
    event = order.point(SIDE)
    order.issue(SIDE, "copy to the device", [access(8, 16, is_write=True)])
    order.issue(KERNELS, "mm", [access()], operation="backward 0")
    (race,) = order.races
    assert race.startswith("backward 0: mm on kernels reads what stream #1 writes, without waiting for it")
    order.restart()
    order.wait(KERNELS, event)
    order.issue(KERNELS, "mm", [access()])
    assert not order.races, "the first copy is over"
    order.issue(KERNELS, "mm", [access(4, 12)])
    assert len(order.races) == 1, "the second copy, of which it reads four bytes, was issued after the event"
    waits = [(done.stream, done.kind, done.waits_for) for done in order.operations]
    assert waits == [("kernels", "mm", ("stream #1",))]


def test_what_is_read_is_not_written_before_that_is_over_and_waits_are_passed_on():
    order = StreamOrder()
    order.issue(KERNELS, "mm", [access(is_write=True)])
    order.wait(SIDE, order.point(KERNELS))
    order.issue(SIDE, "copy to the host", [access(), access(storage=2, is_write=True)])
    order.issue(KERNELS, "zero_", [access(is_write=True)])
    order.issue(HOST, "add_", [access(storage=2)])
    assert sorted(race.split(" on ")[0] for race in order.races) == ["between passes: add_", "between passes: zero_"]
    order.restart()
    order.wait(HOST, order.point(SIDE))
    order.issue(KERNELS, "zero_", [access(is_write=True)])
    assert not order.races, "what the host has seen is over for all that it issues afterwards"
    order.free(1)
    order.issue(SIDE, "copy to the host", [access()])
    assert not order.races, "another storage at the same place is another storage"


SCRIPT = """
from lengthwise.runtime.dryrun.shim import load_shim

load_shim()

import json
import os
import sys

import torch

from lengthwise.runtime.comm import activation_offload
from lengthwise.runtime.dryrun import fake_cuda
from lengthwise.runtime.dryrun.engine_step import fake_rank

fake_cuda.install()
if sys.argv[1] == "forgets":
    activation_offload._wait_for = lambda event, device: None
with fake_rank(0, 2, ranks_per_node=2) as (world, recorder):
    x = torch.zeros(4, 256, device="cuda", requires_grad=True)
    micro_batch = activation_offload.HostOffload(world.device).micro_batch()
    for _ in range(3):
        with micro_batch.layer(lambda tensor: False):
            x = (x * x).exp()
    x.sum().backward()
    sys.stdout.write(json.dumps(recorder.order.document))
sys.stdout.flush()
os._exit(0)  # as processes of dry runs end: an interpreter's exit may meet autograd's thread of the device, and aborts
"""


@pytest.mark.deep
@pytest.mark.parametrize("events", ["waits", "forgets"])
def test_offload_waits_for_its_copies_and_it_is_seen_if_it_forgets(events):
    ran = subprocess.run([sys.executable, "-c", SCRIPT, events], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-2000:]
    document = json.loads(ran.stdout)
    copies = {row["stream"]: row["operations"] for row in document["streams"]}
    assert {"copy to the host"} in map(set, copies.values()) and {"copy to the device"} in map(set, copies.values())
    assert bool(document["races"]) == (events == "forgets"), document["races"]
