"""What the demo prints, from made-up runs."""

from dataclasses import replace

from lengthwise.cli.tables.demo_table import NEXT, headline, print_demo, reasons
from lengthwise.report.run_summary import summarise
from lengthwise.session.demo_settings import DEMO_LENGTHS, NUM_RANKS, POLICIES
from tests.report.fake_run import make_run


def summaries_of(tmp_path):
    runs = [make_run(tmp_path / policy, policy=policy, name=policy) for policy in POLICIES]
    return [summarise(run) for run in runs]


def test_the_demo_ends_with_the_speed_of_auto_its_reasons_and_one_next_step(tmp_path, capsys):
    print_demo(summaries_of(tmp_path), tmp_path / "report.html", tmp_path / "trace.json.gz")
    printed = capsys.readouterr().out
    assert all(policy in printed for policy in POLICIES)
    assert printed.lstrip().startswith("auto, the default policy: ")
    assert printed.rstrip().endswith(NEXT) and printed.count("next") == 1


def test_where_auto_is_not_ahead_it_is_said_with_the_figures(tmp_path):
    padded, static, auto = summaries_of(tmp_path)
    padded, static = (
        replace(run, tokens_per_s=speed, predicted_step_time_s=predicted_s)
        for run, speed, predicted_s in ((padded, 50.0, 3.0), (static, 150.0, 2.0))
    )
    auto = replace(auto, tokens_per_s=100.0, predicted_step_time_s=1.0)
    assert headline([padded, static, auto]).endswith("100 tokens/s, 2.00x padded and 0.67x static")
    shared, of_padded, of_static = reasons([padded, static, auto])
    assert "on one rank: by the measured costs, sharing none was faster" in shared
    assert "lost" not in of_padded and "auto lost to static here" in of_static and "idle time" in of_static
    of_static = reasons([padded, replace(static, tokens_per_s=101.0), auto])[2]
    assert "do not tell their speeds from each other" in of_static
    of_static = reasons([padded, replace(static, predicted_step_time_s=1.01), auto])[2]
    assert "predicted to take the same time" in of_static and "lost" not in of_static


def test_the_demo_has_sequences_longer_than_the_fair_share_of_a_rank():
    assert DEMO_LENGTHS["max_length"] > DEMO_LENGTHS["tokens_per_step"] / NUM_RANKS
