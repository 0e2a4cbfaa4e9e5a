"""Models that cannot be prepared as they are, and errors of their own code."""

import pytest
import torch
import transformers
from torch import nn

import lengthwise as lw
from lengthwise.config.prepare_options import PrepareOptions
from lengthwise.core.errors import CheckError, InputError, LengthwiseError
from lengthwise.runtime.wrap.forward_patch import PreparedForward
from lengthwise.session.model_checks import check_model, forward_errors_named
from tests.session import models


def test_a_model_of_which_a_part_is_compiled_in_place_is_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    check_model(model)
    model[1].compile()
    with pytest.raises(InputError, match=r"1 of Sequential is compiled, .*: leave compile\(\) out"):
        check_model(model)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("made", [torch.jit.script, lambda module: torch.jit.trace(module, torch.ones(1, 2))])
def test_what_torch_jit_made_is_refused_by_its_path(made):
    for model, name in (
        (nn.Sequential(nn.Linear(2, 2), made(nn.Linear(2, 2))), "1 of Sequential"),
        (made(nn.Linear(2, 2)), ""),
    ):
        with pytest.raises(
            InputError, match=rf"{name}.* was made by torch.jit.script or torch.jit.trace, .*put the module in"
        ):
            lw.prepare(model, models.rows(), verbose=False)


class OfProperty(nn.Module):
    @property
    def forward(self):
        return lambda x: x


def test_a_forward_that_is_a_property_is_refused():
    with pytest.raises(InputError, match=r"forward of OfProperty is a property.*: make it a method"):
        PreparedForward(OfProperty(), lambda x: x)


CALL = "a pack of one sequence, of 11 or 7 slots, in float64 on cpu"


def named(**options):
    return forward_errors_named(nn.Linear(1, 1), PrepareOptions(**options), call=CALL)


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), torch.distributed.DistBackendError("NCCL"), CheckError("its own")],
)
def test_errors_that_are_not_those_of_the_call_pass_as_they_are(error):
    with pytest.raises(type(error)) as raised, named():
        raise error
    assert raised.value is error


@pytest.mark.parametrize(
    "error",
    [RuntimeError("shapes\n do not fit"), KeyError("idx"), NotImplementedError("not implemented yet: pass no labels")],
)
def test_an_error_of_the_forward_says_how_it_was_called(error):
    line = r"in test_model_checks.py, line \d+"
    said = rf"forward of Linear fails with {CALL}, {line} \({type(error).__name__}: .*\); say how it is called"
    with pytest.raises(InputError, match=said) as raised, named():
        raise error
    assert "\n" not in str(raised.value)


def given(micro_batch, more=None):
    """What a user says of inputs, or of the loss."""


@pytest.mark.parametrize(
    ("options", "way_out"),
    [
        ({}, "say how it is called with inputs=lambda micro_batch: {...}, and how its loss is made with loss=lambda"),
        ({"inputs": given}, "say how its loss is made with loss=lambda output, micro_batch: ..."),
        ({"loss": given}, "say how it is called with inputs=lambda micro_batch: {...}"),
        ({"inputs": given, "loss": given}, "change that line, or what inputs= and loss= make"),
    ],
)
def test_what_was_said_of_the_call_is_not_asked_for_again(options, way_out):
    with pytest.raises(InputError) as raised, named(**options):
        raise ValueError("too many values to unpack")
    assert str(raised.value).partition("); ")[2].startswith(way_out)
    assert [name for name in options if f"{name}=lambda" in str(raised.value)] == []


@pytest.mark.parametrize(
    "compute",
    [
        lambda: torch.ones(2, 2) @ torch.ones(2, 2, dtype=torch.float64),
        lambda: torch.nn.functional.linear(torch.ones(2, 2), torch.ones(2, 2, dtype=torch.float64)),
        lambda: torch.special.gammainc(torch.ones(2, requires_grad=True), torch.ones(2)).sum().backward(),
        lambda: torch.fft.fft(torch.ones(4, dtype=torch.bfloat16)),
        lambda: torch.linalg.inv(torch.ones(2, 2, dtype=torch.float16)),
    ],
)
def test_errors_of_torch_ask_for_nothing_that_does_not_help(compute):
    said = f"{CALL}, in test_model_checks.py, line .* set another device=, or"
    with pytest.raises(InputError, match=said) as raised, named():
        compute()
    assert "inputs=" not in str(raised.value) and "loss=" not in str(raised.value)


@pytest.mark.parametrize("is_inside", [False, True])
def test_experts_whose_product_has_no_float64_are_told_of_the_other_one(is_inside):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.MixtralConfig(vocab_size=models.VOCAB, num_hidden_layers=2, num_local_experts=2, **sizes)
    inner = transformers.MixtralForCausalLM(config).double()
    model = Around(inner) if is_inside else inner
    options = {"cost": models.mixed_cost(), "memory_gib": 40, "verbose": False, "check": False, "packing": "always"}
    way_out = "model.inner.set_experts" if is_inside else "model.set_experts"
    with pytest.raises(InputError, match=rf'mat_a .*\); call {way_out}_implementation\("eager"\) before') as raised:
        lw.prepare(model, models.rows(), **options)
    assert "inputs=" not in str(raised.value)
    inner.set_experts_implementation("eager")
    lw.prepare(model, models.rows(), **options).close()


class Around(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, idx, targets=None):
        logits = self.inner(idx).logits
        return nn.functional.cross_entropy(logits[0], targets[0], ignore_index=-100)


class WithoutBackward(models.GPT):
    """Calls a function of torch that has no backward."""

    def forward(self, idx, targets=None):
        logits, loss = super().forward(idx, targets)
        return logits, None if loss is None else torch.special.gammainc(loss, torch.ones_like(loss))


class MixedDtypes(models.GPT):
    """Multiplies weights by numbers of another dtype."""

    def forward(self, idx, targets=None):
        self.head(self.tokens(idx).float())
        return super().forward(idx, targets)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (WithoutBackward, r"WithoutBackward in float64 fails on a sequence alone, .* \(.*igamma: input.*\)"),
        (
            MixedDtypes,
            r"fails with one sequence, of \d+ or \d+ slots, in float64 on cpu, in .*dtype.*; change that line",
        ),
    ],
)
def test_prepare_says_with_which_lengths_and_in_which_dtype_a_forward_fails(kind, message):
    with pytest.raises(LengthwiseError, match=message) as raised:
        lw.prepare(kind().double(), models.rows(), cost=models.mixed_cost(), memory_gib=40, verbose=False)
    assert "inputs=" not in str(raised.value)
