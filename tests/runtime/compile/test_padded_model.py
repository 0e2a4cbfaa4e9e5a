"""Users' own padded loops: a model compiled for some shapes alone."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import lengthwise
from lengthwise.core.errors import InputError
from lengthwise.data.size_buckets import padded_lattice

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
    compiled = lengthwise.compile(model, lattice.shapes, made_up, backend="eager")
    after = [torch.random.get_rng_state(), model.num_calls, *model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert model.head.weight.grad is None and torch.equal(model.head.bias.grad, torch.ones(11))
    model.eval()
    recompiled = lengthwise.compile(model, lattice.shapes, made_up, backend="eager")
    for rows, length in lattice.shapes * 2:
        tokens = torch.arange(rows * length).view(rows, length) % 11
        loss = recompiled(tokens=tokens, targets=tokens + 0)  # one tensor as both would be another graph
        torch.testing.assert_close(loss, model(tokens, tokens))
        loss.backward()
    with torch.no_grad():  # validation
        tokens = torch.arange(3 * 12).view(3, 12) % 11
        torch.testing.assert_close(recompiled(tokens=tokens, targets=tokens), model(tokens, tokens))
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


@pytest.mark.deep
def test_gradients_of_a_compiled_model_are_summed_over_ranks_or_the_call_is_refused(ranks):
    """By DistributedDataParallel around what was compiled; around the model alone it would not know of the call."""
    whole = gradients_of(Tagger().eval(), (0, 1))
    for found in ranks(2).run(gradients_under_ddp):
        for mine, theirs in zip(found, whole, strict=True):
            torch.testing.assert_close(mine, theirs / 2)


def batch_of(rank):
    tokens = (torch.arange(24).view(6, 4) * (rank + 2)) % 11
    return {"tokens": tokens, "targets": (tokens + 1) % 11}


def gradients_of(model, parts):
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    for part in parts:
        model(**batch_of(part)).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def gradients_under_ddp():
    rank, model = torch.distributed.get_rank(), Tagger().eval()
    compiled = lengthwise.compile(model, [(6, 4)], made_up, backend="aot_eager")
    inner = DistributedDataParallel(model)
    with pytest.raises(InputError, match="called beside DistributedDataParallel"):
        compiled(**batch_of(rank))
    with torch.no_grad():
        compiled(**batch_of(rank))
    del inner
    compiled = lengthwise.compile(model, [(6, 4)], made_up, backend="aot_eager")
    wrapped = DistributedDataParallel(compiled)
    with pytest.raises(InputError, match="called beside DistributedDataParallel"):
        compiled(**batch_of(rank))
    with pytest.raises(InputError, match=r"is wrapped with DistributedDataParallel.*compile the model first"):
        lengthwise.compile(DistributedDataParallel(Tagger()), [(6, 4)], made_up, backend="aot_eager")
    expected = gradients_of(wrapped, (rank,))
    del wrapped
    cut = lengthwise.compile(Tagger().eval(), [(6, 4)], made_up, backend="aot_eager", bucket_mib=1e-5)
    for gradient, other in zip(gradients_of(DistributedDataParallel(cut), (rank,)), expected, strict=True):
        torch.testing.assert_close(gradient, other)
    assert cut.recompiles == 0
    return expected


@pytest.mark.deep
def test_a_reset_frees_what_was_compiled_and_compiles_other_shapes():
    compiled = lengthwise.compile(Tagger().eval(), [(6, 4)], made_up, backend="aot_eager")
    before = compiled(**batch_of(1))
    compiled.reset([(3, 8)])
    assert compiled.shapes == ((3, 8),) and compiled.recompiles == 0
    with pytest.raises(InputError, match="shape 6 x 4 is none that the model is compiled for: 3 x 8"):
        compiled(**batch_of(1))
    compiled(**made_up(3, 8)).backward()
    assert compiled.recompiles == 0
    compiled.reset([(6, 4), (3, 8)])
    torch.testing.assert_close(compiled(**batch_of(1)), before)
    assert compiled.recompiles == 0
    with pytest.raises(InputError, match="at least one shape"):
        compiled.reset([])
    with pytest.raises(InputError, match="bucket_mib=0 is the size"):
        lengthwise.compile(Tagger(), [(6, 4)], made_up, backend="aot_eager", bucket_mib=0)
