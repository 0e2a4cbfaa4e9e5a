"""What fits, through the command line."""

import json
from itertools import pairwise

import pytest

GIVEN = ("memory", "--model", "llama-tiny", "--device", "H100-80GB", "--gpus", "4")


ANSWERS = {}
"""What was asked already, by the options."""


def ask(cli, *more):
    if more not in ANSWERS:
        code, out, err = cli(*GIVEN, *more, "--json")
        assert code == 0, err
        ANSWERS[more] = json.loads(out)
    return ANSWERS[more]


def test_more_recompute_and_more_devices_hold_longer_sequences(cli):
    longest = {(s["method"], s["degree"], s["stages"], s["recomputed_layers"]): s["max_tokens"]
               for s in ask(cli)["schemes"]}  # fmt: skip
    for (method, degree, stages, recomputed), tokens in longest.items():
        if recomputed:
            assert tokens >= longest[method, degree, stages, 0]
        if degree == 2 and method != "dense":
            assert tokens > longest["dense", 1, stages, recomputed]


def test_the_longest_is_the_longest(cli):
    document = ask(cli)
    assert document["longest"]["max_tokens"] == max(scheme["max_tokens"] for scheme in document["schemes"])
    assert document["fits"] is None


def test_the_cheapest_scheme_for_a_length_holds_it_and_takes_the_least_work(cli):
    document = ask(cli, "--length", "100000")
    cheapest, fits = document["cheapest"], document["fits"]
    assert cheapest["max_tokens"] >= 100_000
    assert cheapest["device_s"] == min(fit["device_s"] for fit in fits)
    assert all(fit["peak_gib"] <= document["memory_gib"] for fit in fits)


@pytest.mark.parametrize("text", ["32000", "32K", "32k", "0.032M", "31.25Ki"])
def test_lengths_have_suffixes(cli, text):
    assert ask(cli, "--length", text)["length"] == 32_000


def test_less_memory_holds_less(cli):
    assert ask(cli, "--hbm", "10")["longest"]["max_tokens"] < ask(cli)["longest"]["max_tokens"]


def test_limits_limit_the_schemes(cli):
    schemes = ask(cli, "--max-degree", "2", "--max-stages", "2", "--methods", "ring")["schemes"]
    assert {scheme["method"] for scheme in schemes} == {"dense", "ring"}
    assert max(scheme["degree"] for scheme in schemes) == max(scheme["stages"] for scheme in schemes) == 2


def test_a_length_is_answered_in_one_line(cli):
    code, out, _ = cli(*GIVEN, "--length", "100000")
    assert code == 0
    (line,) = out.splitlines()
    cheapest = ask(cli, "--length", "100000")["cheapest"]
    assert line.startswith(f"a sequence of 100,000 tokens fits: the least work is under {cheapest['scheme']}, with ")
    assert "of 73.4 GiB on each device at its peak" in line and "of the schemes that were looked at for it" in line


def test_tables_are_printed_for_people(cli):
    for more in ([], ["--length", "100000", "--table"]):
        code, out, _ = cli(*GIVEN, *more)
        assert code == 0
        assert "longest sequence" in out and "recompute 4" in out
        assert ("schemes fit a sequence of 100,000 tokens" in out) == bool(more)


def test_what_has_no_price_is_said(cli, tmp_path):
    config = {
        "model_type": "gemma2", "head_dim": 32, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
        "num_hidden_layers": 4, "num_key_value_heads": 2, "sliding_window": 512, "vocab_size": 8192,
        "attention_bias": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    given = ["memory", "--model", tmp_path, "--device", "A10G-24GB", "--gpus", 2]
    assert json.loads(cli(*given, "--json")[1])["not_priced"] == "biases"
    assert f"not priced in {tmp_path.name}: biases" in cli(*given, "--length", 5000)[1]


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        (["--model", "llama-tin"], 2, "did you mean llama-tiny"),
        (["--model", "."], 2, "holds no config.json"),
        (["--device", "nowhere.yml"], 2, "there is no device file nowhere.yml; known: A100-40GB"),
        (["--device", "H100-80G.yaml"], 2, "there is no device file H100-80G.yaml; did you mean H100-80GB?"),
        (["--device", "A100"], 2, "did you mean A100-"),
        (["--hbm", "200"], 2, "200 GiB of memory are more than the 79.1 GiB of a "),
        (["--hbm", "0.001"], 3, "no scheme fits: the leanest, <4,1> ulysses_z r4, takes 6.4 MiB"),
        (["--gpus", "1", "--length", "1000000000000"], 3, "The longest that fits has"),
        (["--model", "bert-1024", "--length", "513"], 2, "longer than the 512 positions that bert-1024 has learned"),
    ],
)
def test_what_cannot_be_answered_is_refused_with_the_right_exit_code(cli, changes, code, message):
    found, out, err = cli(*GIVEN, *changes, "--json")
    assert found == code
    assert message in err
    assert json.loads(out)["exit_code"] == code


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(
    "more",
    [
        ("--host-memory", "0.001"), ("--model", "transformer-2d-1.2b", "--gpus", "3"),
        ("--model", "transformer-2d-1.2b", "--gpus", "1"),
        pytest.param(("--model", "llama-3-8b", "--host-memory", "0.5"), marks=pytest.mark.deep),
    ],
)  # fmt: skip
def test_every_rung_holds_more_than_those_before_also_where_the_host_is_small(cli, more):
    reach = [rung["max_tokens"] for rung in ask(cli, *more)["ladder"]]
    assert len(reach) > 2 and all(longer > shorter for shorter, longer in pairwise(reach))


def test_one_token_is_no_tokens(cli):
    assert "a sequence of 1 token fits" in cli(*GIVEN, "--length", 1)[1]


def test_each_rung_of_the_ladder_holds_at_least_as_much_as_those_before(cli):
    ladder = ask(cli)["ladder"]
    reach = [rung["max_tokens"] for rung in ladder]
    assert reach == sorted(reach) and reach[-1] > reach[0]
    names = [rung["rung"] for rung in ladder]
    assert names[0] == "as it is" and names[-1] == "optimizer on host" and len(set(names)) == len(names) == 8
    for before, rung in pairwise(ladder):
        assert rung["at_tokens"] == before["max_tokens"] and rung["slowdown"] > 0
    assert ladder[0]["host_gib"] == 0 < ladder[-1]["host_gib"]
    on_cpus = ask(cli, "--device", "cpu")["ladder"]
    assert [rung["rung"] for rung in on_cpus] == [
        "as it is", "sharded gradients", "selective recompute", "recompute", "feed-forward tiles", "sharded weights",
    ]  # fmt: skip


@pytest.mark.deep
def test_sharded_gradients_are_listed_beside_whole_ones_and_are_a_rung_where_they_hold_more(cli):
    given = ("memory", "--model", "llama-13b", "--device", "H100-80GB", "--methods", "ulysses", "--json")
    limits = json.loads(cli(*given)[1])
    longest = {(s["degree"], s["stages"], s["recomputed_layers"], s["sharded_gradients"]): s for s in limits["schemes"]}
    assert longest[8, 1, 40, False]["max_tokens"] == 0 < longest[8, 1, 40, True]["max_tokens"]
    assert longest[8, 1, 40, True]["state_gib"] < longest[8, 1, 40, False]["state_gib"]
    assert (1, 1, 40, True) not in longest, "one device shards nothing"
    assert [rung["rung"] for rung in limits["ladder"][:3]] == ["as it is", "sharded gradients", "selective recompute"]
    assert "z2" not in limits["ladder"][0]["scheme"] and "z2" in limits["ladder"][1]["scheme"]
    whole = json.loads(cli(*given, "--shard-gradients", "none")[1])
    assert not any(scheme["sharded_gradients"] for scheme in whole["schemes"])
    assert [scheme for scheme in limits["schemes"] if not scheme["sharded_gradients"]] == whole["schemes"]
    everywhere = json.loads(cli(*given, "--shard-gradients", "all")[1])
    assert all(scheme["sharded_gradients"] == (scheme["degree"] > 1) for scheme in everywhere["schemes"])
    assert [rung["rung"] for rung in everywhere["ladder"][:2]] == ["as it is", "selective recompute"]


def test_an_8b_trains_on_half_a_million_tokens_of_one_gpu_if_the_host_has_room(cli):
    given = ("memory", "--model", "llama-3-8b", "--device", "H100-80GB", "--gpus", "1", "--length", "500K")
    code, out, err = cli(*given, "--host-memory", "1000")
    assert code == 0 and "of saved tensors and the optimizer's state on the host" in out, err
    code, out, err = cli(*given, "--host-memory", "240")
    assert code == 3 and "into host memory" in err and "has 240" in err and "--host-memory" in err
    code, out, err = cli(*given[:4], "cpu", "--length", "9", "--host-memory", "200")
    assert code == 2 and "200 GiB of host memory for a cpu" in err


@pytest.mark.parametrize(("gpus", "length"), [(8, "5M"), pytest.param(32, "15M", marks=pytest.mark.deep)])
def test_longer_sequences_than_fit_on_devices_alone_fit_with_the_host(cli, gpus, length):
    given = ("memory", "--model", "llama-3-8b", "--device", "H100-80GB", "--gpus", gpus, "--length", length)
    code, out, err = cli(*given)
    assert code == 0 and "fits: the least work is under" in out and "on the host" in out, err


def test_slices_are_the_last_rung_and_hold_a_length_that_nothing_else_does(cli):
    few = "--model", "llama-3-8b", "--gpus", "3", "--max-degree", "1", "--max-stages", "2", "--host-memory", "0"
    *others, last = ask(cli, *few)["ladder"]
    assert last["rung"] == "slices in time" and last["scheme"].endswith(" c64")
    assert others[-1]["rung"] == "attention by groups of heads", "no memory of a host, no rungs of it"
    assert last["max_tokens"] > 1.1 * others[-1]["max_tokens"]
    length = str((others[-1]["max_tokens"] + last["max_tokens"]) // 2)
    limits = ask(cli, *few, "--length", length)
    assert limits["fits"] and all(fit["slices"] > 1 for fit in limits["fits"])
    assert ask(cli, *few, "--length", str(last["max_tokens"]))["fits"]
    code, _, err = cli(*GIVEN, *few, "--length", str(last["max_tokens"] + 1))
    assert code == 3 and f"The longest that fits has {last['max_tokens']:,} tokens" in " ".join(err.split())
    code, _, err = cli(*GIVEN, *few, "--length", length, "--slices", "none")
    assert code == 3 and f"{others[-1]['max_tokens']:,} tokens" in " ".join(err.split())
    assert "slices in time" not in [rung["rung"] for rung in ask(cli, *few, "--slices", "none")["ladder"]]


def test_the_ladder_ends_where_a_model_has_no_more_positions(cli):
    given = "--model", "bert-1024", "--device", "RTX4090-24GB", "--gpus", "1"
    assert len(ask(cli, *given)["ladder"]) == 1 and ask(cli, *given)["ladder"][0]["max_tokens"] > 512


def test_selective_recompute_is_looked_at_for_a_length(cli):
    """As in the ladder, where recomputing attention too takes a third longer."""
    given = (
        "memory", "--model", "qwen2.5-0.5b", "--device", "B200-180GB", "--gpus", "24", "--host-memory", "20",
        "--max-degree", "1", "--max-stages", "1", "--json",
    )  # fmt: skip
    ladder = {rung["rung"]: rung for rung in json.loads(cli(*given)[1])["ladder"]}
    longest = ladder["selective recompute"]["max_tokens"]
    cheapest = json.loads(cli(*given, "--length", str(longest))[1])["cheapest"]
    assert cheapest["scheme"].endswith("s24")


@pytest.mark.parametrize("command", [("memory",), ("compare", "--lengths", "commoncrawl")], ids=["memory", "compare"])
def test_options_that_contradict_one_another_are_named_as_options(cli, command):
    given = ("--model", "llama-7b", "--device", "H100-80GB", "--methods", "metp", "--shard-gradients", "all")
    code, _, err = cli(*command, *given, "--gpus", "8")
    assert code == 2 and "--shard-gradients=all, and by metp ranks hold shards" in err


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(
    "command",
    [
        ("memory",),
        ("memory", "--length", "1000"),
        pytest.param(
            ("compare", "--lengths", "commoncrawl", "--max-length", "1000", "--steps", "1", "--policies", "static"),
            marks=pytest.mark.deep,
        ),
    ],
    ids=["memory", "memory of a length", "compare"],
)
def test_a_host_without_room_for_the_state_is_named(cli, command):
    given = ("--model", "llama-7b", "--device", "A100-40GB", "--gpus", "3", "--max-stages", "1")
    code, _, err = cli(*command, *given, "--host-memory", "10")
    assert code == 3 and "at least 34.0 GiB per device; a device's share of the host has 10.0 GiB" in err
    assert "Raise --host-memory if there is more" in err
    assert cli(*command, *given, "--host-memory", "60")[0] == 0
