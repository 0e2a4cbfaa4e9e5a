import pytest

from lengthwise.core.errors import InputError
from lengthwise.report.trace_choice import TraceChoice


def test_numbers_and_ranges_hold_both_ends():
    choice = TraceChoice.parse("3-5,8", "0, 2-3")
    assert [step for step in range(12) if choice.has_step(step)] == [3, 4, 5, 8]
    assert choice.ranks_among(3) == [0, 2] and choice.ranks_among(8) == [0, 2, 3]


def test_nothing_written_chooses_everything():
    choice = TraceChoice.parse(None, None)
    assert choice.has_step(10**6) and choice.ranks_among(3) == [0, 1, 2]
    choice.check(steps=[7], num_ranks=1)


@pytest.mark.parametrize("text", ["", "a", "3-", "-3", "5-3", "1,,2", "3..5", "1-2-3", "9" * 40])
def test_anything_else_is_refused(text):
    with pytest.raises(InputError, match=r"--trace-steps .* is no list of numbers and ranges such as 3-5,8"):
        TraceChoice.parse(text, None)


def test_steps_and_ranks_that_are_not_there_are_named():
    with pytest.raises(InputError, match="--trace-steps 8-9: the steps are 2 to 7; choose among them"):
        TraceChoice.parse("2,8-9", None).check(steps=range(2, 8), num_ranks=4)
    with pytest.raises(InputError, match="--trace-ranks 4: the ranks are 0 to 3; choose among them"):
        TraceChoice.parse(None, "0-3,4").check(steps=range(2, 8), num_ranks=4)
