from itertools import product

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lengthwise.runtime.models.chunked_loss import chunked_cross_entropy
from lengthwise.runtime.models.targets import IGNORE
from tests.runtime.models.cases import assert_same

# Logits in bfloat16 carry a relative error of 2^-9 each; losses of order one inherit it.
BFLOAT16_TOLERANCE = 2e-2


def case(tokens=13, hidden=5, vocab=17, *, dtype=torch.float64, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    hidden_TD = (scale * torch.randn(tokens, hidden, generator=generator, dtype=torch.float64)).to(dtype)
    head_VD = torch.randn(vocab, hidden, generator=generator, dtype=torch.float64).to(dtype)
    targets_T = torch.randint(vocab, (tokens,), generator=generator)
    targets_T[::4] = IGNORE
    return hidden_TD.requires_grad_(), head_VD.requires_grad_(), targets_T


def loss_and_gradients(function, hidden_TD, head_VD, targets_T, weight=1.0):
    loss = function(hidden_TD, head_VD, targets_T)
    dhidden, dhead = torch.autograd.grad(loss * weight, [hidden_TD, head_VD])
    return {"loss": loss.detach(), "dhidden": dhidden, "dhead": dhead}


def plain(hidden_TD, head_VD, targets_T):
    return F.cross_entropy(hidden_TD @ head_VD.T, targets_T, reduction="sum", ignore_index=IGNORE)


def chunked(chunk_tokens):
    return lambda *case: chunked_cross_entropy(*case, chunk_tokens=chunk_tokens)


@pytest.mark.parametrize(("chunk_tokens", "scale"), list(product([1, 3, 9, 100], [1.0, 1e4])))
def test_chunked_loss_is_cross_entropy_with_its_gradients(chunk_tokens, scale):
    sample = case(scale=scale)
    assert_same(
        loss_and_gradients(chunked(chunk_tokens), *sample, weight=0.37), loss_and_gradients(plain, *sample, weight=0.37)
    )


def test_chunked_loss_passes_gradcheck():
    hidden_TD, head_VD, targets_T = case()
    assert torch.autograd.gradcheck(
        lambda h, w: chunked_cross_entropy(h, w, targets_T, chunk_tokens=4), (hidden_TD, head_VD)
    )


def test_either_input_may_need_no_gradient():
    hidden_TD, head_VD, targets_T = case()
    both = loss_and_gradients(chunked(4), hidden_TD, head_VD, targets_T)
    (dhidden,) = torch.autograd.grad(chunked(4)(hidden_TD, head_VD.detach(), targets_T), hidden_TD)
    (dhead,) = torch.autograd.grad(chunked(4)(hidden_TD.detach(), head_VD, targets_T), head_VD)
    assert_same({"dhidden": dhidden, "dhead": dhead}, {k: both[k] for k in ("dhidden", "dhead")}, tolerance=0)


def test_without_gradients_only_the_loss_is_computed():
    hidden_TD, head_VD, targets_T = case()
    with torch.no_grad(), Matrices() as seen:
        loss = chunked(4)(hidden_TD, head_VD, targets_T)
    assert not loss.requires_grad
    assert_same(loss, plain(hidden_TD, head_VD, targets_T).detach())
    assert seen.products == 3  # ten targets in chunks of four, one product each


def test_a_pack_without_targets_has_loss_zero_and_zero_gradients():
    hidden_TD, head_VD, targets_T = case()
    grads = loss_and_gradients(chunked(4), hidden_TD, head_VD, torch.full_like(targets_T, IGNORE))
    assert all(not x.any() for x in grads.values())


def test_a_second_backward_scales_afresh():
    hidden_TD, head_VD, targets_T = case()
    loss = chunked(4)(hidden_TD, head_VD, targets_T)
    first = torch.autograd.grad(2 * loss, hidden_TD, retain_graph=True)[0]
    assert_same(torch.autograd.grad(2 * loss, hidden_TD)[0], first, tolerance=0)


def test_a_backward_makes_no_second_gradient_of_the_head_unless_the_graph_is_kept():
    hidden_TD, head_VD, targets_T = case()
    for keeps in (True, False):
        loss = chunked(4)(hidden_TD, head_VD, targets_T)
        saved = {x.data_ptr() for x in loss.grad_fn.saved_tensors if x is not None}
        made = torch.autograd.grad(2 * loss, [hidden_TD, head_VD], retain_graph=keeps)
        assert [x.data_ptr() in saved for x in made] == [not keeps] * 2


def test_bfloat16_loss_is_float32_and_near_the_exact_one():
    sample = case(tokens=200, hidden=32, vocab=64, dtype=torch.bfloat16, scale=0.3)
    exact = [x.detach().double().requires_grad_() if x.is_floating_point() else x for x in sample]
    actual, expected = loss_and_gradients(chunked(16), *sample), loss_and_gradients(plain, *exact)
    assert actual["loss"].dtype is torch.float32
    assert {actual["dhidden"].dtype, actual["dhead"].dtype} == {torch.bfloat16}
    assert_same({k: x.double() for k, x in actual.items()}, expected, tolerance=BFLOAT16_TOLERANCE)


class Matrices(TorchDispatchMode):
    """Counts matrix products and remembers the largest tensor made."""

    def __init__(self):
        super().__init__()
        self.products = self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.products += func.overloadpacket._qualified_op_name in ("aten::mm", "aten::addmm_")
        made = [x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        self.largest = max([self.largest, *made])
        return out


def test_logits_of_the_whole_pack_never_exist_and_none_is_computed_twice():
    hidden_TD, head_VD, targets_T = case(tokens=256, hidden=8, vocab=128)
    with Matrices() as seen:
        chunked(16)(hidden_TD, head_VD, targets_T).backward()
    assert seen.largest == max(256 * 8, 16 * 128)
    assert seen.products == 3 * 12  # 192 targets in chunks of 16: the logits and two gradients
