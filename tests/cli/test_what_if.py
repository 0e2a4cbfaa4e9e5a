"""The planning problem of a question on the command line."""

from lengthwise.cli.what_if import parse_counts


def test_counts_are_read_once_each_in_the_order_given():
    assert parse_counts("64, 8,64", "--gpus") == [64, 8]
