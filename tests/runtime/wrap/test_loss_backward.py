"""What a loop calls a loss: exact where ranks have no target, exact with terms of other means, refused otherwise."""

import copy

import pytest
import torch

from lengthwise.core.errors import CheckError, InputError
from lengthwise.runtime.wrap.loss_backward import roots_of
from tests.runtime.loop.loops import (
    labels_of_some,
    make_run,
    masked_mean,
    masked_mean_alone,
    model_of,
    sums_alone,
    teacher_alone,
    teacher_of,
    terms_alone,
    train_with_masked_mean,
    train_with_other_calls,
    train_with_sums,
    train_with_teacher,
    train_with_terms,
    train_with_two_forwards,
    two_forwards_alone,
)


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(
    ("num_ranks", "degree", "recomputed"), [(1, 1, 0), pytest.param(2, 2, 1, marks=pytest.mark.deep), (3, 3, 0)]
)
def test_a_mean_over_no_targets_poisons_no_gradient(ranks, num_ranks, degree, recomputed):
    loss, weights = masked_mean_alone()
    found = ranks(num_ranks).run(train_with_masked_mean, degree, recomputed)
    assert num_ranks == 1 or sum(num_without for *_, num_without in found)
    for mine, theirs, _ in found:
        assert mine == pytest.approx(loss, abs=1e-12)
        torch.testing.assert_close(theirs, weights, rtol=0, atol=1e-11)


def test_a_backward_of_outputs_without_a_loss_leaves_the_loss_out():
    values = torch.ones(3, requires_grad=True)
    output = {"loss": (values * 0).sum() / 0, "logits": values * 2}
    ((_, zeros),) = roots_of(output, None)
    assert zeros.shape == (3,) and not zeros.any()
    ((edge, zeros),) = roots_of((output["loss"], None), [values * 3])
    torch.autograd.backward([edge], [zeros])
    assert values.grad.tolist() == [0.0, 0.0, 0.0]
    assert roots_of(output["loss"], None) == ()


WAYS = ("side", "declared", "tokens", "step")


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(
    ("num_ranks", "degree", "labelled"),
    [
        (1, 1, False),
        (2, 2, True),
        *(
            pytest.param(*case, labelled, marks=pytest.mark.deep)
            for case in ((1, 1), (3, 3), (2, 2), (4, 2)) for labelled in (False, True)
            if (*case, labelled) not in ((1, 1, False), (2, 2, True))
        ),
    ],
)  # fmt: skip
def test_terms_that_are_means_over_tokens_and_sequences_train_what_one_device_trains(
    ranks, num_ranks, degree, labelled
):
    loss, weights = terms_alone(labelled)
    for way in WAYS:
        for mine, theirs in ranks(num_ranks).run(train_with_terms, degree, way, labelled):
            assert mine == pytest.approx(loss, abs=1e-11), way
            torch.testing.assert_close(theirs, weights, rtol=0, atol=1e-11, msg=way)


WRONG = {
    "divided": (lambda model, m: model(**m.inputs)[1] / 4, CheckError, "got a loss of .* that was checked .*; so its"),
    "summed": (lambda model, m: model(**m.inputs)[1] * m.num_targets, CheckError, "not divided, summed or shifted"),
    "with a mean over tokens": (
        lambda model, m: model(**m.inputs)[1] + 1e-3 * model(**m.inputs)[0].square().mean(),
        CheckError,
        r"side=micro_batch.mean\(values, over='tokens'\)",
    ),
    "one per token": (lambda model, m: model(**m.inputs)[0].sum(-1)[0], InputError, r"the loss has shape \["),
    "a number": (lambda model, m: model(**m.inputs)[1].item(), InputError, "takes the loss as a tensor; got float"),
    "detached": (lambda model, m: model(**m.inputs)[1].detach(), InputError, "it was detached"),
    "counted": (lambda model, m: model(**m.inputs)[1].long(), InputError, "the loss is int64"),
    "complex": (lambda model, m: model(**m.inputs)[1] * 1j, InputError, "the loss is complex128"),
    "of no forward": (
        lambda model, m: model.tokens.weight.square().mean(), InputError, "was not called in this micro-batch"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_losses_that_cannot_be_weighed_are_refused(name):
    make, error, message = WRONG[name]
    for at in (0, 1):  # also after a loss that was right
        run = make_run(model_of(), degree=1)
        with pytest.raises(error, match=message):
            for step in run.steps():
                for number, micro_batch in enumerate(step):
                    right = run.model(**micro_batch.inputs)[1] if number < at else None
                    step.backward(make(run.model, micro_batch) if right is None else right)
        run.close()


def test_a_loss_of_the_micro_batch_before_is_refused():
    run, losses = make_run(model_of(), degree=1), []
    with pytest.raises(CheckError, match=r"step\.backward got a loss of"):
        for step in run.steps():
            for micro_batch in step:
                losses.append(run.model(**micro_batch.inputs)[1])
                step.backward(losses[0])
    run.close()


LATER = {
    "with another term": lambda loss, logits, m: loss + 0.01 * logits.square().mean(),
    "of other operations before the last": lambda loss, logits, m: logits.square().sum() / (m.targets != -100).sum(),
}


@pytest.mark.parametrize("name", LATER)
def test_a_loss_made_by_loss_is_compared_with_it_and_what_changes_later_is_seen(name):
    run = make_run(model_of(), degree=1, num_steps=4)
    run.wrapped_model._loss = lambda output, m: masked_mean(output[0], m.targets)
    numbers = []
    with pytest.raises(CheckError, match=r"step\.backward got a loss of"):
        for step in run.steps():
            for micro_batch in step:
                logits = run.model(**micro_batch.inputs)[0]
                loss = masked_mean(logits, micro_batch.targets)
                step.backward(loss if step.number < 3 else LATER[name](loss, logits, micro_batch))
                numbers.append(step.number)
            step.update()
    assert numbers == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3], "the next micro-batch is looked at when losses are made otherwise"
    run.close()


def test_a_mean_over_what_labels_leave_uncounted_is_refused():
    run = make_run(model_of(), degree=1, labels=labels_of_some)
    for step in run.steps():
        for micro_batch in step:
            logits, loss = run.model(**micro_batch.inputs)
            with pytest.raises(InputError, match="one value for each of the 23 slots"):
                micro_batch.mean(logits, over="targets")
            with pytest.raises(InputError, match="over 'targets', 'tokens', 'sequences' or 'units', not over 'layers'"):
                micro_batch.mean(logits[0].sum(-1), over="layers")
            with pytest.raises(InputError, match="mean_over is 'targets', 'tokens', 'units' or 'step', not 'seq"):
                step.backward(loss, mean_over="sequences")
            with pytest.raises(InputError, match=r"prepare\(..., count_targets=True\)"):
                step.backward(loss, side=micro_batch.mean(logits[0].sum(-1), over="tokens"))
            break
        break
    run.close()


@pytest.mark.parametrize(
    ("num_ranks", "degree", "recomputed"),
    [(3, 3, 0), *(pytest.param(*sizes, marks=pytest.mark.deep) for sizes in ((1, 1, 0), (2, 2, 1)))],
)
def test_a_frozen_teacher_is_exact_at_every_degree(ranks, num_ranks, degree, recomputed):
    expected = teacher_alone()
    for weights in ranks(num_ranks).run(train_with_teacher, degree, recomputed, {}):
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    "place",
    ["backward of layer 1", *(pytest.param(f"forward of layer {n}", marks=pytest.mark.deep) for n in (0, 1))],
)
def test_a_rank_that_runs_out_of_memory_beside_a_teacher_leaves_nobody_waiting(ranks, place):
    """The first forward of some micro-batches is the teacher's, of others the trained model's."""
    expected = teacher_alone()
    for weights in ranks(2).run(train_with_teacher, 2, 1, {1: (place,)}):
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-11)


def test_a_model_that_was_not_prepared_is_refused_in_a_micro_batch():
    run, teacher, head = make_run(model_of(), degree=1), teacher_of(), torch.nn.Sequential(torch.nn.Linear(61, 1))
    head.double()
    with pytest.raises(InputError, match=r"Model is the trained model.*under torch\.no_grad\(\)"):
        run.frozen(run.model)
    for step in run.steps():
        for micro_batch in step:
            logits, _ = run.model(**micro_batch.inputs)
            head(logits)  # acts on each token by itself
            with run.plain():
                teacher(torch.zeros(1, 5, dtype=torch.int64), torch.zeros(1, 5, dtype=torch.int64))
            with pytest.raises(
                InputError, match=r"Model was called in a micro-batch.*prepare\(..., frozen=\[model\]\)"
            ):
                copy.deepcopy(teacher)(**micro_batch.inputs)
            with pytest.raises(InputError, match="LSTM was called"):
                torch.nn.LSTM(61, 3).double()(logits)
            break
        break
    run.close()
    teacher(torch.zeros(1, 5, dtype=torch.int64), torch.zeros(1, 5, dtype=torch.int64))


class Averaging(torch.nn.Module):
    """A teacher whose tokens meet outside of attention."""

    def __init__(self):
        super().__init__()
        self.inner = teacher_of()

    def forward(self, idx, targets=None):
        logits, loss = self.inner(idx, idx)
        return logits - logits.mean(1, keepdim=True), loss


class Counting(Averaging):
    """A teacher that counts its calls."""

    num_calls = 0

    def forward(self, idx, targets=None):
        self.num_calls += 1
        logits, loss = self.inner(idx, idx)
        return logits * self.num_calls, loss


def test_a_teacher_that_keeps_state_between_calls_is_refused_with_that_reason():
    run, teacher = make_run(model_of(), degree=1), Counting()
    with pytest.raises(CheckError, match=r"The forward of Counting gives something else .* its attribute num_calls"):
        run.frozen(teacher)
    run.close()


def test_a_teacher_that_mixes_sequences_is_refused():
    run, teacher = make_run(model_of(), degree=1), Averaging()
    with pytest.raises(CheckError, match="Averaging computes other outputs for two sequences in one pack"):
        run.frozen(teacher)
    assert "forward" not in vars(teacher)
    run.close()


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(
    ("num_ranks", "degree", "recomputed"), [(1, 1, 0), (2, 2, 1), pytest.param(3, 3, 0, marks=pytest.mark.deep)]
)
def test_a_model_that_is_called_several_times_in_a_micro_batch_is_exact_also_where_it_does_not_fit(
    ranks, num_ranks, degree, recomputed
):
    expected = two_forwards_alone()
    fails = [{1: (place,)} for place in ("forward of layer 1", "backward of layer 0")] if num_ranks > 1 else [{}]
    for places in fails:
        for weights in ranks(num_ranks).run(train_with_two_forwards, degree, recomputed, places):
            torch.testing.assert_close(weights, expected, rtol=0, atol=1e-11)


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(
    ("num_ranks", "degree", "recomputed"), [(1, 1, 0), (2, 2, 1), pytest.param(3, 3, 0, marks=pytest.mark.deep)]
)
def test_a_loss_over_sums_by_sequence_is_exact_also_where_it_does_not_fit(ranks, num_ranks, degree, recomputed):
    """The very first micro-batch does not fit: in the trained model, in the teacher, or in the backward."""
    expected, last = sums_alone(), num_ranks - 1
    ways = [
        (False, ()),
        (False, ("forward of layer 0",)),
        (True, ("forward of layer 1",)),
        (True, ("backward of layer 1",)),
    ]
    first = {1: 0, 2: 3, 3: 1}[num_ranks]  # two ranks fail in the backward alone
    for teacher_first, places in ways[first:]:
        fails = {last: places} if places else {}
        for weights, void in ranks(num_ranks).run(train_with_sums, degree, recomputed, fails, teacher_first):
            torch.testing.assert_close(weights, expected, rtol=0, atol=1e-11)
            assert void == ([0] if fails else [])


def test_ranks_that_share_a_micro_batch_sum_values_of_one_shape(ranks):
    first, second = ranks(2).run(train_with_other_calls, 2)
    assert "got values of [] for each slot here and of [61] on rank 1" in first
    assert "got values of [61] for each slot here and of [] on rank 0" in second
