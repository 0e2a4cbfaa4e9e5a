"""Draws from generators of the process in ``inputs=`` and ``loss=`` are refused by name; others are left alone."""

import random

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from lengthwise.core.errors import InputError
from lengthwise.runtime.verify.float64_mode import NoiseFreeMode
from lengthwise.runtime.wrap.refused_draws import draws_refused, item_read
from tests.runtime.loop.modules import GPT
from tests.runtime.loop.runs import learned, micro_batch_of
from tests.runtime.loop.test_plain_modules import built

CPU = torch.device("cpu")
DRAWS = {
    "torch.rand": lambda: torch.rand(1), "torch.randn": lambda: torch.randn(3),
    "torch.randn_like": lambda: torch.randn_like(torch.zeros(3)),
    "torch.dropout": lambda: F.dropout(torch.ones(9), 0.5),
    "Tensor.normal_": lambda: torch.zeros(2).normal_(), "torch.randperm": lambda: torch.randperm(4),
    "numpy.random": lambda: np.random.rand(), "Python's random": random.random,
    "torch, and": lambda: torch.nn.functional.fractional_max_pool2d(torch.ones(1, 1, 4, 4), 2, output_size=2),
}  # fmt: skip


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_is_refused_by_name_with_the_way_out(name):
    reason = f"inputs= of prepare draws from {name}.*micro_batch.uniform_of_sequences"
    with pytest.raises(InputError, match=reason), draws_refused("inputs=", CPU):
        DRAWS[name]()


@pytest.mark.parametrize("name", ["torch.rand", "torch.randn_like"])
def test_so_it_is_where_the_check_answers_noise_without_drawing(name):
    reason = f"loss= of prepare draws from {name}"
    with NoiseFreeMode(double=True), pytest.raises(InputError, match=reason), draws_refused("loss=", CPU):
        DRAWS[name]()


def test_generators_of_ones_own_noise_of_the_micro_batch_and_reads_of_items_are_no_such_draws():
    micro_batch = micro_batch_of((5, 4))
    with draws_refused("inputs=", CPU):
        torch.rand(2, generator=torch.Generator().manual_seed(0))
        np.random.default_rng(0).normal()
        F.dropout(torch.ones(3), 0.5, training=False)
        micro_batch.normal(2), micro_batch.uniform_of_sequences(), micro_batch.tokens
        with item_read():  # a dataset that seeds generators by the number of an item
            np.random.seed(3), torch.rand(2), random.random()
    with pytest.raises(InputError, match=r"draws from numpy\.random"), draws_refused("inputs=", CPU):
        np.random.rand()
        with item_read():
            pass


def test_functions_of_prepare_are_called_so():
    def loss(output, micro_batch):
        return output[0].sum() * random.random()

    model = built(GPT, num_layers=1)
    wrapped_model = learned(model, inputs=lambda micro_batch: {"idx": torch.randint(9, (1, 5))}, loss=loss)
    micro_batch = micro_batch_of((5,))
    for name, call in (
        ("inputs= of prepare draws from torch.randint", wrapped_model.inputs_of),
        ("inputs= of prepare draws from torch.randint", wrapped_model.stock_inputs_of),
        ("loss= of prepare draws from Python's random", lambda given: wrapped_model.loss_of([torch.ones(3)], given)),
    ):
        with pytest.raises(InputError, match=name):
            call(micro_batch)
