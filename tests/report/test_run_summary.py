import json
import math
from dataclasses import replace

import pytest

from lengthwise.core.batch import Pack
from lengthwise.core.errors import CheckError, InputError
from lengthwise.core.planned_micro_batch import PlannedMicroBatch
from lengthwise.core.run_folder import RunFolder, timeline_to_row
from lengthwise.core.step_plan import Pipeline, StepPlan
from lengthwise.core.timeline import PUSH, Span, SpanKind, Timeline
from lengthwise.report.record import read_record
from lengthwise.report.run_summary import slowest_steps, summarise, time_shares, typical_step, worst_step
from tests.report.fake_run import SCHEME, edit_row, make_run

ROUNDED = 1e-6
"""Timeline files keep microseconds."""


def plan(step: int, *, time_s: float) -> StepPlan:
    """Two ranks; 30 + 50 tokens on the first, of which 20 more are padding; 100 on the second."""
    packs = (Pack(ids=(0, 1), lengths=(30, 50), padded_to=50), Pack(ids=(2,), lengths=(100,)))
    return StepPlan(
        step=step,
        policy="padded",
        pipelines=tuple(
            Pipeline(
                ranks=(rank,), scheme=SCHEME, micro_batches=(PlannedMicroBatch(pack=pack, time_s=time_s, peak_bytes=1),)
            )
            for rank, pack in enumerate(packs)
        ),
        loss_normaliser=177,
        update_s=0.0,
        time_s=time_s,
        lower_bound_s=0.8,
    )


def spans(rank: int, *, compute_s: float, end_s: float) -> tuple[Span, ...]:
    return (
        Span(start_s=0.0, end_s=compute_s, rank=rank, kind=SpanKind.COMPUTE),
        Span(start_s=compute_s, end_s=end_s, rank=rank, kind=SpanKind.COMMUNICATE, name=PUSH),
    )


def hand_made(path) -> RunFolder:
    """Three steps: a slow first; then 2 s and 4 s, in which rank 0 computes half as long as rank 1."""
    folder = RunFolder(path)
    (path / "timeline").mkdir(parents=True)
    folder.config.write_text("name: hand\nplan: {policy: padded}\n")
    times_s = (10.0, 2.0, 4.0)
    plans = [plan(0, time_s=1.0), plan(1, time_s=1.0), plan(2, time_s=5.0)]
    folder.plans.write_text("".join(json.dumps(p.to_json()) + "\n" for p in plans))
    rows = [
        {"step": k, "loss/avg": 3.0 - k, "perf/step_time_s": t, "data/num_tokens": 180} for k, t in enumerate(times_s)
    ]
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for rank in range(2):
        timelines = [
            Timeline(step=k, num_ranks=2, spans=spans(rank, compute_s=t * (rank + 1) / 4, end_s=t))
            for k, t in enumerate(times_s)
        ]
        folder.timeline(rank).write_text("".join(json.dumps(timeline_to_row(t)) + "\n" for t in timelines))
    return folder


def test_figures_equal_those_computed_by_hand(tmp_path):
    summary = summarise(hand_made(tmp_path / "run"))
    assert (summary.name, summary.policy, summary.num_ranks, summary.num_steps) == ("hand", "padded", 2, 3)
    assert (summary.status, summary.num_warmup, summary.num_tokens) == ("unknown", 1, 540)
    assert summary.tokens_per_s == pytest.approx(360 / 6)
    assert summary.padding_fraction == pytest.approx(20 / 200)
    assert summary.step_time_s == pytest.approx(3.0)
    assert summary.predicted_step_time_s == pytest.approx(3.0)
    # errors 1/2 - 1 = -0.5 and 5/4 - 1 = 0.25
    assert summary.prediction_error == pytest.approx((0.5 + 0.25) / 2)
    # gaps 1/0.8 - 1 = 0.25 and 5/0.8 - 1 = 5.25
    assert summary.gap == pytest.approx((0.25 + 5.25) / 2)
    assert summary.final_loss == 1.0
    # rank 0 computes a quarter of the step and waits until rank 1, at half of it, arrives: 1/4 of 1 of 2 ranks
    assert summary.idle_fraction == pytest.approx(1 / 8, abs=ROUNDED)
    # 1/2 over the mean of 1/4 and 1/2
    assert summary.imbalance == pytest.approx(4 / 3, abs=ROUNDED)


def test_steps_of_several_numbers_of_ranks_weigh_by_device_seconds(tmp_path):
    folder = hand_made(tmp_path / "run")
    plans = [
        plan(0, time_s=1.0),
        plan(1, time_s=1.0),
        replace(plan(2, time_s=5.0), pipelines=plan(2, time_s=5.0).pipelines[:1], num_devices=1),
    ]
    folder.plans.write_text("".join(json.dumps(p.to_json()) + "\n" for p in plans))
    row = timeline_to_row(Timeline(step=2, num_ranks=1, spans=spans(0, compute_s=1.0, end_s=4.0)))
    before = folder.timeline(0).read_text().splitlines()[:2]
    folder.timeline(0).write_text("\n".join([*before, json.dumps(row)]) + "\n")
    edit_row(folder, 1, time__data_wait_s=0.5)
    edit_row(folder, 2, time__data_wait_s=0.2)
    record = read_record(folder)
    summary = summarise(folder)
    # of 2 s on 2 ranks and 4 s on one, rank 0 waits for a quarter of the former
    assert summary.idle_fraction == pytest.approx(2 / 4 / (2 * 2 + 4), abs=ROUNDED)
    shares = time_shares(record, summary)
    assert shares["idle"] / sum(shares.values()) == pytest.approx(summary.idle_fraction, abs=ROUNDED)
    assert summary.data_wait == pytest.approx((0.5 * 2 + 0.2) / (2 * 2 + 4))
    assert (summary.num_ranks, summary.ranks_in_words) == (2, "1 to 2")
    assert worst_step(summary, record.timelines) == 1


def test_warm_up_steps_count_for_loss_and_tokens_but_not_for_speed(tmp_path):
    folder = hand_made(tmp_path / "run")
    assert summarise(folder, warmup=0).tokens_per_s == pytest.approx(540 / 16)
    assert summarise(folder, warmup=2).step_time_s == pytest.approx(4.0)
    assert summarise(folder, warmup=9).num_warmup == 2


def test_steps_are_chosen_by_time_and_idling(tmp_path):
    record = read_record(hand_made(tmp_path / "run"))
    summary = summarise(record.folder)
    assert [s.step for s in slowest_steps(summary)] == [2, 1]
    assert worst_step(summary, record.timelines) == 2
    assert typical_step(summary, [2]) == 2 and typical_step(summary, [0]) is None
    shares = time_shares(record, summary)
    assert shares["idle"] / sum(shares.values()) == pytest.approx(1 / 8, abs=ROUNDED)


def test_missing_metrics_come_from_the_plan_and_the_timeline(tmp_path):
    folder = hand_made(tmp_path / "run")
    folder.metrics.write_text("".join(json.dumps({"step": k}) + "\n" for k in range(3)))
    summary = summarise(folder)
    assert summary.tokens_per_s == pytest.approx(60) and summary.final_loss is None
    assert [s.max_length for s in summary.steps] == [100] * 3


def test_metrics_alone_are_enough(tmp_path):
    folder = hand_made(tmp_path / "run")
    folder.plans.unlink()
    for rank in range(2):
        folder.timeline(rank).unlink()
    summary = summarise(folder)
    assert summary.tokens_per_s == pytest.approx(60)
    assert summary.idle_fraction is None and summary.gap is None and summary.prediction_error is None


def test_json_has_null_for_what_is_not_finite(tmp_path):
    folder = make_run(tmp_path / "run", num_steps=4)
    edit_row(folder, 3, loss__avg=math.nan)
    document = summarise(folder).to_json()
    assert document["final_loss"] is None and "steps" not in document
    json.dumps(document, allow_nan=False)


def test_plans_of_steps_that_never_ran_do_not_count(tmp_path):
    folder = make_run(tmp_path / "run", num_steps=6)
    folder.metrics.write_text("".join(folder.metrics.read_text().splitlines(keepends=True)[:4]))
    assert summarise(folder).num_steps == 4


def test_a_folder_without_configuration_is_refused(tmp_path):
    with pytest.raises(InputError, match="not a run folder"):
        summarise(RunFolder(tmp_path))


def test_a_run_without_a_finished_step_is_refused(tmp_path):
    folder = make_run(tmp_path / "run", num_steps=2)
    folder.metrics.write_text('{"step": 0')
    with pytest.raises(InputError, match="no finished step"):
        summarise(folder)


@pytest.mark.parametrize(
    "name", ["plans.jsonl", "metrics.jsonl", "status.json", "corpus.json", "timeline/rank_00001.jsonl"]
)
def test_damage_names_the_file(tmp_path, name):
    folder = make_run(tmp_path / "run", num_steps=2)
    (folder.path / name).write_text('{"step": 0, "histogram": [{}], "half\n')
    with pytest.raises(InputError, match=name.partition("/")[0]):
        read_record(folder)


def test_a_plan_changed_by_hand_fails_its_digest(tmp_path):
    folder = make_run(tmp_path / "run", num_steps=2)
    folder.plans.write_text(folder.plans.read_text().replace('"loss_normaliser": ', '"loss_normaliser": 1', 1))
    with pytest.raises(CheckError, match=r"plans\.jsonl"):
        read_record(folder)


@pytest.mark.parametrize(
    ("lacking", "state", "missing"),
    [
        ((), "done", ()),
        ((1,), "done", ((1, 1),)),
        ((0, 2, 3, 5), "done", ((0, 0), (2, 3), (5, 5))),
        ((5,), "running", ()),  # its plan was made ahead
    ],
)
def test_steps_without_a_row_are_named(tmp_path, lacking, state, missing):
    folder = make_run(tmp_path / "run", num_steps=6, status={"state": state})
    lines = folder.metrics.read_text().splitlines(keepends=True)
    folder.metrics.write_text("".join(line for step, line in enumerate(lines) if step not in lacking))
    summary = summarise(folder)
    assert summary.missing_steps == missing and summary.num_steps == 6 - len(lacking)
    words = {1: "lack a row of step 1; all figures leave it out", 4: "lack rows of 4 steps: 0, 2 to 3, 5; all figures"}
    assert words[len(lacking)] in summary.missing_in_words if missing else not summary.missing_in_words
