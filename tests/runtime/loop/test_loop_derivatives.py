"""Gradients that a loop takes itself, by ``torch.autograd.grad``, and losses of slots that read sums of sequences."""

import pytest
import torch

from lengthwise.core.errors import InputError
from tests.runtime.loop.loops import LR, make_run, model_of, plain_loop, weights_of
from tests.runtime.loop.memory_runs import LENGTHS, Source

TOLERANCE = 1e-10


def test_derivatives_that_a_plan_has_not_are_refused_on_every_rank_and_the_step_comes_again(ranks):
    losses, weights = plain_loop()
    for tried in ranks(2).run(derivatives_in_loops):
        for _, (found, of_rank) in tried:
            assert found == pytest.approx(losses, abs=TOLERANCE)
            torch.testing.assert_close(of_rank, weights, rtol=0, atol=TOLERANCE)
        shared, by_layer, first_order = [said for said, _ in tried]
        assert "second derivatives of attention that ranks share" in shared and "max_degree=1" in shared
        assert "before step.backward(loss)" in by_layer and "weights='whole'" in by_layer
        assert not first_order


def derivatives_in_loops():
    """What a loop was told that differentiated its loss by embeddings in its second step, and what it learned."""
    return [
        derivative_in_loop(2, create_graph=True),
        derivative_in_loop(1, by_layer=True),
        derivative_in_loop(2),
    ]


def derivative_in_loop(degree, *, by_layer=False, **options):
    model, embedded, losses, said = model_of(), [], [], ""
    model.tokens.register_forward_hook(lambda module, given, output: embedded.append(output))
    run = make_run(model, degree=degree, by_layer=by_layer)
    for step in run.steps():
        try:
            for micro_batch in step:
                loss = model(**micro_batch.inputs)[1]
                if step.number == 1 and step.attempt == 0:
                    torch.autograd.grad(loss, embedded[-1], retain_graph=True, **options)
                step.backward(loss)
            losses.append(step.update().loss)
        except InputError as error:
            said = str(error)
    run.close()
    return said, (losses, weights_of(model))


def test_a_loss_of_slots_that_read_the_sum_of_their_sequence_is_exact_where_ranks_share_it(ranks):
    model = model_of()
    for sequence in range(len(LENGTHS)):
        tokens = torch.from_numpy(Source().tokens(sequence))[None]
        values_t = model(tokens, tokens)[0][0, :, 0]
        (values_t.sum().tanh() * values_t**2).sum().div(sum(LENGTHS)).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= LR * parameter.grad
    for weights in ranks(2).run(train_with_sums):
        torch.testing.assert_close(weights, weights_of(model), rtol=0, atol=TOLERANCE)


def train_with_sums():
    model = model_of()
    run = make_run(model, degree=2, num_steps=1)
    for step in run.steps():
        for micro_batch in step:
            values_t = model(**micro_batch.inputs)[0][0, :, 0]
            of_slot = micro_batch.per_sequence(values_t).tanh()[numbers_of(micro_batch)]
            step.backward(micro_batch.mean(of_slot * values_t**2, over="tokens"), mean_over="step")
        step.update()
    run.close()
    return weights_of(model)


def numbers_of(micro_batch):
    """[t] which sequence of the micro-batch each slot is of; 0 for padding."""
    numbers_t = torch.zeros(micro_batch.shard.num_slots, dtype=torch.long)
    for number, (_, slots, _) in enumerate(micro_batch.own_slots()):
        numbers_t[slots] = number
    return numbers_t
