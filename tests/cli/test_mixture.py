"""Every command that takes a configuration takes a mixture."""

import json

import numpy as np
import pytest


@pytest.fixture
def config(cli, tmp_path):
    """Two rows of lengths, the first passed twice as often as its share alone would have it."""
    for name, lengths in {"long": [900, 700, 800], "short": [10, 20, 30, 40]}.items():
        np.save(tmp_path / f"{name}.npy", np.array(lengths))
        assert cli("index", tmp_path / f"{name}.npy", "--out", tmp_path / name)[0] == 0
    parts = [{"index": str(tmp_path / "long"), "share": 1}, {"index": str(tmp_path / "short"), "share": 0.25}]
    path = tmp_path / "run.yaml"
    data = {"mixture": parts, "tokens_per_step": 2000}
    path.write_text(json.dumps({"data": data, "cluster": {"name": "2xcpu"}}))
    return path


def test_lengths_alone_are_planned_and_simulated_with_the_shares_of_tokens_that_were_asked_for(cli, config, tmp_path):
    code, out, err = cli("plan", config, "plan.policy=static", "--steps", 20, "--json")
    assert code == 0, err
    lengths = [
        length
        for plan in json.loads(out)["plans"]
        for pipeline in plan["pipelines"]
        for m in pipeline["micro_batches"]
        for length in m["lengths"]
    ]
    long, short = sum(n for n in lengths if n > 100), sum(n for n in lengths if n < 100)
    assert long / short == pytest.approx(4, rel=0.05)
    code, out, err = cli("simulate", config, "--steps", 2, "--json")
    assert code == 0 and json.loads(out)["num_steps"] == 2, err


def test_stats_are_of_an_epoch(cli, config, tmp_path):
    code, out, err = cli("stats", config, "--json")
    tokens = json.loads(out)["num_tokens"]
    assert code == 0 and (tokens - 2400) / 2400 == pytest.approx(0.25, rel=0.05), err
    repeats = [{"index": str(tmp_path / "long"), "repeat": 0.34}, {"index": str(tmp_path / "short"), "repeat": 10}]
    code, out, err = cli("stats", config, f"data.mixture={json.dumps(repeats)}")
    assert code == 0 and "41 sequences" in out and "first epoch" in out, err
    code, out, err = cli("stats", config, "--sampling", "data.order=curriculum", "data.tokens_per_step=1000", "--json")
    assert code == 0, err


def test_a_printed_configuration_is_the_one_that_was_read(cli, config, tmp_path):
    code, out, err = cli("config", config)
    assert code == 0, err
    (tmp_path / "printed.yaml").write_text(out)
    assert cli("config", tmp_path / "printed.yaml", "--json")[1] == cli("config", config, "--json")[1]


def test_settings_of_parts_that_contradict_one_another_end_with_the_exit_code_of_bad_input(cli, config):
    code, _, err = cli("plan", config, "data.index=elsewhere")
    assert code == 2 and "data.index=elsewhere and data.mixture are both set" in err
