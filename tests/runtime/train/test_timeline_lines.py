import json

from lengthwise.core.json_lines import read_jsonl
from lengthwise.runtime.train.step_metrics import TimelineLines


def write(path, steps, *, max_bytes, words=20):
    lines = TimelineLines(path, max_bytes)
    for step in steps:
        lines.on_step({"step": step, "num_ranks": 1, "spans": "x" * words})
        assert path.stat().st_size <= max_bytes
    lines.close()
    return [row["step"] for row in read_jsonl(path)]


def test_a_file_within_its_bound_holds_every_step(tmp_path):
    assert write(tmp_path / "a.jsonl", range(50), max_bytes=10_000) == list(range(50))


def test_a_full_file_keeps_its_last_steps_and_thins_older_ones(tmp_path):
    steps = write(tmp_path / "a.jsonl", range(2000), max_bytes=10_000)
    size = len(json.dumps({"step": 1000, "num_ranks": 1, "spans": "x" * 20})) + 1
    assert len(steps) * size > 10_000 / 3, "no more is lost than must be"
    assert steps == sorted(set(steps)) and steps[0] == 0
    dense = 10_000 // size // 4
    assert steps[-dense:] == list(range(2000 - dense, 2000))


def test_ranks_whose_files_fill_at_different_steps_have_many_in_common(tmp_path):
    small = write(tmp_path / "a.jsonl", range(2000), max_bytes=10_000)
    large = write(tmp_path / "b.jsonl", range(2000), max_bytes=10_000, words=33)
    assert len(set(small) & set(large)) > 0.5 * min(len(small), len(large))


def test_a_resumed_run_goes_on_within_the_bound(tmp_path):
    write(tmp_path / "a.jsonl", range(500), max_bytes=10_000)
    steps = write(tmp_path / "a.jsonl", range(500, 1500), max_bytes=10_000)
    assert steps[0] == 0 and steps[-1] == 1499


def test_one_row_above_the_bound_is_kept_alone(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = TimelineLines(path, 100)
    for step in range(3):
        lines.on_step({"step": step, "spans": "x" * 200})
    lines.close()
    assert [row["step"] for row in read_jsonl(path)] == [2]
