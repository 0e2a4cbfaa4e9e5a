"""Loops go on with tensors that have no numbers: shapes, dtypes and devices are those of the tensors they stand for."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from lengthwise.runtime.wrap.missing_tensor import MissingTensor

SLOTS, VOCABULARY = 7, 11
LABELS = torch.tensor([3, -100, 0, 10, 2, -100, 5])
HEAD = torch.nn.Linear(VOCABULARY, 4, dtype=torch.float64)

BODIES = {
    "shape": lambda x: x.view(x.size(0) * x.shape[1], x.shape[-1]),
    "unpacked shape": lambda x: torch.ones(*list(x.shape)),
    "cross entropy": lambda x: F.cross_entropy(x[0], LABELS),
    "every token's": lambda x: F.cross_entropy(x[0], LABELS, reduction="none")[LABELS != -100],
    "log-probabilities": lambda x: x.log_softmax(-1).gather(-1, LABELS.clamp(0)[None, :, None]).squeeze(-1),
    "best": lambda x: x.max(-1),
    "best few": lambda x: x.topk(3)[1],
    "halves": lambda x: x.chunk(2, dim=1),
    "rows": lambda x: [row.sum() for row in x[0]],
    "unbound": lambda x: x.unbind(1),
    "split": lambda x: x.split([3, 4], 1),
    "accuracy": lambda x: (x[0].argmax(-1) == LABELS).float().mean(),
    "not equal": lambda x: (x[0].argmax(-1) != 3).double(),
    "clipped": lambda x: ((x.exp() - 1).abs() > 0.2).double().mean(),
    "where": lambda x: torch.where(x < 0, 0.0, x),
    "inverted": lambda x: (~x.isnan() & x.isfinite()).sum(),
    "arithmetic": lambda x: 2 * x.mean() ** 2 / 3 - 1 + -x.sum() // 2,
    "stacked": lambda x: torch.stack([x.mean().detach(), torch.zeros((), dtype=torch.float64)]),
    "summed": lambda x: sum([x.mean(), x.sum()]),
    "chosen": lambda x: x[:, LABELS != -100],
    "masked": lambda x: torch.masked_select(x[0], (LABELS != -100)[:, None]),
    "a module": lambda x: HEAD(x),
    "dtype": lambda x: x.to(torch.bfloat16).float(),
    "moved": lambda x: x.detach().cpu().to("cpu", torch.float32),
    "like": lambda x: torch.zeros_like(x[0]) + x.new_ones(SLOTS, 1),
    "written": lambda x: x.clone().masked_fill_(x > 0, 0.0),
    "einsum": lambda x: torch.einsum("btv,v->bt", x, torch.ones(VOCABULARY, dtype=torch.float64)),
    "scaled": lambda x: torch.amp.GradScaler("cpu").scale(x.mean()),
    "transposed": lambda x: x.mT.contiguous().permute(0, 2, 1).flatten(),
    "largest of two": lambda x: torch.maximum(x.mean(), x.max()),
}


@pytest.mark.parametrize("body", BODIES)
def test_results_have_the_shapes_and_dtypes_that_numbers_would_give(body):
    real = torch.randn(1, SLOTS, VOCABULARY, dtype=torch.float64, requires_grad=True)
    missing = MissingTensor(1, SLOTS, VOCABULARY, dtype=torch.float64)
    expected, actual = (pytree.tree_leaves(BODIES[body](x)) for x in (real, missing))
    assert [(x.shape, x.dtype, x.device) for x in actual] == [(x.shape, x.dtype, x.device) for x in expected]


def test_numbers_are_nan_and_zero_and_checks_of_a_loop_pass():
    x = MissingTensor(2, 3, dtype=torch.float64)
    loss = x.mean()
    assert math.isnan(loss.item()) and math.isnan(float(loss)) and math.isnan(round(loss, 3))
    assert f"{loss:.3f}" == "%.3f" % loss == "nan" and "not computed on this rank" in repr(loss)  # noqa: UP031
    assert np.isnan(x.tolist()).all() and np.isnan(np.asarray(x)).all() and x.numpy().shape == (2, 3)
    assert int(x.argmax()) == 0 and [10, 20][x.argmax()] == 10
    assert not torch.isnan(loss) and not x.isinf().any() and torch.isfinite(x).all() and not (~x.isfinite()).any()
    assert not loss > 1e4 and not (loss != loss).any() and (x > 0).sum().item() == 0
    assert isinstance(loss, Tensor) and len(x) == 2 and x.dim() == 2 and max(loss, loss) is loss


def test_what_a_loop_does_to_gradients_of_them_does_nothing():
    loss = MissingTensor(dtype=torch.float64)
    loss.backward()
    loss.register_hook(lambda gradient: gradient)
    assert loss.requires_grad and loss.grad is None and loss.is_cpu


def test_gradients_of_them_are_missing_and_numbers_are_no_rows():
    weight, loss = torch.ones(2, 3, requires_grad=True), MissingTensor(dtype=torch.float64)
    gradient, of_loss = torch.autograd.grad(loss, [weight, loss], create_graph=True)
    assert isinstance(gradient, MissingTensor) and gradient.shape == (2, 3) and math.isnan(of_loss.item())
    with pytest.raises(TypeError, match="0-d"):
        list(loss)
    assert len(list(MissingTensor(2, 3))) == 2


def test_sums_that_they_are_added_to_are_nan_and_counts_stay():
    loss, total, count, both = MissingTensor(), torch.zeros(()), torch.zeros((), dtype=torch.int64), torch.zeros(2)
    total += loss
    count += loss.argmax()
    both[1] = loss
    assert math.isnan(total.item()) and type(total) is Tensor and count.item() == 0
    assert both[0] == 0 and math.isnan(both[1].item())


def test_a_device_is_that_of_what_they_stand_for():
    x = MissingTensor(3, device="cuda:1")
    assert x.device == torch.device("cuda:1") and x.is_cuda and (x * 2).mean().device == x.device
    assert x.cpu().device.type == "cpu" and x.to(torch.zeros(1)).device.type == "cpu" and x.cuda().is_cuda
