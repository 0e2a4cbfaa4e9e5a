"""Weights in the same memory are one parameter, or refused."""

import pytest
import torch
from torch import nn

from lengthwise.core.errors import InputError
from lengthwise.session.model_checks import check_model
from lengthwise.session.overlapping_weights import check_no_weights_overlap


def pair(first, second):
    model = nn.Module()
    model.first, model.second = nn.Parameter(first), nn.Parameter(second)
    return model


def tied_by_data():
    model = nn.ModuleDict({"embedding": nn.Embedding(7, 4), "head": nn.Linear(4, 7)})
    model["head"].weight.data = model["embedding"].weight.data
    return model


def with_view_in_buffer():
    model = nn.Linear(4, 7)
    model.register_buffer("transposed", model.weight.detach().t())
    return model


numbers = torch.arange(24.0).view(4, 6)
halves = numbers.bfloat16()
OVERLAPPING = {
    "tied by data": (tied_by_data, r"embedding.weight and head.weight of ModuleDict lie in the same memory"),
    "transposed": (lambda: pair(numbers, numbers.t()), "first and second"),
    "a row in common": (lambda: pair(numbers[:3], numbers[2:]), "first and second"),
    "columns in common": (lambda: pair(numbers[:, :3], numbers[:, 2:]), "first and second"),
    "bfloat16": (lambda: pair(halves, halves[0]), "first and second"),
    "a view in a buffer": (with_view_in_buffer, "weight and transposed of Linear"),
}


@pytest.mark.parametrize("name", OVERLAPPING)
def test_trained_weights_in_the_memory_of_others_are_refused(name):
    make, names = OVERLAPPING[name]
    with pytest.raises(InputError, match=names):
        check_model(make())


@pytest.mark.parametrize(
    "model",
    [
        nn.LSTM(3, 4),  # whose weights lie in one storage
        pair(numbers[:2], numbers[2:]),
        pair(numbers[:, ::2], numbers[:, 1::2]),
        pair(numbers, numbers.t()).requires_grad_(False),
        pair(torch.empty(0), torch.empty(0)),
        pair(torch.empty(3, device="meta"), torch.empty(3, device="meta")),
    ],
)
def test_others_are_let_through(model):
    check_no_weights_overlap(model)


def test_one_parameter_in_two_places_is_one():
    model = tied_by_data()
    model["head"].weight = model["embedding"].weight
    check_no_weights_overlap(model)
