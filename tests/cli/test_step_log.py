"""What `lengthwise train` shows of its steps, on a terminal and in a file."""

from io import StringIO

import pytest
from rich.console import Console

from lengthwise.cli import step_log
from lengthwise.cli.step_log import DATA_SHEETS, MOST_COLUMNS, StepLog, short_strategy, step_line, step_table

ROW = {
    "step": 2, "loss/avg": 8.61957, "lr": 2e-3, "lr_factor": 1.0, "perf/tokens_per_s": 2527.4,
    "perf/step_time_s": 1.254,
    "plan/pred_time_s": 1.284, "balance/idle_frac": 0.052, "memory/max_reserved_gib": 0.62, "compile/recompiles": 0,
    "data/wait_frac": 0.01, "plan/policy": "auto", "plan/strategy": "2 x <1,1> dense",
}  # fmt: skip
HUGE = {
    **ROW, "step": 999_998, "loss/avg": 123456.7, "lr_factor": 0.25, "perf/tokens_per_s": 1e9, "perf/step_time_s": 4e5,
    "plan/pred_time_s": 3e5, "memory/max_reserved_gib": 141.0, "compile/recompiles": 12345, "data/wait_frac": 1.0,
    "plan/strategy": " + ".join(f"{n} x <{n},{n}> ulysses r{n}" for n in range(1, 9)),
}  # fmt: skip


def test_the_line_of_a_step_says_the_figures_that_matter():
    line = step_line(ROW, num_steps=6)
    assert line == "step 3/6  loss 8.6196  lr 2.0e-03  2,527 tokens/s  2x<1>  peak 0.6 GiB  eta 0:00:04"


def test_what_is_unusual_is_named():
    row = {**ROW, "compile/recompiles": 3, "data/wait_frac": 0.2, "lr_factor": 0.5}
    line = step_line(row, num_steps=6)
    assert "recompiles 3" in line and "data wait 20%" in line and "lr 2.0e-03 x0.50" in line
    usual = step_line(ROW, num_steps=6)
    assert "recompiles" not in usual and "data wait" not in usual and " x0" not in usual


def test_a_strategy_is_told_by_what_is_shared():
    assert short_strategy("6 x <1,1> dense + 1 x <2,1> ulysses r4") == "6x<1> + 1x<2>"
    assert short_strategy("1 x <2,1> ring + 2 x <2,1> ulysses + 1 x <4,2> metp") == "3x<2> + 1x<4,2>"
    assert short_strategy("1 x <4,1> ulysses, then 4 x <1,1> dense") == "1x<4>, then 4x<1>"


def test_a_validation_has_a_line_of_its_own_whatever_steps_are_logged(monkeypatch):
    log, file = _log(monkeypatch, is_terminal=False, log_every=10, has_profile=True)
    for step, loss, best in ((0, 3.0, 1), (1, None, None), (2, 3.5, 1)):
        validated = {} if loss is None else {"val/loss": loss, "val/best_step": best, "val/time_s": 8.0}
        log.on_step({**ROW, "step": step} | validated)
    log.close()
    assert [line for line in file.getvalue().splitlines() if not line.startswith("step")] == [
        "validation after step 1: loss 3.0000, the lowest so far",
        "validation after step 3: loss 3.5000, the lowest was after step 1",
    ]
    assert file.getvalue().count("\nstep ") == 1 and file.getvalue().startswith("step 1/6")


def test_a_step_is_shown_before_its_validation_which_the_remaining_time_reckons_with(monkeypatch):
    log, file = _log(monkeypatch, is_terminal=False, log_every=2, has_profile=True)
    log.on_step({**ROW, "step": 1})
    log.on_validation({**ROW, "step": 2})
    assert file.getvalue().splitlines()[-1] == "validating after step 3"
    log.on_step({**ROW, "step": 2, "val/loss": 3.0, "val/best_step": 3, "val/time_s": 8.0})
    log.on_step({**ROW, "step": 3})
    log.close()
    lines = file.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "step 2/6", "step 3/6", "validating after step 3", "validation after step 3: loss 3.0000, the lowest so far",
        "step 4/6",
    ]  # fmt: skip
    assert lines[1].endswith("eta 0:00:04") and lines[-1].endswith("eta 0:00:11"), "half of 8 s a step"


@pytest.mark.parametrize("has_profile", [True, False])
def test_no_line_and_no_table_is_wider_than_a_hundred_columns(has_profile):
    for row in (ROW, HUGE, {**HUGE, "plan/pred_time_s": None, "loss/avg": float("nan")}):
        line = step_line(row, num_steps=1_000_000)
        assert line.startswith("step ") and "loss" in line and len(line) <= MOST_COLUMNS
    console = Console(file=StringIO(), width=200)
    console.print(
        step_table([ROW, {**ROW, "step": 99_999, "val/loss": 123.4567}], num_steps=100_000, has_profile=has_profile)
    )
    lines = console.file.getvalue().splitlines()
    assert max(len(line.rstrip()) for line in lines) <= MOST_COLUMNS
    assert lines[0].split() == [
        "step", "loss", "val", "loss", "lr", "tokens/s", "step", "time", *(["predicted"] if has_profile else []),
        "idle", "peak", "plan",
    ]  # fmt: skip
    assert "auto 2x<1>" in lines[1] and "auto" not in lines[2]  # told once, where it changes
    largest = {**HUGE, "step": 9_999_998, "loss/avg": 123456.789, "val/loss": 123456.789, "val/best_step": 1}
    console = Console(file=StringIO(), width=200)
    console.print(step_table([largest], num_steps=10_000_000, has_profile=has_profile))
    assert max(len(line.rstrip()) for line in console.file.getvalue().splitlines()) <= 120


def _log(monkeypatch, *, is_terminal, **options):
    from rich.progress import Progress

    console = Console(
        file=StringIO(), width=120, force_terminal=is_terminal, force_interactive=is_terminal, markup=False
    )
    monkeypatch.setattr(step_log, "progress", lambda: Progress(console=console))
    return StepLog(**{"num_steps": 6, "log_every": 1, "has_profile": False, **options}), console.file


def test_a_file_gets_a_line_a_step(monkeypatch):
    log, file = _log(monkeypatch, is_terminal=False)
    for step, strategy in enumerate(["2 x <1,1> dense", "2 x <1,1> dense", "1 x <2,1> ulysses"]):
        log.on_step({**ROW, "step": step, "plan/strategy": strategy})
    log.close()
    lines = file.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == [DATA_SHEETS, "step 1/6", "step 2/6", "step 3/6"]
    assert "1x<2>" in lines[-1]


def test_only_every_log_every_th_step_is_shown_and_a_profile_needs_no_note(monkeypatch):
    log, file = _log(monkeypatch, is_terminal=False, log_every=2, has_profile=True)
    for step in range(4):
        log.on_step({**ROW, "step": step})
    log.close()
    assert [line.split("  ")[0] for line in file.getvalue().splitlines()] == ["step 2/6", "step 4/6"]


def test_a_terminal_gets_a_table_with_a_bar_that_goes_away(monkeypatch):
    log, file = _log(monkeypatch, is_terminal=True)
    log.on_compiled(1, 3)
    for step in range(3):
        log.on_step({**ROW, "step": step})
    assert "compile 1/3 sizes" in file.getvalue()
    log.close()
    last = file.getvalue().rpartition("tokens/s")[2]
    assert "3/6" in last and "compile" not in last and "━" not in last
