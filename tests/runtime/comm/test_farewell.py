"""A rank whose program ends says so to those that wait for it."""

import sys

import pytest

from lengthwise.core.errors import CommunicationError, InputError
from lengthwise.runtime.comm.activity import ACTIVITY, told_to_peers
from lengthwise.runtime.comm.farewell import Farewell


class Peers:
    """Keeps what is said."""

    def __init__(self):
        self.said = []

    def say_failed(self, reason):
        self.said.append(reason)

    def wait_until_heard(self):
        self.said.append("waits")


@pytest.fixture
def peers(monkeypatch):
    made = Peers()
    monkeypatch.setattr(ACTIVITY, "peers", made)
    monkeypatch.setattr(ACTIVITY, "name", "forward 1")
    monkeypatch.setattr(ACTIVITY, "step", 7)
    return made


def test_a_program_that_ends_by_an_error_tells_it_and_shows_it_as_before(peers, monkeypatch):
    shown = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: shown.append(error[1]))
    farewell, error = Farewell(), ValueError("my own mistake")
    farewell.begin()
    farewell.begin()
    sys.excepthook(ValueError, error, None)
    farewell.say()
    expected = "its program ended at step 7, forward 1 by ValueError: my own mistake"
    assert peers.said == [expected, "waits", expected] and shown == [error]


def test_a_program_that_ends_without_one_tells_that(peers):
    Farewell().say()
    assert peers.said == ["its program ended"]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (InputError("sequence 7 cannot be read"), ["sequence 7 cannot be read"]),
        (KeyError("lengths"), ["KeyError('lengths')"]),
        (CommunicationError("rank 1 failed: its disk is full"), []),  # no cause of its own
    ],
)
def test_a_command_that_fails_tells_errors_of_its_own(peers, error, expected):
    with pytest.raises(type(error)) as raised, told_to_peers():
        raise error
    assert raised.value is error and peers.said == expected
