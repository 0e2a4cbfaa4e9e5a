"""A collective that fails says which ranks did not come, and what they do instead."""

import json
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from lengthwise.core.errors import CommunicationError, InputError
from lengthwise.runtime.comm import liveness
from lengthwise.runtime.comm.activity import ACTIVITY, Activity, CollectiveWait
from lengthwise.runtime.comm.liveness import Liveness
from lengthwise.runtime.comm.world import rendezvous

TIMED_OUT = RuntimeError("[gloo/unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation to complete")
CLOSED = RuntimeError("[gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:9391.")


@pytest.fixture
def rank(monkeypatch):
    """``rank(r)``: what rank r of three has of liveness, all of them in this process."""
    monkeypatch.setattr(liveness, "ANSWER_S", 0.3)
    monkeypatch.setattr(liveness, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(ACTIVITY, "name", "forward 1")
    monkeypatch.setattr(ACTIVITY, "step", 7)
    monkeypatch.setattr(ACTIVITY, "waits_for", "")
    monkeypatch.setattr(ACTIVITY, "peers", None)
    store, made = dist.HashStore(), []

    def make(number):
        made.append(Liveness(store, rank=number, size=3, timeout_s=5.0))
        return made[-1]

    yield make
    for one in made:
        one.close()


WAITS = {"place": "step 3", "since_s": 1.0, "waits_for": "broadcast"}


def told_at_once(answers, monkeypatch):
    """What rank 0 of three is told where ``answers`` are there when it asks."""
    monkeypatch.setattr(liveness, "POLL_S", "it need not wait")
    store = dist.HashStore()
    for other, answer in answers.items():
        store.set(f"lengthwise/liveness/rank_{other}", json.dumps(answer))
    asking = Liveness(store, rank=0, size=3, timeout_s=5.0)
    try:
        return str(asking.explain("all-gather", CLOSED))
    finally:
        asking.close()


def test_a_rank_that_computes_instead_of_coming_answers_where_it_is(rank):
    first, _, _ = rank(0), rank(1), rank(2)
    message = str(first.explain("pull of weights", TIMED_OUT))
    assert "step 7, forward 1: pull of weights was not over within 5 s" in message
    assert "rank 1 did not come, it is at step 7, forward 1 for" in message and "rank 0 did not" not in message
    assert "train.timeout_s" in message


def test_a_rank_that_does_not_answer_is_named(rank):
    first, _ = rank(0), rank(2)
    message = str(first.explain("all-gather", CLOSED))
    assert "all-gather lost a rank: no answer from rank 1 (killed, stopped, or cut off)" in message


def test_the_error_of_the_rank_that_failed_first_is_told_instead(rank):
    first, second = rank(0), rank(1)
    second.say_failed("sequence 7 cannot be read")
    assert str(first.explain("all-gather", CLOSED)) == "rank 1 failed: sequence 7 cannot be read"


def test_of_several_ranks_that_failed_the_first_is_told(monkeypatch):
    assert told_at_once({1: {"failed": "its disk is full"}, 2: {"failed": "its disk is full too"}}, monkeypatch) == (
        "rank 1 failed: its disk is full"
    )


@pytest.mark.parametrize(
    ("answers", "expected"),
    [({1: {"failed": "its disk is full"}}, "rank 1 failed"), ({1: WAITS, 2: WAITS}, "rank 1 waits at step 3")],
)
def test_nobody_is_waited_for_once_a_rank_has_failed_or_all_have_answered(answers, expected, monkeypatch):
    assert expected in told_at_once(answers, monkeypatch)


def test_a_rank_that_said_why_it_fails_is_not_said_to_compute_when_it_is_asked_later(rank):
    first, second, third = rank(0), rank(1), rank(2)
    second.say_failed("sequence 7 cannot be read")
    first.explain("all-gather", CLOSED)
    second._thread.join()  # it has seen that somebody asks
    assert str(third.explain("all-gather", CLOSED)) == "rank 1 failed: sequence 7 cannot be read"


def test_ranks_that_wait_for_different_things_are_told(rank):
    first, _, _ = rank(0), rank(1), rank(2)
    ACTIVITY.waits_for = "broadcast"
    message = str(first.explain("all-gather", TIMED_OUT))
    assert "rank 1 waits at step 7, forward 1: broadcast; rank 2 waits at" in message and "rank 0" not in message


@pytest.mark.parametrize("error", [TIMED_OUT, CLOSED, dist.DistBackendError("NCCL communicator was aborted")])
def test_errors_of_the_transport_name_the_operation(rank, error):
    activity = Activity(step=3, name="push")
    waiting = CollectiveWait("reduce-scatter", (0, 2), activity=activity)
    with pytest.raises(CommunicationError, match=r"step 3, push: reduce-scatter of ranks 0 and 2"), waiting:
        raise error


def test_a_rank_is_said_to_wait_only_while_it_waits():
    activity = Activity()
    with CollectiveWait("all-gather", activity=activity):
        assert activity.to_json()["waits_for"] == "all-gather"
    assert activity.to_json()["waits_for"] == ""


@pytest.mark.parametrize("error", [RuntimeError("expected scalar type Float"), InputError("no"), KeyError("socket")])
def test_other_errors_pass_as_they_are(error):
    activity = Activity()
    with pytest.raises(type(error)) as raised, CollectiveWait("all-gather", activity=activity):
        raise error
    assert raised.value is error


def started(**others):
    return {"device": "cpu", "torch": "2.13.0", "lengthwise": "1.0", "number of ranks": 3, **others}


def come(store, others):
    for rank, values in others.items():
        store.set(f"lengthwise/start/{rank}", json.dumps(values))


def test_ranks_that_do_not_start_are_named():
    store = dist.HashStore()
    come(store, {2: started()})
    with pytest.raises(CommunicationError, match=r"rank 1 of 3 did not start within 0.1 s"):
        rendezvous(store, started(), rank=0, size=3, timeout_s=0.1)


@pytest.mark.parametrize(
    ("key", "value"), [("device", "cuda"), ("torch", "2.12.1"), ("lengthwise", "0.9"), ("number of ranks", 2)]
)
def test_ranks_on_other_devices_or_versions_are_refused_before_they_connect(key, value):
    store = dist.HashStore()
    come(store, {1: started(**{key: value}), 2: started()})
    with pytest.raises(InputError, match=rf"{key} is .* on ranks 0 and 2, .* on rank 1"):
        rendezvous(store, started(), rank=0, size=3, timeout_s=5)


def test_a_rank_that_keeps_the_store_waits_until_all_others_have_heard_why_it_ends(monkeypatch):
    monkeypatch.setattr(liveness, "LINGER_S", 30.0)
    store = dist.HashStore()
    keeper, asking, failing = (
        Liveness(store, rank=rank, size=3, timeout_s=5.0, keeps_store=rank == 0) for rank in range(3)
    )
    keeper.say_failed("its disk is full")
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(keeper.wait_until_heard)
        assert str(asking.explain("all-gather", CLOSED)) == "rank 0 failed: its disk is full"
        failing.say_failed("mine too")
        assert waits.result(timeout=20) is None
    for one in (keeper, asking, failing):
        one.close()


def test_no_other_rank_waits_to_be_heard_nor_for_ranks_that_are_gone(monkeypatch):
    monkeypatch.setattr(liveness, "LINGER_S", 0.2)
    store = dist.HashStore()
    keeper, other = (Liveness(store, rank=rank, size=2, timeout_s=5.0, keeps_store=rank == 0) for rank in range(2))
    other.wait_until_heard()
    keeper.wait_until_heard()
    for one in (keeper, other):
        one.close()


PROGRAM = """
import torch
from lengthwise.runtime.comm.farewell import FAREWELL
from lengthwise.runtime.comm.collectives import gather_rows
from lengthwise.runtime.comm.world import start_world

world = start_world("cpu")
FAREWELL.begin()
if world.is_first:
    raise ValueError("my own mistake")
gather_rows(torch.zeros(1))
"""


@pytest.mark.deep
def test_ranks_without_torchrun_hear_why_the_first_one_ended(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    addresses = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(program)], stderr=subprocess.PIPE, text=True,
            env=os.environ | addresses | {"RANK": str(rank), "TORCHELASTIC_USE_AGENT_STORE": ""},
        )
        for rank in range(2)
    ]  # fmt: skip
    first, second = (rank.communicate(timeout=60)[1] for rank in ranks)
    assert "ValueError: my own mistake" in first
    assert "rank 0 failed: its program ended at" in second and "by ValueError: my own mistake" in second


def test_a_rank_whose_torchrun_is_gone_asks_its_store_no_more(rank, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    orphan = rank(0)
    monkeypatch.setattr(os, "getppid", lambda: 1)
    orphan._thread.join(10)
    assert not orphan._thread.is_alive()
