"""A profile measures a layer of each kind, and counts it as often as the model has it."""

import pytest
import torch
from torch import nn

from lengthwise.runtime.profile.layer_kinds import MOST_KINDS, kinds_of, measured_layers
from lengthwise.runtime.profile.trial import Trial
from lengthwise.runtime.profile.two_layer_profile import measure_bytes
from tests.runtime.loop.loops import make_run
from tests.runtime.loop.memory_runs import Layer, Model


class Numbered(nn.Module):
    """A layer that knows its number and the size of its window."""

    def __init__(self, number, window=None, width=4):
        super().__init__()
        self.layer_idx, self.name, self.window = number, f"layer {number}", window
        self.linear = nn.Linear(width, width)


def layers_of(windows, width=4):
    return nn.ModuleList(Numbered(number, window, width) for number, window in enumerate(windows))


def test_layers_that_differ_in_their_number_alone_are_of_one_kind():
    for count in (2, 3, 9):
        assert kinds_of(layers_of([None] * count)) == [0] * count
        assert measured_layers(layers_of([8] * count)).shares == {0: 0.0, 1: 1.0}
    assert measured_layers(layers_of([8])).shares == {0: 1.0}


def test_each_kind_stands_for_its_share_of_the_layers():
    assert measured_layers(layers_of([8, None] * 3)).shares == {0: 0.0, 1: 0.5, 2: 0.5}
    assert measured_layers(layers_of([None, 8, 8, None, 8, 8, None, 8])).shares == {0: 0.0, 1: 5 / 8, 3: 3 / 8}
    measured = measured_layers(layers_of([None, 8, 8]))
    assert measured.shares == pytest.approx({0: 1 / 3, 1: 2 / 3}) and measured.mean((3.0, 6.0)) == pytest.approx(5.0)
    frozen = layers_of([8] * 4)
    frozen[2].requires_grad_(False)
    assert measured_layers(frozen).shares == {0: 0.0, 1: 0.75, 2: 0.25}


def test_layers_of_rare_kinds_count_as_those_of_the_closest_size():
    widths = [4, 4, 8, 8, 16, 16, 32, 32, 5, 31]
    layers = nn.ModuleList(Numbered(number, width=width) for number, width in enumerate(widths))
    shares = measured_layers(layers).shares
    assert len(shares) == MOST_KINDS + 1
    assert shares == pytest.approx({0: 0.0, 1: 0.3, 2: 0.2, 4: 0.2, 6: 0.3})


class Widening(Layer):
    """A layer that may keep more for its backward."""

    is_wide = False

    def forward(self, x):
        out = super().forward(x)
        return out + (x.repeat(1, 1, 50) ** 2).mean() if self.is_wide else out


def bytes_of_layers():
    """Bytes of a layer in the mean over the model, by how many of its four layers are wide."""
    counted = []
    for number in (0, 1, 4):
        torch.manual_seed(0)
        model = Model()
        model.layers = nn.ModuleList(Widening(2) for _ in range(4))
        for layer in model.layers[4 - number :]:
            layer.is_wide = True
        run = make_run(model.double(), degree=1)
        measured = measured_layers(run.wrapped_model.structure.layers)
        run.wrapped_model.layers.computed = frozenset(measured.numbers)
        numbers, _ = measure_bytes(run, Trial(lengths=(16,), group=run.alone), measured)
        counted.append(numbers)
        run.close()
    return counted


def test_bytes_of_a_model_of_two_kinds_lie_between_those_of_either(ranks):
    ((narrow, mixed, wide),) = ranks(1).run(bytes_of_layers)
    assert wide[0] > 2 * narrow[0]
    assert mixed[0] == pytest.approx((3 * narrow[0] + wide[0]) / 4, abs=1)
    assert mixed[1:3] == narrow[1:3] and mixed[3] == wide[3], "the one that is recomputed is the largest"
