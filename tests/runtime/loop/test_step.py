"""What ranks bring to the update of a step, and what comes of it; ranks are rows here, and none communicates."""

import math
import re
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from lengthwise.core.batch import EVERY_TOKEN, GlobalBatch
from lengthwise.core.errors import CheckError, InputError, LengthwiseError
from lengthwise.runtime.loop import update_reports
from lengthwise.runtime.loop.call_order import NUM_VALUES, RankOperation, RankReports, bits_of, float_of
from lengthwise.runtime.loop.loop_ledger import MOST_WITHOUT_LOSS, LoopLedger, num_planned
from lengthwise.runtime.loop.loss_weighing import Uses
from lengthwise.runtime.loop.step import Step
from lengthwise.runtime.loop.update_reports import NUM_DIGESTS
from lengthwise.runtime.wrap.collator import PackCollator
from tests.runtime.loop.runs import Packs, Source, plan_of

LENGTHS = (8, 6, 4, 2)
LR, FACTOR = 0.5, 0.25
BY_TARGET, TARGETS, PIPELINE, MICRO_BATCH, FINGERPRINT, IS_CHANGED, RATE, DIGEST = range(8)
DIRECT, USES = 11, 12
SEQUENCES, TOKENS = 15, 16


def groups_of(num_phases, shared=0):
    """Two ranks that share a pipeline in the phase ``shared`` and have their own in the others."""
    by_phase = [
        [Packs(ranks=(r,), packs=((2,),) if r == 0 else (), phase=p) for r in (0, 1)] for p in range(num_phases)
    ]
    by_phase[shared] = [Packs(ranks=(0, 1), packs=((0,), (1,)), phase=shared)]
    return tuple(group for groups in by_phase for group in groups)


def step_of(monkeypatch, changes, *, num_phases=2, clip_norm=0.0, **given):
    """A step of rank 0 that is computed; ``changes``: what rank 1 reports otherwise, by column or name."""
    batch = GlobalBatch(step=3, ids=tuple(range(len(LENGTHS))), lengths=LENGTHS, objective=EVERY_TOKEN)
    plan = replace(plan_of(batch, groups_of(num_phases, given.get("shared", 0)), 1), lr_factor=FACTOR)
    run = mock.Mock(
        world=SimpleNamespace(rank=0, size=2, is_first=True, device=torch.device("cpu")), ledger=LoopLedger(),
        readers=None, counts_targets=False,
        collator=PackCollator(source=Source(LENGTHS), objective=EVERY_TOKEN), clip_norm=clip_norm,
        lr=given.get("lr", lambda step: LR), overlap=None,
    )  # fmt: skip
    run.inspect.return_value = given.get("problem", ""), 77, True
    run.gradients.problem.return_value = given.get("gradient_problem", "")
    run.loss_check.problem.return_value = ""
    run.state.global_norm.return_value = (given.get("norm", 2.0), None)
    run.state.loss_scaler, run.state.optimizer = given.get("loss_scaler"), None
    clock = SimpleNamespace(span=lambda kind, name: nullcontext())
    step = Step(run, plan, clock, attempt=0)
    for position in range(len(step._own)):
        step._shards[position] = SimpleNamespace(is_finished=True, read_digest=1 << position, host_bytes=0)
    step._weighing.by_target += given.get("loss", 30.0)
    step._weighing.num_targets, step._weighing.uses = given.get("num_targets", 10), Uses.TARGETS
    step.failure = given.get("failure")

    def meet(world, operation, number, *, values, note):
        assert (operation, number) == (RankOperation.UPDATE, 3)
        mine = [*values, *[0] * (NUM_VALUES - len(values))]
        rest = dict(zip((SEQUENCES, TOKENS), np.subtract(num_planned(plan), mine[SEQUENCES:]).tolist()))
        other = [(rest | changes).get(column, value) for column, value in enumerate(mine)]
        step.said = mine, note
        return RankReports(
            operations=(operation, changes.get("operation", operation)), steps=(3, 3),
            values=(tuple(mine), tuple(other)), notes=(note, changes.get("note", note)),
        )  # fmt: skip

    monkeypatch.setattr(update_reports, "sync_ranks", meet)
    return step


def test_what_a_rank_brings_is_in_the_row_that_others_read(monkeypatch):
    step = step_of(monkeypatch, {}, num_phases=6)
    step._weighing.direct, step._weighing.uses = 1.5, Uses.UNITS
    step.update()
    row, note = step.said
    assert [float_of(row[k]) for k in (BY_TARGET, RATE, DIRECT)] == [30.0, LR * FACTOR, 1.5] and note == ""
    assert (row[TARGETS], row[PIPELINE], row[MICRO_BATCH]) == (10, -1, -1)
    assert (row[SEQUENCES], row[TOKENS]) == num_planned(step.plan), "it is the first rank of all pipelines with packs"
    assert (row[FINGERPRINT], row[IS_CHANGED], row[USES]) == (77, 1, int(Uses.UNITS))
    # two micro-batches of the first phase, then one of each other phase, of which the last three share a digest
    assert row[DIGEST : DIGEST + NUM_DIGESTS] == [0b11, 0b100, 0b1000, 0b1110000]
    step.run.take_over_changes.assert_called_once_with(mock.ANY, "step 3", columns=(FINGERPRINT, IS_CHANGED))
    step.run.gradients.problem.assert_called_once_with()


@pytest.mark.parametrize(
    ("given", "clip", "expected"),
    [
        ({}, 0.0, (3.0, 2.0)),
        ({"num_targets": 5}, 0.0, (6.0, 4.0)),
        ({}, 10.0, (3.0, 2.0)),
        ({}, 0.5, (3.0, 2.0)),
        ({"num_targets": 5}, 0.5, (6.0, 4.0)),
    ],
)
def test_loss_norm_and_clip_are_those_of_the_targets_that_were_counted(monkeypatch, given, clip, expected):
    """The plan counts 20 targets, 10 for each rank."""
    step = step_of(monkeypatch, {}, clip_norm=clip, **given)
    result = step.update()
    loss, norm = expected
    assert (result.loss, result.grad_norm, result.lr) == pytest.approx((loss, norm, LR * FACTOR))
    factor = norm / 2.0
    options = step.run.state.step.call_args.kwargs
    assert options["lr"] == LR * FACTOR
    assert options["clip"] == pytest.approx(factor * (min(1.0, clip / (norm + 1e-6)) if clip else 1.0), rel=1e-12)
    step.run.pull_weights.assert_called_once()
    step.run.state.finish_push.assert_called_once()
    step.run.finish.assert_called_once_with(step)
    with pytest.raises(CheckError, match="step 3 has been updated"):
        step.update()


def test_shares_of_means_over_the_step_are_added_with_the_factor_of_the_gradient(monkeypatch):
    step = step_of(monkeypatch, {DIRECT: bits_of(0.5)}, num_targets=5)
    step._weighing.direct = 1.0
    assert step.update().loss == pytest.approx(60 / 10 + 2.0 * 1.5)
    step = step_of(monkeypatch, {USES: 0, DIRECT: bits_of(0.0)}, num_targets=0, loss=0.0)
    step._weighing.uses, step._weighing.direct = Uses.UNITS, 0.25
    assert step.update().loss == pytest.approx(0.25), "without a target there may be means over units on some rank"
    assert step_of(monkeypatch, {TARGETS: 0}, num_targets=1).update().loss == 60.0


def test_a_step_without_a_loss_is_skipped_with_a_warning_and_many_in_a_row_end_the_run(monkeypatch, caplog):
    ledger = LoopLedger(without_loss=MOST_WITHOUT_LOSS - 2)
    step = step_of(monkeypatch, {}, num_targets=0, loss=0.0)
    step.run.ledger, step.run.skipped = ledger, [1]
    result = step.update()
    assert result.is_skipped and math.isnan(result.loss) and result.grad_norm == 0.0
    assert re.search(r"step 3: no token of its \d+ sequences .* has a loss.*it is skipped", caplog.text)
    step.run.discard.assert_called_once_with()
    step.run.finish.assert_called_once_with(step)
    assert step.run.skipped == [1, 3], "which tells a checkpoint how many updates there were"
    assert not step.run.state.step.called and not step.run.pull_weights.called
    again = step_of(monkeypatch, {}, num_targets=0, loss=0.0)
    again.run.ledger = LoopLedger.of(ledger.state_dict())
    with pytest.raises(LengthwiseError, match=r"step 3: no token .* has a loss.* as in the 9 steps before it"):
        again.update()
    with_loss = step_of(monkeypatch, {})
    with_loss.run.ledger = ledger
    assert not with_loss.update().is_skipped and ledger.without_loss == 0


def test_the_first_gradient_of_exactly_zero_is_warned_of(monkeypatch, caplog):
    step = step_of(monkeypatch, {}, norm=0.0)
    assert step.update().grad_norm == 0.0
    assert "step 3: the gradient of every trained weight is exactly 0" in caplog.text
    caplog.clear()
    again = step_of(monkeypatch, {}, norm=0.0)
    again.run.ledger = LoopLedger.of(step.run.ledger.state_dict())
    again.update()
    assert again.run.ledger.zero_gradients == 2 and not caplog.records


REFUSED = {
    "not finite": ({}, {"loss": math.nan}, LengthwiseError, "loss nan and gradient norm 2.0 are not both finite"),
    "an infinite norm": ({}, {"norm": math.inf}, LengthwiseError, "loss 3.0 and gradient norm inf are not both"),
    "left": (
        {"operation": RankOperation.LEAVE, "note": "left it after 1"}, {}, CheckError,
        "rank 1: left it after 1; so no rank updates, and the step comes again",
    ),
    "noted": ({"note": "a parameter is gone"}, {}, CheckError, "rank 1: a parameter is gone"),
    "of this rank": ({"note": ""}, {"problem": "a parameter is gone"}, CheckError, "rank 0: a parameter is gone"),
    "of gradients": ({"note": ""}, {"gradient_problem": "zero_grad()"}, CheckError, r"rank 0: zero_grad\(\)"),
    "no rate": ({"note": ""}, {"lr": lambda step: -1.0}, CheckError, "rank 0: lr of step 3 is -1.0; give one number"),
    "other rates": ({RATE: bits_of(0.75)}, {}, CheckError, "lr is 0.125, 0.75 on ranks 0 to 1; it has to be the same"),
    "a sequence lost": ({SEQUENCES: -1}, {}, CheckError, "ranks ran a backward of 2 sequences with 18 tokens"),
    "tokens twice": ({TOKENS: 2}, {}, CheckError, "sequences with 20 tokens, and the step has 3 with 18; compare its"),
    "other sequences": ({DIGEST: 7}, {}, CheckError, "ranks 0-1 share sequences, but read other tokens or labels"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_step_on_which_ranks_do_not_agree_is_discarded_with_the_reason(monkeypatch, name):
    changes, given, kind, said = REFUSED[name]
    step = step_of(monkeypatch, changes, **given)
    with pytest.raises(kind, match=f"^step 3: .*{said}") as refused:
        step.update()
    assert isinstance(refused.value, kind)
    step.run.discard.assert_called_once()
    step.run.note_failure.assert_called_once_with(str(refused.value))
    assert step.is_over and step.result is None and not step.run.state.step.called and not step.run.finish.called


def test_ranks_at_other_operations_are_refused(monkeypatch):
    with pytest.raises(CheckError, match=r"rank 1 called run.save\(\) before step 3"):
        step_of(monkeypatch, {"operation": RankOperation.SAVE}).update()


def test_what_is_not_shared_or_not_read_to_the_end_is_not_compared(monkeypatch):
    step_of(monkeypatch, {DIGEST + 1: 99}).update()  # pipelines of one rank each
    with pytest.raises(CheckError, match="ranks 0-1 share sequences"):
        step_of(monkeypatch, {DIGEST + 1: 99}, shared=1).update()
    step_of(monkeypatch, {DIGEST: 99}, num_phases=NUM_DIGESTS + 1).update()
    with pytest.raises(CheckError, match="share sequences"):
        step_of(monkeypatch, {DIGEST: 99}, num_phases=NUM_DIGESTS).update()
    step = step_of(monkeypatch, {DIGEST: 99, PIPELINE: 0})
    assert step.update() is None


@pytest.mark.parametrize(("changes", "failure"), [({PIPELINE: 0}, None), ({}, (0, 1)), ({PIPELINE: -1}, (2, 0))])
def test_a_step_in_which_a_rank_ran_out_of_memory_is_aborted(monkeypatch, changes, failure):
    step = step_of(monkeypatch, changes, failure=failure)
    assert step.update() is None
    (aborted, reports), _ = step.run.abort_step.call_args
    assert aborted is step and (failure or (0, -1)) in zip(reports.column(PIPELINE), reports.column(MICRO_BATCH))
    assert not step.run.state.step.called and not step.run.take_over_changes.called


def test_a_mean_over_units_that_needs_the_number_of_targets_is_refused_with_the_step(monkeypatch):
    step = step_of(monkeypatch, {USES: int(Uses.UNITS)})
    step._weighing.totals = replace(step._weighing.totals, is_exact=False)
    with pytest.raises(InputError, match=r"^step 3: a mean over units beside one over targets"):
        step.update()
    step.run.discard.assert_called_once()


def test_an_update_waits_for_all_micro_batches_and_a_backward_for_one(monkeypatch):
    step = step_of(monkeypatch, {})
    step._shards[1].is_finished = False
    with pytest.raises(CheckError, match="step 3: update after 2 of 3 micro-batches"):
        step.update()
    assert not step.is_over
    with pytest.raises(CheckError, match="step 3: backward without a micro-batch; call it once for each"):
        step.backward(torch.zeros((), requires_grad=True))
