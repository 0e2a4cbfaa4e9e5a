"""The fastest plan of all: every strategy that tiles the cluster, every dispatch, every packing, one or two phases."""

from functools import cache
from itertools import combinations_with_replacement, product

import numpy as np

from lengthwise.core.one_f_one_b import PassTimes, pipeline_end_s
from lengthwise.core.pipeline_config import Strategy
from lengthwise.core.zero_bubble import filled_end_s
from lengthwise.cost.overlapped import hides_updates


def partitions(items):
    """Every way to split items into packs."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for packs in partitions(rest):
        yield [[first], *packs]
        for number in range(len(packs)):
            yield [*packs[:number], [first, *packs[number]], *packs[number + 1 :]]


class BruteForce:
    """The optimum of a batch over some candidates.

    Pipelines of one stage run each pack as any candidate of their family; those of several run all as one candidate.
    """

    def __init__(self, problem, candidates, lengths, *, most_phases=1, may_idle=False):
        self.may_idle = may_idle
        self.problem, self.lengths, self.most_phases = problem, np.array(lengths), most_phases
        groups = {}
        for candidate in candidates:
            groups.setdefault(candidate if candidate.num_stages > 1 else candidate.family, []).append(candidate)
        self.kinds = list(groups.values())
        self.everything = (1 << len(lengths)) - 1
        self.pipeline_s = cache(self._pipeline_s)

    def _pipeline_s(self, kind, mask, parts=None):
        """Seconds of one pipeline of a kind with the sequences of ``mask``, packed in the best way.

        ``parts``: of an update that passes may hide, whose exposed pulls and pushes it then has; None: of none.
        """
        members = self.kinds[kind]
        best_s = np.inf if mask else 0.0
        for packs in partitions([i for i in range(len(self.lengths)) if mask >> i & 1]) if mask else ():
            times_s = [
                min(
                    (
                        float(member.times_s(self.lengths[pack]).sum()) + member.overhead_s
                        for member in members
                        if self.lengths[pack].sum() <= member.max_tokens
                    ),
                    default=np.inf,
                )
                for pack in packs
            ]
            if max(times_s) < best_s:
                forwards = [members[0].forwards] * len(packs)
                stages = members[0].num_stages
                late_s = 0.0 if parts is None else self._moved_s(members, packs, times_s, parts)
                end_s = pipeline_end_s(sorted(times_s, reverse=True), forwards, stages)
                if members[0].scheme.zero_bubble:
                    end_s = self._split_end_s(members[0], packs, times_s)
                best_s = min(best_s, late_s + end_s)
        return best_s

    def _split_end_s(self, one, packs, times_s):
        """Seconds of a pipeline that splits backwards, the longest pack first."""
        numbers = sorted(range(len(packs)), key=lambda number: -times_s[number])
        forwards_s = [times_s[number] / one.forwards for number in numbers]
        backwards_s = [times_s[number] - forward_s for number, forward_s in zip(numbers, forwards_s)]
        weights_s = [float(one.weight_times_s(self.lengths[packs[number]]).sum()) for number in numbers]
        return filled_end_s(PassTimes(forwards_s, backwards_s, weights_s), one.num_stages)

    def _moved_s(self, members, packs, times_s, parts):
        """Seconds of pulls and pushes that a pipeline does not hide, packs of one stage in the best order."""
        one, forwards = members[0], members[0].forwards
        covers_s = [
            time_s - one.overhead_s - float(one.cost.comm_times_s(self.lengths[pack], one.scheme).sum())
            for pack, time_s in zip(packs, times_s)
        ]
        numbers = sorted(range(len(packs)), key=lambda number: -times_s[number])
        ends = [(numbers[0], numbers[-1])]
        if one.num_stages == 1:
            ends = [(a, b) for a in numbers for b in numbers if a != b or len(packs) == 1]
        return min(
            parts.exposed_pull_s(covers_s[a] / forwards) + parts.exposed_push_s(covers_s[b] * (1 - 1 / forwards))
            for a, b in ends
        )

    @property
    def strategies(self):
        """Every multiset of kinds that tiles the cluster, or some of its devices where others may be idle."""
        num_devices = self.problem.num_devices
        for count in range(1, num_devices + 1):
            for kinds in combinations_with_replacement(range(len(self.kinds)), count):
                used = sum(self.kinds[kind][0].num_devices for kind in kinds)
                if used == num_devices or (self.may_idle and used < num_devices):
                    yield kinds

    def phase_s(self, kinds, parts=None):
        """[masks] seconds of a phase with some sequences under a strategy, dispatched in the best way."""
        best_s = np.full(self.everything + 1, np.inf)
        best_s[0] = 0.0
        for kind in kinds:
            new_s = np.full_like(best_s, np.inf)
            for mask in range(self.everything + 1):
                part = mask
                while True:
                    new_s[mask] = min(new_s[mask], max(best_s[mask ^ part], self.pipeline_s(kind, part, parts)))
                    if not part:
                        break
                    part = (part - 1) & mask
            best_s = new_s
        return best_s

    def best_s(self):
        """Seconds of the fastest step."""
        cost, planned = self.problem.cost, []
        for kinds in self.strategies:
            schemes = tuple(self.kinds[kind][0].scheme for kind in kinds)
            ends = np.cumsum([scheme.num_devices for scheme in schemes]).tolist()
            ranks = tuple(tuple(range(end - scheme.num_devices, end)) for scheme, end in zip(schemes, ends))
            strategy = Strategy(schemes=schemes, ranks=ranks, num_idle=self.problem.num_devices - ends[-1])
            if hides_updates(cost):
                parts = cost.update_parts([strategy])
                planned.append((strategy, self.phase_s(kinds, parts), parts.rest_s))
            else:
                planned.append((strategy, self.phase_s(kinds), cost.update_s(strategy)))
        best_s = min(times_s[self.everything] + update_s for _, times_s, update_s in planned)
        if self.most_phases > 1:
            assert not hides_updates(cost), "pulls come before the first phase alone, and pushes after the last"
            for (one, one_s, update_s), (two, two_s, other_s) in product(planned, planned):
                both_s = one_s[1:-1] + two_s[::-1][1:-1]
                if both_s.size:
                    best_s = min(best_s, both_s.min() + cost.switch_s(one, two) + max(update_s, other_s))
        return float(best_s)
