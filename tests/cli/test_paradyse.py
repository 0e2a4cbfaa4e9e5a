"""ParaDySe's loop on real ranks: profile, learned costs, a method per layer and length, training under a limit."""

import json

import numpy as np
import pytest

from lengthwise.config.run_config import load
from lengthwise.core.pipeline_config import Method, uniform_scheme
from lengthwise.core.run_folder import RunFolder
from lengthwise.core.specs import cluster_preset
from lengthwise.core.wording import GIB
from lengthwise.data.corpus import open_corpus
from lengthwise.session.planning import make_cost
from lengthwise.session.trained_model import resolve_model
from tests.cli import runs

METHODS = (Method.MEGATRON_TS, Method.METP)


def slow_down(path, method):
    """Makes the method four times as slow as it was measured: on a busy machine a repeat may find any the fastest."""
    profile = json.loads(path.read_text())
    for row in [row for part in profile["shared"] if part["method"] == method for row in part["rows"]]:
        for times, name in [(row, "time_s"), (row["parts"], "attention_s"), (row["parts"], "ffn_s")]:
            times[name] *= 4
    path.write_text(json.dumps(profile))


@pytest.mark.deep
def test_two_ranks_train_what_the_leanest_method_alone_holds_by_costs_learned_from_their_profile(tmp_path):
    own = [
        f"data.index={runs.make_corpus(tmp_path / 'corpus')}", "data.order=sorted", "data.max_length=1200",
        "data.over_length=split", "data.sequences_per_step=8", "train.steps=6", "model.num_layers=2",
        "plan.policy=paradyse", f"plan.methods=[{','.join(METHODS)}]", "plan.recompute=none", "cluster.name=2xcpu",
        "plan.tile_tokens=0",
    ]  # fmt: skip
    shared = ["--degree", 2, "--methods", "megatron_ts,metp", "--lengths", "quantiles:4", "--repeats", 1]
    profiled = runs.lengthwise("profile", *own, *shared, "--out", tmp_path / "profile.json", "--json")
    assert all(row["parts"]["ffn_s"] > 0 for part in json.loads(profiled.stdout)["shared"] for row in part["rows"])
    slow_down(tmp_path / "profile.json", Method.METP)
    own += ["plan.cost=hybrid", f"plan.profile={tmp_path / 'profile.json'}"]
    config = load(None, own)
    spec = resolve_model(config, open_corpus(config.data))
    schemes = [uniform_scheme(2, degree=2, method=method) for method in METHODS]

    def cost_within(memory_gib):
        return make_cost(config, spec, cluster_preset("2xcpu", memory_gib=memory_gib))

    ample = cost_within(4.0)
    share = ample.memory_limit_bytes / ample.cluster.device.memory_bytes
    needed = ample.peak_bytes(np.array([1200]), schemes[1], num_devices=2)[0]
    memory_gib = 1.02 * float(needed) / share / GIB
    reaches = [cost_within(memory_gib).max_tokens(scheme, num_devices=2) for scheme in schemes]
    assert reaches[0] < 1200 <= reaches[1], "METP alone holds the longest"
    limits = [f"cluster.memory_gib={memory_gib}", f"run_folder={tmp_path / 'run'}"]
    done = runs.lengthwise("train", *own, *limits, "--nproc", 2)
    assert "failed" not in done.stderr
    folder = RunFolder(tmp_path / "run")
    mixes = {
        micro_batch.methods or pipeline.scheme.methods for plan in folder.read_plans().values()
        for pipeline in plan.pipelines for micro_batch in pipeline.micro_batches
    }  # fmt: skip
    assert (Method.METP,) * 2 in mixes and {method for mix in mixes for method in mix} == set(METHODS)
    assert any(len(set(mix)) == 2 for mix in mixes), "layers of one micro-batch have different methods"
    assert {plan.policy for plan in folder.read_plans().values()} == {"paradyse"}
    losses = [row["loss/avg"] for row in folder.read_metrics()]
    assert len(losses) == 6 and losses[-1] < losses[0]
