"""Arguments that belong to a sequence and not to its slots: texts of lengths of their own, attended jointly."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lengthwise as lw
from lengthwise.core.errors import InputError
from tests.session.models import VOCAB
from tests.session.structure_runs import LENGTHS, LR, OPTIONS, rows

pytestmark = pytest.mark.usefixtures("unchecked")


WIDTH, HEADS = 16, 2
TEXTS = [torch.tensor(np.random.default_rng(n).normal(size=(1 + 5 * n % 7, WIDTH))) for n in range(len(LENGTHS))]


class JointBlock(nn.Module):
    """Tokens and text have their own weights and attend to one another, as in MM-DiT."""

    def __init__(self):
        super().__init__()
        self.of_tokens, self.of_text, self.mlp = (nn.Linear(WIDTH, n * WIDTH) for n in (3, 3, 1))

    def forward(self, x, text):
        joint = torch.cat([self.of_text(text), self.of_tokens(x)], 1)
        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in joint.chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + F.gelu(self.mlp(y[:, text.shape[1] :])), text + y[:, : text.shape[1]]


class Joint(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList(JointBlock() for _ in range(2))

    def forward(self, idx, text, scale=1.0):
        x = scale * self.tokens(idx)
        for block in self.blocks:
            x, text = block(x, text)
        return self.head(x)


def inputs(micro_batch):
    text = torch.cat([TEXTS[sequence] for sequence in micro_batch.sequence_ids])
    return {"idx": micro_batch.tokens[None], "text": text[None], "scale": 0.5}


def loss_of(output, micro_batch):
    return F.cross_entropy(output[0], micro_batch.targets)


def model():
    torch.manual_seed(0)
    return Joint().double()


def weights_of_a_loop():
    alone = model()
    optimizer = torch.optim.SGD(alone.parameters(), lr=LR)
    for row, text in zip(rows(), TEXTS):
        tokens = torch.as_tensor(row)
        output = alone(tokens[None], text[None], 0.5)[0]
        loss = F.cross_entropy(output[:-1], tokens[1:], reduction="sum") / (sum(LENGTHS) - len(LENGTHS))
        loss.backward()
    optimizer.step()
    return list(alone.parameters())


def prepared(kind):
    return lw.prepare(kind, rows(), steps=1, inputs=inputs, loss=loss_of, **OPTIONS)


CALLS = {
    "as they are made": lambda model, micro_batch: model(**micro_batch.inputs),
    "by position": lambda model, micro_batch: model(*inputs(micro_batch).values()),
    "some made anew": lambda model, micro_batch: model(
        text=inputs(micro_batch)["text"], **{k: v for k, v in micro_batch.inputs.items() if k != "text"}
    ),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_each_sequence_has_its_own(call):
    joint = model()
    run = prepared(joint)
    assert run.wrapped_model.by_sequence is not None, "their numbers of tokens are not those of the slots"
    for step in run.steps():
        for micro_batch in step:
            step.backward(loss_of(call(joint, micro_batch), micro_batch))
        step.update()
    off = [float((a - b).detach().abs().max()) for a, b in zip(weights_of_a_loop(), joint.parameters())]
    assert max(off) < 1e-12
    run.close()


def test_one_that_is_not_what_was_made_is_refused_by_name():
    joint = model()
    run = prepared(joint)
    with pytest.raises(InputError, match=r"argument 'text' is another one for each.*micro_batch.inputs\['text'\]"):
        for step in run.steps():
            for micro_batch in step:
                output = joint(**micro_batch.inputs | {"text": 2.0 * micro_batch.inputs["text"]})
                step.backward(loss_of(output, micro_batch))
    run.close()


def test_one_that_is_the_same_for_all_may_be_another_in_a_call():
    joint = model()
    run = prepared(joint)
    for step in run.steps():
        for micro_batch in step:
            output, other = (joint(**micro_batch.inputs | {"scale": scale}) for scale in (0.5, 0.25))
            assert not torch.equal(output, other)
            step.backward(loss_of(output, micro_batch))
        step.update()
    run.close()
