"""Ranks that are at different operations of a run all know it, and say which ranks are where."""

import math

import pytest

from lengthwise.core.errors import CheckError, InputError
from lengthwise.runtime.comm.activity import ACTIVITY
from lengthwise.runtime.loop import call_order
from lengthwise.runtime.loop.call_order import (
    NUM_VALUES,
    RankOperation,
    RankReports,
    all_succeed,
    bits_of,
    float_of,
    sync_ranks,
)
from tests.runtime.train.runs import local_world

BEGIN, UPDATE, LEAVE, SKIP, SAVE, RESUME, ITEMS, SCORE, COUPLE, CLOSE, COMPARE, *_ = RankOperation


def reports_of(*places, notes=()):
    """The reports of ranks at ``places``: pairs of an operation and a step."""
    operations, steps = zip(*places)
    return RankReports(
        operations=operations, steps=steps, values=tuple((rank, -rank) for rank in range(len(steps))),
        notes=notes or ("",) * len(steps),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("places", "also"),
    [
        ([(BEGIN, 3)], ()),
        ([(COMPARE, 3)] * 2, ()),
        ([(UPDATE, 3)] * 4, ()),
        ([(UPDATE, 3), (LEAVE, 3)], (LEAVE, UPDATE)),
        ([(LEAVE, 3), (LEAVE, 3)], (LEAVE, UPDATE)),
        ([(SAVE, 3), (SAVE, 3)], (LEAVE, UPDATE)),
    ],
)
def test_ranks_at_one_operation_or_at_those_that_may_meet_go_on(places, also):
    reports_of(*places).check_same(*also)


@pytest.mark.parametrize(
    ("places", "also", "said"),
    [
        ([(BEGIN, 3), (SAVE, 3), (BEGIN, 3)], (), "ranks 0 and 2 began step 3, rank 1 called run.save() before step 3"),
        ([(BEGIN, 3), (BEGIN, 4)], (), "rank 0 began step 3, rank 1 began step 4"),
        ([(BEGIN, 3), (BEGIN, 4)], (BEGIN,), "rank 0 began step 3, rank 1 began step 4"),
        ([(UPDATE, 3), (LEAVE, 4)], (LEAVE, UPDATE), "rank 0 called step.update() of step 3, rank 1 left step 4 witho"),
        ([(UPDATE, 3), (SKIP, 3)], (LEAVE, UPDATE), "rank 0 called step.update() of step 3, rank 1 called step.skip()"),
        (
            [(UPDATE, 3), (RESUME, 3)],
            (),
            "rank 0 called step.update() of step 3, rank 1 called run.resume(): all ranks",
        ),
    ],
)
def test_ranks_that_are_elsewhere_are_told_from_one_another(places, also, said):
    with pytest.raises(CheckError) as raised:
        reports_of(*places).check_same(*also)
    assert str(raised.value).startswith(said) and "take them out of `if rank == ...`" in str(raised.value)


def test_each_operation_has_the_call_that_a_loop_makes():
    assert [operation.call for operation in RankOperation] == [
        "begin of a step", "step.update()", "end of a step that was left", "step.skip()", "run.save()", "run.resume()",
        "run.step(items)", "run.score(items)", "end of the forwards of a step", "run.close()", "run.compare()",
        "end of the callbacks", "gathering of values", "save of the model",
        "optimizer.eval() or train()",
    ]  # fmt: skip
    assert [operation.described(7) for operation in RankOperation] == [
        "began step 7", "called step.update() of step 7", "left step 7 without step.update()",
        "called step.skip() of step 7", "called run.save() before step 7", "called run.resume()",
        "called run.step(items) of step 7", "called run.score(items) before step 7", "computed the forwards of step 7",
        "called run.close() in step 7", "called run.compare() before step 7",
        "ended its callbacks before step 7", "gathered values before step 7", "saved the model before step 7",
        "called eval() or train() of the optimizer before step 7",
    ]  # fmt: skip


def test_notes_are_told_with_their_ranks_and_equal_ones_once():
    places = [(UPDATE, 0)] * 4
    assert reports_of(*places, notes=("full", "", "full", "gone")).notes_text() == "ranks 0 and 2: full; rank 3: gone"
    assert reports_of((UPDATE, 0), notes=("full",)).notes_text() == "full"
    assert reports_of(*places).column(1) == (0, -1, -2, -3)


@pytest.mark.parametrize("value", [0.0, -0.0, 0.1, -1e300, 5e-324, math.inf, -math.inf])
def test_a_float_is_the_same_after_it_was_an_integer(value):
    assert -(1 << 63) <= bits_of(value) < 1 << 63
    assert float_of(bits_of(value)) == value and math.copysign(1, float_of(bits_of(value))) == math.copysign(1, value)
    assert math.isnan(float_of(bits_of(math.nan)))


def test_every_rank_gets_what_all_of_them_report(ranks):
    for rank, reports in enumerate(ranks(2).run(_reported)):
        with_notes, without, activity = reports
        assert with_notes.operations == (UPDATE, SAVE) and with_notes.steps == (5, 6)
        assert with_notes.notes == ("", "its disk is full") and without.notes == ("", "")
        assert [row[:3] for row in with_notes.values] == [(0, -8, 0), (0, 1 << 62, 0)]
        assert {len(row) for row in with_notes.values} == {NUM_VALUES}
        assert without.operations == (BEGIN, BEGIN)
        assert activity == ("step.update()", 5) if rank == 0 else activity == ("run.save()", 6)


def _reported():
    world = local_world()
    if world.rank:
        reports = sync_ranks(world, SAVE, 6, values=[0, 1 << 62], note="its disk is full")
    else:
        reports = sync_ranks(world, UPDATE, 5, values=[0, -8])
    activity = ACTIVITY.name, ACTIVITY.step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(call_order, "gather_json", None)  # without notes there is no second collective
        return reports, sync_ranks(world, BEGIN, 6), activity


def test_work_that_fails_on_a_rank_fails_on_all_with_the_first_ranks_error(ranks):
    assert ranks(3).run(_worked, ()) == [0, 1, 2]
    assert ranks(3).run(_worked, (1, 2)) == [
        "InputError: ranks 1-2 cannot go on: 1 is gone", "CheckError: 1 is gone", "CheckError: 2 is gone"
    ]  # fmt: skip


def _worked(failing):
    world = local_world()

    def work():
        if world.rank in failing:
            raise CheckError(f"{world.rank} is gone")
        return world.rank

    try:
        return all_succeed(world, work)
    except (CheckError, InputError) as error:
        return f"{type(error).__name__}: {error}"
