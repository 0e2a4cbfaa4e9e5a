"""A loss that is known by its operations is another one with other sequences, or with another coefficient."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import lengthwise as lw
from lengthwise.core.errors import CheckError
from lengthwise.runtime.wrap.loss_check import largest_difference
from tests.runtime.harness import with_check
from tests.session.loops import as_started_by_torchrun
from tests.session.structure_runs import OPTIONS, pipeline_of, plan_of, rows
from tests.session.structures import LAYERS, Plain

pytestmark = pytest.mark.usefixtures("unchecked")

STEPS = 5
ANOTHER = r"got a loss of .*the one that was checked before the run"


def in_packs(*packs):
    """A planner of packs on one rank."""

    def plan(batch):
        lengths = dict(zip(batch.ids, batch.lengths))
        ids = sorted(lengths)
        parts = [[ids[number] for number in pack] for pack in packs]
        pipelines = (pipeline_of(lengths, (0,), parts, LAYERS, False),)
        return replace(plan_of("alone", LAYERS, 1, False, batch), pipelines=pipelines)

    return plan


ALONE_FIRST = in_packs([0], [1], [2, 3, 4, 5])
TOGETHER = in_packs([0, 1, 2], [3, 4, 5])


def trained(loss_of, *, planner, items=None, model=None, mean_over=None, **options):
    """Train ``STEPS`` steps with a loss made of model, micro-batch and the number of the step."""
    torch.manual_seed(0)
    model = model or Plain().double()
    with lw.prepare(model, items or rows(), steps=STEPS, **OPTIONS, **options) as run:
        run.planner = planner
        for step in run.steps():
            for micro_batch in step:
                step.backward(loss_of(model, micro_batch, step.number), mean_over=mean_over)
            step.update()
        return run.next_step


def shifted_by_hand(model, micro_batch, step):
    logits, _ = model(**micro_batch.inputs)
    ids = micro_batch.inputs["idx"]
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def of_logits(output, micro_batch):
    return F.cross_entropy(output[0][0], micro_batch.labels)


def annealed(model, micro_batch, step, *, begins=1):
    logits, loss = model(**micro_batch.inputs)
    return loss + 0.01 * (step >= begins) * logits.logsumexp(-1).pow(2).mean()


def divided(model, micro_batch, step):
    return model(**micro_batch.inputs)[1] / (1 + step)


def of_logits_in_loop(model, micro_batch, step):
    return of_logits(model(**micro_batch.inputs), micro_batch)


def annealed_in_loop(model, micro_batch, step, *, begins=1):
    logits, _ = model(**micro_batch.inputs)
    loss = F.cross_entropy(logits[0], micro_batch.labels)
    return loss + 0.01 * (step >= begins) * logits.logsumexp(-1).pow(2).mean()


@pytest.mark.parametrize("options", [{}, pytest.param({"loss": of_logits}, marks=pytest.mark.deep)])
def test_a_loss_of_one_sequence_is_compared_again_where_there_are_several(options):
    with pytest.raises(CheckError, match=ANOTHER):
        trained(shifted_by_hand, planner=ALONE_FIRST, **options)
    assert trained(of_logits_in_loop, planner=ALONE_FIRST, **options) == STEPS


@pytest.mark.parametrize("options", [pytest.param({}, marks=pytest.mark.deep), {"loss": of_logits}])
def test_a_loss_is_compared_again_where_tokens_have_no_target(options):
    """Tokens are shifted within each sequence, and those of a prompt count too."""

    def by_tokens(model, micro_batch, step):
        logits, _ = model(**micro_batch.inputs)
        ids = micro_batch.tokens.roll(-1).masked_fill(micro_batch.is_last, -100)
        return F.cross_entropy(logits[0], ids)

    prompts = [{"input_ids": row, "labels": np.where((n > 2) & (np.arange(len(row)) < 2), -100, row)}
               for n, row in enumerate(rows())]  # fmt: skip
    prompts[3]["labels"] = prompts[3]["input_ids"]  # of two tokens, the only target
    with pytest.raises(CheckError, match=ANOTHER):
        trained(by_tokens, planner=TOGETHER, items=prompts, **options)
    assert trained(of_logits_in_loop, planner=TOGETHER, items=prompts, **options) == STEPS


@pytest.mark.parametrize("loss_of", [partial(annealed, begins=3), pytest.param(divided, marks=pytest.mark.deep)])
def test_a_coefficient_that_changes_is_noticed_at_the_update_where_the_model_makes_the_loss(loss_of):
    with pytest.raises(CheckError, match=rf"step [13]: step.backward {ANOTHER}"):
        trained(loss_of, planner=TOGETHER)


@pytest.mark.parametrize(
    ("begins", "noticed"), [(3, 4), *(pytest.param(*step, marks=pytest.mark.deep) for step in ((1, 1), (2, 2)))]
)
def test_a_coefficient_that_changes_is_noticed_now_and_then_where_the_checked_loss_costs_something(begins, noticed):
    numbers = []

    def loss_of(model, micro_batch, step):
        numbers.append(step)
        return annealed_in_loop(model, micro_batch, step, begins=begins)

    with pytest.raises(CheckError, match=ANOTHER):
        trained(loss_of, planner=TOGETHER, loss=of_logits)
    assert numbers[-1] == noticed


def test_a_loss_function_is_called_again_after_1_2_4_steps_alone():
    calls = []

    def counted(output, micro_batch):
        calls.append(None)
        return of_logits(output, micro_batch)

    def loss_of(model, micro_batch, step):
        calls.append(step)
        return of_logits_in_loop(model, micro_batch, step)

    trained(loss_of, planner=TOGETHER, loss=counted)
    begun = calls.index(0)
    steps = [before for before, call in zip(calls[begun:], calls[begun + 1 :]) if call is None]
    assert steps == [0, 1, 2, 4]


@pytest.mark.parametrize("change", [lambda loss, z: loss.add_(z), lambda loss, z: loss.div_(4)])
def test_a_loss_that_the_loop_changes_in_place_is_another(change):
    def loss_of(model, micro_batch, step):
        logits, loss = model(**micro_batch.inputs)
        return change(loss, logits.logsumexp(-1).mean())

    with pytest.raises(CheckError, match=ANOTHER):
        trained(loss_of, planner=TOGETHER)


def outcome_of_one_rank():
    """What a rank gets, where only the first one's loss has a coefficient that changes."""
    as_started_by_torchrun()
    torch.manual_seed(0)
    model = Plain().double()
    run = lw.prepare(model, rows(), steps=STEPS, **OPTIONS)
    run.planner = partial(plan_of, "alone", LAYERS, run.world.size, False)
    before, message = [], ""
    try:
        for step in run.steps():
            before = [parameter.detach().clone() for parameter in model.parameters()]
            for micro_batch in step:
                step.backward(annealed(model, micro_batch, step.number, begins=1 if run.world.rank == 0 else STEPS))
            step.update()
    except CheckError as error:
        message = str(error)
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters()))
    run.close()
    return message


def test_every_rank_learns_of_a_loss_that_one_rank_notices_and_no_weight_changes(ranks):
    messages = ranks(2).run(with_check, outcome_of_one_rank)
    assert len(set(messages)) == 1 and "step 1: rank 0: step.backward got a loss of" in messages[0]


def under_autocast(loss_of):
    def made(model, micro_batch, step):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss_of(model, micro_batch, step)

    return made


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.deep)])
def test_autocast_lets_no_other_loss_through(dtype):
    made = partial(trained, planner=TOGETHER)
    for other in (shifted_by_hand, partial(annealed, begins=0)):
        torch.manual_seed(0)
        with pytest.raises(CheckError, match=ANOTHER):
            made(under_autocast(other), model=Plain().to(dtype))
    assert made(under_autocast(of_logits_in_loop), model=Plain().to(dtype)) == STEPS


def of_wide_logits(model, micro_batch, step):
    logits, _ = model(**micro_batch.inputs)
    return F.cross_entropy(logits[0].float(), micro_batch.labels)


def summed(model, micro_batch, step):
    logits, _ = model(**micro_batch.inputs)
    return F.cross_entropy(logits[0], micro_batch.labels, reduction="none").sum() / micro_batch.num_targets


@pytest.mark.parametrize(
    ("loss_of", "dtype"),
    [
        (of_wide_logits, torch.bfloat16),
        *(
            pytest.param(*case, marks=pytest.mark.deep)
            for case in ((summed, torch.float16), (of_wide_logits, torch.float16), (summed, torch.bfloat16))
        ),
    ],
)
def test_one_loss_in_16_bits_is_recognized_whatever_rounds_it_with_a_warning(dtype, loss_of, caplog):
    assert trained(loss_of, planner=TOGETHER, model=Plain().to(dtype)) == STEPS
    assert caplog.text.count("is taken for the checked one") == 1


def test_the_loss_of_a_model_in_16_bits_needs_no_warning(caplog):
    assert trained(lambda model, m, step: model(**m.inputs)[1], planner=TOGETHER, model=Plain().bfloat16()) == STEPS
    assert "is taken for the checked one" not in caplog.text


@pytest.mark.parametrize(
    ("dtypes", "off", "is_one"),
    [
        ((torch.float32, torch.float32), 3e-5, True),
        ((torch.float32, torch.float32), 6e-5, False),
        ((torch.float64, torch.float64), 6e-9, False),
        ((torch.float64, torch.float32), 3e-5, True),
        ((torch.float16, torch.float32), 1e-2, False),
        ((torch.bfloat16, torch.float32), 1e-1, False),
        ((torch.bfloat16, torch.bfloat16), 2**-5, True),
    ],
)
def test_losses_differ_by_what_the_narrower_of_their_dtypes_rounds(dtypes, off, is_one):
    loss, value = (torch.tensor(number, dtype=dtype) for number, dtype in zip((4.0 + off, 4.0), dtypes))
    assert (abs(float(loss) - float(value)) <= largest_difference(loss, value)) == is_one


def test_small_losses_in_16_bits_that_were_recognized_are_no_others_by_rounding():
    small, near = torch.tensor(0.0091), torch.tensor(0.0109, dtype=torch.bfloat16)
    assert abs(float(small) - float(near)) < largest_difference(small, near, is_known=True)
    assert abs(4.0 - 4.05) < largest_difference(torch.tensor(4.05), near * 0 + 4, is_known=True)
    assert abs(4.0 - 4.1) > largest_difference(torch.tensor(4.1), near * 0 + 4, is_known=True)
    of_autocast = largest_difference(torch.tensor(0.002), torch.tensor(0.0038), head=torch.bfloat16)
    assert 0.0018 < of_autocast < 0.1
    assert largest_difference(small, small.clone(), is_known=True) == pytest.approx(1e-5)


def test_another_micro_batch_of_a_step_is_compared_again_each_time():
    """The last one has another loss from the second step on, and the function of ``loss=`` costs something."""

    def loss(model, micro_batch, step):
        output = model(**micro_batch.inputs)
        is_last = micro_batch.pack.ids[-1] == len(rows()) - 1
        return of_logits(output, micro_batch) + 0.1 * (step > 0 and is_last) * output[0].pow(2).mean()

    with pytest.raises(CheckError, match=ANOTHER):
        trained(loss, planner=TOGETHER, loss=of_logits)
