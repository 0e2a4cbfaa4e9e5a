"""Users' own padded loops: a model compiled for some shapes alone."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lengthwise
from lengthwise.core.errors import InputError
from lengthwise.data.lattice import padded_lattice

LENGTHS = [3, 4, 6, 11, 12, 12]


class Tagger(nn.Module):
    """Next-token prediction with dropout and a buffer that counts calls."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.register_buffer("num_calls", torch.zeros(()))

    def forward(self, tokens, targets):
        self.num_calls += 1
        hidden = F.dropout(torch.tanh(self.embedding(tokens)), 0.5, self.training)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


def made_up(rows, length):
    return {"tokens": torch.zeros(rows, length, dtype=torch.int64), "targets": torch.ones(rows, length).long()}


def test_batches_of_the_lattice_run_compiled_others_are_refused_and_the_model_is_left_as_it_was():
    lattice = padded_lattice(LENGTHS, most=2, budget=24, multiple_of=4)
    assert lattice.shapes == ((6, 4), (2, 12))
    torch.manual_seed(0)
    model = Tagger()
    model.head.bias.grad = torch.ones(11)
    before = [torch.random.get_rng_state(), model.num_calls.clone(), *(w.clone() for w in model.parameters())]
    compiled = lengthwise.compile(model, lattice.shapes, made_up, backend="aot_eager")
    after = [torch.random.get_rng_state(), model.num_calls, *model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert model.head.weight.grad is None and torch.equal(model.head.bias.grad, torch.ones(11))
    model.eval()
    recompiled = lengthwise.compile(model, lattice.shapes, made_up, backend="aot_eager")
    for rows, length in lattice.shapes * 2:
        tokens = torch.arange(rows * length).view(rows, length) % 11
        loss = recompiled(tokens=tokens, targets=tokens + 0)  # one tensor as both would be another graph
        torch.testing.assert_close(loss, model(tokens, tokens))
        loss.backward()
    assert recompiled.recompiles == 0
    with pytest.raises(InputError, match=r"shape 3 x 12 is none .*: 6 x 4, 2 x 12; pad it to one of them"):
        compiled(**made_up(3, 12))
    with pytest.raises(InputError, match="no tensor"):
        compiled()


def test_without_shapes_there_is_nothing_to_compile():
    with pytest.raises(InputError, match="at least one shape"):
        lengthwise.compile(Tagger(), [], made_up)
    wrong = r"make_batch\(2, 64\) is not what it was asked for: a batch of shape 2 x 65"
    with pytest.raises(InputError, match=wrong):
        lengthwise.compile(Tagger(), [(2, 64)], lambda rows, length: made_up(rows, length + 1), backend="eager")
