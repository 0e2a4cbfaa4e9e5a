"""A run that is stopped goes on with another number of ranks: the same batches follow, and everything is counted."""

import json

import pytest

from lengthwise.core.run_folder import RunFolder
from tests.cli.runs import lengthwise, make_corpus

STOP, STEPS = 3, 6


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """A corpus, and one of other texts."""
    folder = tmp_path_factory.mktemp("parts")
    (folder / "b").mkdir()
    for number in range(9):
        (folder / "b" / f"{number}.txt").write_text(f"{number} other words " * (4 + number))
    lengthwise("index", folder / "b", "--out", folder / "b-index")
    return [make_corpus(folder / "a"), folder / "b-index"]


def batches_of(plans):
    """Ids of every step, whichever rank computes them."""
    return {
        step: sorted(
            item
            for pipeline in plan.pipelines
            for m in pipeline.micro_batches
            for item in zip(m.pack.ids, m.pack.lengths)
        )
        for step, plan in plans.items()
    }


def test_a_mixture_stopped_on_two_ranks_goes_on_with_one_as_if_it_had_never_stopped(parts, tmp_path):
    mixture = [{"index": str(parts[0]), "name": "a", "repeat": 0.5}, {"index": str(parts[1]), "name": "b"}]
    config = tmp_path / "run.yaml"
    config.write_text(
        json.dumps(
            {
                "data": {
                    "mixture": mixture, "max_length": 600, "over_length": "split", "tokens_per_step": 3000,
                    "order": "curriculum", "pacing": "linear",
                },
                "model": {"num_layers": 2, "hidden_size": 32, "ffn_size": 64},
                "optim": {"schedule": "constant"},
                "cluster": {"name": "1xcpu"},
                "plan": {"policy": "packed"},
            }
        )
    )  # fmt: skip
    lengthwise("plan", config, "--out", tmp_path / "whole.jsonl", "--steps", STEPS)
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole.jsonl").rename(tmp_path / "whole" / "plans.jsonl")
    expected = batches_of(RunFolder(tmp_path / "whole").read_plans())

    run = RunFolder(tmp_path / "run")
    lengthwise("train", config, f"run_folder={run.path}", f"train.steps={STOP}", "cluster.name=2xcpu", "--nproc", 2)
    plans = run.read_plans()
    assert sorted(plans) == list(range(STOP)) and {plan.num_devices for plan in plans.values()} == {2}
    ledger = run.read_json("ledger.json")
    assert ledger["steps"] == STOP and ledger["sequences_seen"] == sum(len(expected[step]) for step in range(STOP))

    sampling = run.read_json("sampling.json")
    assert [trend["name"] for trend in sampling["trends"]] == ["length"] and sampling["trends"][0]["pearson"] > 0.5

    lengthwise("train", "--resume", run.path, f"train.steps={STEPS}", "cluster.name=1xcpu")
    plans = run.read_plans()
    assert [plan.num_devices for _, plan in sorted(plans.items())] == [2] * STOP + [1] * (STEPS - STOP)
    assert batches_of(plans) == expected

    ledger = run.read_json("ledger.json")
    assert ledger["steps"] == STEPS and ledger["epochs"] >= 1
    assert ledger["tokens_seen"] == sum(length for items in expected.values() for _, length in items)
    a, b = ledger["parts"]
    assert (a["name"], a["repeat"], b["name"], b["repeat"]) == ("a", 0.5, "b", 1)
    assert a["sequences_seen"] + b["sequences_seen"] == ledger["sequences_seen"]
    assert ledger["tokens_in"] == ledger["tokens_out"] == a["tokens_in"] + b["tokens_in"]

    lengthwise("report", run.path)
    assert "Seen of b" in run.report.read_text()
