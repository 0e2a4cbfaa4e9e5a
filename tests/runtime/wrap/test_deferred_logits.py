"""A head's deferred logits: losses and gradients are those of the whole matrix, which is not made for them."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lengthwise.core.errors import InputError
from lengthwise.runtime.wrap import deferred_logits
from lengthwise.runtime.wrap.deferred_logits import DeferredHead, DeferredLogits

V, D, B, T = 23, 6, 2, 37
IDS = torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(1))
LABELS = torch.where(torch.arange(T) % 5 == 0, -100, IDS)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred_logits, "chunk_tokens", lambda vocab_size, device: 8)


def _losses_of_transformers(logits: Tensor) -> Tensor:
    targets = F.pad(LABELS, (0, 1), value=-100)[..., 1:]
    return F.cross_entropy(logits.float().view(-1, V), targets.reshape(-1), ignore_index=-100, reduction="mean")


USES: dict[str, Callable[[Tensor], Tensor]] = {
    "transformers' mean": _losses_of_transformers,
    "sum": lambda x: F.cross_entropy(x.reshape(B * T, V), LABELS.view(-1), reduction="sum"),
    "module": lambda x: nn.CrossEntropyLoss()(x.flatten(0, 1), LABELS.flatten()),
    "each token": lambda x: (F.cross_entropy(x.flatten(0, 1), LABELS.flatten(), reduction="none") ** 2).sum(),
    "other ignored label": lambda x: F.cross_entropy(x.flatten(0, 1), IDS.flatten(), ignore_index=3),
    "label smoothing": lambda x: F.cross_entropy(x.flatten(0, 1), LABELS.flatten(), label_smoothing=0.1),
    "scaled": lambda x: _losses_of_transformers(2.5 * x / 7),
    "scaled by a tensor": lambda x: _losses_of_transformers(x * torch.tensor(0.3, dtype=x.dtype)),
    "soft-capped": lambda x: _losses_of_transformers(torch.tanh(x / 3.0) * 3.0),
    "shifted": lambda x: F.cross_entropy(x[..., :-1, :].reshape(-1, V), IDS[..., 1:].reshape(-1)),
    "selected": lambda x: F.cross_entropy(x[LABELS != -100], LABELS[LABELS != -100]),
    "last tokens": lambda x: F.cross_entropy(x[:, -3:].flatten(0, 1), IDS[:, -3:].flatten()),
    "one row": lambda x: F.cross_entropy(x[1], LABELS[1]),
    "log-probabilities": lambda x: (x.gather(-1, IDS[..., None])[..., 0] - x.logsumexp(-1)).sin().sum(),
    "row by row": lambda x: torch.stack([torch.logsumexp(row, dim=-1) for row in x]).square().sum(),
    "log-softmax": lambda x: -x.log_softmax(-1).gather(-1, IDS[..., None]).mean(),
    "vocabulary second": lambda x: F.cross_entropy(x.transpose(1, 2), LABELS),
    "weights of classes": lambda x: F.cross_entropy(x.flatten(0, 1), LABELS.flatten(), weight=torch.rand(V).to(x)),
    "some classes": lambda x: x[..., 2:9].exp().sum(),
    "a norm beside": lambda x: _losses_of_transformers(x) + 1e-3 * x.logsumexp(-1).square().mean(),
    "changed in place": lambda x: _losses_of_transformers(x.mul_(2.0)),
    "a learned scale": lambda x: _losses_of_transformers(x * nn.Parameter(torch.tensor(0.5, dtype=x.dtype))),
}
CHUNKED = set(USES) - {
    "log-softmax", "vocabulary second", "weights of classes", "some classes", "changed in place", "a learned scale",
}  # fmt: skip


class _Model(nn.Module):
    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(D, D), nn.Linear(D, V, bias=bias)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, x: Tensor) -> Any:
        return self.head(torch.tanh(self.body(x)))


def _model(*, bias: bool = True, dtype: torch.dtype = torch.float64) -> tuple[_Model, _Model, Tensor]:
    torch.manual_seed(0)
    stock = _Model(bias=bias).to(dtype)
    deferred = deepcopy(stock)
    DeferredHead(deferred, is_plain=lambda: False)
    return stock, deferred, torch.randn(B, T, D, dtype=dtype)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("use", USES)
def test_losses_and_gradients_are_those_of_whole_logits(use: str, bias: bool) -> None:
    stock, deferred, x = _model(bias=bias)
    logits = deferred(x)
    assert isinstance(logits, DeferredLogits) and logits.shape == (B, T, V) and logits.dtype == torch.float64
    torch.manual_seed(2)
    loss = USES[use](logits)
    loss.backward()
    torch.manual_seed(2)
    expected = USES[use](stock(x))
    expected.backward()
    limit = 1e-6 if "float()" in use or use in _CAST else 1e-12
    torch.testing.assert_close(loss, expected, rtol=limit, atol=limit)
    for (name, parameter), other in zip(stock.named_parameters(), deferred.parameters()):
        torch.testing.assert_close(other.grad, parameter.grad, rtol=limit, atol=limit, msg=name)
    assert (logits._whole is None) == (use in CHUNKED)


_CAST = {
    "transformers' mean", "scaled", "scaled by a tensor", "soft-capped", "a norm beside", "changed in place",
    "a learned scale",
}  # fmt: skip


@pytest.mark.parametrize("use", ["transformers' mean", "sum", "soft-capped", "log-probabilities", "label smoothing"])
@pytest.mark.parametrize("autocast", [False, True])
def test_low_precision_is_that_of_whole_logits(use: str, autocast: bool) -> None:
    stock, deferred, x = _model(dtype=torch.float32 if autocast else torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = deferred(x)
        loss, expected = USES[use](logits), USES[use](stock(x))
    assert (logits.dtype, loss.dtype) == (torch.bfloat16, expected.dtype)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=2e-2, atol=2e-2)
    for parameter, other in zip(stock.parameters(), deferred.parameters()):
        torch.testing.assert_close(other.grad, parameter.grad, rtol=5e-2, atol=5e-2 * float(parameter.grad.abs().max()))


def test_logits_of_a_forward_without_gradients_have_none_when_they_are_computed() -> None:
    _, deferred, x = _model()
    with torch.no_grad():
        logits = deferred(x)
    assert not F.cross_entropy(
        logits.flatten(0, -2), torch.zeros(x.shape[:-1].numel(), dtype=torch.int64)
    ).requires_grad


def test_autocast_leaves_float64_as_it_is() -> None:
    stock, deferred, x = _model()
    with torch.autocast("cpu", torch.bfloat16):
        logits = deferred(x)
        assert logits.dtype is stock(x).dtype is torch.float64
        torch.testing.assert_close(logits.logsumexp(-1), stock(x).logsumexp(-1), rtol=1e-12, atol=0)


def test_no_chunk_is_larger_than_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    _, deferred, x = _model()
    largest = 0
    linear = F.linear

    def watched(hidden: Tensor, weight: Tensor, *others: Any) -> Tensor:
        nonlocal largest
        if len(weight) == V:
            largest = max(largest, hidden.numel() // D)
        return linear(hidden, weight, *others)

    logits = deferred(x)
    monkeypatch.setattr(F, "linear", watched)
    USES["soft-capped"](logits).backward()
    assert 0 < largest <= 8


def test_no_target_gives_no_number_and_no_gradient() -> None:
    stock, deferred, x = _model()
    for model in (stock, deferred):
        loss = F.cross_entropy(model(x).flatten(0, 1), torch.full((B * T,), -100))
        assert loss.isnan()
        loss.backward()
        assert all(bool((parameter.grad == 0).all()) for parameter in model.parameters())


def test_a_view_does_not_miss_a_change_in_place() -> None:
    _, deferred, x = _model()
    logits = deferred(x)
    view = logits.view(-1, V)
    with pytest.raises(InputError, match="mul_ changes logits in place after a view"):
        logits.mul_(2.0)
    assert logits.exp().isfinite().all()  # whole now
    with pytest.raises(InputError, match="mul_ changes logits in place after a view"):
        logits.mul_(2.0)
    with pytest.raises(InputError, match="__setitem__ changes logits in place"):
        view[0] = 0.0
    del view
    logits.mul_(2.0)
    torch.testing.assert_close(logits + 0, deferred(x) * 2.0 + 0)


def test_metrics_of_logits_have_no_gradient() -> None:
    stock, deferred, x = _model()
    logits = deferred(x)
    assert torch.equal(logits.detach().argmax(dim=-1), stock(x).argmax(-1)) and logits._whole is None
    assert not logits.detach().requires_grad and logits.requires_grad
    assert torch.equal(logits.detach() + 0, stock(x).detach())


def test_errors_are_those_of_torch() -> None:
    _, deferred, x = _model()
    with pytest.raises(ValueError, match="batch_size"):
        F.cross_entropy(deferred(x).flatten(0, 1), LABELS.flatten()[:-1])
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        deferred(x).view(-1, V + 1)


def test_heads_that_do_more_are_left_alone() -> None:
    model = _Model(bias=False)
    model.head = nn.Sequential(nn.Linear(D, V))
    DeferredHead(model, is_plain=lambda: False)
    assert type(model(torch.randn(B, T, D))) is Tensor
    model = _Model(bias=False)
    head = DeferredHead(model, is_plain=lambda: False)
    head.release()
    assert type(model(torch.randn(B, T, D))) is Tensor
