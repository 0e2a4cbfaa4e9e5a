"""The planning problem of a question on the command line."""

import pytest

from lengthwise.core.errors import InputError
from lengthwise.session.planning_args import parse_counts


def test_counts_are_read_once_each_in_the_order_given():
    assert parse_counts("64, 8,64", "--gpus") == [64, 8]


@pytest.mark.parametrize("words", ["", "0", "8,", "²", "٨", "1e3", "-8", "8.0", ",".join(map(str, range(1, 30)))])
def test_what_is_no_count_is_refused(words):
    with pytest.raises(InputError, match="not a list of up to 16 numbers of devices"):
        parse_counts(words, "--gpus")
