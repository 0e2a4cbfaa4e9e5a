import math

import pytest

from lengthwise.report import units


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.234, "1.23 s"), (12.34, "12.3 s"), (0.0456, "45.6 ms"), (7.89e-4, "789 µs"), (0.0, "0 s"), (0.9999, "1.00 s"),
     (1234.0, "1,234 s"), (None, "n/a"), (math.nan, "n/a")],
)  # fmt: skip
def test_durations_choose_their_unit(value, text):
    assert units.seconds(value).replace("\u00a0", " ") == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.1234, "12.3 %"), (1.0, "100 %"), (3.456, "346 %"), (0.0, "0.0 %"), (None, "n/a")]
)
def test_shares_are_per_cent(value, text):
    assert units.share(value).replace("\u00a0", " ") == text


def test_other_numbers():
    assert units.share(-0.05, signed=True) == "-5.0\u00a0%"
    assert units.count(1234567.4) == "1,234,567"
    assert units.tokens(512) == "512" and units.tokens(4096) == "4K" and units.tokens(3 << 19) == "1.5M"
    assert units.tokens(5000) == "5,000"
    assert units.number(2.34567) == "2.346" and units.number(math.nan) == "NaN" and units.number(None) == "n/a"
    assert units.ratio(2.314) == "2.31x"
    assert units.compact(12_500) == "12.5k" and units.compact(3e6) == "3M"
