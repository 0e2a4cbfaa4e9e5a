"""Losses that ``loss=`` makes of the model's own train what a plain loop trains, in packs and sequence by sequence."""

import copy

import numpy as np
import pytest
import torch
import transformers

import lengthwise as lw
from tests.session.structure_runs import OPTIONS, rows
from tests.session.test_made_labels import llama
from tests.session.test_partial_calls import taking_no_shifted

VOCAB, STEPS, WEIGHT = 71, 2, 0.1
SAME = 1e-6
"""Losses of transformers are float32, and so are the gradients of its logits."""


def mamba():
    sizes = {"hidden_size": 16, "state_size": 4, "num_hidden_layers": 2, "time_step_rank": 2}
    return transformers.MambaForCausalLM(transformers.MambaConfig(vocab_size=VOCAB, **sizes))


def of_logits(logits, labels):
    """The mean of squared log-sum-exps over the tokens that have a target."""
    has_target = labels != -100
    return torch.where(has_target, logits.logsumexp(-1).square(), 0.0).sum() / has_target.sum()


def with_its_own(output, micro_batch):
    return output.loss + WEIGHT * of_logits(output.logits[0], micro_batch.labels)


def plain_loop(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=OPTIONS["lr"])
    tokens = [torch.as_tensor(np.asarray(row)) for row in rows()]
    for _ in range(STEPS):
        count = sum(len(row) - 1 for row in tokens)
        for row in tokens:
            output = model(input_ids=row[None], labels=row[None])
            loss = output.loss + WEIGHT * of_logits(output.logits[0, :-1], row[1:])
            (loss * (len(row) - 1) / count).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("make", "packing"), [(llama, "always"), (llama, "never"), (taking_no_shifted, "always"), (mamba, "auto")]
)
def test_a_loss_that_adds_to_the_models_own_trains_what_a_plain_loop_trains(make, packing):
    torch.manual_seed(0)
    model = make().double()
    stock = copy.deepcopy(model)
    plain_loop(stock)
    run = lw.prepare(model, rows(), loss=with_its_own, packing=packing, **OPTIONS | {"steps": STEPS})
    for step in run.steps():
        for micro_batch in step:
            step.backward(with_its_own(model(**micro_batch.inputs), micro_batch))
        step.update()
    run.close()
    for name, value in stock.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), value, rtol=0, atol=SAME)
