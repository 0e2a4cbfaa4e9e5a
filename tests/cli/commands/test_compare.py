"""Comparing policies through the command line."""

import json

import numpy as np
import pytest

from lengthwise.core.device_spec import DEVICES
from lengthwise.core.errors import InfeasibleError
from lengthwise.core.specs import model_preset
from lengthwise.core.version import __version__
from lengthwise.plan import planner
from lengthwise.plan.policies import POLICIES

FEW = "padded,static,packed"


@pytest.fixture
def lengths(tmp_path):
    """A file with the lengths of 2,000 sequences, most of them short."""
    path = tmp_path / "lengths.npy"
    np.save(path, np.random.default_rng(0).lognormal(6.0, 1.2, 2000).astype(np.int32) + 2)
    return path


def arguments(lengths, *more):
    given = dict(zip(more[::2], more[1::2]))
    given = {
        "--lengths": lengths, "--model": "llama-tiny", "--device": "H100-80GB", "--gpus": 4, "--steps": 3,
        "--max-stages": 1, "--policies": FEW, "--tokens-per-step": 30_000, **given,
    }  # fmt: skip
    return ["compare", *(word for pair in given.items() for word in pair)]


def compare(cli, lengths, *more):
    code, out, err = cli(*arguments(lengths, *more), "--json")
    assert code == 0, err
    return json.loads(out)


def test_every_policy_trains_the_same_tokens(cli, lengths):
    document = compare(cli, lengths)
    trained = [one["tokens_per_s"] * one["step_time_s"] for one in document["policies"]]
    assert [one["policy"] for one in document["policies"]] == FEW.split(",")
    assert trained == pytest.approx([trained[0]] * 3)
    assert 0.8 * 30_000 < trained[0] <= 30_000


def test_shares_of_time_are_whole_and_idle_is_bubbles_and_waiting(cli, lengths):
    for one in compare(cli, lengths, "--max-stages", 2)["policies"]:
        shares = one["time_shares"]
        assert sum(shares.values()) == pytest.approx(1)
        assert one["idle"] == pytest.approx(shares["bubble"] + shares["imbalance"])
        assert one["bubble"] == pytest.approx(shares["bubble"])
        assert one["gap"] >= 0
        assert one["bound_s"] <= one["step_time_s"] * (1 + 1e-9) and len(one["strategies"]) == 3
        assert 0 < one["peak_gib"] < 80


def test_speeds_are_relative_to_static_and_to_the_best_of_the_others(cli, lengths):
    rows = {one["policy"]: one for one in compare(cli, lengths)["policies"]}
    speeds = {name: one["tokens_per_s"] for name, one in rows.items()}
    for name, one in rows.items():
        assert one["over_static"] == pytest.approx(speeds[name] / speeds["static"])
        assert one["over_best_other"] == pytest.approx(
            speeds[name] / max(speed for other, speed in speeds.items() if other != name)
        )


def test_auto_is_never_slower_than_another_policy(cli, lengths):
    rows = compare(cli, lengths, "--policies", ",".join(POLICIES), "--gpus", 2)["policies"]
    speeds = {one["policy"]: one["tokens_per_s"] or 0.0 for one in rows}
    assert speeds["auto"] >= max(speeds.values()) * (1 - 1e-9)


def test_equal_questions_have_equal_answers(cli, lengths):
    first, second = (compare(cli, lengths) for _ in range(2))
    assert first["clusters"] == [{name: first[name] for name in first["clusters"][0]}]
    for document in (first, second):
        del document["clusters"]
        for one in document["policies"]:
            del one["planning_s"], one["preparing_s"]
    assert first == second


def test_steps_of_fewer_tokens_than_the_longest_sequence_has_are_warned_of(cli, lengths):
    longest = int(np.load(lengths).max())
    for tokens, is_warned in ((longest - 1, True), (longest, False)):
        code, _, err = cli(*arguments(lengths, "--tokens-per-step", tokens, "--policies", "static", "--steps", 1))
        words = f"warning: --tokens-per-step {tokens:,} is less than the longest sequence has, {longest:,} tokens"
        assert code == 0 and (words in err) == is_warned


def test_several_clusters_are_listed_and_their_batches_grow(cli, lengths):
    document = compare(cli, lengths, "--gpus", "2,4", "--tokens-per-step", 30_000)
    assert [cluster["gpus"] for cluster in document["clusters"]] == [2, 4]
    assert "policies" not in document
    code, out, err = cli(
        "compare", "--lengths", "commoncrawl", "--model", "llama-tiny", "--device", "H100-80GB", "--gpus", "8,16",
        "--policies", "static", "--steps", 1, "--max-stages", 1, "--json",
    )  # fmt: skip
    assert code == 0, err
    tokens = [cluster["tokens_per_step"] for cluster in json.loads(out)["clusters"]]
    assert tokens == pytest.approx([32_768, 50_000], rel=0.03)
    assert tokens[0] <= 32_768 and tokens[1] <= 50_000


def test_what_nobody_can_run_is_said_once_with_what_it_takes(cli, lengths):
    code, out, err = cli(
        "compare", "--lengths", lengths, "--model", "llama-7b", "--device", "H100-80GB", "--gpus", "1,8", "--steps", 1,
        "--policies", "static,packed,auto", "--max-stages", 1, "--offload", "none",
    )  # fmt: skip
    assert code == 0, err
    (refused,) = [line for line in out.splitlines() if "refused" in line]
    assert refused.startswith("static, packed, auto: refused: no scheme fits: the leanest, <1,1>")
    assert "GiB per device" in refused and "--max-stages" not in refused
    assert "With --offload=auto the optimizer's state may be in host memory" in refused


DEEP = pytest.mark.deep


@pytest.mark.parametrize(
    "more", [pytest.param((), marks=DEEP), pytest.param(("--host-memory", 10), marks=DEEP), ("--max-degree", 1)]
)
def test_what_nothing_fits_takes_is_what_memory_says_and_plans(cli, tmp_path, more):
    """By hand, 70.6 billion parameters take 16 bytes each, of which 12 are in host memory."""
    np.save(tmp_path / "one.npy", [1])
    cluster = ["--model", "llama-3-70b", "--device", "A100-80GB", "--gpus", 8, *more]
    asked = ["compare", *cluster, "--lengths", tmp_path / "one.npy", "--steps", 1, "--policies", "auto"]
    said = [cli(*command, "--hbm", 50)[2] for command in (asked, ["memory", *cluster])]
    needs = [message.removeprefix("error: ").removeprefix("llama-3-70b on 1x8xA100-80GB: ") for message in said]
    assert needs[0] == needs[1]
    if not more:
        assert "takes 51.6 GiB per device for weights and gradients" in needs[0] and "181.6 GiB in all" in needs[0]
        assert cli(*asked, "--hbm", 51.6)[0] == 0


def test_more_devices_than_are_planned_in_about_a_minute_are_refused_with_the_limit(cli, lengths):
    code, _, err = cli(
        "compare", "--lengths", lengths, "--model", "llama-7b", "--device", "H100-80GB", "--gpus", "64,65536",
    )  # fmt: skip
    assert code == 2 and "--gpus 65536: at most 16,384 devices are compared" in err and "lengthwise simulate" in err


def test_memory_that_is_not_the_device_s_own_is_named(cli, lengths):
    assert compare(cli, lengths, "--hbm", 60)["cluster"] == "1x4xH100-80GB at 60 GiB"


def test_a_policy_that_cannot_run_says_why_and_the_others_go_on(cli, lengths, monkeypatch, tmp_path):
    prepare = planner.prepare

    def refuse_static(name, problem):
        if name == "static":
            raise InfeasibleError("static holds no <long> sequence")
        return prepare(name, problem)

    monkeypatch.setattr(planner, "prepare", refuse_static)
    rows = {one["policy"]: one for one in compare(cli, lengths)["policies"]}
    assert rows["static"]["refused"] == "static holds no <long> sequence"
    assert rows["static"]["tokens_per_s"] is rows["packed"]["over_static"] is rows["packed"]["refused"] is None
    assert rows["packed"]["tokens_per_s"] > 0
    code, out, _ = cli(*arguments(lengths, "--html", tmp_path / "page.html"))
    assert code == 0
    assert "static: refused: static holds no <long> sequence" in out
    assert "static holds no &lt;long&gt; sequence" in (tmp_path / "page.html").read_text()


def test_a_cluster_that_is_too_small_does_not_stop_the_larger_one(cli, tmp_path):
    np.save(tmp_path / "long.npy", np.array([900_000, 50, 60]))
    document = compare(
        cli, tmp_path / "long.npy", "--gpus", "1,4", "--hbm", 2, "--tokens-per-step", 900_000, "--offload", "none"
    )
    small, large = document["clusters"]
    assert all("needs" in one["refused"] for one in small["policies"])
    assert not any(one["refused"] for one in large["policies"])


@pytest.fixture
def mixtral(tmp_path):
    """A folder with the configuration of a small mixture of experts."""
    config = {
        "model_type": "mixtral", "hidden_act": "silu", "hidden_size": 128, "intermediate_size": 256,
        "num_attention_heads": 4, "num_hidden_layers": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2,
        "num_local_experts": 8, "vocab_size": 8192, "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "my-moe").mkdir()
    (tmp_path / "my-moe" / "config.json").write_text(json.dumps(config))
    return tmp_path / "my-moe"


@pytest.fixture
def my_gpu(tmp_path):
    path = tmp_path / "my-gpu.yaml"
    path.write_text(
        "memory_gib: 96\nbfloat16_tflops: 500\nmemory_gbyte_per_s: 1800\nlink_gbyte_per_s: 64\n"
        "network_gbit_per_s: 200\ndevices_per_node: 2\n"
    )
    return path


def test_a_model_of_one_s_own_on_a_device_of_one_s_own(cli, lengths, mixtral, my_gpu):
    document = compare(cli, lengths, "--model", mixtral, "--device", my_gpu)
    assert (document["model"], document["cluster"]) == ("my-moe", "2x2xmy-gpu")
    assert "routing between experts" in document["not_priced"]
    assert not any(one["refused"] for one in document["policies"])
    assert "not priced in my-moe: routing between experts" in cli(*arguments(lengths, "--model", mixtral))[1]


def test_hours_and_cost_follow_from_speed_and_price(cli, lengths, my_gpu):
    my_gpu.write_text(my_gpu.read_text() + "price_per_hour: 2.5\n")
    given = ["--device", my_gpu, "--tokens", "1.5B"]
    for price, more in ((2.5, []), (4.0, ["--price-per-hour", "4"])):
        for one in compare(cli, lengths, *given, *more)["policies"]:
            assert one["tokens_per_s_per_gpu"] == pytest.approx(one["tokens_per_s"] / 4)
            assert one["hours"] == pytest.approx(1.5e9 / one["tokens_per_s"] / 3600)
            assert one["cost"] == pytest.approx(one["hours"] * 4 * price)
    out = cli(*arguments(lengths, *given))[1]
    assert "1.5B tokens take" in out and "hours and cost" in out and "…" not in out
    assert compare(cli, lengths)["policies"][0]["hours"] is None


def test_mfu_is_the_model_s_flops_over_the_devices(cli, lengths):
    document = compare(cli, lengths)
    spec, device = model_preset("llama-tiny"), DEVICES["H100-80GB"]
    matmuls = 6 * (spec.num_layers * spec.layer_matmul_params + spec.hidden_size * spec.vocab_size)
    for one in document["policies"]:
        least = one["tokens_per_s_per_gpu"] * matmuls / device.flops_per_s
        assert least < one["mfu"] < 3 * least  # the rest is attention
    (single,) = compare(cli, lengths, "--policies", "packed", "--dtype", "float32")["policies"]
    assert single["mfu"] > 0


def test_gaps_of_a_table_are_to_one_bound(cli, lengths):
    rows = compare(cli, lengths, "--policies", "padded,packed,auto", "--steps", 1)["policies"]
    lowest = min(one["step_time_s"] / (1 + one["gap"]) for one in rows)
    for one in rows:
        assert one["gap_to_common_bound"] >= one["gap"] - 1e-12
        assert one["gap_to_common_bound"] == pytest.approx(one["step_time_s"] / lowest - 1, rel=0.05, abs=0.01)


@pytest.mark.deep
def test_gaps_are_of_the_means_beside_them_also_where_one_step_is_most_of_the_time(cli, tmp_path):
    """Of two steps, one has a sequence of 100,000 tokens alone, which leaves little to gain."""
    np.save(tmp_path / "giant.npy", [100] * 50 + [100_000])
    document = compare(cli, tmp_path / "giant.npy", "--model", "llama-7b", "--policies", "auto,padded", "--steps", 2)
    rows = document["policies"]
    lowest = min(one["bound_s"] for one in rows)
    for one in rows:
        assert one["gap"] == pytest.approx(one["step_time_s"] / one["bound_s"] - 1, rel=1e-6, abs=1e-9)
        assert one["gap_to_common_bound"] == pytest.approx(one["step_time_s"] / lowest - 1, rel=0.05, abs=1e-3)


@pytest.mark.deep
def test_a_sweep_is_one_table_with_a_row_a_size(cli, lengths, tmp_path):
    given = ["--gpus", "2,4", "--tokens-per-step", "5e3,0.01M", "--network", "100,400", "--policies", "static,auto"]
    given += ["--steps", 1, "--devices-per-node", 2, "--methods", "ulysses", "--max-degree", 2]
    document = compare(cli, lengths, *given, "--html", tmp_path / "page.html")
    sizes = [(one["gpus"], one["network_gbit_per_s"], one["token_budget"]) for one in document["clusters"]]
    assert sizes == [(n, rate, tokens) for n in (2, 4) for rate in (100, 400) for tokens in (5_000, 10_000)]
    times = {size: cluster["policies"][0]["step_time_s"] for size, cluster in zip(sizes, document["clusters"])}
    assert times[4, 100, 10_000] > times[4, 400, 10_000] and times[2, 100, 10_000] == times[2, 400, 10_000]
    given[7] = "static,packed"  # which are planned faster
    code, out, err = cli(*arguments(lengths, *given))
    assert code == 0, err
    assert sum(" packed " in line or " static " in line for line in out.splitlines()) == 8
    assert out.splitlines()[0].split() == ["GPUs", "Gbit/s", "tok/step", "policy", "tokens/s", "/GPU", "MFU", "static"]
    page = (tmp_path / "page.html").read_text()
    assert "Speed of auto over static" in page and "The fastest policy by size" in page
    assert "2 GPUs, 100 Gbit/s" in page  # a line of the curve


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("rule", ["split", "drop", "truncate"])
def test_what_the_length_rule_does_is_counted(cli, lengths, rule):
    ledger = compare(cli, lengths, "--max-length", 2000, "--over-length", rule)["ledger"]
    over = np.load(lengths)
    over = over[over > 2000]
    counted = {"split": "split", "drop": "dropped", "truncate": "truncated"}[rule]
    assert ledger[counted] == len(over)
    assert ledger["tokens_in"] - ledger["tokens_out"] == {
        "split": 0, "drop": over.sum(), "truncate": (over - 2000).sum(),
    }[rule]  # fmt: skip
    assert f"{len(over):,} sequences" in cli(*arguments(lengths, "--max-length", 2000, "--over-length", rule))[1]


def test_a_table_is_printed_for_people(cli, lengths):
    code, out, _ = cli(*arguments(lengths, "--jitter", 0.1))
    assert code == 0
    assert "tokens/s" in out and "not measured" in out
    assert "times have its noise, and every policy its own; gaps are of the plans" in out
    assert all(name in out for name in FEW.split(","))
    assert "…" not in out


def test_the_page_needs_nothing_else(cli, lengths, tmp_path):
    page = tmp_path / "page.html"
    code, out, _ = cli(*arguments(lengths, "--html", page, "--gpus", "2,4"))
    assert code == 0
    assert str(page.name) in out
    content = page.read_text()
    assert content.startswith("<!doctype html>")
    assert "http:" not in content and "https:" not in content and "src=" not in content  # its one script is inline
    for words in ("Simulated, not measured", "Scaling", "Where the time goes", "Tokens per second", "Sequence lengths"):
        assert words in content
    for words in ("<dt>Started</dt>", f"Lengthwise {__version__}", f"lengthwise compare --lengths {lengths}"):
        assert words in content


@pytest.mark.first_cells(2)
@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        (["--model", "llama-tin"], 2, "did you mean llama-tiny"),
        (["--device", "H100"], 2, "did you mean H100-80GB"),
        (["--device", "nowhere.yaml"], 2, "there is no device file nowhere.yaml"),
        (["--model", "/nowhere"], 2, "no folder of that name; give the folder"),
        (["--policies", "static,hydraulic"], 2, "did you mean hydraulis"),
        (["--methods", "ulyses"], 2, "did you mean ulysses"),
        (["--lengths", "commoncraw"], 2, "did you mean commoncrawl"),
        (["--gpus", "four"], 2, "not a list of up to 16 numbers of devices"),
        (["--tokens-per-step", "many"], 2, "--tokens-per-step 'many' is not a number of tokens, such as 200000, 200K"),
        (
            ["--tokens-per-step", "1,5M"],
            2,
            "'1,5M' is a step of 1 token and one of 5M; decimals come after a point (1.5M), and commas are between",
        ),
        (["--tokens-per-step", "0"], 2, "--tokens-per-step '0' is not a number of tokens"),
        (
            ["--tokens-per-step", "9T"],
            2,
            "--tokens-per-step must be from 1 to 1,099,511,627,776, not 9,000,000,000,000",
        ),
        (["--network", "fast"], 2, "--network 'fast' is not a list of Gbit/s"),
        (["--network", "0"], 2, "--network must be from 1e-06 to 1,000,000 Gbit/s, not 0"),
        (["--network", "nan"], 2, "--network must be from 1e-06"),
        (["--link", "fast"], 2, "--link 'fast' is not a list of Gbyte/s"),
        (["--link", "-1"], 2, "--link must be from 1e-06 to 1,000,000 Gbyte/s, not -1"),
        (["--link", "nan"], 2, "--link must be from 1e-06"),
        (["--jitter", "nan"], 2, "jitter must be finite and at least 0, not nan"),
        (["--overlap", "1.5"], 2, "overlap is a share of the update between 0 and 1, not 1.5"),
        (["--overlap", "nan"], 2, "overlap is a share of the update between 0 and 1, not nan"),
        (["--price-per-hour", "2"], 2, "--price-per-hour is for a whole training; say of how many --tokens"),
        (["--tokens", "1B", "--price-per-hour", "-1"], 2, "--price-per-hour must be above 0"),
        (["--network", ",".join(map(str, range(1, 70)))], 2, "69 comparisons are asked for, and at most 64 are made"),
        (["--html", "nowhere/page.html"], 2, "there is no folder nowhere"),
        (["--max-degree", "0"], 2, "greater than or equal to 1"),
        (["--max-length", "100", "--over-length", "error"], 2, "over --max-length 100"),
        (["--hbm", "0.01"], 3, "under the leanest scheme"),
        (["--hbm", "0.0001"], 3, "no scheme fits"),
        (["--lengths", "grch38", "--hbm", "2", "--max-degree", "1", "--offload", "none"], 3, "Give --max-length"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_the_right_exit_code(cli, lengths, changes, code, message):
    found, out, err = cli(*arguments(lengths, *changes), "--json")
    assert found == code
    assert message in err
    assert json.loads(out)["exit_code"] == code


def test_how_far_predictions_are_from_measurements_is_printed(cli, lengths, my_gpu):
    assert compare(cli, lengths)["speed_error"] == 0.09
    within = "of public measurements on H100-80GB, nine of ten are within 9 % of such predictions"
    assert within in cli(*arguments(lengths))[1]
    assert compare(cli, lengths, "--device", my_gpu)["speed_error"] is None
    unknown = "too few measurements of my-gpu are public to say how far predictions for it are off"
    assert unknown in cli(*arguments(lengths, "--device", my_gpu))[1]


def test_neither_names_nor_numbers_are_cut_on_a_narrow_terminal(cli, lengths, tmp_path, monkeypatch):
    code = "from lengthwise.plan.policies import prepare\ndef policy(problem):\n    return prepare('static', problem)\n"
    (tmp_path / "policies_with_a_long_name.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("COLUMNS", "40")
    given = arguments(lengths, "--policies", "static,policies_with_a_long_name:policy")
    code, out, err = cli(*given)
    assert code == 0, err
    rows = [line for line in out.splitlines() if line.startswith(("static ", "policies_with"))][:2]
    assert sorted(row.split()[0] for row in rows) == ["policies_with_a_long_name:policy", "static"] and "…" not in out
    assert rows[0].split()[1:] == rows[1].split()[1:], "no number is cut"
    heading = next(line for line in out.splitlines() if line.startswith("policy "))
    assert heading.split() == ["policy", "tokens/s", "/GPU", "static", "MFU", "step", "idle", "gap", "peak"]


FEW_SCHEMES = ("--max-degree", "1", "--max-stages", "1")
REACH = ["compare", "--reach", "--model", "llama-tiny", "--device", "H100-80GB", "--gpus", "8", "--hbm", "0.3"]


@pytest.mark.deep
@pytest.mark.parametrize(
    ("hbm", "limit", "longest"), [("9.75", "5150", range(4458, 4683)), ("9.5", "0", range(757, 796))]
)
def test_reach_ends_between_lengths_that_are_no_multiples_and_below_the_first_one(cli, hbm, limit, longest):
    given = [
        "compare", "--reach", "--model", "qwen2.5-0.5b", "--device", "RTX4090-24GB", "--gpus", "1", "--hbm", hbm,
        "--host-memory", "0", "--policies", "static", "--json", *(["--max-length", limit] if limit != "0" else []),
    ]  # fmt: skip
    (cluster,) = json.loads(cli(*given)[1])["clusters"]
    assert cluster["policies"][0]["reached"][-1]["length"] in longest


@pytest.mark.deep
def test_reach_ends_within_five_per_cent_of_what_a_policy_can_plan(cli):
    four = [*REACH, "--gpus", "4"]
    code, out, err = cli(*four, "--policies", "static,hydraulis", "--json")
    assert code == 0, err
    (cluster,) = json.loads(out)["clusters"]
    furthest, other = cluster["policies"]  # the longest reach first
    assert (furthest["policy"], other["policy"]) == ("static", "hydraulis")
    for policy in (furthest, other):
        lengths = [point["length"] for point in policy["reached"]]
        speeds = [point["tokens_per_s"] for point in policy["reached"]]
        assert lengths == sorted(set(lengths)) and speeds[-1] < speeds[0] and policy["refused"]
        limit = int(policy["refused"].split("--max-length=")[1].split()[0])
        assert limit / 1.06 <= lengths[-1] <= limit
        again = ["--max-length", str(lengths[-1]), "--policies", policy["policy"], "--json"]
        assert json.loads(cli(*four, *again)[1])["clusters"][0]["policies"][0]["reached"][-1]["length"] == lengths[-1]
    assert other["reached"][-1]["length"] < furthest["reached"][-1]["length"]


def test_reach_shows_a_row_a_policy_up_to_a_length_that_is_asked(cli):
    code, out, err = cli(
        *REACH, "--policies", "static,auto", "--max-length", "20K", "--gpus", "2,4", "--methods", "ulysses"
    )
    assert code == 0, err
    rows = [line.split() for line in out.splitlines() if line.startswith(("policy ", "static ", "auto "))]
    assert len(rows) == 6 and rows[0] == ["policy", "4K", "16K", "20,000", "longest"]
    assert {row[-1] for row in rows if row[0] != "policy"} == {"20,000"}


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([*REACH, "--lengths", "commoncrawl"], 2, "--lengths, or --reach"),
        ([*REACH[:1], *REACH[2:]], 2, "--lengths, or --reach"),
        ([*REACH, "--tokens", "1B"], 2, "--tokens is for the lengths of a training"),
        ([*REACH, "--steps", "3"], 2, "--steps is for the lengths of a training"),
        ([*REACH, "--over-length", "drop"], 2, "--over-length is for the lengths of a training"),
        ([*REACH, "--memory-margin", "0.1"], 2, "--memory-margin 0.1 beside --hbm 0.3: plans may fill all of --hbm"),
        ([*REACH, "--hbm", "0.0001", "--policies", "static", *FEW_SCHEMES], 3, "no scheme fits"),
    ],
)
def test_what_has_no_reach_is_refused(cli, arguments, code, message):
    found, _, err = cli(*arguments)
    assert found == code and message in err


def test_a_cluster_that_holds_nothing_keeps_no_other_from_being_shown(cli):
    given = "compare", "--reach", "--model", "llama-7b", "--device", "A100-40GB", "--host-memory", "0"
    code, out, err = cli(*given, "--gpus", "1,4", "--policies", "static", "--max-length", "4096")
    rows = [line.split() for line in out.splitlines() if line.startswith("static ")]
    assert code == 0 and [row[-1] for row in rows] == ["none", "4,096"], err
    assert "has 0.0 GiB. With it on the device, the leanest, <1,1> dense r32, takes" in " ".join(out.split())


@pytest.mark.parametrize(
    ("gpus", "shapes", "more", "policies"),
    [
        ("9", ["1x8+1"], ["--methods", "ulysses"], "static"),
        pytest.param("9", ["1x8+1"], ["--methods", "ulysses"], "static,auto", marks=pytest.mark.deep),
        pytest.param("9,12", ["1x8+1", "1x8+4"], [], "static,hotspa,auto", marks=pytest.mark.deep),
    ],
)
def test_any_number_of_devices_is_compared(cli, gpus, shapes, more, policies):
    """Nodes of eight, the last of which has fewer."""
    given = "compare", "--model", "llama-7b", "--device", "H100-80GB", "--lengths", "commoncrawl", "--steps", "1"
    given = (
        *given,
        "--max-stages",
        "3",
        "--max-length",
        "16384",
        "--tokens-per-step",
        "60000",
    )  # which are planned faster
    document = json.loads(cli(*given, *more, "--gpus", gpus, "--policies", policies, "--json")[1])
    clusters = document["clusters"] if len(shapes) > 1 else [document]
    for cluster, shape in zip(clusters, shapes, strict=True):
        assert cluster["cluster"] == f"{shape}xH100-80GB"
        speeds = {policy["policy"]: policy["tokens_per_s"] for policy in cluster["policies"]}
        assert speeds[policies.split(",")[-1]] == max(speeds.values())
