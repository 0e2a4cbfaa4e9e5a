"""What weights of zero hide at first is seen before training: packs, shares, recompute and stages behind gates."""

import logging
import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lengthwise as lw
from lengthwise.core.errors import CheckError
from lengthwise.runtime.comm.world import start_world
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.verify import precision
from lengthwise.runtime.verify.gradient_check import check_exact
from lengthwise.runtime.verify.stage_check import check_stages
from lengthwise.runtime.verify.trace import trace_model
from lengthwise.runtime.verify.zero_weights import Fill, zeros_filled
from lengthwise.runtime.wrap.collator import PackCollator
from lengthwise.runtime.wrap.wrapped_model import WrappedModel
from tests.runtime.loop.memory_runs import Source as FewTokens
from tests.runtime.loop.modules import WIDTH
from tests.runtime.loop.odd_modules import Odd, OddBlock
from tests.runtime.loop.runs import DENSE, Case, Source
from tests.runtime.loop.test_fsdp2 import wrapped
from tests.runtime.loop.test_plain_modules import LOGITS, built
from tests.runtime.verify.test_gradient_check import PACKS, outcome
from tests.session import models
from tests.session.test_shifting_modules import OPTIONS, Shifting, rows

FILLED = (Fill.SIGNED, Fill.POSITIVE)


class GatedBlock(OddBlock):
    """An odd layer behind a gate that begins at zero."""

    def __init__(self, oddity):
        super().__init__(oddity)
        self.gate = nn.Parameter(torch.zeros(WIDTH))

    def gated(self, gate, change):
        return gate * change

    def forward(self, x, positions, shared):
        return x + self.gated(self.gate, super().forward(x, positions, shared) - x)


class Gated(Odd):
    """Layers behind gates, and a head of zeros."""

    block = GatedBlock

    def __init__(self, oddity=""):
        super().__init__(oddity)
        self.layers = nn.ModuleList(self.block(oddity) for _ in range(3))


def gated(kind=Gated, oddity=""):
    model = built(kind, oddity)
    with torch.no_grad():
        for value in (model.head.weight, model.head.bias, *(layer.gate for layer in model.layers)):
            value.zero_()
    return model


HIDDEN = {
    "token shift": "begins in layer 0 .* calls cat, before its qkv",
    "short convolution": r"begins in layer 0 \(GatedBlock\), in conv",
    "log-n scaling": "begins in layer 0 ",
    "keys of the layer before": "every layer recomputed.* set plan.recompute=none",
}


class AllButClosedBlock(GatedBlock):
    """Behind a gate whose derivative is below all that is compared."""

    def __init__(self, oddity):
        super().__init__(oddity)
        nn.init.constant_(self.gate, -30.0)

    def gated(self, gate, change):
        return gate.sigmoid() * change


class DeadBlock(AllButClosedBlock):
    """Behind a ReLU that no token reaches."""

    def gated(self, gate, change):
        return F.relu(change + gate)


class AllButClosed(Gated):
    block = AllButClosedBlock


class Dead(Gated):
    block = DeadBlock


@pytest.mark.parametrize("kind", [AllButClosed, Dead])
def test_what_a_gate_that_is_all_but_closed_hides_is_refused(ranks, kind):
    assert ranks(1).run(compared, kind, "") == [""]
    said = ranks(1).run(compared, kind, "short convolution")[0]
    assert re.search(HIDDEN["short convolution"].replace("GatedBlock", kind.block.__name__), said), said


def compared(kind, oddity):
    """What a comparison says of a model whose gates are as they begin, and whose weights are as before after it."""
    model = built(kind, oddity)
    before = bits(model.state_dict())
    run = run_with(model, start_world("cpu"))
    said = ""
    try:
        check_exact(run, degrees=[1])
    except CheckError as error:
        said = str(error)
    after = bits(model.state_dict())
    assert all(torch.equal(before[name], after[name]) for name in before)
    run.close()
    return said


ELSEWHERE = ("log-n scaling", "keys of the layer before")
"""Refused without a gate in test_gradient_check."""


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(
    ("oddity", "num_ranks", "by_layer"),
    [
        pytest.param(oddity, *how, marks=[pytest.mark.deep] * (oddity in ELSEWHERE or how != (2, number % 2 == 0)))
        for number, oddity in enumerate(HIDDEN) for how in ((1, False), (2, False), (2, True))
    ],
)  # fmt: skip
def test_what_a_gate_of_zero_hides_is_refused_alike_on_every_rank(ranks, oddity, num_ranks, by_layer):
    case = Case(build=partial(gated, Gated, oddity), **LOGITS)
    refusals = ranks(num_ranks).run(outcome, case, PACKS[num_ranks], by_layer=by_layer)
    assert len(set(refusals)) == 1 and re.search(HIDDEN[oddity], refusals[0]), refusals


def run_with(model, world, *, by_layer=False):
    run = PreparedModel.with_optimizer(
        WrappedModel(model, loss=LOGITS["loss"]), world, by_layer=by_layer, optimizer=DENSE,
        collator=PackCollator(source=Source(), objective="next-token"),
    )  # fmt: skip
    trace_model(run)
    return run


class SkipsLayers(Odd):
    """A skip connection over layers, through a matrix that begins at zero."""

    def __init__(self, oddity=""):
        super().__init__(oddity)
        self.skip = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, tokens):
        x, shared = self.embedding(tokens), {}
        kept = x = self.layers[0](x, None, shared)
        x = self.layers[1](x, None, shared)
        return self.head(self.layers[2](x + self.skip(kept), None, shared))


def test_a_skip_over_stages_that_begins_at_zero_is_refused(ranks):
    assert ranks(1).run(skipped) == [None]


def skipped():
    model = built(SkipsLayers)
    nn.init.zeros_(model.skip.weight)
    run = run_with(model, start_world("cpu"))
    check_exact(run)
    with pytest.raises(CheckError, match="learns something else in stages of"):
        check_stages(run, (1, 1, 1))
    assert not model.skip.weight.any()
    run.close()


def bits(values):
    return {name: value.detach().clone().view(torch.uint8) for name, value in values.items()}


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("in_place", [False, True])
def test_a_check_that_passes_or_raises_leaves_all_bits_as_they_were(monkeypatch, in_place):
    if in_place:
        monkeypatch.setattr(precision, "FEW_NUMBERS", 0)  # compared in the model's own dtype, on its own weights
    for oddity in ("", "short convolution"):
        model = gated(Gated, oddity).float()
        with torch.no_grad():
            model.layers[1].gate[::2] = -0.0
            model.layers[0].norm.bias.zero_()
        model.layers[2].norm.bias.requires_grad_(False).zero_()
        model.register_buffer("table", torch.zeros(3))
        before = bits(model.state_dict())
        run = run_with(model, start_world("cpu"))
        for fill in FILLED:
            with zeros_filled(run, fill):
                trained = [value for value in model.parameters() if value.requires_grad]
                assert all(bool((value != 0).all()) for value in trained)
                assert not model.table.any() and not model.layers[2].norm.bias.any()
                if fill is Fill.POSITIVE:
                    assert (model.layers[1].gate > 0).all() and (model.head.weight > 0).all()
                else:
                    assert model.head.weight.min() < 0 < model.head.weight.max()
                assert 0.05 < float(model.head.weight.detach().abs().mean()) * WIDTH**0.5 < 0.15
        if oddity:
            with pytest.raises(CheckError):
                check_exact(run)
        else:
            check_exact(run)
        after = bits(model.state_dict())
        assert all(torch.equal(before[name], after[name]) for name in before)
        run.close()


def test_shares_of_weights_have_the_values_that_whole_ones_have(ranks):
    ranks(2).run(shares_and_whole)


def shares_and_whole():
    model, world = gated(), start_world("cpu")
    run = run_with(model, world)
    with zeros_filled(run, Fill.SIGNED):
        named = run.wrapped_model.structure.parameters
        whole = torch.cat([named[name].detach().flatten() for name in run.state.table.slots])
    run.gather_by_layer()
    before = run.state.master.clone()
    with zeros_filled(run, Fill.SIGNED):
        own = [whole[start:end] for start, end in run.state.owned_layout.intervals[world.rank]]
        assert torch.equal(run.state.master, torch.cat(own)) and (before == 0).any()
    assert torch.equal(run.state.master, before)
    run.close()


def test_weights_that_fsdp2_shards_are_filled_and_left_as_they_were(ranks):
    ranks(2).run(with_fsdp2)


def with_fsdp2():
    world = start_world("cpu")
    model = wrapped(world)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("down.weight"):
                parameter.to_local().zero_()
    before = bits({name: value.to_local() for name, value in model.named_parameters()})
    run = PreparedModel.with_optimizer(
        WrappedModel(model), world, optimizer=DENSE,
        collator=PackCollator(source=FewTokens(), objective="next-token"),
    )  # fmt: skip
    trace_model(run)
    with zeros_filled(run, Fill.SIGNED):
        filled = dict(model.named_parameters())
        down = next(value for name, value in filled.items() if name.endswith("down.weight"))
        assert (down != 0).all() and len(down.unique()) == down.numel()
    check_exact(run)
    with pytest.raises(CheckError, match="no"), zeros_filled(run, Fill.SIGNED):
        raise CheckError("no")
    run.close()
    after = bits({name: value.to_local() for name, value in model.named_parameters()})
    assert all(torch.equal(before[name], after[name]) for name in before)


class RootOfGate(GatedBlock):
    def gated(self, gate, change):
        return torch.log1p(30.0 * gate) * change


class OnlyZero(GatedBlock):
    def gated(self, gate, change):
        return gate * change / (gate == 0)


class NeedsPositive(Gated):
    block = RootOfGate


class NeedsZero(Gated):
    block = OnlyZero


def test_weights_that_may_not_be_negative_are_filled_with_positive_values():
    model = gated(NeedsPositive, "short convolution")
    run = run_with(model, start_world("cpu"))
    with pytest.raises(CheckError, match="in conv"):
        check_exact(run)
    run.close()


def test_weights_whose_zeros_are_needed_are_compared_as_they_are_with_a_warning(caplog):
    run = run_with(gated(NeedsZero, "short convolution"), start_world("cpu"))
    with caplog.at_level(logging.WARNING, logger="lengthwise"):
        check_exact(run)
    assert caplog.text.count("NeedsZero was compared with its weights as they are") == 1
    run.close()


def test_how_a_head_of_zeros_uses_labels_is_found_out():
    torch.manual_seed(0)
    model = Shifting().double()
    nn.init.zeros_(model.head.weight)
    run = lw.prepare(model, rows(), **OPTIONS)
    assert run.wrapped_model.labels.is_in_module and run.wrapped_model.by_sequence is None
    run.close()


class Structured(models.GPT):
    """A row of zeros for padding, a masked head, and a matrix of norm zero that is made of two parameters."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(models.VOCAB, 24, padding_idx=0)
        self.register_buffer("mask", (torch.arange(24) % 2).float())
        nn.utils.parametrizations.weight_norm(self.blocks[0].mlp[2])
        with torch.no_grad():
            self.head.weight *= self.mask
            self.blocks[0].mlp[2].parametrizations.weight.original0.zero_()

    def forward(self, idx, targets=None):
        x = self.tokens(idx) + self.places(torch.arange(idx.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.head.weight * self.mask)
        return logits, None if targets is None else F.cross_entropy(logits[0], targets[0])


def test_zeros_that_mean_something_are_exact_in_packs_as_before():
    model = Structured().double()
    before = bits(model.state_dict())
    run = lw.prepare(model, rows(), **OPTIONS)
    assert run.wrapped_model.by_sequence is None
    run.close()
    after = bits(model.state_dict())
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_gate_of_zero_hides_nothing_where_a_model_is_compared_in_16_bits(monkeypatch):
    monkeypatch.setattr(precision, "dtypes_of", lambda run: [None])
    run = run_with(gated(Gated, "short convolution").bfloat16(), start_world("cpu"))
    with pytest.raises(CheckError, match="in conv"):
        check_exact(run)
    run.close()
