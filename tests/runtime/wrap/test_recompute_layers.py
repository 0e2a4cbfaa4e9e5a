"""Layers that are computed again: which, what they keep, and that nothing else changes."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lengthwise.runtime.wrap.context import active
from lengthwise.runtime.wrap.recompute_layers import recompute, selective_contexts
from tests.runtime.loop.modules import GPT, VOCAB, Llama, RotaryBlock
from tests.runtime.loop.runs import Case, assert_exact, learned, packed, randomised, shard_of, step_on_ranks
from tests.runtime.loop.test_families import AT_TWO
from tests.runtime.loop.test_plain_modules import DEGREES, LOGITS, built, gpt_case

LENGTHS = (40, 3, 21)


def _kept_bytes(model, shard):
    """Bytes of what a forward keeps for its backward, each tensor once, parameters apart."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def note(x):
        if x.untyped_storage().data_ptr() not in own:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes(), x
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        output = packed(model, shard)
    del output
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("model_class", [GPT, Llama])
def test_each_layer_that_recomputes_keeps_less(model_class):
    model = built(model_class)
    learned(model)
    kept = [_kept_bytes(model, shard_of(LENGTHS, recompute=(True,) * r + (False,) * (3 - r))) for r in range(4)]
    saved = [more - less for more, less in pairwise(kept)]
    assert min(saved) > 0.2 * kept[0] and max(saved) < 1.1 * min(saved), kept


class Kernels(TorchDispatchMode):
    """Counts what is launched of attention and of matrix products."""

    def __init__(self):
        super().__init__()
        self.attention = self.products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        self.attention += "scaled_dot_product" in name and "backward" not in name
        self.products += name in ("aten::mm", "aten::addmm")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "flags", [(False, False, False), (True, False, True), (True, True, True), (False, True, False)]
)
def test_just_the_layers_that_are_told_to_are_computed_again(flags):
    model = built(Llama)
    learned(model)
    shard = shard_of((9,), recompute=flags)
    output = packed(model, shard)
    with Kernels() as kernels, active(shard):
        output.sum().backward()
    assert kernels.attention == sum(flags)


@pytest.mark.deep  # by default: tests/runtime/loop/test_fsdp2.py, tests/session/test_kept_attention.py
def test_a_selective_recompute_is_exact_at_degrees_1_to_4(ranks):
    case = gpt_case("is_causal")
    case = Case(**{**case.__dict__, "options": {"context": selective_contexts()}})
    for found in ranks(4).run(step_on_ranks, case, DEGREES):
        assert_exact(case, found, "selective")


def test_a_selective_recompute_keeps_the_outputs_of_attention_and_does_not_attend_again():
    kept, launched = {}, {}
    for is_selective in (False, True):
        model = built(GPT)
        learned(model, context=selective_contexts() if is_selective else None)
        shard = shard_of(LENGTHS, recompute=(True, True, True))
        kept[is_selective] = _kept_with_caches(model, shard)
        launched[is_selective] = _kernels_of_backward(model, shard)
    assert kept[True] > kept[False], "outputs of attention are kept"
    assert launched[False].attention == 3 * len(LENGTHS) and launched[True].attention == 0


def _kept_with_caches(model, shard):
    """Bytes that exist after a forward because of it."""
    import gc

    def alive():
        tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor]
        return {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}

    gc.collect()
    gc.freeze()  # millions of objects that there were before are not looked at
    before = alive()
    output = packed(model, shard)
    gc.collect()
    after = alive()
    del output
    gc.unfreeze()
    return sum(size for where, size in after.items() if where not in before)


def _kernels_of_backward(model, shard):
    output, _ = packed(model, shard)
    with Kernels() as kernels, active(shard):
        output.sum().backward()
    return kernels


class OwnLoop(Llama):
    """Calls its layers in its own way, which are in no list of layers."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = self.layers
        self.layers = nn.ModuleList([nn.Identity()])

    def forward(self, tokens):
        tables = self.cos[None, None, : tokens.shape[1]], self.sin[: tokens.shape[1], :]
        x = self.embedding(tokens)
        for layer in (self.one, self.two, self.three):
            x, _ = recompute(layer, x, tables=tables)
        return self.head(x)


@pytest.mark.parametrize("flags", [(), (False, True, False), (True, False, True)])
def test_a_model_can_say_itself_what_is_recomputed(flags):
    torch.manual_seed(0)
    model, expected = randomised(OwnLoop()), randomised(OwnLoop())
    expected.load_state_dict(model.state_dict())
    tokens = torch.arange(9)[None] % VOCAB
    expected(tokens).sum().backward()
    shard = shard_of((9,), recompute=flags)
    with active(shard):
        output = model(tokens)
        with Kernels() as kernels:
            output.sum().backward()
    assert kernels.attention == sum(flags)
    for (name, one), other in zip(model.named_parameters(), expected.parameters()):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0, msg=name)


def test_a_layer_of_a_prepared_model_is_recomputed_once_where_its_model_asks_as_well():
    torch.manual_seed(0)
    model = built(Asking)
    learned(model)
    shard = shard_of((9,), recompute=(True, False, True))
    output = packed(model, shard)
    with Kernels() as kernels, active(shard):
        output.sum().backward()
    assert kernels.attention == 2


class Asking(Llama):
    def forward(self, tokens):
        tables = self.cos[None, None, : tokens.shape[1]], self.sin[: tokens.shape[1], :]
        x = self.embedding(tokens)
        for layer in self.layers:
            x, _ = recompute(layer, x, tables=tables)
        return self.head(x)


def test_outside_of_a_micro_batch_a_layer_is_just_called():
    x, tables = torch.randn(1, 5, 32), (torch.ones(5, 8), torch.zeros(5, 8))
    layer = RotaryBlock()
    assert torch.equal(recompute(layer, x, tables=tables)[0], layer(x, tables=tables)[0])
    assert recompute(partial(torch.add, x), x).equal(x + x)


def test_tuples_and_keywords_pass_through_recomputed_layers(ranks):
    case = Case(build=partial(built, Asking), **LOGITS)
    assert_exact(case, ranks(2).run(step_on_ranks, case, AT_TWO)[0])
