"""Models that cannot be prepared as they are, and errors of their own code."""

import pytest
import torch
from torch import nn

from lengthwise.core.errors import CheckError, InputError
from lengthwise.session.model_checks import check_model, forward_errors_named


def test_a_model_of_which_a_part_is_compiled_in_place_is_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    check_model(model)
    model[1].compile()
    with pytest.raises(InputError, match=r"1 of Sequential is compiled, .*: leave compile\(\) out"):
        check_model(model)


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), torch.distributed.DistBackendError("NCCL"), CheckError("its own")],
)
def test_errors_that_are_not_those_of_the_call_pass_as_they_are(error):
    with pytest.raises(type(error)) as raised, forward_errors_named(nn.Linear(1, 1)):
        raise error
    assert raised.value is error


@pytest.mark.parametrize("error", [RuntimeError("shapes\n do not fit"), KeyError("idx"), NotImplementedError()])
def test_an_error_of_the_forward_says_how_it_was_called(error):
    said = rf"forward of Linear fails .*\({type(error).__name__}: .*\); say how it is called"
    with pytest.raises(InputError, match=said) as raised, forward_errors_named(nn.Linear(1, 1)):
        raise error
    assert "\n" not in str(raised.value)
