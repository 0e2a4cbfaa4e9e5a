"""The linear program whose optimum says how soon any micro-batches of a pipeline can end under 1F1B.

Its variables are the shares of all work that each micro-batch has, and when each pass starts; every pass comes after
the one before it on its stage, and after what it needs of a neighbour. Where backwards are split, gradients of weights
may be computed in any parts after their backward, but none is left when S micro-batches later a forward begins, as
``lengthwise.core.zero_bubble`` says. A forward takes a share of its micro-batch's seconds between two limits.

S stages, V micro-batches.
"""

from collections import defaultdict
from collections.abc import Iterable
from itertools import count

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_matrix

from lengthwise.core.pass_order import PassKind, issue_order

DIGITS = 6

Terms = Iterable[tuple[int, float]]


def solved(num_stages: int, forwards: tuple[float, float], weights: float, num_micro_batches: int) -> float:
    """One entry of ``least_ends``, solved, and rounded down."""
    program = _Program(num_stages, forwards, weights, num_micro_batches)
    return float(np.floor(program.least_s() * 10**DIGITS) / 10**DIGITS)


class _Program:
    """The linear program of one number of stages and of micro-batches."""

    def __init__(self, num_stages: int, forwards: tuple[float, float], weights: float, num_micro_batches: int) -> None:
        self._stages, self._count, self._weights = num_stages, num_micro_batches, weights
        self._forward, self._backward = 1 / forwards[1], 1 - 1 / forwards[0]
        self._between = 1 / forwards[0] - 1 / forwards[1]
        self._numbers: dict[object, int] = defaultdict(count().__next__)
        self._rows: list[dict[int, float]] = []
        self.end = self._numbers["end"]
        self._sizes = [self._numbers["size", number] for number in range(num_micro_batches)]
        self._more = [self._numbers["more of a forward", number] for number in range(num_micro_batches)]

    def least_s(self) -> float:
        """Seconds at the optimum."""
        for size, more in zip(self._sizes, self._more):
            self._at_least([(size, self._between), (more, -1.0)])
        for stage in range(self._stages):
            self._add_stage(stage)
        for number in range(self._count):
            for stage in range(1, self._stages):
                self._follows(stage, stage - 1, PassKind.FORWARD, number)
                self._follows(stage - 1, stage, PassKind.BACKWARD, number)
        rows = [(row, column, value) for row, terms in enumerate(self._rows) for column, value in terms.items()]
        places, columns, values = zip(*rows)
        shape = len(self._rows), len(self._numbers)
        cost = np.zeros(shape[1])
        cost[self.end] = 1.0
        all_work = coo_matrix(([1.0] * self._count, ([0] * self._count, self._sizes)), shape=(1, shape[1]))
        matrix = -coo_matrix((values, (places, columns)), shape=shape).tocsr()
        result = linprog(cost, A_ub=matrix, b_ub=np.zeros(shape[0]), A_eq=all_work, b_eq=[1.0], method="highs")
        return float(result.fun)

    def _at_least(self, terms: Terms) -> None:
        """Require that the sum of variables, times their factors, is not negative."""
        row: dict[int, float] = defaultdict(float)
        for number, factor in terms:
            row[number] += factor
        self._rows.append(row)

    def _start(self, stage: int, kind: PassKind, number: int) -> int:
        return self._numbers["start", stage, kind, number]

    def _taken(self, kind: PassKind, number: int, *, is_split: bool) -> list[tuple[int, float]]:
        """What a pass takes, as terms to subtract."""
        if kind is PassKind.FORWARD:
            return [(self._sizes[number], -self._forward), (self._more[number], -1.0)]
        share = self._backward + self._between - (self._weights if is_split else 0.0)
        return [(self._sizes[number], -share), (self._more[number], 1.0)]

    def _add_stage(self, stage: int) -> None:
        order = issue_order(stage, num_stages=self._stages, num_micro_batches=self._count)
        is_split = self._weights > 0 and stage > 0
        gaps: list[list[tuple[int, float]]] = [[] for _ in range(len(order) + 1)]
        if is_split:
            places = {a_pass: place for place, a_pass in enumerate(order)}
            for number, size in enumerate(self._sizes):
                first = places[PassKind.BACKWARD, number] + 1
                last = places.get((PassKind.FORWARD, number + self._stages), len(order))
                parts = [self._numbers["weights", stage, number, place] for place in range(first, last + 1)]
                self._at_least([*((part, 1.0) for part in parts), (size, -self._weights)])
                for place, part in enumerate(parts, first):
                    gaps[place].append((part, -1.0))
        before: list[tuple[int, float]] = []
        for place, (kind, number) in enumerate(order):
            start = self._start(stage, kind, number)
            self._at_least([(start, 1.0), *before, *gaps[place]])
            before = [(start, -1.0), *self._taken(kind, number, is_split=is_split)]
        self._at_least([(self.end, 1.0), *before, *gaps[-1]])

    def _follows(self, stage: int, needed: int, kind: PassKind, number: int) -> None:
        """Require that a pass begins when that of the stage that it needs has ended."""
        taken = self._taken(kind, number, is_split=self._weights > 0 and needed > 0)
        self._at_least([(self._start(stage, kind, number), 1.0), (self._start(needed, kind, number), -1.0), *taken])
