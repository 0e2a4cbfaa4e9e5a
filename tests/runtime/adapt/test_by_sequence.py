"""Models that packs would change train exactly, sequence by sequence."""

from functools import partial

import pytest

from tests.runtime.adapt.odd_modules import Odd
from tests.runtime.adapt.runs import Case, Packs, assert_exact, step_on_ranks
from tests.runtime.adapt.test_plain_modules import LOGITS, built

PACKS = {
    1: (Packs(ranks=(0,), packs=((2, 3, 6), (0, 8), (4, 1, 5, 7, 9)), recompute=(True, False, True)),),
    2: (
        Packs(ranks=(0,), packs=((2, 3, 6), (0, 8)), recompute=(True, False, True)),
        Packs(ranks=(1,), packs=((4, 1), (5, 7, 9)), recompute=(False, True)),
    ),
}
ODDITIES = (
    "token shift", "short convolution", "second mixer", "log-n scaling", "sinks and window", "strides",
    "sinks and wide window", "shared keys",
)  # fmt: skip


@pytest.mark.parametrize("oddity", ODDITIES)
def test_what_packs_would_change_is_exact_sequence_by_sequence(ranks, oddity):
    case = Case(build=partial(built, Odd, oddity), **LOGITS, options={"by_sequence": True})
    for num_ranks, packs in PACKS.items():
        for result in ranks(num_ranks).run(step_on_ranks, case, packs):
            assert_exact(case, result, oddity)
