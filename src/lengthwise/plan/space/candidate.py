"""A scheme with its costs, as planners see it, and the candidates of one cluster that planners choose among."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import numpy as np

from lengthwise.core.cost import CostModel
from lengthwise.core.errors import InputError, Setting
from lengthwise.core.one_f_one_b import forwards_in, least_stages, least_stages_in_any_order, most_weights_in
from lengthwise.core.pipeline_config import (
    Method,
    PipelineConfig,
    Strategy,
    WeightPlacement,
    homogeneous,
    spread,
    uniform_scheme,
)
from lengthwise.cost.gradient_reduction import ReductionTime
from lengthwise.data.size_buckets import round_down

NUM_COMPARED = 64
"""Lengths by which candidates are compared that stand in for one another."""
Family = tuple[int, tuple[int, ...], WeightPlacement, bool, bool, int]
"""Degree, layers per stage, weights, whether gradients are sharded and backwards split, and slices: schemes that agree
in them can stand in for one another, pack by pack."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """A parallel configuration with its costs. Compared by identity: a search space holds each scheme once."""

    scheme: PipelineConfig
    cost: CostModel
    num_cluster_devices: int
    token_limit: int | None = None
    """Most tokens of a micro-batch, where the user wants fewer than memory holds."""
    sizes: tuple[int, ...] = ()
    """Tokens that micro-batches are filled up to, ascending; empty: to none."""
    longest_local: int = 0
    """Tokens up to which a sequence may be whole on one rank of a stage, which then sends nothing of it; 0: none is."""
    _recomputing: dict[int, "Candidate"] = field(init=False, default_factory=dict, repr=False)
    _in_slices: dict[int, "Candidate"] = field(init=False, default_factory=dict, repr=False)
    _alone_s: dict[int, np.ndarray] = field(init=False, default_factory=dict, repr=False)
    _alone_at_s: dict[int, float] = field(init=False, default_factory=dict, repr=False)

    @cached_property
    def num_devices(self) -> int:
        """Devices of one pipeline."""
        return self.scheme.num_devices

    @cached_property
    def num_stages(self) -> int:
        """Number of pipeline stages."""
        return self.scheme.num_stages

    @cached_property
    def forwards(self) -> float:
        """How many forwards a micro-batch takes as long as."""
        return forwards_in(self.scheme.recompute)

    @cached_property
    def least_stages(self) -> float:
        """Stages with which a flow shop bounds a pipeline; see ``lengthwise.core.one_f_one_b.least_stages``."""
        return least_stages(self.scheme)

    @cached_property
    def least_stages_in_any_order(self) -> float:
        """Stages with which one bounds a pipeline of packs in any order; see ``least_stages_in_any_order``."""
        return least_stages_in_any_order(self.scheme)

    @cached_property
    def flow_stages(self) -> float:
        """Stages of a flow shop that takes as long with equal micro-batches whose work is all products.

        Where backwards are split, the first stage waits for a forward and what cannot wait of a backward, and has done
        as many weight passes less than other stages by the end (ZB-H1). Slices leave the bubble of one.
        """
        if self.scheme.slices > 1:
            return 1 + (self.num_stages - 1) / self.scheme.slices
        later = 1 - 2 * self.most_weights
        return 1 + (self.num_stages - 1) * later if self.scheme.zero_bubble else self.num_stages

    @cached_property
    def alone_stages(self) -> float:
        """Stages with which S' x bounds what a micro-batch takes alone whose stages take x: weight passes overlap.

        So do slices: each goes down all stages and back between passes of the others, the largest of n with at least an
        n-th of x.
        """
        if self.scheme.slices > 1:
            return self.flow_stages
        return 1 + (self.num_stages - 1) * (1 - self.most_weights) if self.scheme.zero_bubble else self.num_stages

    @cached_property
    def most_weights(self) -> float:
        """The largest share of a micro-batch's seconds that gradients of weights take, where these may wait; else 0."""
        return most_weights_in(self.scheme.recompute) if self.scheme.zero_bubble else 0.0

    @cached_property
    def family(self) -> Family:
        """What candidates share that can stand in for one another."""
        scheme = self.scheme
        flags = scheme.shard_gradients, scheme.zero_bubble
        return scheme.degree, scheme.stage_layers, scheme.weights, *flags, scheme.slices

    @cached_property
    def max_tokens(self) -> int:
        """Most tokens of a micro-batch, padding included."""
        fitting = self.cost.max_tokens(self.scheme, num_devices=self.num_cluster_devices)
        max_tokens = min(fitting, self.token_limit) if self.token_limit else fitting
        return round_down(max_tokens, self.sizes) if self.sizes else max_tokens

    @cached_property
    def overhead_s(self) -> float:
        """Seconds per stage that a micro-batch costs before its first token."""
        return self.cost.overhead_s(self.scheme)

    @cached_property
    def launch_s(self) -> float:
        """Seconds per stage that a micro-batch takes at least, since its kernels are launched; 0 if unknown."""
        launch_s = getattr(self.cost, "launch_s", None)
        return 0.0 if launch_s is None else float(launch_s(self.scheme))

    @cached_property
    def largest_pack(self) -> int:
        """Tokens of the largest micro-batch that was measured; 0 if none was."""
        largest_pack = getattr(self.cost, "largest_pack", None)
        return 0 if largest_pack is None else int(largest_pack(self.scheme))

    @cached_property
    def reduction(self) -> ReductionTime | None:
        """Seconds of reducing a micro-batch's gradients to shares; None where whole ones are kept."""
        reduction = getattr(self.cost, "reduction", None)
        return reduction(self.scheme) if reduction is not None and self.scheme.shard_gradients else None

    @cached_property
    def update_s(self) -> float:
        """Seconds of a step outside its micro-batches, under as many equal pipelines as the cluster has room for.

        What no pass can hide, if costs say how much passes hide.
        """
        return self.cost.update_s(self._equal_pipelines)

    @cached_property
    def whole_update_s(self) -> float:
        """Seconds of :attr:`update_s` if passes hid nothing; they never hide more than they take themselves."""
        whole_update_s = getattr(self.cost, "whole_update_s", self.cost.update_s)
        return float(whole_update_s(self._equal_pipelines))

    @property
    def _equal_pipelines(self) -> Strategy:
        devices = self.num_cluster_devices
        return homogeneous(self.scheme, devices, num_idle=devices % self.num_devices)

    @cached_property
    def state_bytes(self) -> int:
        """Bytes per device before any token."""
        return int(self.cost.peak_bytes(0, self.scheme, num_devices=self.num_cluster_devices))

    def times_s(self, lengths: np.ndarray) -> np.ndarray:
        """Seconds per stage that each sequence adds to a micro-batch, if it is on one rank where it may be."""
        times_s = self.shared_times_s(lengths)
        if not self.longest_local:
            return times_s
        return np.where(lengths <= self.longest_local, np.minimum(times_s, self.local_times_s(lengths)), times_s)

    def shared_times_s(self, lengths: np.ndarray) -> np.ndarray:
        """Seconds per stage that each sequence adds to a micro-batch if all ranks share it in equal parts."""
        return self.cost.sequence_times_s(lengths, self.scheme)

    def local_times_s(self, lengths: np.ndarray) -> np.ndarray:
        """Seconds per stage that each sequence adds if ranks have whole sequences, all as many: as one device each.

        Raises:
            InputError: there are no costs of one device.
        """
        return self.cost.sequence_times_s(lengths, self._of_one_device) / self.scheme.degree

    def comm_times_s(self, lengths: np.ndarray) -> np.ndarray:
        """Seconds of :meth:`times_s` in communication that computation does not hide."""
        comm_s = self.cost.comm_times_s(lengths, self.scheme)
        if not self.longest_local:
            return comm_s
        local_s = self.cost.comm_times_s(lengths, self._of_one_device) / self.scheme.degree
        return np.where(lengths <= self.longest_local, np.minimum(comm_s, local_s), comm_s)

    @cached_property
    def _of_one_device(self) -> PipelineConfig:
        """The scheme with stages of one device."""
        methods = (Method.DENSE,) * self.scheme.num_layers
        return replace(self.scheme, degree=1, methods=methods, shard_gradients=False)

    def alone_s(self, longest: int) -> np.ndarray:
        """Seconds per stage of micro-batches of one sequence, of some lengths up to ``longest``; computed once."""
        if longest not in self._alone_s:
            self._alone_s[longest] = self.times_s(lengths_up_to(longest)) + self.overhead_s
        return self._alone_s[longest]

    def alone_at_s(self, tokens: int) -> float:
        """Seconds per stage of a micro-batch of one sequence of so many tokens; computed once."""
        if tokens not in self._alone_at_s:
            self._alone_at_s[tokens] = float(self.times_s(np.array([tokens]))[0]) + self.overhead_s
        return self._alone_at_s[tokens]

    def weight_times_s(self, lengths: np.ndarray) -> np.ndarray:
        """Seconds per stage of each sequence in gradients of weights that may wait; 0 where backwards are whole."""
        weight_times_s = getattr(self.cost, "weight_times_s", None)
        if weight_times_s is None or not self.scheme.zero_bubble:
            return np.zeros(len(lengths))
        return np.minimum(weight_times_s(lengths, self.scheme), self.most_weights * self.times_s(lengths))

    def recomputing(self, num_layers: int) -> "Candidate":
        """The candidate that recomputes so many layers, at even distances, and is alike otherwise; made once."""
        if num_layers not in self._recomputing:
            recompute = spread(num_layers, self.scheme.num_layers)
            self._recomputing[num_layers] = replace(self, scheme=replace(self.scheme, recompute=recompute))
        return self._recomputing[num_layers]

    def in_slices(self, count: int) -> "Candidate":
        """The candidate whose micro-batches have ``count`` slices, and that is alike otherwise; made once."""
        if count == self.scheme.slices:
            return self
        if count not in self._in_slices:
            self._in_slices[count] = replace(self, scheme=replace(self.scheme, slices=count))
        return self._in_slices[count]

    @property
    def is_limited_by_host(self) -> bool:
        """Whether the host holds no more tokens of a micro-batch, though the device would."""
        limit = getattr(self.cost, "max_host_tokens", None)
        return limit is not None and limit(self.scheme, num_devices=self.num_cluster_devices) <= self.max_tokens

    def host_bytes(self, num_tokens: int) -> int:
        """Bytes that a micro-batch, and the model state, put into the host's memory for each device."""
        host_bytes = getattr(self.cost, "host_bytes", None)
        return int(host_bytes(num_tokens, self.scheme, num_devices=self.num_cluster_devices)) if host_bytes else 0

    def peak_bytes(self, num_tokens: np.ndarray) -> np.ndarray:
        """Bytes per device while micro-batches of ``num_tokens`` are computed."""
        return self.cost.peak_bytes(num_tokens, self.scheme, num_devices=self.num_cluster_devices)


@lru_cache(maxsize=256)
def lengths_up_to(longest: int) -> np.ndarray:
    """The lengths by which candidates are compared that stand in for one another."""
    return np.unique(np.geomspace(1, longest, NUM_COMPARED).astype(np.int64))


def most_tokens(candidates: Iterable[Candidate]) -> int:
    """Tokens of the longest sequence that any of them holds."""
    return max((candidate.max_tokens for candidate in candidates), default=0)


def make_candidates(
    schemes: Iterable[PipelineConfig], cost: CostModel, *, num_devices: int, token_limit: int | None = None
) -> tuple[Candidate, ...]:
    """Candidates for the schemes that ``cost`` knows, ``num_devices`` can hold and that fit at least one token."""
    candidates = []
    for scheme in schemes:
        if scheme.num_devices > num_devices:
            continue
        candidate = Candidate(scheme=scheme, cost=cost, num_cluster_devices=num_devices, token_limit=token_limit)
        try:
            if candidate.max_tokens >= 1:
                candidates.append(candidate)
        except InputError:
            continue  # no costs for it: a profile knows what was profiled
    return tuple(candidates)


def schemes_of(
    num_layers: int,
    *,
    degrees: Sequence[int],
    stages: Sequence[int],
    methods: Sequence[Method],
    recomputed: Sequence[int],
    head_layers: float = 0.0,
) -> list[PipelineConfig]:
    """Every combination that makes sense: dense where a stage is one device, the given methods where it is several."""
    return [
        uniform_scheme(
            num_layers, degree=degree, stages=count, method=method, recomputed=layers, head_layers=head_layers
        )
        for degree in degrees
        for count in stages
        if count <= num_layers
        for method in ([Method.DENSE] if degree == 1 else methods)
        for layers in recomputed
        if method is not Method.DENSE or degree == 1
    ]


def degrees_of(num_devices: int, devices_per_node: int) -> list[int]:
    """Degrees that tile nodes: divisors and powers of two within a node, whole nodes beyond, and all devices."""
    inside = min(num_devices, devices_per_node)
    degrees = {d for d in range(1, inside + 1) if inside % d == 0 or d & (d - 1) == 0}
    nodes = num_devices // devices_per_node
    across = {n * devices_per_node for n in range(1, nodes + 1) if nodes % n == 0 or n & (n - 1) == 0}
    return sorted(degrees | across | {num_devices})


def stages_of(num_devices: int, num_layers: int) -> list[int]:
    """Up to eight stages: powers of two, and every number where pipelines of those may not fill the devices."""
    limit = min(8, num_devices, num_layers)
    is_power = num_devices & (num_devices - 1) == 0
    return [count for count in range(1, limit + 1) if not is_power or count & (count - 1) == 0]


def reach_in_words(single: Sequence[Candidate]) -> tuple[int, str]:
    """Most tokens of a sequence under candidates of one stage, and what to tell where a policy of these needs more."""
    if not single:
        return 0, (
            "no scheme of one stage holds the model's state. Allow a higher degree or methods that shard weights, "
            f"or set {Setting.POLICY}=auto, which uses several stages."
        )
    reach = max(candidate.max_tokens for candidate in single)
    degrees = ", ".join(map(str, sorted({candidate.scheme.degree for candidate in single})))
    return reach, (
        f"the search space's reach {reach:,} tokens, at degrees {degrees}. Allow more degrees or recompute, or lower "
        f"{Setting.MAX_LENGTH}."
    )
