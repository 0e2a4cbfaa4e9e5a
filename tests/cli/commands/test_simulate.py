"""Plans executed in virtual time through the command line."""

import gzip
import json
import platform
from dataclasses import asdict, replace
from itertools import pairwise

import numpy as np
import pytest

from lengthwise.core.specs import model_preset
from lengthwise.core.version import __version__
from lengthwise.session.simulate_plans import simulate
from tests.report.fake_run import make_run
from tests.sim.plans import lane, make_plan


def write(path, *plans):
    path.write_text("".join(json.dumps(plan.to_json()) + "\n" for plan in plans))
    return path


@pytest.fixture
def staged(tmp_path):
    """Three steps of two phases; in the first, a pipeline of two stages and one of two devices."""
    plans = [
        make_plan(
            [lane(3.0, 2.0, 1.0, stages=2), lane(4.0, degree=2, comm=0.25, padded_to=10)],
            [lane(1.0) for _ in range(4 - empty)] + [lane() for _ in range(empty)],
            switch_s=0.5, step=empty,
        )
        for empty in range(3)
    ]  # fmt: skip
    return write(tmp_path / "plans.jsonl", *plans)


@pytest.fixture
def single(tmp_path):
    return write(tmp_path / "single.jsonl", make_plan([lane(3.0, 2.0, 1.0), lane(1.0)], update_s=0.0))


@pytest.fixture
def tiny(tmp_path):
    """A plan of as many layers as llama-tiny has, outside of a run."""
    times_s = ((3.0, 2.0, 1.0), (1.0,))
    return write(tmp_path / "tiny.jsonl", make_plan([lane(*each, layers=4) for each in times_s], update_s=0.0))


def test_a_plan_without_stages_takes_the_time_that_was_planned(cli, single):
    document = json.loads(cli("simulate", single, "--json")[1])
    assert document["step_time_s"] == pytest.approx(6.0)
    assert document["idle"] == pytest.approx(document["imbalance"]) == pytest.approx(5 / 12)
    assert document["tokens_per_s"] == pytest.approx(20 / 6)


def test_losses_are_shares_of_the_device_time(cli, staged):
    document = json.loads(cli("simulate", staged, "--json")[1])
    parts = [document[name] for name in ("compute", "communicate", "bubble", "imbalance", "switch", "update")]
    assert sum(parts) == pytest.approx(1)
    assert min(parts) > 0
    assert document["idle"] == pytest.approx(document["bubble"] + document["imbalance"])


def test_steps_limits_what_is_read(cli, staged):
    assert json.loads(cli("simulate", staged, "--steps", 2, "--json")[1])["num_steps"] == 2


@pytest.mark.parametrize("is_of_run", [True, False])
def test_of_a_step_that_is_there_twice_the_last_plan_counts(cli, tmp_path, is_of_run):
    """In a run that changed its policy, too; other files may hold the plans of several policies."""
    again = [make_plan([lane(9.0)], step=1), replace(make_plan([lane(8.0)], step=1), policy="other")]
    path = write(tmp_path / "plans.jsonl", *(make_plan([lane(1.0)], step=step) for step in range(3)), *again)
    if is_of_run:
        (tmp_path / "config.yaml").write_text("{}")
    first, both = (json.loads(cli("simulate", path, *more, "--json")[1]) for more in (["--steps", 2], []))
    assert (first["num_steps"], both["num_steps"]) == (2, 3 if is_of_run else 4)
    times_s = [step.step_time_s for step in simulate(path)]
    update_s = times_s[0] - 1
    assert [round(time_s - update_s, 6) for time_s in times_s] == ([1, 8, 1] if is_of_run else [1, 9, 1, 8])


def test_a_straggler_slows_the_step_by_its_factor(cli, single):
    slow = json.loads(cli("simulate", single, "--straggler", "0:1.5", "--straggler", "1:2", "--json")[1])
    assert slow["step_time_s"] == pytest.approx(9.0)
    assert slow["idle"] == pytest.approx(7 / 18)


def test_jitter_is_repeatable(cli, staged):
    noisy = [cli("simulate", staged, "--jitter", jitter, "--json")[1] for jitter in (0.1, 0.1, 0)]
    assert noisy[0] == noisy[1] != noisy[2]


def test_a_table_is_printed_for_people(cli, staged):
    out = cli("simulate", staged)[1]
    for words in ("3 steps of policy any on 4 devices", "tokens/s", "bubbles within pipelines", "imbalance between"):
        assert words in out


def test_a_peak_of_a_few_kilobytes_is_not_printed_as_nothing(cli, staged, tmp_path):
    printed = cli("simulate", staged, "--html", tmp_path / "page.html")[1]
    assert "1.6\u00a0KiB" in printed and "1.6\u00a0KiB" in (tmp_path / "page.html").read_text()


def test_a_trace_has_every_pass_and_switch_and_no_overlaps(cli, staged, tmp_path):
    path = tmp_path / "trace.json.gz"
    assert cli("simulate", staged, "--trace", path)[0] == 0
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X" and "kind" in event["args"]]
    for rank in range(4):
        mine = sorted((e["ts"], e["ts"] + e["dur"]) for e in spans if e["pid"] == rank + 1)
        assert all(before[1] <= after[0] + 1e-3 for before, after in pairwise(mine))
        of_step = [e for e in spans if e["pid"] == rank + 1 and e["args"]["step"] == 0]
        names = [e["name"] for e in of_step if e["args"]["kind"] != "wait"]
        first = [f"{part} {i}" for part in ("forward", "backward") for i in range(3)] if rank < 2 else None
        if first:
            assert sorted(names) == sorted([*first, "forward 0", "backward 0", "switch", "update"])
    assert {e["pid"] for e in events if e["ph"] == "C"} == {1, 2, 3, 4}


def test_a_trace_holds_as_many_steps_as_viewers_bear(cli, staged, tmp_path, monkeypatch):
    monkeypatch.setattr("lengthwise.session.simulation_traces.MOST_SPANS", 10)
    code, _, err = cli("simulate", staged, "--trace", tmp_path / "trace.json.gz")
    events = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    assert (code, {e["args"]["step"] for e in events if e["ph"] == "X"}) == (0, {0})
    assert "first 1 of 3 steps" in " ".join(err.split())


def test_a_page_shows_timeline_and_memory_and_every_step(cli, staged, tmp_path):
    path = tmp_path / "page.html"
    assert cli("simulate", staged, "--html", path, "--jitter", 0.1, "--straggler", "1:2")[0] == 0
    page = path.read_text()
    for words in (
        "Policy any on 4 devices", "3 steps · jitter 0.1 · rank 1 slower by 2x", "A typical step", "The worst step",
        "A typical step: memory", "MiB per device", "bubbles within pipelines", "switch strategies",
    ):  # fmt: skip
        assert words in page
    assert page.count("<svg role=") == 5
    assert page.count("<script") == 1 and page.count("http:") == page.count("https:") == page.count("src=") == 0
    steps = page[page.index("<h3>Steps</h3>") :]
    assert [f"<td>{step}</td>" in steps for step in range(4)] == [True, True, True, False]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--straggler", "3"], "--straggler 3 is not RANK:FACTOR"),
        (["--straggler", "a:2"], "--straggler a:2 is not RANK:FACTOR"),
        (["--straggler", "9:2"], "no rank 9 to be slow"),
        (["--straggler", "1:0.5"], "at least 1, not 0.5"),
        (["--jitter", "-1"], "jitter must be finite and at least 0"),
        (["--overlap", "-0.1"], "overlap is a share of the update between 0 and 1, not -0.1"),
        (["--html", "nowhere/page.html"], "cannot write nowhere/page.html"),
    ],
)
def test_what_cannot_be_simulated_is_refused(cli, single, arguments, message):
    code, _, err = cli("simulate", single, *arguments)
    assert code == 2
    assert message in err


def test_an_empty_plan_file_is_refused(cli, tmp_path):
    code, _, err = cli("simulate", write(tmp_path / "plans.jsonl"))
    assert code == 2
    assert "no plans in" in err


def test_a_trace_holds_the_chosen_steps_and_ranks(cli, staged, tmp_path):
    path = tmp_path / "trace.json.gz"
    chosen = ("--trace-steps", "1-2", "--trace-ranks", "0,3")
    assert cli("simulate", staged, "--trace", path, *chosen, "--kineto", tmp_path / "ranks")[0] == 0
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert {e["args"]["step"] for e in events if e["ph"] == "X"} == {1, 2}
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {"predicted rank 0", "predicted rank 3"}
    assert [file.name[:10] for file in sorted((tmp_path / "ranks").iterdir())] == ["rank_00000", "rank_00003"]


def test_a_step_or_rank_that_is_not_there_is_refused_before_anything_is_written(cli, staged, tmp_path):
    path = tmp_path / "trace.json.gz"
    code, _, err = cli("simulate", staged, "--trace", path, "--trace-steps", "7")
    assert code == 2 and "--trace-steps 7: the steps are 0 to 2; choose among them" in err
    code, _, err = cli("simulate", staged, "--kineto", path, "--trace-ranks", "0-2,9")
    assert code == 2 and "--trace-ranks 9: the ranks are 0 to 3; choose among them" in err
    assert not path.exists()


def test_execution_traces_need_the_model_and_all_ranks(cli, single, tmp_path):
    folder = tmp_path / "chakra"
    code, _, err = cli("simulate", single, "--chakra", folder)
    assert code == 2 and "--chakra needs the sizes of the model" in err and "--model NAME" in err
    code, _, err = cli("simulate", single, "--chakra", folder, "--model", "llama-tiny")
    assert code == 2 and "the plans share out 12 layers, model llama-tiny has 4" in err
    plans = make_run(tmp_path / "run", num_steps=3).plans
    code, _, err = cli("simulate", plans, "--chakra", folder, "--model", "llama-tiny", "--trace-ranks", "0")
    assert code == 2 and "--chakra writes all ranks" in err and not folder.exists()
    assert cli("simulate", plans, "--chakra", folder, "--model", "llama-tiny", "--trace-steps", "1-2")[0] == 0
    assert {path.name for path in folder.iterdir()} == {f"lengthwise.{rank}.et" for rank in range(4)} | {
        "comm_groups.json"
    }


def test_the_page_of_a_run_s_plans_has_the_memory_of_its_devices(cli, tmp_path):
    run = make_run(tmp_path / "run", num_steps=2)
    assert cli("simulate", run.plans, "--html", tmp_path / "page.html")[0] == 0
    assert "memory of a device, 16.0" in (tmp_path / "page.html").read_text()
    (run.path / "provenance.json").unlink()
    assert cli("simulate", run.plans, "--html", tmp_path / "page.html")[0] == 0
    assert "memory of a device" not in (tmp_path / "page.html").read_text()


def test_a_configuration_is_answered_in_mfu_hours_and_cost_as_compare_does(cli, tmp_path):
    np.save(tmp_path / "lengths.npy", np.array([100, 900, 3000, 500] * 8))
    assert cli("index", tmp_path / "lengths.npy", "--out", tmp_path / "index")[0] == 0
    given = [f"data.index={tmp_path / 'index'}", "model.preset=llama-tiny", "cluster.name=8xH100-80GB"]
    given += ["plan.policy=static", "train.dtype=bfloat16", "data.tokens_per_step=36000", "--steps", 1]
    budget = ["--tokens", "1B", "--price-per-hour", 2]
    document = json.loads(cli("simulate", *given, *budget, "--json")[1])
    speed = document["tokens_per_s"]
    assert document["hours"] == pytest.approx(1e9 / speed / 3600)
    assert document["cost"] == pytest.approx(document["hours"] * 8 * 2)
    lengths = np.array([100, 900, 3000, 500] * 8)
    flops_per_token = model_preset("llama-tiny").train_flops(lengths).sum() / lengths.sum()
    assert document["mfu"] == pytest.approx(speed * flops_per_token / (8 * 989e12))
    printed = cli("simulate", *given, *budget, "--html", tmp_path / "page.html")[1]
    for words in ("MFU", "hours of the whole training", "cost of the whole training"):
        assert words in printed
    page = (tmp_path / "page.html").read_text()
    for words in ("<dt>Software</dt>", f"Lengthwise {__version__}", "lengthwise simulate data.index=", platform.node()):
        assert words in page
    assert "hours of" not in cli("simulate", *given)[1]


def test_plans_outside_of_a_run_have_no_mfu(cli, single):
    document = json.loads(cli("simulate", single, "--tokens", "1M", "--json")[1])
    assert document["mfu"] is document["cost"] is None
    assert document["hours"] == pytest.approx(1e6 / document["tokens_per_s"] / 3600)
    code, _, err = cli("simulate", single, "--price-per-hour", 2)
    assert code == 2 and "say of how many --tokens" in err


def test_plans_outside_of_a_run_have_an_mfu_where_model_and_device_are_named(cli, tiny):
    code, out, err = cli("simulate", tiny, "--model", "llama-tiny", "--json")
    assert code == 0 and json.loads(out)["mfu"] is None and "add --device NAME" in err and "--model" not in err
    assert "add --model NAME and --device NAME" in cli("simulate", tiny)[2]
    code, out, err = cli("simulate", tiny, "--model", "llama-tiny", "--device", "H100-80GB", "--json")
    document = json.loads(out)
    lengths = np.array([5, 5, 5, 5])
    flops_per_token = model_preset("llama-tiny").train_flops(lengths).sum() / lengths.sum()
    assert document["mfu"] == pytest.approx(document["tokens_per_s"] * flops_per_token / (2 * 989e12)) and not err
    code, _, err = cli("simulate", tiny, "--device", "H100-80")
    assert code == 2 and "did you mean H100-80GB" in err
    code, _, err = cli("simulate", "cluster.name=8xH100-80GB", "--device", "H100-80GB")
    assert code == 2 and "set cluster.name of the configuration" in err


@pytest.fixture
def resumed(tmp_path):
    """Two steps of one device, and one of two that went on, of as many layers as llama-tiny has."""
    alone = [make_plan([lane(4.0, layers=4)], update_s=0.0, step=step) for step in range(2)]
    return write(
        tmp_path / "resumed.jsonl",
        *alone,
        make_plan([lane(2.0, layers=4), lane(1.0, layers=4)], update_s=0.0, step=2),
    )


def test_steps_of_several_numbers_of_devices_weigh_by_device_seconds(cli, resumed):
    named = ("--model", "llama-tiny", "--device", "H100-80GB")
    code, out, _ = cli("simulate", resumed, *named, "--json")
    document = json.loads(out)
    assert code == 0 and (document["num_devices"], document["step_with_other_devices"]) == (2, 2)
    assert document["tokens_per_s"] == pytest.approx(20 / 10)
    assert document["tokens_per_s_per_gpu"] == pytest.approx(20 / (4 + 4 + 2 * 2))
    assert document["idle"] == pytest.approx(1 / (4 + 4 + 2 * 2))
    flops = model_preset("llama-tiny").train_flops(np.array([5, 5, 5, 5])).sum()
    assert document["mfu"] == pytest.approx(flops / (12 * 989e12))
    assert "on up to 2 devices, simulated" in cli("simulate", resumed)[1]
    code, _, err = cli("simulate", resumed, *named, "--tokens", "1M")
    assert code == 2 and "step 2 of " in err and "another number of devices" in err and "--steps" in err
    assert json.loads(cli("simulate", resumed, "--tokens", "1M", "--steps", 2, "--json")[1])["hours"] > 0


def test_traces_have_the_ranks_of_every_step(cli, resumed, tmp_path):
    path, folder = tmp_path / "trace.json.gz", tmp_path / "chakra"
    places = ("--trace", path, "--kineto", tmp_path / "ranks")
    assert cli("simulate", resumed, *places, "--trace-ranks", "1")[0] == 0
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert {event["args"]["step"] for event in events if event["ph"] == "X"} == {2}
    assert [file.name[:10] for file in (tmp_path / "ranks").iterdir()] == ["rank_00001"]
    code, _, err = cli("simulate", resumed, *places, "--trace-ranks", "1", "--trace-steps", "0-1")
    assert code == 2 and "--trace-ranks 1: the ranks are 0 to 0" in err
    assert cli("simulate", resumed, "--chakra", folder, "--model", "llama-tiny")[0] == 0
    assert {file.name for file in folder.glob("*.et")} == {"lengthwise.0.et", "lengthwise.1.et"}


def test_a_model_device_or_dtype_that_the_configuration_names_is_not_named_again(cli):
    for option, setting in (("--model", "model.*"), ("--dtype", "train.dtype")):
        code, _, err = cli(
            "simulate", "cluster.name=8xH100-80GB", option, {"--model": "llama-7b"}.get(option, "float32")
        )
        assert code == 2 and f"{option} is for files of plans" in err and f"set {setting} of the configuration" in err


def test_a_model_device_or_dtype_that_is_not_the_run_s_is_refused(cli, tmp_path):
    run = make_run(tmp_path / "run", num_steps=1)
    run.write_json("model.json", asdict(model_preset("llama-tiny")))
    others = {"--model": "gpt-tiny", "--device": "A100-80GB", "--dtype": "float64"}
    own = {"--model": "llama-tiny", "--device": "H100-80GB", "--dtype": "float32"}
    for option, name in own.items():
        code, _, err = cli("simulate", run.plans, option, others[option])
        assert code == 2 and f"has another {option[2:]}, {name}; leave {option} out" in err
        assert cli("simulate", run.plans, option, name)[0] == 0


def test_plans_of_other_layers_or_faster_than_devices_are_not_those_of_the_model(cli, single, tmp_path):
    named = ("--model", "llama-tiny", "--device", "H100-80GB")
    code, _, err = cli("simulate", single, *named)
    assert code == 2 and "the plans share out 12 layers, model llama-tiny has 4" in err
    assert "one of other sizes than its preset by a folder that holds a config.json with them" in err
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2}
    document = {"model_type": "llama", "num_hidden_layers": 12, "vocab_size": 99, "rms_norm_eps": 1e-5, **sizes}
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "config.json").write_text(json.dumps(document))
    assert cli("simulate", single, "--model", tmp_path / "own", *named[2:])[0] == 0, "the way out works"
    fast = write(tmp_path / "fast.jsonl", make_plan([lane(1e-8, layers=4)], update_s=0.0))
    code, _, err = cli("simulate", fast, *named)
    assert code == 2 and "faster than 1 H100-80GB could at their peak" in err and "llama-tiny in bfloat16" in err


def test_the_peak_of_an_mfu_is_that_of_the_dtype(cli, tiny, tmp_path):
    (tmp_path / "gpu.yaml").write_text(
        "memory_gib: 80\nbfloat16_tflops: 400\nfloat32_tflops: 100\nmemory_gbyte_per_s: 2000\nlink_gbyte_per_s: 300\n"
        "network_gbit_per_s: 200\n"
    )
    named = ("simulate", tiny, "--model", "llama-tiny", "--device", tmp_path / "gpu.yaml", "--json")
    wide, narrow = (json.loads(cli(*named, "--dtype", dtype)[1])["mfu"] for dtype in ("float32", "bfloat16"))
    assert wide == pytest.approx(4 * narrow) and json.loads(cli(*named)[1])["mfu"] == narrow


def test_a_page_says_that_it_draws_many_spans_coarsely(cli, tmp_path):
    many, few = (
        write(tmp_path / f"{count}.jsonl", make_plan([lane(*[1.0] * count), lane(1.0)])) for count in (100, 10)
    )
    for plans, is_coarse in ((many, True), (few, False)):
        assert cli("simulate", plans, "--html", tmp_path / "page.html")[0] == 0
        assert ("Rows of over 150 spans show what fills most" in (tmp_path / "page.html").read_text()) is is_coarse
