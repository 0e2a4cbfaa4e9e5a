"""What a pipeline idles at least while it fills and drains, for the overhead of the slices by which it idles less.

Passes of N slices run on S equal stages; a micro-batch that is not cut is one slice. Slice j takes s_j seconds a stage,
its forward s_j / F. Forwards come in order on every stage. A backward comes after all forwards of its micro-batch, and
those of later micro-batches after it. What follows holds for any order else.

**Filling.** The last stage begins the forward of slice j no earlier than after all forwards before it on the first
stage and S - 1 of its own, and has computed by then those forwards and no backwards but of earlier micro-batches. So
if it has idled for I_b seconds by then, (S - 1) s_j / F <= I_b + (1 - 1 / F) (s_1 + ... + s_{j-1}): the first slices
are small, and each is larger by r = 1 + (F - 1) / (S - 1) times at most, counted with what came before. Slices of P
seconds together are no fewer than log_r(1 + (F - 1) P / (F I_b)).

**Draining.** From the end of its backward on the last stage a slice takes S - 1 backwards to the first one, which then
has the backwards after it to do; the last stage has those and forwards of later micro-batches. So if it idles for I_a
seconds from then on, (S - 1) (1 - 1 / F) s_j <= I_a + (s_{j+1} + ... + s_N) / F, and slices of Q seconds are no fewer
than log_q(1 + Q / (F I_a)) with q = 1 + 1 / ((F - 1) (S - 1)). Where backwards are split, gradients of weights may fill
that, too, and nothing is certain.

**Both.** Every forward comes before its backward. So at the time at which the last stage begins the forward of some
slice, that one and all before it bear out what is said of filling, with what has been idled by then; it and all behind
it what is said of draining, with what will be; and idle seconds before and after it come to those of the step. Taken is
the last slice of the longest micro-batch, of M seconds or more in n slices, the largest of at least M / n. Slices
before and behind it have c seconds of overhead each, so that there is work for a small number of slices, which idle, or
a large one. With X seconds of time before it and Y behind it, idle seconds included, idle seconds and overhead before
it are no less than the minimum over I_b of I_b + c log_r((I_b + (F - 1) X) / (F I_b)) with I_b >= (S - 1) M / n -
(F - 1) X, and behind it over I_a of I_a + c log_q((Y + (F - 1) I_a) / (F I_a)) with I_a >= (S - 1) M / n - Y / (F - 1).
Either minimum is at a root of a quadratic, or at the limit.
"""

from functools import cache
from typing import NamedTuple

import numpy as np

CELLS = 96
"""Into which seconds before the longest micro-batch, and idle ones, are cut; each counts by the better of its ends."""
RATIO = 1.25
"""Of seconds of the longest micro-batch that are looked at together, as others may be in it."""
FRONTS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3)
"""Shares of all work that slices have which are looked at as filling the pipeline, the rest as draining it."""


class _Side(NamedTuple):
    """Filling or draining: beside slices of s seconds, T seconds have I idle ones with (S - 1) s <= (a / b) T + I.

    All figures are broadcast.
    """

    a: np.ndarray
    b: np.ndarray
    later: np.ndarray
    """S - 1."""
    forwards: np.ndarray
    """F."""

    @classmethod
    def filling(cls, later: np.ndarray, forwards: np.ndarray) -> "_Side":
        return cls(forwards - 1, np.ones_like(forwards), later, forwards)

    @classmethod
    def draining(cls, later: np.ndarray, forwards: np.ndarray) -> "_Side":
        return cls(np.ones_like(forwards), forwards - 1, later, forwards)

    def slices(self, time_s: np.ndarray, idle_s: np.ndarray) -> np.ndarray:
        """Slices, at least, of the seconds that are not idle."""
        with np.errstate(divide="ignore", invalid="ignore"):
            growth = (self.a * time_s + self.b * idle_s) / (self.forwards * idle_s)
            return np.maximum(0.0, np.log(growth)) / np.log1p(self.a / (self.b * self.later))

    def least_s(
        self, least_time_s: np.ndarray, most_time_s: np.ndarray, largest_s: np.ndarray, overhead_s: np.ndarray
    ) -> np.ndarray:
        """Idle seconds and overhead at least, of a time between two limits beside slices of ``largest_s``; inf if there
        is not enough time for these.
        """
        scale = overhead_s / np.log1p(self.a / (self.b * self.later))
        half = self.a * least_time_s / (2 * self.b)
        best_s = np.minimum(np.sqrt(half * half + 2 * half * scale) - half, least_time_s)
        needed_s = self.later * largest_s - self.a / self.b * most_time_s
        idle_s = np.maximum(np.maximum(best_s, needed_s), 1e-12 * most_time_s)
        taken_s = idle_s + overhead_s * self.slices(least_time_s, idle_s)
        return np.where((needed_s > most_time_s) | (most_time_s < 0), np.inf, taken_s)


def most_beside_s(
    time_s: float,
    longest_s: np.ndarray,
    *,
    overhead_s: np.ndarray,
    slices: np.ndarray,
    stages: np.ndarray,
    forwards: tuple[np.ndarray, np.ndarray],
    is_whole: np.ndarray,
) -> np.ndarray:
    """[E] the most seconds of work beside the longest sequence of each of E pipelines, without any overhead.

    Args:
        time_s: by which the pipelines end.
        longest_s: [E] seconds a stage of the longest sequence, with the overhead of its micro-batch.
        overhead_s: [E] of a slice.
        slices: [E] of the longest micro-batch, at most.
        stages: [E] two at least.
        forwards: [E] how many times its forward's seconds a micro-batch takes, at least and at most.
        is_whole: [E] whether backwards are whole.
    """
    least_s, micro_batch_s = np.full(len(longest_s), np.inf), longest_s.copy()
    while len(open_ := np.flatnonzero(micro_batch_s < time_s)):
        later, c_s = stages[open_, None] - 1.0, overhead_s[open_, None]
        front = _Side.filling(later, forwards[1][open_, None])
        back = _Side.draining(later, forwards[0][open_, None])
        size_s = micro_batch_s[open_, None]
        largest_s, left_s = size_s / slices[open_, None], (time_s - size_s) * np.linspace(0, 1, CELLS + 1)
        idle_s = front.least_s(left_s[:, :-1], left_s[:, 1:], largest_s, c_s)
        behind_s = np.maximum(0.0, time_s - size_s * RATIO - left_s[:, 1:])
        behind_s = back.least_s(behind_s, left_s[:, -1:] - left_s[:, :-1], largest_s, c_s)
        of_size_s = (idle_s + np.where(is_whole[open_, None], behind_s, 0.0)).min(axis=1)
        least_s[open_] = np.minimum(least_s[open_], of_size_s)
        micro_batch_s *= RATIO
    return np.where(longest_s < time_s, time_s - longest_s - least_s, 0.0)


@cache
def ends_of_slices(
    num_stages: int, least_forwards: float, most_forwards: float, numbers: tuple[int, ...], *, is_whole: bool
) -> np.ndarray:
    """[len(numbers)] how many times the seconds that it computes a pipeline of so many slices takes at least.

    Those that fill it have the first share of all work, and the others drain it; one is counted twice.
    """
    later = np.array(num_stages - 1.0)
    front, back = _Side.filling(later, np.array(most_forwards)), _Side.draining(later, np.array(least_forwards))
    idle = np.geomspace(1e-7, 4 * num_stages, 600)
    fewest = front.slices(1 + idle, idle)
    if is_whole:
        fewest = np.maximum(fewest, back.slices(1 + idle, idle))
        cells = np.linspace(0, 1, CELLS + 1)
        for share in FRONTS:
            before, behind = idle[:, None] * cells[1:], idle[:, None] * (1 - cells[:-1])
            both = front.slices(share + before, before) + back.slices(1 - share + behind, behind) - 1
            fewest = np.maximum(fewest, both.min(axis=1))
    enough = fewest[None, :] <= np.array(numbers)[:, None] * (1 + 1e-9)
    ends: np.ndarray = 1 + idle[np.maximum(enough.argmax(axis=1) - 1, 0)]
    return ends
