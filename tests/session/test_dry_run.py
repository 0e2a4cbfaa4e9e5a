"""Dry runs: a step of any rank on fake tensors counts what costs and plan say, without a GPU."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from lengthwise.config.run_config import load
from lengthwise.core.batch import Pack
from lengthwise.core.errors import InputError
from lengthwise.core.pipeline_config import WEIGHTS_OF, Method, PipelineConfig, WeightPlacement
from lengthwise.core.planned_micro_batch import PlannedMicroBatch
from lengthwise.core.specs import cluster_preset, model_preset
from lengthwise.core.step_plan import Pipeline, StepPlan
from lengthwise.cost.analytic.volume import layer_volume
from lengthwise.session import dry_run
from lengthwise.session.dry_run import PlanToRun, dry_run_plan, dry_run_plans
from tests.session import test_dry_run_slices as slices

SPEC = replace(model_preset("llama-tiny"), num_layers=2)
CONFIG = load(None, ["train.dtype=bfloat16"])


LARGE = replace(model_preset("llama-7b"), num_layers=2)
FEW_KV_HEADS = replace(LARGE, num_kv_heads=8)
WITHIN = 0.05
"""How far the memory model may be from what was counted."""


def scheme_of(*methods, degree=1, stages=1, recompute=False):
    return PipelineConfig(
        degree=degree,
        stage_layers=(SPEC.num_layers // stages,) * stages,
        recompute=(recompute,) * SPEC.num_layers,
        methods=tuple(map(Method, methods)),
        weights=WEIGHTS_OF.get(Method(methods[0]), WeightPlacement.WHOLE),
    )


def plan_of(*pipelines):
    """A plan of (scheme, lengths of each micro-batch) on consecutive ranks."""
    made, rank, sequence = [], 0, 0
    for scheme, packs in pipelines:
        micro_batches = []
        for lengths in packs:
            ids = tuple(range(sequence, sequence := sequence + len(lengths)))
            micro_batches.append(
                PlannedMicroBatch(pack=Pack(ids=ids, lengths=tuple(lengths)), time_s=1.0, peak_bytes=1)
            )
        ranks = tuple(range(rank, rank := rank + scheme.num_devices))
        made.append(Pipeline(ranks=ranks, scheme=scheme, micro_batches=tuple(micro_batches)))
    return StepPlan(
        step=0, policy="test", pipelines=tuple(made), loss_normaliser=100, update_s=0.0, time_s=1.0, lower_bound_s=1.0
    )


HETEROGENEOUS = plan_of(
    (scheme_of("ulysses", "ring", degree=2, stages=2), [[512, 256], [768]]),
    (scheme_of("megatron_ts", "ulysses_z", degree=2, recompute=True), [[768]]),
    (scheme_of("dense", "dense", stages=2), [[256, 512]] * 3),
)


ALONE = plan_of((scheme_of("dense", "dense"), [[64]]))
LONG = plan_of((scheme_of("dense", "dense"), [[8192, 8192, 4096]]))
OFFLOADED = plan_of((replace(scheme_of("ring", "ring", degree=2), offload=(True, True)), [[768]]))
TWO_LARGE = plan_of(
    (scheme_of("dense", "dense"), [[16384, 16384]]),
    (scheme_of("ulysses", "ulysses", degree=2, recompute=True), [[65536]]),
)
DEEP = replace(LARGE, num_layers=8)


def on_deep(scheme):
    """The scheme with four times the layers."""
    stages = tuple(4 * layers for layers in scheme.stage_layers)
    return replace(scheme, stage_layers=stages, methods=4 * scheme.methods, recompute=4 * scheme.recompute)


TWO_NODES = plan_of(
    (on_deep(scheme_of("ulysses", "ulysses", degree=2, stages=2)), [[512]]),
    *[(on_deep(scheme_of("dense", "dense", stages=2)), [[512]])] * 2,
)
IN_FLOAT32 = load(None, ["train.dtype=float32"])
ON_HOST = load(None, ["train.dtype=bfloat16", "train.offload_state=host"])


def run_of(plan, *ranks, model=SPEC, config=CONFIG, nodes=1):
    cluster = cluster_preset(f"{nodes}x{plan.num_devices // nodes}xH100-80GB")
    return PlanToRun(plan=plan, model=model, cluster=cluster, config=config, ranks=ranks)


IN_DEEP_RUNS = ("alone", "alone, state on host", "one node")
"""Of one rank, and with as many units on their way: others here have as many."""


@pytest.fixture(scope="module")
def documents(request):
    """Every dry run of these tests, from one process."""
    runs = {
        "heterogeneous": run_of(HETEROGENEOUS, 1, 4, 7),
        "heterogeneous, state on host": run_of(HETEROGENEOUS, 4, config=ON_HOST),
        "alone": run_of(ALONE, 0),
        "alone, state on host": run_of(ALONE, 0, config=ON_HOST),
        "offloaded": run_of(OFFLOADED, 0),
        "large": run_of(TWO_LARGE, 1, model=LARGE),
        "two nodes": run_of(TWO_NODES, 0, model=DEEP, nodes=2),
        "one node": run_of(TWO_NODES, 7, model=DEEP),
        "float32": run_of(LONG, 0, model=FEW_KV_HEADS, config=IN_FLOAT32),
        "float32, shared": run_of(HETEROGENEOUS, 0, config=IN_FLOAT32),
        "slices": run_of(slices.plan_in_slices(2), 2, model=slices.MODEL),
    }
    if request.config.getoption("markexpr") != "deep":
        runs = {name: run for name, run in runs.items() if name not in IN_DEEP_RUNS}
    return dict(zip(runs, dry_run_plans(list(runs.values()))))


@pytest.mark.parametrize(("name", "rank"), [("heterogeneous", 4), pytest.param("alone", 0, marks=pytest.mark.deep)])
def test_a_state_in_host_memory_takes_nothing_of_the_device(documents, name, rank):
    """One rank alone keeps the weights, and of gradients what is on its way to the host."""
    rows = [
        next(row for row in documents[key]["ranks"] if row["rank"] == rank) for key in (name, f"{name}, state on host")
    ]
    device, host = (row["peak_bytes"] for row in rows)
    assert host["optimizer"] == 0 < device["optimizer"] and host["weights"] == device["weights"]
    assert sum(host.values()) <= sum(device.values()) - 0.9 * device["optimizer"] + device["weights"]
    assert (host["gradients"] == 0) == (name == "alone")
    assert rows[0]["races"] == rows[1]["races"] == []
    waits = {wait["line"].partition(" in ")[2] for wait in rows[1]["synchronisations"]}
    assert waits == {"global_norm"}, "copies are waited for on other ways"


def test_activations_in_host_memory_move_on_streams_of_their_own_and_nothing_waits(documents):
    """What two layers keep goes out and comes back, but for the last one's, whose backward follows at once."""
    (row,) = documents["offloaded"]["ranks"]
    copies = {copy["direction"]: copy for copy in row["host_copies"] if copy["stream"]}
    kept_bytes = layer_volume(SPEC, Method.RING, degree=2, dtype="bfloat16").kept_bytes * 768
    assert copies["to the host"]["bytes"] == pytest.approx(2 * kept_bytes, rel=0.02)
    assert 2 * copies["to the device"]["bytes"] == copies["to the host"]["bytes"]
    assert copies["to the host"]["stream"] != copies["to the device"]["stream"]
    assert {wait["line"].partition(" in ")[2] for wait in row["synchronisations"]} == {"global_norm"}
    assert row["races"] == []
    copied = [done for done in row["stream_order"] if done["stream"] != "kernels" and "copy" in done["kind"]]
    assert {done["stream"]: done["kind"] for done in copied} == {
        "stream #1": "copy to the host", "stream #2": "copy to the device",
    }  # fmt: skip
    awaited = {name for done in row["stream_order"] if done["stream"] == "kernels" for name in done["waits_for"]}
    assert {"stream #1", "stream #2"} < awaited, "memory is freed once it is copied, and used once it is back"


@pytest.mark.parametrize("nodes", [pytest.param("one node", marks=pytest.mark.deep), "two nodes"])
def test_weights_and_gradients_on_their_way_take_the_memory_of_few_units(documents, nodes):
    """However many are pulled or pushed at once: they would take several times as much again."""
    unit_bytes = 4 * DEEP.layer_matmul_params
    for row in documents[nodes]["ranks"]:
        assert row["peak_total_bytes"] <= 1.01 * row["predicted"]["peak_total_bytes"] + unit_bytes
        assert row["races"] == [], "nobody reads weights that are not there yet"


def test_collectives_of_every_rank_are_those_of_the_proven_plan(documents):
    document = documents["heterogeneous"]
    assert document["differences"] == [] and len(document["ranks"]) == 3
    assert [row["races"] for row in document["ranks"]] == [[]] * 3


def test_attention_in_float32_keeps_no_logits_and_what_costs_leave_out_of_it_is_said(documents):
    (row,) = documents["float32"]["ranks"]
    predicted = row["predicted"]
    assert row["peak_total_bytes"] < 1.1 * predicted["peak_total_bytes"], "keys and values of all heads are kept"
    assert row["flops"]["attention"] == pytest.approx(predicted["flops"]["attention"], rel=0.01)
    assert row["flops"]["products"] <= 1.001 * predicted["flops"]["products"], "none for logits of attention"
    assert documents["float32"]["not_predicted"] is None and documents["heterogeneous"]["not_predicted"] is None
    assert "no fused kernel for attention in float32 where" in documents["float32, shared"]["not_predicted"]


def test_flops_and_sent_bytes_are_those_of_the_closed_forms(documents):
    for row in documents["heterogeneous"]["ranks"]:
        predicted = row["predicted"]
        # Tokens without a target skip the head: a rank may have one more of them than its share.
        assert row["flops"]["products"] == pytest.approx(predicted["flops"]["products"], rel=0.001), row["rank"]
        # Costs count half of each square of attention, of which kernels compute the diagonal too.
        assert row["flops"]["attention"] == pytest.approx(predicted["flops"]["attention"], rel=0.01), row["rank"]


def test_the_host_waits_for_the_device_in_the_update_alone(documents):
    for row in documents["heterogeneous"]["ranks"]:
        waits = [(wait["line"].partition(" in ")[2], wait["count"]) for wait in row["synchronisations"]]
        assert waits == [("global_norm", 1)], (row["rank"], row["synchronisations"])


def test_peaks_are_within_five_percent_of_the_memory_model(documents):
    for row in documents["large"]["ranks"]:
        assert row["predicted"]["peak_total_bytes"] == pytest.approx(row["peak_total_bytes"], rel=WITHIN), row["rank"]
    assert documents["large"]["differences"] == []


def test_peaks_of_stages_in_slices_are_near_the_closed_forms(documents):
    slices.assert_near(documents["slices"])


@pytest.mark.deep
@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_ranks_together_write_a_whole_checkpoint(name):
    cluster, config = cluster_preset("1x8xH100-80GB"), load(None, ["train.dtype=bfloat16", f"optim.name={name}"])
    document = dry_run_plan(HETEROGENEOUS, SPEC, cluster, config=config, ranks=range(8))
    written = [row["checkpoint"]["bytes"] for row in document["ranks"]]
    if name == "adamw":  # weights and two averages in float32, shared out evenly
        assert sum(written) == 3 * 4 * SPEC.num_params
        assert max(written) <= 1.01 * min(written)
    else:  # whole parameters, dealt; of averages one row and one column
        assert 4 * SPEC.num_params < sum(written) < 4.2 * SPEC.num_params


def test_a_rank_that_is_not_there_is_refused():
    with pytest.raises(InputError, match=r"rank 8 is none of the plan's 8 ranks; name one up to 7"):
        dry_run_plan(HETEROGENEOUS, SPEC, cluster_preset("1x8xH100-80GB"), config=CONFIG, ranks=[8])


def test_while_ranks_run_their_number_is_shown(monkeypatch):
    shown, bar = [], mock.MagicMock()
    bar.__enter__().add_task.side_effect = lambda words, total: shown.append(words)

    def ran(command, **options):
        assert shown == ["run 3 ranks on fake tensors"]
        Path(command[-1]).write_text(json.dumps({"answers": [[], []]}))

    monkeypatch.setattr(subprocess, "run", ran)
    monkeypatch.setattr(dry_run, "progress", lambda: bar)
    assert dry_run.run_process([{"ranks": [0, 1]}, {"ranks": [5]}]) == [[], []]
