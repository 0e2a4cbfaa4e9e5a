"""Chakra execution traces, decoded with the protobuf library and replayed."""

import json
from collections import Counter
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings

from lengthwise.core.errors import InputError
from lengthwise.core.pipeline_config import Method
from lengthwise.core.specs import ModelSpec
from lengthwise.cost.analytic.volume import layer_volume
from lengthwise.report.chakra import Collective, NodeType, write_chakra
from lengthwise.sim.sim_options import SimOptions
from lengthwise.sim.simulate_step import run_step
from tests.examples import examples
from tests.sim.plans import LAYERS, lane, make_plan, plans

MODEL = ModelSpec(
    name="tiny",
    num_layers=LAYERS,
    hidden_size=64,
    ffn_size=128,
    num_heads=8,
    num_kv_heads=8,
    head_size=8,
    vocab_size=512,
)
SCHEMA = {
    "AttributeProto": [
        ("name", 1, "string"), ("int32_val", 7, "int32"), ("int64_val", 9, "int64"), ("uint64_val", 13, "uint64"),
        ("bool_val", 27, "bool"), ("string_val", 29, "string"),
    ],
    "GlobalMetadata": [("version", 1, "string"), ("attr", 2, "AttributeProto*")],
    "Node": [
        ("id", 1, "uint64"), ("name", 2, "string"), ("type", 3, "int32"), ("data_deps", 5, "uint64*"),
        ("duration_micros", 7, "uint64"), ("attr", 10, "AttributeProto*"),
    ],
}  # fmt: skip
"""The part of et_def.proto that is written; an enumeration is a number on the wire."""


@dataclass(frozen=True)
class Node:
    id: int
    kind: int
    deps: tuple
    duration_us: int
    attributes: dict


def messages():
    """Classes of the protobuf library for ``SCHEMA``."""
    descriptor_pb2 = pytest.importorskip("google.protobuf.descriptor_pb2")
    from google.protobuf import descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="et_def.proto", package="ChakraProtoMsg", syntax="proto3")
    for name, fields in SCHEMA.items():
        message = file.message_type.add(name=name)
        if name == "AttributeProto":
            message.oneof_decl.add(name="value")
        for field_name, number, kind in fields:
            field = message.field.add(name=field_name, number=number)
            field.label = field.LABEL_REPEATED if kind.endswith("*") else field.LABEL_OPTIONAL
            kind = kind.rstrip("*")
            if kind in SCHEMA:
                field.type, field.type_name = field.TYPE_MESSAGE, f".ChakraProtoMsg.{kind}"
            else:
                field.type = getattr(field, f"TYPE_{kind.upper()}")
            if field_name.endswith("_val"):
                field.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"ChakraProtoMsg.{name}")) for name in SCHEMA
    }


def read(path):
    """The metadata and the nodes of a trace."""
    classes, content, at, decoded = messages(), path.read_bytes(), 0, []
    while at < len(content):
        length = shift = 0
        while True:
            byte = content[at]
            at += 1
            length |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        message = classes["Node" if decoded else "GlobalMetadata"]()
        message.ParseFromString(content[at : at + length])
        decoded.append(message)
        at += length
    nodes = []
    for message in decoded[1:]:
        attributes = {a.name: getattr(a, a.WhichOneof("value")) for a in message.attr}
        nodes.append(Node(message.id, message.type, tuple(message.data_deps), message.duration_micros, attributes))
    return decoded[0], nodes


def traces(folder, *steps, model=MODEL):
    count = write_chakra(folder, steps, model, dtype="bfloat16")
    return [read(folder / f"lengthwise.{rank}.et")[1] for rank in range(count)]


def groups_of(folder, num_ranks):
    return {"": list(range(num_ranks)), **json.loads((folder / "comm_groups.json").read_text())}


def replay_us(nodes_of, groups):
    """Microseconds of all ranks where communication takes no time; fails if some rank waits for ever."""
    ends = [{} for _ in nodes_of]
    collectives = [Counter() for _ in nodes_of]
    sent, joined = {}, {}
    waiting = {rank: list(nodes) for rank, nodes in enumerate(nodes_of)}
    while any(waiting.values()):
        moved = False
        for rank, nodes in waiting.items():
            rest = []
            for node in nodes:
                at, a = node.attributes, ends[rank]
                if any(dep not in a for dep in node.deps):
                    rest.append(node)
                    continue
                start = max((a[dep] for dep in node.deps), default=0)
                if node.kind == NodeType.COMM_RECV:
                    key = (at["comm_src"], at["comm_dst"], at["comm_tag"])
                    if key not in sent:
                        rest.append(node)
                        continue
                    start = max(start, sent[key])
                elif node.kind == NodeType.COMM_SEND:
                    sent[at["comm_src"], at["comm_dst"], at["comm_tag"]] = start
                elif node.kind == NodeType.COMM_COLL:
                    group = at.get("pg_name", "")
                    key = (group, node.id)
                    if key not in joined.setdefault(rank, {}):
                        joined[rank][key] = (collectives[rank][group], start)
                        collectives[rank][group] += 1
                    turn = joined[rank][key][0]
                    starts = [
                        s for other in groups[group] for (g, _), (t, s) in joined.get(other, {}).items()
                        if g == group and t == turn
                    ]  # fmt: skip
                    if len(starts) < len(groups[group]):
                        rest.append(node)
                        continue
                    start = max(starts)
                a[node.id] = start + node.duration_us
                moved = True
            waiting[rank] = rest
        assert moved, "ranks wait for ever"
    return max(max(a.values(), default=0) for a in ends)


def test_a_file_begins_with_its_metadata_and_numbers_its_nodes(tmp_path):
    write_chakra(tmp_path / "et", [make_plan([lane(3.0, 2.0, stages=2)])], MODEL, dtype="bfloat16")
    metadata, nodes = read(tmp_path / "et" / "lengthwise.1.et")
    assert metadata.version == "0.0.4" and metadata.attr[0].string_val == "chakra.0.0.4"
    assert [node.id for node in nodes] == list(range(1, len(nodes) + 1))
    assert all(dep < node.id for node in nodes for dep in node.deps)
    assert all(node.attributes["is_cpu_op"] is False for node in nodes)
    assert not any(nodes[0].deps) and all(node.deps for node in nodes[1:])


@settings(deadline=None, max_examples=examples(30))
@given(plan=plans())
def test_ranks_never_wait_in_vain_and_take_the_simulated_time_where_communication_is_free(plan, tmp_path_factory):
    folder, plan = tmp_path_factory.mktemp("et"), _split_where_nothing_is_sent(plan)
    nodes_of = traces(folder, plan)
    exact = run_step(_without_communication(plan), SimOptions())
    computing_s = exact.meet_s - sum(phase.switch_end_s - phase.end_s for phase in exact.phases)
    took_us = replay_us(nodes_of, groups_of(folder, plan.num_devices))
    assert took_us <= computing_s * 1e6 + 50
    if len({pipeline.phase for pipeline in plan.pipelines}) == 1:
        assert took_us == pytest.approx(computing_s * 1e6, abs=50)


def _split_where_nothing_is_sent(plan):
    """Backwards whole elsewhere: the order of weight passes follows the plan's seconds, with what is sent in them."""
    return replace(
        plan,
        pipelines=tuple(
            replace(p, scheme=replace(p.scheme, zero_bubble=False)) if any(m.comm_s for m in p.micro_batches) else p
            for p in plan.pipelines
        ),
    )


def _without_communication(plan):
    return replace(
        plan,
        pipelines=tuple(
            replace(p, micro_batches=tuple(replace(m, time_s=m.time_s - m.comm_s, comm_s=0.0) for m in p.micro_batches))
            for p in plan.pipelines
        ),
    )


@settings(deadline=None, max_examples=examples(30))
@given(plan=plans())
def test_every_send_has_its_receive_and_every_collective_all_its_ranks(plan, tmp_path_factory):
    folder = tmp_path_factory.mktemp("et")
    nodes_of = traces(folder, plan, plan)
    ends = {NodeType.COMM_SEND: Counter(), NodeType.COMM_RECV: Counter()}
    calls = [{} for _ in nodes_of]
    for rank, nodes in enumerate(nodes_of):
        for node in nodes:
            at = node.attributes
            if node.kind in ends:
                side = "comm_src" if node.kind == NodeType.COMM_SEND else "comm_dst"
                assert at[side] == rank
                ends[node.kind][at["comm_src"], at["comm_dst"], at["comm_tag"], at["comm_size"]] += 1
            elif node.kind == NodeType.COMM_COLL:
                calls[rank].setdefault(at.get("pg_name", ""), []).append((at["comm_type"], at["comm_size"]))
    assert ends[NodeType.COMM_SEND] == ends[NodeType.COMM_RECV]
    groups = groups_of(folder, plan.num_devices)
    for rank, by_group in enumerate(calls):
        for group, sequence in by_group.items():
            assert rank in groups[group]
            assert all(calls[other][group] == sequence for other in groups[group])


def test_messages_and_collectives_have_the_bytes_of_their_tokens(tmp_path):
    plan = make_plan([lane(3.0, degree=4, stages=2)])
    nodes = traces(tmp_path / "et", plan)[0]
    (sent,) = [node for node in nodes if node.kind == NodeType.COMM_SEND]
    assert sent.attributes["comm_size"] == 2 * 64 * 2, "2 of 5 tokens, 64 numbers of 2 bytes"
    volume = layer_volume(MODEL, Method.ULYSSES, degree=4, dtype="bfloat16")
    exchanged = [n.attributes["comm_size"] for n in nodes if n.attributes.get("comm_type") == Collective.ALL_TO_ALL]
    sent_bytes = [6 * 5 * one.tokens.all_to_all for one in (volume.forward, volume.backward)]
    assert exchanged == [round(num_bytes * 4 / 3) for num_bytes in sent_bytes]


def test_rings_run_beside_the_computation_and_exchanges_after_it(tmp_path):
    plan = make_plan([lane(3.0, degree=2)])
    for method, is_beside in ((Method.RING, True), (Method.ULYSSES, False)):
        nodes = traces(tmp_path / method, _with_method(plan, method))[0]
        computed = next(n for n in nodes if n.kind == NodeType.COMP)
        moved = next(n for n in nodes if n.kind == NodeType.COMM_COLL and n.deps)
        assert (moved.deps == computed.deps) is is_beside and (moved.deps == (computed.id,)) is not is_beside


def _with_method(plan, method):
    (pipeline,) = plan.pipelines
    scheme = replace(pipeline.scheme, methods=(method,) * LAYERS)
    return replace(plan, pipelines=(replace(pipeline, scheme=scheme),))


def test_ranks_that_some_steps_do_not_have_have_the_operations_of_the_others(tmp_path):
    alone, both = (make_plan([lane(1.0) for _ in range(size)], step=size) for size in (1, 2))
    nodes_of = traces(tmp_path, alone, both)
    assert len(nodes_of) == 2
    computed = [sum(node.kind == NodeType.COMP for node in nodes) for nodes in nodes_of]
    assert computed == [4, 2]
    shrunk = traces(tmp_path, both, alone)
    assert [sum(node.kind == NodeType.COMP for node in nodes) for nodes in shrunk] == [4, 2]


def test_plans_of_another_model_are_refused(tmp_path):
    with pytest.raises(InputError, match="the plans share out 12 layers, model tiny has 6; name the model"):
        traces(tmp_path, make_plan([lane(3.0)]), model=replace(MODEL, num_layers=6))
