"""What packs of many sequences are compared by: zeros filled, in float64, and whatever form layers return."""

import re
from collections import namedtuple
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lengthwise as lw
from lengthwise.core.errors import CheckError
from lengthwise.runtime.verify import compute_settings
from lengthwise.runtime.verify.crowded_packs import _few, crowding_problem
from lengthwise.runtime.verify.float64_mode import noise_free
from lengthwise.runtime.verify.layer_outputs import tensors_in, with_tensors
from lengthwise.runtime.verify.zero_weights import Fill
from tests.session.loops import as_started_by_torchrun
from tests.session.models import Block
from tests.session.structure_runs import OPTIONS
from tests.session.structures import WIDTH, Plain
from tests.session.test_crowded_packs import CAPACITY, LONGEST, corpus


class Behind(Plain):
    """Each token reads what lies far back in the pack, behind a gate."""

    gate = 0.0

    def __init__(self):
        super().__init__()
        self.reads = nn.Linear(WIDTH, WIDTH)
        self.reads_by = nn.Parameter(torch.full((WIDTH,), self.gate))

    def run(self, x, idx):
        back = F.pad(self.reads(x), (0, 0, CAPACITY, 0))[:, : x.shape[1]]
        return super().run(x + self.reads_by * back, idx)


class BehindSmall(Behind):
    gate = 1e-6


@dataclass
class State:
    x: torch.Tensor
    name: str = "state"


Pair = namedtuple("Pair", "x others")


class Formed(Plain):
    """Its layers return their hidden states in some form; the last one is not called."""

    make = staticmethod(lambda x: {"x": x})
    read = staticmethod(lambda made: made["x"])

    class Layer(Block):
        def forward(self, x):
            return self.make(super().forward(x))

    def layer(self):
        layer = self.Layer(WIDTH, 2)
        layer.make = self.make
        return layer

    def run(self, x, idx):
        for block in self.blocks[:-1]:
            x = self.read(block(x))
        return x


class InList(Formed):
    make, read = staticmethod(lambda x: [x.sum(), x]), staticmethod(lambda made: made[1])


class InDataclass(Formed):
    make, read = staticmethod(State), staticmethod(lambda made: made.x)


class InNamespace(Formed):
    """Of a form that is not looked into."""

    make, read = staticmethod(lambda x: SimpleNamespace(x=x)), staticmethod(lambda made: made.x)


def unchecked(kind, dtype=torch.float64):
    torch.manual_seed(0)
    model = kind().to(dtype)
    return lw.prepare(model, corpus(), steps=1, check=False, **{**OPTIONS, "sequences_per_step": 31})


@pytest.mark.parametrize(
    ("kind", "dtype"), [(Behind, torch.float64), (BehindSmall, torch.float64), (BehindSmall, torch.float32)]
)
def test_a_memory_behind_a_gate_of_zero_or_a_small_one_is_seen(kind, dtype):
    run = unchecked(kind, dtype)
    before = [value.clone() for value in run.model.parameters()]
    problem = crowding_problem(run, 18 * 18)
    assert "in a pack of 324 slots than in one of 18" in problem
    assert crowding_problem(run, CAPACITY) == ""
    assert all(torch.equal(old, new) for old, new in zip(before, run.model.parameters()))
    run.close()


@pytest.mark.first_cells(2)
@pytest.mark.parametrize("kind", [Plain, Formed, InList, InDataclass, InNamespace])
def test_what_the_layer_called_last_returns_is_compared_in_any_form_or_else_all_gradients(kind):
    run = unchecked(kind)
    with noise_free(run):
        few = _few(run, (11, 7), Fill.NOTHING, with_gradients=True)
    if kind is InNamespace:
        assert len(few.of_parameters) == len(run.wrapped_model.structure.parameters) and not few.gradients
    else:
        assert [value.shape for value in few.gradients.values()] == [(18, WIDTH)] and not few.of_parameters
    assert len(few.outputs) == 1
    assert crowding_problem(run, 18 * 18) == ""
    run.close()


def test_tensors_are_found_and_changed_in_any_form():
    one, two, three = (torch.full((2, 2), float(number)) for number in range(3))
    made = {"a": [one, "word"], "b": Pair(two, None), "c": State(three)}
    assert [float(value[0, 0]) for value in tensors_in(made)] == [0.0, 1.0, 2.0]
    changed = with_tensors(made, lambda value: value + 1)
    assert isinstance(changed["b"], Pair) and isinstance(changed["c"], State)
    assert [float(value[0, 0]) for value in tensors_in(changed)] == [1.0, 2.0, 3.0]
    assert made["c"].x is three and changed["c"].name == "state"


class FarBack(Plain):
    """Of each sequence, tokens beyond a place read what lies as far back; ranks that share it roll their own tokens."""

    far = 50

    def run(self, x, idx):
        is_beyond = torch.arange(x.shape[1], device=x.device) >= self.far
        return super().run(torch.where(is_beyond[:, None], x + torch.roll(x, self.far, 1), x), idx)


def problem_beyond(most_compared):
    """Why models are refused where gradients of sequences as long as the longest are not compared."""
    as_started_by_torchrun()
    torch.manual_seed(0)
    before, compute_settings.LONG = compute_settings.LONG, most_compared
    try:
        lw.prepare(FarBack().double(), corpus(), steps=1, packing="always", **{**OPTIONS, "sequences_per_step": 31})
    except CheckError as error:
        return str(error)
    finally:
        compute_settings.LONG = before


def test_ranks_compare_the_loss_of_sequences_beyond_those_of_which_they_compare_gradients(ranks):
    for problem in ranks(2).run(problem_beyond, 44):
        assert re.search(rf"sequences of 5, {LONGEST} slots in one pack, degree 2.*: the loss differs", problem)
