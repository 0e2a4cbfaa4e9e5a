"""Plans as MLCommons Chakra execution traces, one file per rank: workloads for network simulators such as ASTRA-sim.

A rank's trace is its operations in order: all-gathers of weights, receives, forwards and backwards with the collectives
of their layers, sends, reduce-scatters of gradients. Computation takes what the plan predicts, less the communication
that computation does not hide; communication is told in bytes, and how long it takes is the simulator's to say. Rings
and the weights of sharded layers move beside the computation, other collectives after it.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path

import numpy as np

from lengthwise.core.batch import Pack
from lengthwise.core.pipeline_config import Method
from lengthwise.core.sliced_passes import slices_of
from lengthwise.core.specs import ModelSpec
from lengthwise.core.step_plan import Pipeline, StepPlan, check_layers, most_devices
from lengthwise.core.zero_bubble import pass_times, splits, stage_times
from lengthwise.cost.analytic.volume import LayerPass, layer_volume
from lengthwise.cost.links import Sent
from lengthwise.cost.memory_model import DTYPE_BYTES
from lengthwise.cost.weight_shards import held_params, largest_held_params
from lengthwise.report import protobuf
from lengthwise.report.whole_file import write_whole
from lengthwise.sim.schedule_check import PASSES, Operation, OperationKind, operations

SCHEMA_VERSION = "0.0.4"
PREFIX = "lengthwise"
"""Trace of rank r: PREFIX.r.et."""
GROUPS_FILE = "comm_groups.json"


class NodeType(IntEnum):
    """Kinds of nodes, as the schema numbers them."""

    COMP = 4
    COMM_SEND = 5
    COMM_RECV = 6
    COMM_COLL = 7


class Collective(IntEnum):
    """Kinds of collectives, as the schema numbers them."""

    ALL_GATHER = 2
    ALL_TO_ALL = 6
    REDUCE_SCATTER = 7


Calls = list[tuple[Collective, int]]
"""Collectives and the bytes that each rank puts into them."""
KINDS = {operation: kind for kind, operation in PASSES.items()}
_FIELD_OF_VALUE = {"int32": 7, "int64": 9, "uint64": 13, "bool": 27, "string": 29}
_TYPE_OF_ATTRIBUTE = {
    "is_cpu_op": "bool", "num_ops": "int64", "tensor_size": "uint64", "comm_type": "int64", "comm_size": "int64",
    "comm_src": "int32", "comm_dst": "int32", "comm_tag": "int32", "pg_name": "string",
}  # fmt: skip


def write_chakra(folder: Path, plans: Sequence[StepPlan], model: ModelSpec, *, dtype: str) -> int:
    """Write the traces of all ranks over all steps, and the groups of their collectives; returns how many traces.

    Ranks that some steps do not have wait in those.

    Raises:
        InputError: the plans are of another model, or the folder cannot be written.
    """
    check_layers(plans, model.num_layers, model=model.name)
    num_ranks = most_devices(plans)
    groups: dict[tuple[int, ...], str] = {tuple(range(num_ranks)): ""}
    traces = [_RankTrace(rank=rank, groups=groups) for rank in range(num_ranks)]
    tags: dict[tuple[int, int, int, bool], int] = {}
    for plan in plans:
        work = _Work(plan=plan, model=model, dtype=dtype)
        for _, lists in operations(plan):
            for trace, operations_of_rank in zip(traces, lists):
                for operation in operations_of_rank:
                    key = (plan.step, operation.pipeline, operation.number, operation.is_backward)
                    trace.run(operation, work, tag=tags.setdefault(key, len(tags)))
    folder.mkdir(exist_ok=True)
    files = {folder / f"{PREFIX}.{trace.rank}.et": bytes(trace.content) for trace in traces}
    named = {name: list(ranks) for ranks, name in groups.items() if name}
    write_whole({**files, folder / GROUPS_FILE: json.dumps(named).encode()})
    return len(files)


@dataclass(frozen=True, kw_only=True)
class _Work:
    """Seconds, operations and bytes of a step's passes."""

    plan: StepPlan
    model: ModelSpec
    dtype: str

    @property
    def width(self) -> int:
        """Bytes of a number in the compute dtype."""
        return DTYPE_BYTES[self.dtype]

    def weight_bytes(self, width: int) -> int:
        """Bytes of the weights on the rank that holds the most, ``width`` a number."""
        schemes = {pipeline.scheme for pipeline in self.plan.pipelines if pipeline.micro_batches}
        return width * max((largest_held_params(self.model, scheme) for scheme in schemes), default=0)

    def duration_us(self, operation: Operation) -> int:
        """Microseconds of computing in a pass."""
        pipeline = self.plan.pipelines[operation.pipeline]
        micro_batch = pipeline.micro_batches[operation.micro_batch]
        times = stage_times(pass_times(pipeline), _stage(pipeline, operation))
        pass_s = times[KINDS[operation.kind]][operation.number]
        if operation.kind is OperationKind.WEIGHTS:
            return round(pass_s * 1e6)
        whole_s = pass_s
        if operation.kind is OperationKind.BACKWARD:
            whole_s = pass_times(pipeline).backwards_s[operation.number]
        exposed = micro_batch.comm_s / micro_batch.time_s if micro_batch.time_s else 0.0
        return round(max(0.0, pass_s - whole_s * exposed) * 1e6)

    def layers(self, operation: Operation) -> list[tuple[LayerPass, int]]:
        """The layers of a pass: equal ones once, with their number; a backward computes recomputed forwards again.

        Half of the products of a backward give gradients of weights, which have a pass of their own where it is split.
        """
        pipeline = self.plan.pipelines[operation.pipeline]
        micro_batch = pipeline.micro_batches[operation.micro_batch]
        methods, recompute = pipeline.methods_of(micro_batch), pipeline.recompute_of(micro_batch)
        stage = _stage(pipeline, operation)
        layers, is_split = pipeline.scheme.layers_of_stage(stage), splits(pipeline, stage, operation.number)
        passes: list[tuple[LayerPass, int]] = []
        counts: Counter[tuple[Method, bool]] = Counter((methods[layer], recompute[layer]) for layer in layers)
        for (method, is_recomputed), count in sorted(counts.items()):
            volume = layer_volume(self.model, method, degree=pipeline.scheme.degree, dtype=self.dtype)
            half = volume.backward.matmul_flops / 2
            if operation.kind is OperationKind.WEIGHTS:
                if not is_recomputed:
                    passes.append((LayerPass(matmul_flops=half, attention_flops=0.0), count))
                continue
            is_forward = operation.kind is OperationKind.FORWARD
            if is_forward or is_recomputed:
                passes.append((volume.forward, count))
            if not is_forward:
                passes.append(
                    (
                        replace(volume.backward, matmul_flops=half)
                        if is_split and not is_recomputed
                        else volume.backward,
                        count,
                    )
                )
        return passes

    def num_ops(self, operation: Operation) -> int:
        """Floating-point operations of a pass on one rank, the head left out."""
        pack = self.plan.pipelines[operation.pipeline].micro_batches[operation.micro_batch].pack
        tokens = self._tokens(operation)
        squares = self._squares(pack, tokens.stop) - self._squares(pack, tokens.start)
        return round(
            sum(
                count * (layer.matmul_flops * len(tokens) + layer.attention_flops * squares)
                for layer, count in self.layers(operation)
            )
        )

    def _tokens(self, operation: Operation) -> range:
        """The tokens of its pack that a pass computes."""
        return slices_of(self.plan.pipelines[operation.pipeline])[operation.number].tokens

    def _squares(self, pack: Pack, end: int) -> float:
        """Pairs of tokens, a token and itself twice, that attention of the first ``end`` tokens of a pack computes."""
        bounds = np.minimum(np.asarray(pack.cu_seqlens, dtype=np.float64), end)
        lengths = np.diff(bounds)
        return float((lengths * self.model.reach(lengths)).sum())

    def tensor_bytes(self, operation: Operation) -> int:
        """Bytes of the weights and of the input that a pass reads."""
        pipeline = self.plan.pipelines[operation.pipeline]
        num_tokens = len(self._tokens(operation)) // pipeline.scheme.degree
        weights = held_params(self.model, pipeline.scheme, stage=_stage(pipeline, operation))
        return self.width * (weights + num_tokens * self.model.hidden_size)

    def calls(self, operation: Operation) -> tuple[Calls, Calls]:
        """The collectives of a pass: those beside its computation, and those after it."""
        num_tokens = len(self._tokens(operation))
        beside, after = np.zeros(3), np.zeros(3)
        for layer, count in self.layers(operation):
            tokens, weights = count * num_tokens * _sent(layer.tokens), count * _sent(layer.weights)
            ring = np.array([count * num_tokens * layer.tokens.ring, 0.0, 0.0])
            beside += weights + ring
            after += tokens - ring
        return _calls(beside, len(operation.ranks)), _calls(after, len(operation.ranks))


def _stage(pipeline: Pipeline, operation: Operation) -> int:
    return next(s for s in range(pipeline.scheme.num_stages) if pipeline.ranks_of(s) == operation.ranks)


def _sent(sent: Sent) -> np.ndarray:
    """[3] Bytes that one rank sends in the pattern of an all-gather, an all-to-all and a reduce-scatter."""
    return np.array([sent.all_gather + sent.broadcast + sent.ring, sent.all_to_all, sent.reduce_scatter + sent.reduce])


def _calls(sent: np.ndarray, degree: int) -> Calls:
    """Collectives in which each of ``degree`` ranks sends so many bytes.

    A rank of p sends all of what it puts into an all-gather p - 1 times; of the others it keeps a p-th.
    """
    if degree == 1:
        return []
    others = degree - 1
    sizes = zip(Collective, sent * [1 / others, degree / others, degree / others])
    return [(kind, round(size)) for kind, size in sizes if round(size)]


@dataclass(kw_only=True)
class _RankTrace:
    """The nodes of one rank, encoded as they come."""

    rank: int
    groups: dict[tuple[int, ...], str]
    """The name of each set of ranks that have run collectives; shared by all ranks. That of all ranks is empty."""
    content: bytearray = field(default_factory=bytearray)
    _num_nodes: int = 0
    _last: list[int] = field(default_factory=list)
    """What the next operation waits for."""
    _received: list[int] = field(default_factory=list)
    """The input of the next pass."""
    _sends: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        schema = protobuf.content(1, "schema") + protobuf.content(29, f"chakra.{SCHEMA_VERSION}")
        metadata = protobuf.content(1, SCHEMA_VERSION) + protobuf.content(2, schema)
        self.content += protobuf.delimited(metadata)

    def run(self, operation: Operation, work: _Work, *, tag: int) -> None:
        """Append the nodes of an operation."""
        kind, ranks = operation.kind, operation.ranks
        size = operation.num_tokens * work.model.hidden_size * work.width
        if kind is OperationKind.RECEIVE:
            self._received = [self._message(operation, self._last, size, tag)]
        elif kind is OperationKind.SEND:
            self._sends.append(self._message(operation, self._last, size, tag))
        elif kind in KINDS:
            self._pass(operation, work)
        elif len(ranks) > 1:
            if kind is OperationKind.PULL:
                call = Collective.ALL_GATHER, work.weight_bytes(work.width) // len(ranks)
            else:
                call = Collective.REDUCE_SCATTER, work.weight_bytes(max(4, work.width))
            self._last = [self._collective(str(kind), call, ranks, [*self._last, *self._sends])]
            self._sends = []

    def _pass(self, operation: Operation, work: _Work) -> None:
        before, self._received = [*self._last, *self._received], []
        name = f"{operation.kind} {operation.micro_batch} of pipeline {operation.pipeline}"
        beside, after = work.calls(operation)
        attributes = {"num_ops": work.num_ops(operation), "tensor_size": work.tensor_bytes(operation)}
        self._last = [self._add(NodeType.COMP, name, before, attributes, duration_us=work.duration_us(operation))]
        self._last += [self._collective(name, call, operation.ranks, before) for call in beside]
        for call in after:
            self._last = [self._collective(name, call, operation.ranks, self._last)]

    def _message(self, operation: Operation, dependencies: list[int], size: int, tag: int) -> int:
        sender, receiver = operation.ranks
        node_type = NodeType.COMM_SEND if operation.kind is OperationKind.SEND else NodeType.COMM_RECV
        name = f"{operation.kind} {operation.what}"
        attributes = {"comm_src": sender, "comm_dst": receiver, "comm_size": size, "comm_tag": tag}
        return self._add(node_type, name, dependencies, attributes)

    def _collective(self, name: str, call: tuple[Collective, int], ranks: tuple[int, ...], after: list[int]) -> int:
        kind, size = call
        group = self.groups.setdefault(ranks, str(len(self.groups)))
        attributes: dict[str, int | str] = {"comm_type": int(kind), "comm_size": size}
        if group:
            attributes["pg_name"] = group
        return self._add(NodeType.COMM_COLL, f"{kind.name} of {name}", after, attributes)

    def _add(
        self, node_type: NodeType, name: str, dependencies: list[int], attributes: Mapping[str, int | str], *,
        duration_us: int = 0,
    ) -> int:  # fmt: skip
        """Append a node; returns its number."""
        self._num_nodes += 1
        parts = [
            protobuf.number(1, self._num_nodes), protobuf.content(2, name), protobuf.number(3, node_type),
            protobuf.numbers(5, dependencies), protobuf.number(7, duration_us),
        ]  # fmt: skip
        for attribute, value in {"is_cpu_op": 0, **attributes}.items():
            place = _FIELD_OF_VALUE[_TYPE_OF_ATTRIBUTE[attribute]]
            encoded = protobuf.content(place, value) if isinstance(value, str) else protobuf.number(place, value)
            parts.append(protobuf.content(10, protobuf.content(1, attribute) + encoded))
        self.content += protobuf.delimited(b"".join(parts))
        return self._num_nodes
