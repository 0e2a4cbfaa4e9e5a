"""optim.lr_scaling: the rate of every step follows its batch, also of a run that was stopped and gone on with."""

import json

import pytest


@pytest.fixture
def settings(tmp_path, cli):
    """Sequences of 4 to 40 bytes and an end; a step takes 64 tokens."""
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": "x" * (4 * n)}) + "\n" for n in range(1, 11)))
    code, _, err = cli("index", tmp_path / "text.jsonl", "--out", tmp_path / "index")
    assert code == 0, err
    return [
        f"data.index={tmp_path / 'index'}",
        "data.tokens_per_step=64",
        "cluster.name=1xcpu",
        "optim.lr=0.5",
        "plan.policy=static",
    ]


def plans(cli, settings):
    code, out, err = cli("plan", *settings, "--steps", 5, "--json")
    assert code == 0, err
    return json.loads(out)["plans"]


def lengths_of(plan):
    return [n for p in plan["pipelines"] for m in p["micro_batches"] for n in m["lengths"]]


def test_plans_scale_the_rate_by_what_is_counted(cli, settings):
    for by, size in (("tokens", sum), ("sequences", len), ("targets", lambda lengths: sum(lengths) - len(lengths))):
        for plan in plans(
            cli, [*settings, "optim.lr_scaling=linear", f"optim.lr_scaling_by={by}", "optim.lr_reference=8"]
        ):
            assert plan["lr_factor"] == size(lengths_of(plan)) / 8
    assert {plan["lr_factor"] for plan in plans(cli, settings)} == {1.0}


def test_the_reference_left_out_is_the_budget(cli, settings):
    for plan in plans(cli, [*settings, "optim.lr_scaling=sqrt", "optim.lr_clamp=[0.9,1]"]):
        assert plan["lr_factor"] == pytest.approx(max(0.9, (sum(lengths_of(plan)) / 64) ** 0.5))


def test_a_clamp_the_wrong_way_round_is_bad_input(cli, settings):
    code, _, err = cli("plan", *settings, "optim.lr_scaling=linear", "optim.lr_clamp=[4,0.25]")
    assert code == 2 and "optim.lr_clamp: the least factor comes first" in err
