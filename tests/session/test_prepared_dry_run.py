"""Dry runs of models of transformers: a prepared step on fake tensors, weights whole or gathered by layer."""

import json
from dataclasses import replace

import pytest

from lengthwise.config.run_config import load
from lengthwise.core.batch import Pack
from lengthwise.core.layer_profile import AS_PREPARED, SPLIT_BACKWARD, LayerVariant
from lengthwise.core.pipeline_config import Method, uniform_scheme
from lengthwise.core.planned_micro_batch import PlannedMicroBatch, PlannedSlice
from lengthwise.core.specs import cluster_preset
from lengthwise.core.step_plan import Pipeline, StepPlan
from lengthwise.models.stock_model import read_stock_model
from lengthwise.session.dry_run import run_process
from lengthwise.session.prepared_dry_run import PreparedDryRun, differences_of, schemes_of

SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 16384, "max_position_embeddings": 8192,
}  # fmt: skip
MODELS = {
    "llama": {"architectures": ["LlamaForCausalLM"], **SIZES},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], **SIZES, "head_dim": 16, "tie_word_embeddings": True},
    "mistral": {"architectures": ["MistralForCausalLM"], **SIZES, "sliding_window": 512},
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 16384,
        "n_positions": 8192, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    },
    "modernbert": {
        "architectures": ["ModernBertForMaskedLM"], **SIZES, "mask_token_id": 4, "pad_token_id": 0, "cls_token_id": 1,
        "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2,
    },
}  # fmt: skip
BY_HAND = {
    "architectures": ["BloomForCausalLM"], "model_type": "bloom", "hidden_size": 64, "n_layer": 3, "n_head": 4,
    "vocab_size": 512, "hidden_dropout": 0.0, "attention_dropout": 0.0, "pad_token_id": 0,
}  # fmt: skip
"""Of a model that computes attention without a kernel, with a bias for every pair of tokens."""
NUM_RANKS, TOKENS = 4, 32768
ROUNDED = 4096
"""Bytes of padding of all units."""
WITHIN = 0.05
"""How far the memory model may be from what was counted."""
BEYOND = 0.3
"""How far it may be above that of slices: plans count on larger ones, and on all that a pass may have at once."""


def plan_of(degree):
    """Two micro-batches of four sequences for each group of ``degree`` ranks."""
    scheme = uniform_scheme(3, degree=degree, method=Method.DENSE if degree == 1 else Method.ULYSSES, recomputed=0)
    pipelines = []
    for first in range(0, NUM_RANKS, degree):
        packs = [
            Pack(ids=tuple(range(start, start + 4)), lengths=(TOKENS // 4,) * 4) for start in (8 * first, 8 * first + 4)
        ]
        micro_batches = tuple(PlannedMicroBatch(pack=pack, time_s=1.0, peak_bytes=1) for pack in packs)
        pipelines.append(
            Pipeline(ranks=tuple(range(first, first + degree)), scheme=scheme, micro_batches=micro_batches)
        )
    return StepPlan(
        step=0, policy="test", pipelines=tuple(pipelines), loss_normaliser=1, update_s=0.0, time_s=1.0,
        lower_bound_s=1.0,
    )  # fmt: skip


def with_shared_gradients(plan):
    pipelines = (replace(p, scheme=replace(p.scheme, shard_gradients=True)) for p in plan.pipelines)
    return replace(plan, pipelines=tuple(pipelines))


def in_groups_of_heads(plan):
    changes = {"recompute": (True,) * 3, "head_groups": 2}
    return replace(plan, pipelines=tuple(replace(p, scheme=replace(p.scheme, **changes)) for p in plan.pipelines))


def in_split_stages(plan):
    """Two micro-batches on two stages of two ranks, of which the second has two layers and splits its backwards."""
    (pipeline, _) = plan.pipelines
    scheme = replace(pipeline.scheme, stage_layers=(1, 2), zero_bubble=True)
    micro_batches = (replace(m, weights_s=0.2) for m in pipeline.micro_batches)
    return replace(plan, pipelines=(Pipeline(ranks=(0, 1, 2, 3), scheme=scheme, micro_batches=tuple(micro_batches)),))


def in_sliced_stages(plan):
    """Two micro-batches on two stages of two ranks, in three slices."""
    (pipeline, _) = plan.pipelines
    scheme = replace(pipeline.scheme, stage_layers=(1, 2), slices=3)
    slices = tuple(PlannedSlice(size, 1 / 3) for size in (15_000, 10_000, 7_768))
    micro_batches = (replace(m, slices=slices) for m in pipeline.micro_batches)
    return replace(plan, pipelines=(Pipeline(ranks=(0, 1, 2, 3), scheme=scheme, micro_batches=tuple(micro_batches)),))


PLANS = {"whole": plan_of(1), "by-layer": plan_of(2)}
PLANS["sharded gradients"] = with_shared_gradients(plan_of(2))
PLANS["groups of heads"] = in_groups_of_heads(PLANS["sharded gradients"])
PLANS["split backwards"] = in_split_stages(plan_of(2))
PLANS["slices"] = in_sliced_stages(plan_of(2))
"""By what ranks hold of weights and gradients; in groups of heads; two in stages."""
IN_DEEP_RUNS = ("whole", "groups of heads", "split backwards", "slices")
"""Plans that tests of dry runs, groups of heads, stages and slices have as well."""
SOME_PLANS = [pytest.param(name, marks=pytest.mark.deep) if name in IN_DEEP_RUNS else name for name in PLANS]
RANKS = {
    "whole": [0],
    "by-layer": [3],
    "sharded gradients": [0],
    "groups of heads": [0],
    "split backwards": [2],
    "slices": [2],
}


def plans_for(model, *, is_deep):
    """By name; only models that predict next tokens compute in slices."""
    left_out = () if is_deep else IN_DEEP_RUNS
    return {
        name: plan for name, plan in PLANS.items()
        if name not in left_out and (name != "slices" or model != "modernbert")
    }  # fmt: skip


def is_needed(degree, method, lengths, variant):
    """No plan here has one rank in a stage by itself, which splits no backward, or alone with groups of heads."""
    return degree > 1 or not (variant["split_backward"] or (variant["head_groups"] > 1 and lengths != (TOKENS,)))


def profile_by_hand(folder, config):
    """The request for a profile of ``BY_HAND``."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(BY_HAND))
    trial = PreparedDryRun(config, read_stock_model(folder), cluster_preset("1xcpu"))
    return trial.profile_request(96, [(1, Method.DENSE)], (32,) * 3)


@pytest.fixture(
    scope="module", params=[name if name == "llama" else pytest.param(name, marks=pytest.mark.deep) for name in MODELS]
)
def dry_runs(request, tmp_path_factory):
    """What ranks did in the step of a model, by what they hold of its weights."""
    cluster, config = cluster_preset("1x4xH100-80GB"), load(None, ["train.dtype=bfloat16"])
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "config.json").write_text(json.dumps({**MODELS[request.param], "model_type": request.param}))
    trial = PreparedDryRun(config, read_stock_model(folder), cluster)
    is_deep = request.config.getoption("markexpr") == "deep"
    plans = plans_for(request.param, is_deep=is_deep)
    schemes = sorted({scheme for plan in plans.values() for scheme in schemes_of(plan)})
    steps = [
        trial.step_request(plan, RANKS[name], num_kept=0 if name == "by-layer" else None)
        for name, plan in plans.items()
    ]
    variants = AS_PREPARED, *[LayerVariant(head_groups=2), SPLIT_BACKWARD] * is_deep
    profiled = trial.profile_request(TOKENS, schemes, variants=variants)
    profiled["packs"] = [pack for pack in profiled["packs"] if is_needed(*pack)]
    others = [profile_by_hand(folder / "by hand", config)] if is_deep else []
    (profile,), *answers = run_process([profiled, *steps, *others])
    costs = {
        name: trial.cost_of(profile, longest=TOKENS, weights="by-layer" if name == "by-layer" else "whole")
        for name in plans
    }
    counted = {"counted layers": profile["rows"], "by hand": answers.pop() if is_deep else []}
    return counted | {
        name: [trial.beside_prediction(plan, costs[name], row, num_kept=0) for row in rows]
        for (name, plan), rows in zip(plans.items(), answers)
    }


def rows_of(dry_runs, weights):
    """What ranks did under one plan, if the model can be computed by it."""
    if weights not in dry_runs:
        pytest.skip("tokens of this model see later ones")
    return dry_runs[weights]


@pytest.mark.parametrize("weights", SOME_PLANS)
def test_peaks_are_within_five_percent_of_the_memory_model_of_prepared_models(dry_runs, weights):
    for row in rows_of(dry_runs, weights):
        ratio = row["predicted"]["peak_total_bytes"] / row["peak_total_bytes"]
        assert 1 - WITHIN <= ratio <= 1 + (BEYOND if weights == "slices" else WITHIN), row["rank"]


@pytest.mark.parametrize("weights", SOME_PLANS)
def test_no_tensor_has_a_number_for_every_token_and_word(dry_runs, weights):
    for row in rows_of(dry_runs, weights):
        own_tokens = TOKENS // PLANS[weights].pipelines[0].scheme.degree
        assert row["largest_allocation"][0] < own_tokens * SIZES["vocab_size"], row["largest_allocation"]


@pytest.mark.parametrize("weights", SOME_PLANS)
def test_collectives_are_among_planned_ranks_and_in_one_order(dry_runs, weights):
    rows = rows_of(dry_runs, weights)
    assert differences_of(PLANS[weights], rows) == []
    assert [row["races"] for row in rows] == [[]] * len(RANKS[weights]), "all that is gathered is awaited"


def test_units_are_gathered_for_the_forward_and_again_for_the_backward(dry_runs, request):
    if "llama" not in request.node.name:
        pytest.skip("other models have units without parameters, or tied ones")
    last = 4
    gathers = ["all_gather"] * (last + 1)
    expected = [*gathers, "all_gather", *["all_gather", "reduce_scatter"] * (last - 1), "reduce_scatter"]
    for row in dry_runs["by-layer"]:
        issued = [
            c["kind"] for c in row["collectives"] if c["operation"] == "micro-batch 0" and len(c["ranks"]) == NUM_RANKS
        ]
        assert sorted(issued) == sorted([*expected, "reduce_scatter"]) and issued[: last + 1] == gathers


@pytest.mark.deep
def test_a_rank_keeps_its_share_of_sharded_gradients(dry_runs):
    (row,), (whole, *_) = dry_runs["sharded gradients"], dry_runs["whole"]
    kept, of_all = (run["peak_bytes"]["gradients"] for run in (row, whole))
    assert 0 <= kept - of_all / 2 <= ROUNDED, "each unit's share is rounded up"
    units = row["predicted"]["peak_bytes"]["gradients"] - kept
    assert 0 < units <= of_all * (1 + 1 / 2), "plans reckon with two whole units beside it, and the share of one"


def test_gathered_state_is_a_share_and_two_units(dry_runs):
    for row in dry_runs["by-layer"]:
        state = {kind: row["peak_bytes"][kind] for kind in ("weights", "gradients", "optimizer")}
        assert sum(state.values()) <= 1.1 * sum(row["predicted"]["peak_bytes"].values()), state


@pytest.mark.deep
def test_groups_of_heads_keep_the_outputs_of_attention_once(dry_runs):
    """Ulysses keeps them in the split of heads, and what comes after in the split of tokens."""
    kept_bytes = {
        (max(lengths), degree, variant["head_groups"]): counted["kept_bytes"]
        for degree, _, lengths, variant, counted in dry_runs["counted layers"]
        if not variant["split_backward"]
    }
    of_outputs = 2 * SIZES["hidden_size"] * TOKENS // 2
    assert kept_bytes[TOKENS, 2, 1] - kept_bytes[TOKENS, 2, 2] == pytest.approx(of_outputs, rel=1e-3)
    assert kept_bytes[TOKENS, 1, 1] == pytest.approx(kept_bytes[TOKENS, 1, 2], rel=1e-3)


@pytest.mark.deep
def test_attention_by_hand_with_biases_is_traced_in_packs(dry_runs):
    (by_hand,) = dry_runs["by hand"]
    assert by_hand["by_sequence"] == ""


@pytest.mark.deep
def test_stages_are_run_and_hold_what_the_memory_model_says_of_each(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**MODELS["llama"], "model_type": "llama"}))
    trial = PreparedDryRun(load(None, ["train.dtype=bfloat16"]), read_stock_model(tmp_path), cluster_preset("3xcpu"))
    packs = [Pack(ids=tuple(range(n, n + 4)), lengths=(TOKENS // 4,) * 4) for n in (0, 4, 8)]
    micro_batches = tuple(PlannedMicroBatch(pack=pack, time_s=1.0, peak_bytes=1) for pack in packs)
    staged = Pipeline(ranks=(0, 1, 2), scheme=uniform_scheme(3, stages=3), micro_batches=micro_batches)
    plan = replace(PLANS["whole"], pipelines=(staged,), num_devices=0)
    requests = [trial.profile_request(TOKENS, schemes_of(plan)), trial.step_request(plan, [0, 1, 2], num_kept=0)]
    (profile,), rows = run_process(requests)
    cost = trial.cost_of(profile, longest=TOKENS, weights="by-layer")
    assert differences_of(plan, rows) == []
    for row in rows:
        row = trial.beside_prediction(plan, cost, row, num_kept=0)
        predicted = row["predicted"]["peak_bytes"]
        assert row["predicted"]["peak_total_bytes"] == pytest.approx(row["peak_total_bytes"], rel=WITHIN), row["rank"]
        assert row["peak_bytes"]["weights"] == pytest.approx(predicted["weights"], rel=WITHIN), row["rank"]
        assert row["peak_bytes"]["gradients"] == pytest.approx(predicted["gradients"], rel=WITHIN), row["rank"]
    first, middle, last = (row["peak_bytes"]["weights"] for row in rows)
    assert middle <= first < last, "the first and the last have what is outside of layers too"


@pytest.mark.deep
def test_biases_of_every_pair_of_tokens_are_predicted_and_are_gone_when_they_are_learned(tmp_path):
    """Of a small Bloom they are most of the peak; tensors without a device (meta) are no part of it."""
    (tmp_path / "config.json").write_text(json.dumps(BY_HAND))
    trial = PreparedDryRun(load(None, ["train.dtype=bfloat16"]), read_stock_model(tmp_path), cluster_preset("2xcpu"))
    packs = [Pack(ids=tuple(range(n, n + 4)), lengths=(768,) * 4) for n in (0, 4, 8, 12)]
    micro_batches = tuple(PlannedMicroBatch(pack=pack, time_s=1.0, peak_bytes=1) for pack in packs)
    pipelines = [
        Pipeline(ranks=(rank,), scheme=uniform_scheme(3), micro_batches=micro_batches[rank::2]) for rank in (0, 1)
    ]
    plan = replace(PLANS["whole"], pipelines=tuple(pipelines), num_devices=0)
    profile_request = trial.profile_request(768, schemes_of(plan), packs[0].lengths)
    (profile,), (row,) = run_process([profile_request, trial.step_request(plan, [0], num_kept=None)])
    row = trial.beside_prediction(plan, trial.cost_of(profile, longest=768, weights="whole"), row, num_kept=0)
    assert row["predicted"]["peak_total_bytes"] == pytest.approx(row["peak_total_bytes"], rel=WITHIN)
