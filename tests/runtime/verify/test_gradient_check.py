"""What would train otherwise than the model as its user calls it is exact or refused, never wrong."""

import re
from functools import partial
from typing import ClassVar

import pytest
import torch

from lengthwise.core.errors import CheckError, LengthwiseError
from lengthwise.runtime.verify.gradient_check import check_exact
from lengthwise.runtime.verify.scratch_copy import check_buffers, saved_buffers
from lengthwise.runtime.verify.trace import trace_model
from lengthwise.runtime.wrap.collator import PackCollator
from lengthwise.runtime.wrap.wrapped_model import WrappedModel
from tests.runtime.harness import with_check
from tests.runtime.loop.memory_runs import run_of
from tests.runtime.loop.odd_modules import Odd
from tests.runtime.loop.runs import DENSE, Case, Packs, Source, Stream, assert_exact, step_on_ranks
from tests.runtime.loop.test_plain_modules import LOGITS, built
from tests.runtime.train.runs import local_world

PACKS = {
    1: (Packs(ranks=(0,), packs=((2, 3, 6), (0, 8), (4, 1, 5, 7, 9)), recompute=(True, False, True)),),
    2: (Packs(ranks=(0, 1), packs=((2, 3, 6), (0, 8), (4, 1, 5, 7, 9)), recompute=(True, False, True)),),
    3: (Packs(ranks=(0, 1, 2), packs=((2, 3, 6), (0, 8), (4, 1, 5, 7, 9)), recompute=(True, False, True)),),
}


def outcome(case, packs, **options):
    """The steps of a case, or the sentence that refuses it."""
    try:
        return with_check(step_on_ranks, case, packs, **options)
    except LengthwiseError as error:
        return f"{type(error).__name__}: {error}"


BY_HAND = r"begins in layer 0 \(OddBlock\) itself, which calls "
ODDITIES = {
    "token shift": BY_HAND + "cat, before its qkv",
    "short convolution": r"begins in layer 0 \(OddBlock\), in conv \(Conv1d, which calls conv1d\)",
    "second mixer": BY_HAND + "cumsum",
    "log-n scaling": BY_HAND,
    "batch norm": r"changes its buffer layers.0.batch_norm.running_mean \(BatchNorm1d\), .* use LayerNorm",
    "keys of the layer before": "every layer recomputed.* set plan.recompute=none",
    "layer drop": "decides what is computed, .* set layerdrop",
}


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.deep), 2])
@pytest.mark.parametrize(
    # Others are refused by shares of weights below, and behind gates of zero in test_zero_weights.
    "oddity",
    [
        pytest.param(name, marks=[pytest.mark.deep] * (name in ("short convolution", "token shift")))
        for name in ODDITIES
    ],
)
def test_a_model_that_packs_would_train_otherwise_is_refused_alike_on_every_rank(ranks, oddity, num_ranks):
    case = Case(build=partial(built, Odd, oddity), **LOGITS)
    refusals = ranks(num_ranks).run(outcome, case, PACKS[num_ranks])
    assert len(set(refusals)) == 1
    assert re.search(ODDITIES[oddity], refusals[0]), refusals[0]


def test_a_changed_buffer_of_the_model_itself_is_not_to_be_frozen_with_its_modules():
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
    model.register_buffer("seen", torch.zeros(()))
    before = saved_buffers(model)
    model[0](torch.rand(3, 2))
    with pytest.raises(CheckError, match=r"changes its buffer 0\..* \(BatchNorm1d\).*eval\(\) .*, or use LayerNorm"):
        check_buffers(model, before)
    before = saved_buffers(model)
    model.seen += 1
    with pytest.raises(CheckError, match=r"changes its buffer seen \(Sequential\).*; change it in the loop, once a st"):
        check_buffers(model, before)


class Counting(Odd):
    """Counts its calls, and warms its outputs up with them."""

    num_calls = 0

    def forward(self, tokens, positions=None):
        self.num_calls += 1
        return super().forward(tokens, positions) * min(1.0, 0.5 + self.num_calls / 50)


class Averaging(Odd):
    """Scales outputs by a running mean, which is no buffer."""

    def forward(self, tokens, positions=None):
        logits, mean = super().forward(tokens, positions), getattr(self, "running_mean", torch.ones(1))
        self.running_mean = 0.9 * mean + 0.1 * logits.detach().abs().mean()
        return logits * mean


class Remembering(Odd):
    """Remembers the lengths that it has seen, in an object of its own."""

    lengths: ClassVar = []

    def forward(self, tokens, positions=None):
        self.lengths.append(tokens.shape[1])
        return super().forward(tokens, positions) * (1.0 + 1e-3 * len(self.lengths))


KINDS = [(Counting, "num_calls"), (Averaging, "running_mean"), (Remembering, None)]


@pytest.mark.parametrize(
    ("kind", "attribute", "by_layer"),
    [
        pytest.param(*kind, by_layer, marks=[pytest.mark.deep] * (by_layer != (number == 1)))
        for number, kind in enumerate(KINDS) for by_layer in (False, True)
    ],
)  # fmt: skip
def test_state_between_calls_is_the_reason_that_is_given(ranks, kind, attribute, by_layer):
    refusals = ranks(2).run(outcome, Case(build=partial(built, kind, "none"), **LOGITS), PACKS[2], by_layer=by_layer)
    assert len(set(refusals)) == 1
    named = f", such as its attribute {attribute}" if attribute else ""
    assert f"The forward of {kind.__name__} gives something else when it is called again" in refusals[0]
    assert f"it keeps state between calls{named}, which would differ between ranks" in refusals[0]


@pytest.mark.parametrize(
    "oddity", [pytest.param(name, marks=[pytest.mark.deep] * (name != "short convolution")) for name in ODDITIES]
)
def test_shares_of_weights_are_enough_to_refuse_a_model_with_the_same_words(ranks, oddity):
    case = Case(build=partial(built, Odd, oddity), **LOGITS)
    refusals = ranks(3).run(outcome, case, PACKS[3], by_layer=True)
    assert len(set(refusals)) == 1
    assert re.search(ODDITIES[oddity], refusals[0]), refusals[0]


EXACT = [("shared keys", 1), ("shared keys", 3), ("shift from positions", 1)]
EXACT += [("sinks and window", 3), ("sinks and wide window", 2), ("strides", 2)]


@pytest.mark.parametrize(
    ("oddity", "num_ranks"),
    [pytest.param(*case, marks=[pytest.mark.deep] * (case[1] > 1 or "sinks" in case[0])) for case in EXACT],
)
def test_an_odd_model_that_passes_the_check_is_exact(ranks, oddity, num_ranks):
    case = Case(build=partial(built, Odd, oddity), **LOGITS)
    by_layer = (oddity, num_ranks) == ("shared keys", 3)
    for result in ranks(num_ranks).run(outcome, case, PACKS[num_ranks], by_layer=by_layer):
        assert not isinstance(result, str), result
        assert_exact(case, result)


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.deep), 3])
def test_what_is_exact_on_one_rank_and_not_on_several_is_refused_with_the_degree(ranks, num_ranks):
    case = Case(build=partial(built, Odd, "shift from positions"), **LOGITS)
    for refusal in ranks(num_ranks).run(outcome, case, PACKS[num_ranks]):
        assert re.search(r"CheckError: .* slots in one pack, degree 2, .* which calls cat, before its qkv", refusal)


def test_a_check_leaves_every_tensor_gradient_buffer_and_flag_as_it_was(ranks):
    ranks(1).run(check_and_compare)


def check_and_compare():
    """A model in float32 whose modules are partly in eval mode, with statistics and a table that it makes itself."""
    case = Case(build=partial(built, Odd, "short convolution"), **LOGITS)
    model = case.build().float().train()
    model.layers[1].eval()
    model.register_buffer("seen", torch.zeros(3))
    run = run_of(
        WrappedModel(model, loss=case.loss), local_world(), stream=Stream(case=case), planner=lambda batch: None,
        collator=PackCollator(source=Source(), objective=case.objective),
        optimizer=DENSE, lr=lambda step: 1.0, num_steps=1,
    )  # fmt: skip
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    before = {name: (tensor.detach().clone(), tensor.data_ptr(), tensor.grad) for name, tensor in tensors.items()}
    flags, drawn = [module.training for module in model.modules()], torch.get_rng_state()
    trace_model(run)
    with pytest.raises(CheckError):
        check_exact(run)
    assert [module.training for module in model.modules()] == flags
    assert torch.equal(torch.get_rng_state(), drawn) and torch.get_default_dtype() is torch.float32
    after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, (value, address, gradient) in before.items():
        assert after[name] is tensors[name] and after[name].data_ptr() == address and after[name].grad is gradient
        assert torch.equal(after[name], value), name
    assert not run.state.gradients.any()
    run.close()
