"""The memory ladder asks for what takes long to price only where it may change an answer."""

import numpy as np

from lengthwise.session.ladder_rungs import _fastest_s


class Candidate:
    """A candidate whose passes take ``passes_s``; it counts how often its update is priced."""

    def __init__(self, passes_s, update_s, max_tokens=100):
        self.overhead_s, self.flow_stages, self.max_tokens = 0.0, 1, max_tokens
        self._passes_s, self._update_s, self.priced = passes_s, update_s, 0

    def times_s(self, lengths):
        return np.full(len(lengths), self._passes_s)

    @property
    def update_s(self):
        self.priced += 1
        return self._update_s


def test_updates_are_priced_of_those_alone_that_may_be_the_fastest():
    slow, fastest, first, short = Candidate(9.0, 0.0), Candidate(3.0, 1.0), Candidate(2.0, 5.0), Candidate(1.0, 0.0, 9)
    assert _fastest_s([slow, fastest, first, short], 10) == 4.0
    assert [candidate.priced for candidate in (slow, fastest, first, short)] == [0, 1, 1, 0]
    assert _fastest_s([slow], 101) == _fastest_s([slow], 0) == np.inf
