"""`lengthwise.plan`, `compare` and `simulate`: what the commands do, without a command line, a file or torch."""

import inspect
import json
import sys
import textwrap

import numpy as np
import pytest

import lengthwise
from lengthwise.core.errors import InfeasibleError, InputError
from lengthwise.core.specs import cluster_preset, model_preset
from lengthwise.session.compare_lengths import CompareOptions
from lengthwise.session.plan_lengths import PlanningOptions

CLUSTER = {"model": "llama-tiny", "cluster": "4xH100-80GB", "tokens_per_step": 30_000, "max_stages": 1}


@pytest.fixture(scope="module")
def lengths():
    return np.random.default_rng(0).lognormal(6.0, 1.2, 2000).astype(np.int32) + 2


def test_the_function_keeps_its_name_when_the_package_of_the_planner_is_imported():
    import lengthwise.plan.planner

    assert inspect.isfunction(lengthwise.plan)


def test_plans_compute_every_sequence_of_the_step_once(lengths):
    plans = lengthwise.plan(lengths, steps=3, policy="packed", **CLUSTER)
    assert [plan.step for plan in plans] == [0, 1, 2]
    for plan in plans:
        ids = [id for p in plan.pipelines for m in p.micro_batches for id in m.pack.ids]
        assert len(ids) == len(set(ids)) and plan.policy == "packed" and plan.num_devices == 4


def test_names_and_values_give_the_same_plans(lengths, tmp_path):
    np.save(tmp_path / "lengths.npy", lengths)
    named = lengthwise.plan(tmp_path / "lengths.npy", steps=1, **CLUSTER)
    values = {**CLUSTER, "model": model_preset("llama-tiny"), "cluster": cluster_preset("4xH100-80GB")}
    assert [plan.to_json() for plan in named] == [
        plan.to_json() for plan in lengthwise.plan(lengths, steps=1, **values)
    ]


def test_a_margin_leaves_less_memory_to_plans_and_to_the_comparison(lengths):
    given = {**CLUSTER, "model": "llama-7b", "steps": 1, "max_length": 4096, "offload": "none"}
    assert lengthwise.plan(lengths, policy="packed", memory_margin=0.1, **given)
    for options in ({}, {"cluster": cluster_preset("4xH100-80GB")}):
        for call, policy in ((lengthwise.plan, {"policy": "packed"}), (lengthwise.compare, {"policies": ["packed"]})):
            with pytest.raises(InfeasibleError, match=r"a device has 14\.8 GiB"):
                call(lengths, memory_margin=0.8, **{**given, **options, **policy})
            with pytest.raises(InputError, match=r"memory_margin is 1\.5; it is a share"):
                call(lengths, memory_margin=1.5, **{**given, **options, **policy})


def test_a_model_and_a_device_of_one_s_own_are_named_by_their_files(lengths, tmp_path):
    config = {
        "model_type": "gemma2", "head_dim": 32, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
        "num_hidden_layers": 4, "num_key_value_heads": 2, "sliding_window": 512, "vocab_size": 8192,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    device = tmp_path / "box.yaml"
    device.write_text(
        "{memory_gib: 24, bfloat16_tflops: 165, memory_gbyte_per_s: 1000, link_gbyte_per_s: 32,"
        " network_gbit_per_s: 100}"
    )
    given = {**CLUSTER, "model": tmp_path, "cluster": f"1x4x{device}", "steps": 1}
    (plan,) = lengthwise.plan(lengths, policy="static", **given)
    (result,) = lengthwise.compare(lengths, policies=["static"], **given).clusters
    assert plan.num_devices == 4 and result.cluster == "1x4xbox"
    assert lengthwise.simulate([plan])[0].step_time_s == pytest.approx(result.ranked[0].step_time_s)


@pytest.mark.parametrize(
    ("family", "experts", "expected"),
    [("qwen3", {}, "auto"), ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}, "none")],
)
def test_stages_of_any_model_split_backwards_but_for_those_of_experts(lengths, tmp_path, family, experts, expected):
    config = {
        "model_type": family, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, **experts,
        "num_hidden_layers": 4, "num_key_value_heads": 2, "vocab_size": 8192,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    for options in ({}, {"zero_bubble": "auto"}):
        given = {**CLUSTER, "model": tmp_path, "steps": 1, **options}
        document = lengthwise.compare(lengths, policies=["static"], **given).to_json()
        assert document["search_space"]["zero_bubble"] == expected


def test_compare_gives_what_the_command_prints(lengths, tmp_path, cli):
    path = tmp_path / "lengths.npy"
    np.save(path, lengths)
    comparison = lengthwise.compare(path, policies=["static", "packed"], steps=2, **CLUSTER)
    options = ["--model", "llama-tiny", "--device", "H100-80GB", "--gpus", 4, "--tokens-per-step", 30_000]
    options += ["--max-stages", 1, "--steps", 2, "--policies", "static,packed", "--json"]
    code, out, err = cli("compare", "--lengths", path, *options)
    assert code == 0, err

    def timeless(document):
        names = ("planning_s", "preparing_s")  # these are of a clock
        rows = [{name: value for name, value in row.items() if name not in names} for row in document["policies"]]
        return {**document, "policies": rows, "clusters": None}

    printed = json.loads(out)
    assert printed.pop("schema_version") == 1
    assert timeless(json.loads(json.dumps(comparison.to_json()))) == timeless(printed)


def test_a_sweep_of_steps_and_networks_with_the_price_of_a_training(lengths):
    asked = {**CLUSTER, "tokens_per_step": [20_000, 40_000], "tokens": 10**9, "price_per_hour": 2.0}
    comparison = lengthwise.compare(lengths, policies=["static"], steps=1, network_gbit_per_s=100, **asked)
    assert [result.token_budget for result in comparison.clusters] == [20_000, 40_000]
    for document in comparison.to_json()["clusters"]:
        (row,) = document["policies"]
        assert document["network_gbit_per_s"] == 100
        assert row["cost"] == pytest.approx(1e9 / row["tokens_per_s"] / 3600 * 4 * 2)


def test_what_links_noise_and_hidden_updates_change_is_simulated_and_said(lengths):
    def document(**given):
        return lengthwise.compare(lengths, policies=["static"], steps=1, **CLUSTER, **given).to_json()

    plain, slow, noisy, hidden = (
        document(),
        document(link_gbyte_per_s=1e-3),
        document(jitter=0.3),
        document(overlap=1.0),
    )
    (before,), (after,) = plain["policies"], hidden["policies"]
    assert slow["link_gbyte_per_s"] == 1e-3 and "0.001 Gbyte/s within nodes" in slow["cluster"]
    assert slow["policies"][0]["step_time_s"] > before["step_time_s"]
    assert noisy["jitter"] == 0.3 and noisy["policies"][0]["step_time_s"] != before["step_time_s"]
    assert hidden["overlap"] == 1.0 and after["step_time_s"] < before["step_time_s"]
    assert after["bound_s"] < before["bound_s"] and after["bound_s"] <= after["step_time_s"]


def test_one_overlap_is_planned_simulated_and_shown(lengths):
    """What plans reckon with is what simulation hides of the same plans afterwards."""
    given = {**CLUSTER, "steps": 2, "policy": "static"}
    for overlap in (0.3, 1.0):
        plain, hidden = lengthwise.plan(lengths, **given), lengthwise.plan(lengths, **given, overlap=overlap)
        assert [plan.pipelines for plan in plain] == [plan.pipelines for plan in hidden]
        shown = [step.step_time_s for step in lengthwise.simulate(plain, overlap=overlap)]
        assert shown == pytest.approx([plan.time_s for plan in hidden])
        assert shown == pytest.approx([step.step_time_s for step in lengthwise.simulate(hidden)])
    with pytest.raises(InputError, match="overlap is a share of the update between 0 and 1, not 2"):
        lengthwise.plan(lengths, **given, overlap=2)


def test_simulated_speed_is_that_of_the_comparison(lengths):
    steps = lengthwise.simulate(lengthwise.plan(lengths, policy="static", steps=2, **CLUSTER), timelines=True)
    result = lengthwise.compare(lengths, policies=["static"], steps=2, **CLUSTER).clusters[0].ranked[0]
    assert [step.step_time_s for step in steps] == pytest.approx(result.times_s)
    assert [step.timeline.step_time_s for step in steps] == pytest.approx(result.times_s)


def test_a_straggler_is_slower_and_no_timeline_is_made_unasked(lengths):
    plans = lengthwise.plan(lengths, steps=1, policy="static", **CLUSTER)
    (exact,), (slow,) = lengthwise.simulate(plans), lengthwise.simulate(plans, stragglers={0: 3.0})
    assert slow.step_time_s > exact.step_time_s and exact.timeline is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "autp"}, "policy autp: no 'autp'; did you mean auto"),
        ({"methods": ["ring", ""]}, "methods: a name is empty; give some of megatron_ts, .*, or leave methods out"),
        ({"methods": ["ulyses"]}, "methods ulyses: no 'ulyses'; did you mean ulysses"),
        ({"recompute": "some"}, "recompute='some' is not one of 'auto', 'none', 'all'"),
        ({"steps": 0}, "steps=0: at least 1"),
        ({"model": "llama-7"}, "no model preset 'llama-7'"),
        ({"cluster": "8xH100"}, "no device 'H100'"),
        ({"cluster": None}, "cluster=None"),
        ({"model": None}, "model=None: give a name or a path"),
        ({"tokens_per_step": 0}, "tokens_per_step is 0"),
        ({"seed": 1.5}, r"seed=1\.5: give a whole number"),
        ({"memory_margin": "x"}, "memory_margin='x': give a number"),
        ({"policy": ["auto"]}, r"policy=\['auto'\]"),
    ],
)
def test_errors_name_arguments_and_not_options(lengths, options, message):
    with pytest.raises(InputError, match=message):
        lengthwise.plan(lengths, **{**CLUSTER, **options})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"plans": []}, r"plans=\[\]: give what lengthwise.plan returned"), ({"plans": 5}, "lengthwise.plan returned"),
        ({"stragglers": [(0, 2)]}, "give a dictionary"), ({"stragglers": {0: "x"}}, "factor='x'"),
        ({"jitter": "x"}, "jitter='x'"),
    ],
)  # fmt: skip
def test_what_cannot_be_simulated_is_refused_by_name(lengths, arguments, message):
    (plan,) = lengthwise.plan(lengths, steps=1, policy="static", **CLUSTER)
    with pytest.raises(InputError, match=message):
        lengthwise.simulate(**{"plans": plan, **arguments})
    assert len(lengthwise.simulate(plan)) == len(lengthwise.simulate(iter([plan]))) == 1


def test_lists_of_names_may_be_one_name_and_not_empty(lengths):
    twice = {**CLUSTER, "cluster": [CLUSTER["cluster"]] * 2}
    (result,) = lengthwise.compare(lengths, policies="static", methods="ring", steps=1, tokens=1e12, **twice).clusters
    assert [policy.policy for policy in result.ranked] == ["static"]
    for name in ("policies", "methods", "tokens_per_step", "network_gbit_per_s", "link_gbyte_per_s", "cluster"):
        with pytest.raises(InputError, match=f"^{name} is an empty list; (name|give) at least one"):
            lengthwise.compare(lengths, **{**CLUSTER, name: []})
    with pytest.raises(InputError, match=r"^methods is an empty list; name at least one"):
        lengthwise.plan(lengths, methods=(), steps=1, **CLUSTER)
    with pytest.raises(InputError, match="lengths is empty; pass one number"):
        lengthwise.plan([], **CLUSTER)


def test_sequences_beyond_learned_positions_are_refused(lengths):
    given = {**CLUSTER, "model": "bert-1024", "policy": "packed", "steps": 1}
    with pytest.raises(InputError, match=r"has learned positions for 512; set max_length=512 and over_length to"):
        lengthwise.plan(lengths, **given)
    assert lengthwise.plan(lengths, **given, max_length=512)


def test_a_sequence_that_fits_nowhere_is_refused_in_words_of_python():
    with pytest.raises(InfeasibleError, match=r"Give max_length=[0-9]+ or less") as error:
        lengthwise.plan([1 << 36], **CLUSTER)
    assert "--" not in str(error.value)


def test_an_unknown_argument_is_a_mistake_of_the_call(lengths):
    with pytest.raises(TypeError, match=r"no argument max_len; .* max_length"):
        lengthwise.plan(lengths, max_len=5, **CLUSTER)


@pytest.mark.parametrize("function", [lengthwise.plan, lengthwise.compare], ids=lambda function: function.__name__)
def test_every_option_is_documented(function):
    documented = function.__doc__.split("Args:")[1]
    if function is lengthwise.compare:
        own = CompareOptions.__annotations__.keys() - PlanningOptions.__annotations__.keys()
        assert not [name for name in own if f"\n        {name}: " not in documented]
        documented = documented.partition("        options: ")[2].partition("as in")[0]
        assert {*PlanningOptions.__annotations__} <= {*documented.replace(",", " ").split()}
    else:
        assert not [name for name in PlanningOptions.__annotations__ if f"\n        {name}: " not in documented]


@pytest.mark.parametrize("name", ["plan", "compare", "simulate"])
def test_examples_of_docstrings_run_without_torch(name, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    lines = getattr(lengthwise, name).__doc__.split("Args:")[0].splitlines()
    example = textwrap.dedent("\n".join(line for line in lines if line.startswith("        ")))
    example = example.replace("8xH100", "2xH100" if name == "compare" else "4xH100")  # which are planned faster
    plans = lengthwise.plan([90, 70, 400] * 9, model="llama-tiny", cluster="4xH100-80GB", steps=1, policy="static")
    exec(example, {"lengthwise": lengthwise, "plans": plans})
    assert capsys.readouterr().out
