"""Peaks of steps in slices are those of a dry run, and no longer sequence takes more than its keys and tokens do."""

from dataclasses import replace

import pytest

from lengthwise.config.run_config import load
from lengthwise.core.batch import Pack
from lengthwise.core.pipeline_config import Method, uniform_scheme
from lengthwise.core.planned_micro_batch import PlannedMicroBatch
from lengthwise.core.specs import cluster_preset, model_preset
from lengthwise.core.step_plan import Pipeline, StepPlan
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.plan.space.candidate import make_candidates
from lengthwise.plan.space.sliced_packs import cut_pack
from lengthwise.session.dry_run import PlanToRun, dry_run_plans

TOKENS, SLICES = 32_768, 3
MODEL = replace(model_preset("llama-7b"), num_layers=2)
CLUSTER = cluster_preset("1x4xH100-80GB")


def plan_in_slices(recomputed):
    scheme = uniform_scheme(2, degree=2, stages=2, method=Method.ULYSSES, recomputed=recomputed)
    scheme = replace(scheme, slices=SLICES)
    cost = AnalyticCost(model=MODEL, cluster=CLUSTER)
    (candidate,) = make_candidates([scheme], cost, num_devices=4)
    micro_batches = tuple(
        PlannedMicroBatch(
            pack=Pack(ids=(number,), lengths=(TOKENS,)), time_s=1.0,
            peak_bytes=int(cost.peak_bytes(TOKENS, scheme, num_devices=4)),
            slices=cut_pack(candidate, (TOKENS,), 1.0),
        )
        for number in range(2)
    )  # fmt: skip
    line = Pipeline(
        ranks=(0, 1, 2, 3), scheme=scheme, micro_batches=micro_batches, state_bytes=candidate.state_bytes
    )  # fmt: skip
    return StepPlan(
        step=0, policy="by hand", pipelines=(line,), loss_normaliser=1, update_s=0.0, time_s=1.0, lower_bound_s=1.0
    )


@pytest.mark.deep
@pytest.mark.parametrize("recomputed", [2, 0])
def test_peaks_of_both_stages_are_near_the_closed_forms_and_the_plan_is_run_as_proven(recomputed):
    config = load(None, ["train.dtype=bfloat16"])
    run = PlanToRun(plan=plan_in_slices(recomputed), model=MODEL, cluster=CLUSTER, config=config, ranks=(0, 2))
    (document,) = dry_run_plans([run])
    assert_near(document)


def assert_near(document):
    """Peaks are those of the closed forms, or somewhat less, and messages those of the plan."""
    assert not document["differences"]
    for row in document["ranks"]:
        ratio = row["predicted"]["peak_total_bytes"] / row["peak_total_bytes"]
        assert 0.95 <= ratio <= 1.25, (row["rank"], ratio)
