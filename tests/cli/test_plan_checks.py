"""A file of plans is held against the run before its first step: ranks, layers, batches, memory."""

import json
from dataclasses import replace

import pytest

from lengthwise.cli.plan_checks import check_plans_fit, check_plans_of_run
from lengthwise.config.run_config import load
from lengthwise.core.device_spec import CONTEXT_BYTES, DEVICES
from lengthwise.core.errors import CheckError, InfeasibleError, InputError
from lengthwise.core.specs import cluster_preset
from lengthwise.core.wording import GIB
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.data.corpus import open_corpus
from lengthwise.plan.plan_file import PlanFile
from lengthwise.session.planning import resolve_cluster
from lengthwise.session.trained_model import resolve_model
from tests.cli.bad_inputs import good_inputs


@pytest.fixture
def inputs(tmp_path_factory):
    return good_inputs(tmp_path_factory.getbasetemp())


@pytest.fixture
def config(inputs):
    return load(
        None, [f"data.index={inputs}/index", "data.sequences_per_step=4", "train.steps=3", "cluster.name=1xcpu"]
    )


def by_hand(inputs, path, change):
    documents = [json.loads(line) for line in (inputs / "plans.jsonl").read_text().splitlines()]
    for document in documents:
        del document["digest"]
    change(documents[1])
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return PlanFile(path)


def test_plans_of_the_run_pass(inputs, config):
    plans, corpus = PlanFile(inputs / "plans.jsonl"), open_corpus(config.data)
    check_plans_of_run(config, plans, corpus)
    check_plans_of_run(config, plans, corpus, first_step=2)
    check_plans_fit(plans, config, resolve_model(config, corpus), resolve_cluster(config))


def test_padding_that_no_device_holds_is_refused_before_the_first_step(inputs, config, tmp_path):
    def pad(document):
        document["pipelines"][0]["micro_batches"][0]["padded_to"] = 10**9

    plans = by_hand(inputs, tmp_path / "plans.jsonl", pad)
    with pytest.raises(
        InfeasibleError, match=r"step 1: a micro-batch of 4,000,000,000 tokens .* needs .* a device has"
    ):
        check_plans_fit(plans, config, resolve_model(config, open_corpus(config.data)), resolve_cluster(config))


def test_plans_that_fit_with_the_state_in_host_memory_pass_with_it_there_and_name_that_setting(inputs, config):
    plans, spec = PlanFile(inputs / "plans.jsonl"), resolve_model(config, open_corpus(config.data))
    cluster = cluster_preset("1x1xH100-80GB")
    on_device, on_host = (
        max(
            int(cost.peak_bytes(num_tokens, scheme, num_devices=1)) for scheme, (num_tokens, _) in plans.largest.items()
        )
        for cost in (AnalyticCost(model=spec, cluster=cluster, state_on_host=place) for place in (False, True))
    )
    between = replace(cluster, device=replace(cluster.device, memory_bytes=(on_device + on_host) // 2))
    with pytest.raises(InfeasibleError, match=r"Set train.offload_state=host, with which it fits, plan again"):
        check_plans_fit(plans, config, spec, between)
    placed = config.model_copy(update={"train": config.train.model_copy(update={"offload_state": "host"})})
    check_plans_fit(plans, placed, spec, between)


def test_a_late_plan_for_other_sequences_layers_or_ranks_is_refused_before_the_first_step(inputs, config, tmp_path):
    corpus = open_corpus(config.data)
    spec, cluster = resolve_model(config, corpus), resolve_cluster(config)

    def other_ids(document):
        document["pipelines"][0]["micro_batches"][0]["ids"][0] = 11

    with pytest.raises(CheckError, match="step 1 loses"):
        check_plans_of_run(config, by_hand(inputs, tmp_path / "a.jsonl", other_ids), corpus)
    plans = PlanFile(inputs / "plans.jsonl")
    with pytest.raises(InputError, match="is for 1 ranks, the run has 2"):
        check_plans_fit(plans, config, spec, replace(cluster, devices_per_node=2))
    with pytest.raises(InputError, match="layers"):
        check_plans_fit(plans, config, replace(spec, num_layers=7), cluster)


def test_naming_the_cluster_keeps_the_margin_of_a_gpus_memory():
    named = resolve_cluster(load(None, ["cluster.name=8xH100-80GB"]))
    physical = DEVICES["H100-80GB"].memory_bytes
    assert named.device.memory_bytes == physical - CONTEXT_BYTES - int(0.06 * physical)
    none = resolve_cluster(load(None, ["cluster.name=8xH100-80GB", "plan.memory_margin=0"]))
    assert (none.device.memory_bytes, none.device.margin_bytes) == (physical - CONTEXT_BYTES, CONTEXT_BYTES)
    asked = resolve_cluster(load(None, ["cluster.name=8xH100-80GB", "cluster.memory_gib=79"]))
    assert asked.device.memory_bytes == 79 * GIB
    assert resolve_cluster(load(None, ["cluster.name=2xcpu"])).device.memory_bytes == 8 * GIB
    halved = resolve_cluster(load(None, ["cluster.name=2xcpu", "plan.memory_margin=0.5"]))
    assert (halved.device.memory_bytes, halved.device.margin_bytes) == (4 * GIB, 4 * GIB)
