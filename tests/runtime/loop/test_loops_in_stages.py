"""What users' loops do with outputs and with the model goes on on every stage, as it does on one."""

import math

import pytest
import torch

from lengthwise.core.errors import InputError
from tests.runtime.loop.loops import LENGTHS, make_run, model_of, plain_loop, weights_of

EXACT = 1e-10


def watch(logits, loss, labels):
    """What loops log, check and compute beside a loss."""
    batch, tokens, vocabulary = logits.shape
    best, choice = logits.view(batch * tokens, vocabulary).max(-1)
    correct = (choice == labels) & (labels != -100)
    probabilities, _ = logits.softmax(-1).topk(min(2, vocabulary))
    figures = {"loss": loss.item(), "accuracy": correct.float().mean().item(), "best": best[labels != -100].mean()}
    figures["clipped"] = ((probabilities - 1).abs() > 0.2).double().mean()
    for row in logits:
        if torch.isnan(row).any() or not torch.isfinite(loss) or loss > 1e6:
            raise ValueError("the loss has diverged")
    return {name: f"{float(value):.3f}" for name, value in figures.items()}


def train(stages, by_layer):
    run = make_run(model_of(), degree=1, stages=stages, by_layer=by_layer)
    total, losses, figures = torch.zeros((), dtype=torch.float64), [], []
    for step in run.steps():
        for micro_batch in step:
            logits, loss = run.model(**micro_batch.inputs)
            figures.append(watch(logits, loss, micro_batch.labels))
            total += loss.detach()
            step.backward(loss)
        losses.append(step.update().loss)
    weights = weights_of(run.model) if not by_layer else None
    run.close()
    return losses, weights, figures, float(total)


@pytest.mark.parametrize("by_layer", [False, pytest.param(True, marks=pytest.mark.deep)])
@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.deep)])
def test_a_loop_that_looks_at_outputs_trains_in_stages_as_on_one_device(ranks, num_ranks, by_layer):
    losses, weights = plain_loop()
    for rank, found in enumerate(ranks(num_ranks).run(train, num_ranks, by_layer)):
        assert found[0] == pytest.approx(losses, abs=EXACT)
        if not by_layer:
            torch.testing.assert_close(found[1], weights, rtol=0, atol=EXACT)
        is_last = rank == num_ranks - 1
        assert all((figures["loss"] != "nan") == is_last for figures in found[2])
        assert math.isnan(found[3]) != is_last


def train_beside_plain_calls(stages):
    run, values = make_run(model_of(), degree=1, stages=stages), []
    tokens = torch.arange(5)[None] % 3
    for step in run.steps():
        for micro_batch in step:
            with run.plain() as model, torch.no_grad():
                values.append(float(model(tokens, tokens)[1]))
            loss = run.model(**micro_batch.inputs)[1]
            with run.plain() as model, torch.no_grad():
                values.append(float(model(tokens, tokens)[1]))
            step.backward(loss)
        step.update()
    weights = weights_of(run.model)
    run.close()
    return weights, values


def test_a_model_may_be_called_as_it_was_within_a_step_of_stages(ranks):
    _, expected = plain_loop()
    first, second = ranks(2).run(train_beside_plain_calls, 2)
    assert first[1] == second[1] and len(first[1]) >= len(LENGTHS) // 2 and all(map(math.isfinite, first[1]))
    for weights, _ in (first, second):
        torch.testing.assert_close(weights, expected, rtol=0, atol=EXACT)


def other_tokens(degree, stages):
    run = make_run(model_of(), degree=degree, stages=stages)
    step = next(run.steps())
    micro_batches = iter(step)
    micro_batch = next(micro_batches)
    few = torch.zeros(1, micro_batch.shard.num_slots + 1, dtype=torch.int64)
    with pytest.raises(InputError, match=r"was called with .* tokens in a micro-batch .* `with run.plain\(\):`"):
        run.model(few, few)
    run.close()


@pytest.mark.parametrize(("degree", "stages"), [(1, 2), (2, 1)])
def test_a_model_that_is_called_with_other_tokens_in_a_micro_batch_says_how(ranks, degree, stages):
    ranks(2).run(other_tokens, degree, stages)
