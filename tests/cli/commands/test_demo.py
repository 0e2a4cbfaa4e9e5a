"""What the demo prints, from made-up runs."""

from lengthwise.cli.commands import demo
from lengthwise.report.run_summary import summarise
from tests.report.fake_run import make_run


def test_the_table_of_the_demo_says_what_two_cpu_ranks_cannot_show(tmp_path, capsys):
    runs = [make_run(tmp_path / policy, policy=policy, name=policy) for policy in demo.POLICIES]
    demo._print([summarise(run) for run in runs], tmp_path / "report.html")
    printed = capsys.readouterr().out
    assert all(policy in printed for policy in demo.POLICIES)
    assert printed.count(demo.LIMITS) == 1 and "lengthwise compare" in demo.LIMITS
