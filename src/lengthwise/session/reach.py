"""How far policies reach: tokens per second over the length of sequences, up to the longest that each can train."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from math import sqrt
from typing import Any

import numpy as np

from lengthwise.core.lengths import MOST_TOKENS, LengthIndex
from lengthwise.core.specs import ClusterSpec
from lengthwise.session.compare_policies import PolicyComparison
from lengthwise.session.plan_lengths import step_budget

FIRST_LENGTH, GROWTH = 4096, 4
"""Tokens of the sequences of the first step, and how many times as long the next ones are."""
GRAIN, FEWEST = 1024, 16
"""Lengths are multiples of this, where there are some between two; nothing shorter than the second is tried."""
WITHIN = 1.05
"""A policy may hold less than this times the longest length that is shown."""

OnLength = Callable[[int], None]
"""Hears how long the sequences are that are planned next."""


@dataclass(frozen=True, kw_only=True)
class ReachedLength:
    """A step of sequences that are all as long."""

    length: int
    """Tokens per sequence."""
    tokens_per_s: float
    step_time_s: float
    strategy: str
    """The pipelines of the step in words."""


@dataclass(frozen=True, kw_only=True)
class PolicyReach:
    """The lengths that a policy can train, the shortest first."""

    policy: str
    reached: tuple[ReachedLength, ...]
    refused: str
    """Why it cannot train longer ones; empty where the model's positions or the length asked for end the search."""

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest, within 5 % of what the policy holds; 0 if it holds none."""
        return self.reached[-1].length if self.reached else 0

    @property
    def rank(self) -> tuple[float, ...]:
        """What sorts policies: the longest length, then the speed at the shortest ones."""
        return (self.longest_tokens, *(point.tokens_per_s for point in self.reached))

    def at(self, length: int) -> ReachedLength | None:
        """The step of sequences of ``length`` tokens, if it was planned and fits."""
        return next((point for point in self.reached if point.length == length), None)

    def to_json(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "policy": self.policy,
            "reached": [asdict(point) for point in self.reached],
            "refused": self.refused or None,
        }


@dataclass(frozen=True, kw_only=True)
class Reach:
    """Every policy on one cluster, the one with the longest reach first; none may reach any length."""

    cluster: ClusterSpec
    lengths: tuple[int, ...]
    """Lengths that all policies were asked for, while any could train them."""
    policies: tuple[PolicyReach, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "cluster": self.cluster.name,
            "num_devices": self.cluster.num_devices,
            "lengths": list(self.lengths),
            "policies": [policy.to_json() for policy in self.policies],
        }


def policy_reach(
    contest: PolicyComparison,
    cluster: ClusterSpec,
    *,
    tokens_per_step: int | None,
    most_tokens: int,
    on_length: OnLength,
) -> Reach:
    """Plan and simulate steps of ever longer sequences under every policy, until none can hold them.

    Args:
        contest: what is compared; its lengths are not used.
        cluster: where.
        tokens_per_step: tokens of a step, as in `lengthwise.compare`; a step has one sequence at least.
        most_tokens: the longest sequence asked for; 0: as long as any policy can hold.
        on_length: hears of progress.

    """
    search = _Search(contest, cluster, tokens_per_step, on_length)
    lengths, limit = [], most_tokens or MOST_TOKENS
    length = min(FIRST_LENGTH, limit)
    while going := [policy for policy in contest.policies if policy not in search.refused]:
        search.try_length(length, going)
        lengths.append(length)
        if length == limit:
            break
        length = min(length * GROWTH, limit)
    search.refine()
    policies = sorted(map(search.of, reversed(contest.policies)), key=lambda policy: policy.rank, reverse=True)
    return Reach(
        cluster=cluster,
        lengths=tuple(length for length in lengths if any(policy.at(length) for policy in policies)),
        policies=tuple(policies),
    )


class _Search:
    """What is known of every policy's reach so far."""

    def __init__(
        self, contest: PolicyComparison, cluster: ClusterSpec, tokens_per_step: int | None, on_length: OnLength
    ) -> None:
        self._contest, self._cluster, self._tokens_per_step = contest, cluster, tokens_per_step
        self._on_length = on_length
        self._reached: dict[str, dict[int, ReachedLength]] = {policy: {} for policy in contest.policies}
        self.refused: dict[str, tuple[int, str]] = {}
        """Policy -> the shortest length that it cannot train, and why."""

    def of(self, policy: str) -> PolicyReach:
        """What a policy reaches."""
        reached = self._reached[policy]
        return PolicyReach(
            policy=policy,
            reached=tuple(reached[length] for length in sorted(reached)),
            refused=self.refused[policy][1] if policy in self.refused else "",
        )

    def try_length(self, length: int, policies: Sequence[str]) -> None:
        """Plan a step of sequences of ``length`` tokens under some policies."""
        self._on_length(length)
        num_tokens = step_budget(self._of_length(length, 1, policies), self._cluster, self._tokens_per_step)
        contest = self._of_length(length, max(1, num_tokens // length), policies)
        entry = contest.enter(self._cluster, tokens_per_step=max(num_tokens, length))
        for result in contest.run(entry, with_steps=False, on_step=lambda policy, num_done: None).policies:
            if result.refused:
                self.refused[result.policy] = (length, result.refused)
            else:
                self._reached[result.policy][length] = ReachedLength(
                    length=length,
                    tokens_per_s=result.tokens_per_s,
                    step_time_s=result.step_time_s,
                    strategy=result.strategies[0],
                )

    def _of_length(self, length: int, num_sequences: int, policies: Iterable[str]) -> PolicyComparison:
        """The comparison of one step of sequences of that length."""
        lengths = LengthIndex(lengths=np.full(num_sequences, length))
        return replace(self._contest, lengths=lengths, policies=tuple(policies), num_steps=1)

    def refine(self) -> None:
        """Halve what lies between the longest length that a policy holds and the shortest that it does not."""
        while open_ends := {ends for policy in self.refused if (ends := self._ends(policy))}:
            low, high = min(open_ends)
            self.try_length(
                _between(low, high), [policy for policy in self.refused if self._ends(policy) == (low, high)]
            )

    def _ends(self, policy: str) -> tuple[int, int] | None:
        """Between which lengths a policy's reach ends; None where that is known well enough."""
        low, high = max(self._reached[policy], default=0), self.refused[policy][0]
        return (low, high) if high > max(low * WITHIN, low + 1, FEWEST) else None


def _between(low: int, high: int) -> int:
    """A length between two, as many times the one as the other is of it; of thousands of tokens a round one."""
    if not low:
        return high // GROWTH
    middle = sqrt(low * high)
    rounded = round(middle / GRAIN) * GRAIN
    return rounded if low < rounded < high else min(max(int(middle), low + 1), high - 1)
