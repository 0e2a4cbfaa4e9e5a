"""What a run writes reads back, also after a kill in the middle of a line."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from lengthwise.core.errors import InputError
from lengthwise.core.json_lines import drop_steps_from, read_jsonl
from lengthwise.core.run_folder import RunFolder, timeline_from_row, timeline_to_row
from lengthwise.core.timeline import MemorySample, Span, SpanKind, Timeline


def timeline(rank: int, end_s: float) -> Timeline:
    span = Span(start_s=0.25, end_s=end_s, rank=rank, kind=SpanKind.COMPUTE, name="micro-batch 0")
    return Timeline(step=3, num_ranks=2, spans=(span,), memory=(MemorySample(time_s=0.5, rank=rank, num_bytes=2**40),))


def test_timelines_survive_their_file():
    assert timeline_from_row(timeline_to_row(timeline(1, 1.5)), 1) == timeline(1, 1.5)


def test_a_line_cut_off_by_a_kill_is_passed_over_and_a_damaged_one_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n{"st')
    assert [row["step"] for row in read_jsonl(path)] == [0, 1]
    path.write_text('{"step": 0}\n{"st\n{"step": 2}\n')
    with pytest.raises(InputError, match=r"metrics\.jsonl:2 is damaged"):
        list(read_jsonl(path))
    assert list(read_jsonl(tmp_path / "absent.jsonl")) == []


def test_steps_trained_again_count_once_and_in_order(tmp_path):
    folder = RunFolder(tmp_path)
    folder.metrics.write_text('{"step": 1, "x": 1}\n{"step": 0, "x": 2}\n{"step": 1, "x": 3}\n')
    assert folder.read_metrics() == [{"step": 0, "x": 2}, {"step": 1, "x": 3}]


def test_timelines_of_steps_trained_again_on_fewer_ranks_are_those_of_the_last_time(tmp_path):
    folder = RunFolder(tmp_path)
    alone = replace(timeline(0, 2.5), num_ranks=1)
    for rank, parts in enumerate([[timeline(0, 1.5), alone], [timeline(1, 1.5)]]):
        folder.timeline(rank).parent.mkdir(exist_ok=True)
        folder.timeline(rank).write_text("".join(json.dumps(timeline_to_row(part)) + "\n" for part in parts))
    assert {step: (whole.num_ranks, whole.spans) for step, whole in folder.read_timelines().items()} == {
        3: (1, alone.spans)
    }


def test_samples_of_steps_trained_again_count_once(tmp_path):
    folder = RunFolder(tmp_path)
    rows = [{"step": step, "prompt": prompt, "text": step + k} for k in (0, 10) for step in (4, 5) for prompt in "ab"]
    folder.samples.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert folder.read_samples() == rows[4:]


@pytest.mark.parametrize(
    ("steps", "kept"),
    [
        ([0, 1, 2, 3, 4], [0, 1, 2]),
        ([0, 1, 2, 3, 4, 1, 2], [0, 1, 2, 1, 2]),
        ([3, 4], []),
        ([0, 1, 2], [0, 1, 2]),
    ],
)
@pytest.mark.parametrize("end", ["", '{"step": 2, "x', '{"step": 3, "x'])
def test_a_run_that_goes_on_before_a_step_leaves_no_row_of_it_and_of_later_ones(tmp_path, steps, kept, end):
    """Whatever file they are in, and of whichever rank."""
    folder = RunFolder(tmp_path)
    paths = [folder.metrics, folder.plans, folder.samples, *map(folder.timeline, range(3))]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(f'{{"step": {step}, "x": NaN}}\n' for step in steps) + end)
    for rank in range(2):  # one less than before
        folder.drop_steps_from(3, rank=rank, num_ranks=2)
    for path in paths:
        assert [row["step"] for row in read_jsonl(path)] == kept
        assert path.read_text().endswith("\n") or not kept


def test_a_kill_while_rows_are_dropped_loses_none_of_earlier_steps_and_leaves_nothing_for_long(tmp_path):
    path = tmp_path / "metrics.jsonl"
    before = '{"step": 0}\n{"step": 5}\nno row\n{"step": 1}\n'
    path.write_text(before)
    killed = """
import os, sys
from pathlib import Path
from lengthwise.core.json_lines import drop_steps_from
Path.replace = lambda *_: os._exit(9)
drop_steps_from(Path(sys.argv[1]), 2)
"""
    assert subprocess.run([sys.executable, "-c", killed, str(path)], check=False).returncode == 9
    assert path.read_text() == before and len(list(tmp_path.iterdir())) == 2
    drop_steps_from(path, 2)
    assert path.read_text() == before.replace('{"step": 5}\n', "")
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_without_a_configuration_is_no_run(tmp_path):
    with pytest.raises(InputError, match="is not a run folder"):
        RunFolder(tmp_path).check()


def test_documents_are_written_whole_and_absent_ones_are_empty(tmp_path):
    folder = RunFolder(tmp_path)
    folder.write_json("status.json", {"state": "done"})
    assert folder.read_json("status.json") == {"state": "done"}
    assert folder.read_json("nothing.json") == {}
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]
