"""The loss that a model makes of its labels is computed if somebody wants it, and is then what it was."""

import math

import pytest
import torch
from torch.nn import functional as F

import lengthwise as lw
from lengthwise.core.errors import InputError
from lengthwise.runtime.wrap import deferred_logits
from lengthwise.runtime.wrap.deferred_loss import DeferredLoss
from tests.session.test_deferred_head import MODELS

EXACT, CLOSE = 1e-12, 1e-5
"""Relative, in float64 and float32: sums in another order."""
ROWS = [[7, 8, 9, 10, 11, 12, 13, 14, 15], [9, 8, 7, 6], [20, 30, 40, 50, 60, 5, 6]]


@pytest.fixture
def made(monkeypatch):
    """How many losses were computed with their gradients."""
    count = []
    stock = deferred_logits.chunked_cross_entropy

    def counted(*args, **kwargs):
        count.append(1)
        return stock(*args, **kwargs)

    monkeypatch.setattr(deferred_logits, "chunked_cross_entropy", counted)
    return count


def prepared(dtype=torch.float32, steps=2, **options):
    """A small model, which makes its loss in float32, and its run of a few steps."""
    torch.manual_seed(0)
    model = MODELS["tied"]().to(dtype)
    run = lw.prepare(
        model,
        ROWS,
        policy="dcp-intra",
        lr=1e-2,
        sequences_per_step=3,
        steps=steps,
        verbose=False,
        check=False,
        **options,
    )
    return model, run


def losses_t(output, micro_batch):
    """[t] an objective of one's own."""
    return F.cross_entropy(output.logits[0], micro_batch.labels, reduction="none").square()


def own_backward(step, micro_batch, output):
    """The backward of that objective."""
    step.backward(micro_batch.mean(losses_t(output, micro_batch), over="targets"), mean_over="step")


def test_a_loop_with_another_loss_does_not_pay_for_the_models(made) -> None:
    model, run = prepared()
    made.clear()
    for number, step in enumerate(run.steps()):
        for micro_batch in step:
            output = model(**micro_batch.inputs)
            assert output.loss.dim() == 0 and output.loss.requires_grad and output.loss.dtype == torch.float32
            if number == 0:
                own_backward(step, micro_batch, output)
                assert not made
            else:
                step.backward(output.loss)
                assert len(made) == 1
        step.update()
    run.close()


def test_a_loss_that_is_read_has_the_value_and_gradients_of_one_made_at_once() -> None:
    model, run = prepared(torch.float64)
    for step in run.steps():
        for micro_batch in step:
            logits, labels = model(**micro_batch.inputs).logits[0], micro_batch.labels
            loss = F.cross_entropy(logits, labels)
            expected = F.cross_entropy(logits.whole(), labels)
            assert isinstance(loss, DeferredLoss)
            wanted = torch.autograd.grad(3 * expected, list(model.parameters()), retain_graph=True)
            with torch.no_grad():  # its gradients are of the mode in which it was made
                assert abs(loss.item() / expected.item() - 1) < EXACT
            gradients = torch.autograd.grad(loss * 3, list(model.parameters()), retain_graph=True)
            for actual, gradient in zip(gradients, wanted, strict=True):
                torch.testing.assert_close(actual, gradient, rtol=EXACT, atol=EXACT)
            step.backward(loss, mean_over="targets")
        step.update()
    run.close()


def test_the_models_loss_is_computed_to_recognize_an_equal_one_and_then_now_and_then(made) -> None:
    """Also where the loop has let go of it."""
    model, run = prepared(steps=5)
    counts = []
    for step in run.steps():
        made.clear()
        for micro_batch in step:
            logits = model(**micro_batch.inputs).logits[0]
            step.backward(F.cross_entropy(logits, micro_batch.labels))
        counts.append(len(made))
        step.update()
    assert counts == [2, 2, 2, 1, 2]
    run.close()


def test_a_loss_may_be_read_after_its_backward() -> None:
    model, run = prepared()
    for step in run.steps():
        for micro_batch in step:
            output = model(**micro_batch.inputs)
            expected = F.cross_entropy(output.logits[0].whole(), micro_batch.labels).item()
            own_backward(step, micro_batch, output)
            assert abs(output.loss.detach().item() / expected - 1) < CLOSE
        step.update()
    run.close()


def test_a_loss_first_read_after_the_update_is_refused() -> None:
    model, run = prepared()
    for step in run.steps():
        for micro_batch in step:
            output = model(**micro_batch.inputs)
            own_backward(step, micro_batch, output)
        step.update()
        with pytest.raises(InputError, match=r"read it, as in output.loss.item\(\), before step.update"):
            output.loss.item()
    run.close()


def test_a_loss_of_gathered_weights_is_refused_after_its_backward(ranks) -> None:
    ranks(2).run(check_gathered)


def check_gathered() -> None:
    model, run = prepared(weights="by-layer")
    for step in run.steps():
        for micro_batch in step:
            output = model(**micro_batch.inputs)
            own_backward(step, micro_batch, output)
            with pytest.raises(InputError, match=r"before step\.backward"):
                print(output.loss)
        step.update()
    run.close()


@pytest.mark.parametrize(
    "use", ["backward", "own", *(pytest.param(use, marks=pytest.mark.deep) for use in ("arithmetic", "compared"))]
)
def test_a_rank_without_memory_for_the_loss_goes_on_and_the_step_comes_again(monkeypatch, use) -> None:
    results, stock = [], deferred_logits.chunked_cross_entropy
    failures = [True, False] if use == "compared" else [True]  # the last one comes first

    def fails_once(*args, **kwargs):
        if failures and failures.pop():
            raise torch.OutOfMemoryError("out of memory in the loss")
        return stock(*args, **kwargs)

    model, run = prepared()
    monkeypatch.setattr(deferred_logits, "chunked_cross_entropy", fails_once)
    for step in run.steps():
        for micro_batch in step:
            output = model(**micro_batch.inputs)
            has_memory = not failures
            if use == "arithmetic":
                assert math.isnan(float(output.loss)) != has_memory
                step.backward(output.loss * 1.0)
            elif use == "own":
                assert math.isnan(output.loss.item()) != has_memory
                own_backward(step, micro_batch, output)
            elif use == "compared":
                step.backward(F.cross_entropy(output.logits[0], micro_batch.labels))
            else:
                step.backward(output.loss)
        results.append(step.update())
    assert [result is None for result in results] == [True, False, False]
    run.close()
