"""The deciding half through the command line."""

import json

import numpy as np
import pytest

from lengthwise.config.run_config import load
from lengthwise.core.errors import InputError
from lengthwise.session.trained_model import resolve_model
from tests.cost.profiles import MANY_LENGTHS, row, table

NOISY = [row(lengths, noise=1 + 0.05 * (-1) ** n) for n, lengths in enumerate(MANY_LENGTHS)]


@pytest.fixture
def lengths(tmp_path, cli):
    """An index of lengths alone."""
    np.save(tmp_path / "lengths.npy", np.random.default_rng(0).lognormal(6.5, 1.2, 2000).astype(np.int64) + 2)
    code, _, err = cli("index", tmp_path / "lengths.npy", "--out", tmp_path / "index")
    assert code == 0, err
    return tmp_path / "index"


def arguments(lengths, *more):
    return [
        f"data.index={lengths}", "model.preset=llama-7b", "cluster.name=1x8xH200-141GB", "train.dtype=bfloat16",
        "data.tokens_per_step=200000", "plan.recompute=all", "plan.policy=static", *more,
    ]  # fmt: skip


def test_plans_and_simulations_agree_and_need_no_profile(cli, lengths, tmp_path):
    code, out, _ = cli("plan", *arguments(lengths), "--steps", 3, "--out", tmp_path / "plans.jsonl", "--json")
    assert code == 0
    plans = json.loads(out)["plans"]
    assert [plan["step"] for plan in plans] == [0, 1, 2]
    assert all(plan["time_s"] >= plan["lower_bound_s"] > 0 for plan in plans)
    trace = tmp_path / "trace.json.gz"
    code, out, _ = cli("simulate", tmp_path / "plans.jsonl", "--trace", trace, "--json")
    assert code == 0
    summary = json.loads(out)
    assert summary["step_time_s"] == pytest.approx(sum(plan["time_s"] for plan in plans) / 3)
    assert trace.stat().st_size > 100
    planned_here = json.loads(cli("simulate", *arguments(lengths), "--steps", 3, "--json")[1])
    assert summary == planned_here | {"mfu": None}, "a file of plans does not say what its model computes"
    assert 0 < planned_here["mfu"] < 1


def test_many_steps_are_summarised_and_shown_when_asked_for(cli, lengths):
    given = [*arguments(lengths, "plan.policy=static"), "--steps", 12]
    document = json.loads(cli("plan", *given, "--json")[1])
    summary, times = document["summary"], sorted(plan["time_s"] for plan in document["plans"])
    assert (summary["step_time_s"]["least"], summary["step_time_s"]["most"]) == (times[0], times[-1])
    assert summary["step_time_s"]["median"] == pytest.approx((times[5] + times[6]) / 2)
    assert sum(scheme["token_share"] for scheme in summary["schemes"].values()) == pytest.approx(1)
    short, long = cli("plan", *given)[1], cli("plan", *given, "--verbose")[1]
    assert "12 steps of policy static" in short and "longest" not in short
    assert "12 steps of policy static" in long and "longest" in long and len(long.splitlines()) > 12
    assert "longest" in cli("plan", *given[:-1], 3)[1]


def test_a_model_that_is_only_priced_is_planned_and_not_trained(cli, lengths, tmp_path):
    config = {
        "model_type": "mixtral", "hidden_act": "silu", "hidden_size": 512, "intermediate_size": 1024,
        "num_attention_heads": 8, "num_hidden_layers": 4, "num_key_value_heads": 4, "num_experts_per_tok": 2,
        "num_local_experts": 4, "vocab_size": 8192,
    }  # fmt: skip
    (tmp_path / "moe").mkdir()
    (tmp_path / "moe" / "config.json").write_text(json.dumps(config))
    given = [word for word in arguments(lengths, f"model.hf={tmp_path / 'moe'}") if "preset" not in word]
    device = tmp_path / "box.yaml"
    device.write_text(
        "{memory_gib: 96, bfloat16_tflops: 500, memory_gbyte_per_s: 1800, link_gbyte_per_s: 64,"
        " network_gbit_per_s: 200}"
    )
    given.append(f"cluster.name=1x8x{device}")
    for command in ("plan", "simulate"):
        code, _, err = cli(command, *given, "--steps", 1, "--json")
        assert code == 0 and "not priced in moe: routing between experts" in err
    with pytest.raises(InputError, match=r"config\.json: architectures = .* is not supported"):  # as training reads it
        resolve_model(load(None, given), None)


def test_devices_share_layers_unless_settings_say_no(cli, lengths):
    long = [*arguments(lengths, "--steps", 1, "--json"), "plan.policy=static"]
    degrees = [
        max(scheme["degree"] for scheme in json.loads(cli("plan", *long, *limit)[1])["plans"][0]["schemes"])
        for limit in ([], ["plan.max_degree=1"])
    ]
    assert degrees[0] > degrees[1] == 1


def test_all_plans_of_a_file_are_simulated_and_what_is_not_is_said(cli, lengths, tmp_path):
    file = tmp_path / "plans.jsonl"
    assert cli("plan", *arguments(lengths, "plan.policy=static"), "--steps", 12, "--out", file)[0] == 0
    assert json.loads(cli("simulate", file, "--json")[1])["num_steps"] == 12
    assert json.loads(cli("simulate", file, "--steps", 3, "--json")[1])["num_steps"] == 3
    code, _, err = cli("simulate", file, "cluster.name=2xcpu")
    assert code == 2 and "cluster.name=2xcpu does not apply" in err
    file.write_bytes(file.read_bytes()[:-5])
    code, out, err = cli("simulate", file, "--json")
    assert (code, json.loads(out)["num_steps"]) == (0, 11) and "11 plans are whole" in err


def test_a_file_of_plans_holds_those_of_all_steps_of_the_run(cli, lengths, tmp_path):
    file, short = tmp_path / "plans.jsonl", arguments(lengths, "plan.policy=static", "train.steps=14")
    assert cli("plan", *short, "plan.max_degree=2", "--out", file)[0] == 0
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == list(range(14))
    assert len(json.loads(cli("plan", *short, "--json")[1])["plans"]) == 10
    cli("plan", *short, "--steps", 2, "--out", file)
    assert len(file.read_text().splitlines()) == 2


def test_batches_that_groups_balance_are_planned_and_simulated_alike(cli, lengths):
    formed = arguments(lengths, "plan.policy=dcp-inter", "plan.form_batches=true")
    ids = {}
    for g_min in (1, 64):
        code, out, err = cli("plan", *formed, f"plan.g_min={g_min}", "--steps", 2, "--json")
        assert code == 0, err
        plans = json.loads(out)["plans"]
        packs = [m for plan in plans for pipeline in plan["pipelines"] for m in pipeline["micro_batches"]]
        ids[g_min] = [id for pack in packs for id in pack["ids"]]
        assert len(set(ids[g_min])) == len(ids[g_min])
    assert len(ids[64]) > len(ids[1])
    simulated = json.loads(cli("simulate", *formed, "plan.g_min=64", "--steps", 2, "--json")[1])
    assert simulated["step_time_s"] == pytest.approx(sum(plan["time_s"] for plan in plans) / 2)
    code, _, err = cli("plan", *formed, "train.epochs=1", "--out", "plans.jsonl")
    assert code == 2 and "set train.steps" in err


def test_plans_drawn_at_random_are_those_that_training_draws(cli, lengths):
    options = ["plan.method=random", "plan.max_degree=8", "plan.max_stages=2", "plan.policy=static"]
    code, out, err = cli("plan", *arguments(lengths, *options), "--steps", 8, "--json")
    assert code == 0, err
    plans = json.loads(out)["plans"]
    schemes = [scheme for plan in plans for scheme in plan["schemes"]]
    assert len({(scheme["degree"], len(scheme["stage_layers"])) for scheme in schemes}) > 2
    micro_batches = [m for plan in plans for pipeline in plan["pipelines"] for m in pipeline["micro_batches"]]
    assert len({method for m in micro_batches for method in m["methods"] or []}) > 3


@pytest.mark.parametrize("options", [("plan", "--out"), ("simulate", "--html"), ("simulate", "--trace")], ids=" ".join)
def test_where_to_write_is_checked_before_the_work(cli, lengths, tmp_path, options, monkeypatch):
    command, option = options
    monkeypatch.setattr("lengthwise.session.plan_steps.make_planner", None)  # would fail if it were called
    for place, words in ((tmp_path, "is a folder"), (tmp_path / "nowhere" / "x", "there is no folder")):
        code, _, err = cli(command, *arguments(lengths), option, place)
        assert code == 2 and words in err
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.deep
def test_auto_beats_the_baselines_on_long_tailed_lengths(cli, lengths):
    speeds = {}
    for policy in ("padded", "static", "packed", "auto"):
        code, out, err = cli("simulate", *arguments(lengths, f"plan.policy={policy}"), "--json")
        assert code == 0, err
        speeds[policy] = json.loads(out)["tokens_per_s"]
    assert max(speeds, key=speeds.get) == "auto"


def test_tables_are_printed_for_people(cli, lengths):
    shown = cli("plan", *arguments(lengths, "cluster.name=8xA100-80GB"), "--steps", 1)[1]
    assert "gap" in shown and "90 % of predictions are within 11% of public measurements of the device" in shown
    assert "tokens/s" in cli("simulate", *arguments(lengths), "--steps", 1)[1]


@pytest.mark.parametrize(
    ("command", "changes", "code", "message"),
    [
        ("plan", ["cluster.name="], 2, "cluster.name is not set"),
        ("plan", ["plan.policy=aut"], 2, "'auto' or MODULE:FUNCTION of your own, not 'aut'"),
        ("plan", ["data.index="], 2, "data.index is not set"),
        ("plan", ["cluster.name=8xA100-40GB", "plan.max_degree=1", "plan.max_stages=1"], 3, "a device has 36.0 GiB"),
        ("plan", ["plan.profile=nowhere.json"], 2, "no profile at nowhere.json"),
        ("simulate", ["cluster.nam=x"], 2, "did you mean cluster.name?"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_the_right_exit_code(cli, lengths, command, changes, code, message):
    found, _, err = cli(command, *arguments(lengths, *changes))
    assert found == code
    assert message in err


def test_an_empty_plan_file_is_refused(cli, tmp_path):
    (tmp_path / "plans.jsonl").write_text("")
    code, _, err = cli("simulate", tmp_path / "plans.jsonl")
    assert code == 2
    assert "no plans in" in err


def test_the_printed_configuration_is_a_configuration(cli, tmp_path):
    (tmp_path / "config.yaml").write_text(cli("config")[1])
    first = cli("config", tmp_path / "config.yaml", "optim.lr=0.5", "--json")[1]
    assert json.loads(first)["optim"]["lr"] == 0.5
    assert "llama-7b" in cli("config", "--presets")[1]


@pytest.mark.deep
def test_the_same_profile_may_be_fitted_or_learned(cli, lengths, tmp_path):
    table(NOISY).save(tmp_path / "profile.json")
    own = ["model.preset=llama-tiny", "train.dtype=float32", "plan.recompute=auto", "data.max_length=4096"]
    own += ["data.over_length=split", f"plan.profile={tmp_path / 'profile.json'}", "cluster.name=2xcpu"]
    times_s = {}
    for cost in ("fitted", "hybrid"):
        code, out, err = cli("plan", *arguments(lengths, *own, f"plan.cost={cost}"), "--steps", 1, "--json")
        assert code == 0, err
        document = json.loads(out)
        times_s[cost] = document["plans"][0]["time_s"]
        assert (document["cost_error"] is None) == (cost == "hybrid")
    assert times_s["fitted"] != times_s["hybrid"]
    assert times_s["fitted"] == pytest.approx(times_s["hybrid"], rel=0.5)
    own.remove(f"plan.profile={tmp_path / 'profile.json'}")
    code, _, err = cli("plan", *arguments(lengths, *own, "plan.cost=hybrid"), "--steps", 1)
    assert code == 2 and "plan.cost=hybrid: such costs are learned from a profile, and there is none" in err
