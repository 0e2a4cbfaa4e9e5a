"""The processes of dry runs: whatever a rank raises, or if it dies, is one clear error."""

import os

import pytest

from lengthwise.core.errors import InputError, LengthwiseError
from lengthwise.runtime.dryrun.process import in_own_process


def answers(rank):
    return {"rank": rank}


def refuses(rank):
    raise InputError("layers are not called")


def raises_what_cannot_be_sent(rank):
    raise RuntimeError(lambda: rank)


def dies(rank):
    os._exit(1)


def test_an_error_of_any_class_and_the_end_of_a_process_are_told():
    assert in_own_process(answers, 3) == {"rank": 3}
    with pytest.raises(InputError, match="layers are not called"):
        in_own_process(refuses, 3)
    with pytest.raises(LengthwiseError, match=r"rank 3: the step cannot be run on fake tensors: RuntimeError at .*py:"):
        in_own_process(raises_what_cannot_be_sent, 3)
    with pytest.raises(LengthwiseError, match="rank 3: its process ended before the step did"):
        in_own_process(dies, 3)
