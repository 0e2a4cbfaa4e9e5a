"""Cross-entropies of a loop's own that are divided by other numbers than targets are refused by name."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lengthwise.core.errors import CheckError
from lengthwise.runtime.wrap.loss_divisors import COMPARED_ON_DEVICE, DivisorCheck, MeanDivisor
from tests.runtime.wrap.test_loss_check import ALONE_FIRST, TOGETHER, trained
from tests.session.structures import VOCAB

pytestmark = pytest.mark.usefixtures("unchecked")

NUM_TARGETS = 4
LOGITS = torch.linspace(-1, 1, 30, dtype=torch.float64).sin().view(6, 5).requires_grad_()
LABELS = torch.tensor([0, 1, -100, 2, 4, -100])
WEIGHTS = torch.tensor([1.1, 3.0, 0.5, 2.3, 1.7], dtype=torch.float64)


def ce(**options):
    return F.cross_entropy(LOGITS * 1.0, LABELS, **options)


def of_first(number):
    return F.cross_entropy(LOGITS[:number], LABELS[:number])


BY_WEIGHTS = "class weights \\(weight=\\).* mean_over='step'"
OTHERS = {
    "class weights": (lambda: ce(weight=WEIGHTS), BY_WEIGHTS),
    "class weights and smoothing": (lambda: ce(weight=WEIGHTS, label_smoothing=0.1), BY_WEIGHTS),
    "class weights of places": (
        lambda: F.cross_entropy(LOGITS.T[None], LABELS[None], weight=WEIGHTS) * 2 + LOGITS.square().mean(), BY_WEIGHTS
    ),
    "nll_loss": (lambda: F.nll_loss(LOGITS.log_softmax(-1), LABELS, weight=WEIGHTS), BY_WEIGHTS),
    "beside another": (lambda: ce() + 0.1 * ce(weight=WEIGHTS), BY_WEIGHTS),
    "fewer targets": (lambda: of_first(5) + of_first(4), "divided by 3, .* by the 4 targets"),
    "all slots": (lambda: ce(reduction="none").mean(), "divided by 6, .* by the 4 targets"),
    "a sum by all slots": (lambda: ce(reduction="sum") / LABELS.numel(), "divided by 6, "),
    "a sum by weights": (
        lambda: (ce(reduction="none") * 1.0).sum() * 0 + ce(reduction="none").sum() / WEIGHTS[LABELS.clamp(0)].sum(),
        "divided by 8.5, ",
    ),
}  # fmt: skip
SAME = {
    "the mean": ce,
    "smoothing": lambda: ce(label_smoothing=0.1),
    "a part of it": lambda: 0.3 * ce() / 7,
    "two heads": lambda: ce() + 0.3 * ce(),
    "both heads at once": lambda: F.cross_entropy(LOGITS.repeat(2, 1), LABELS.repeat(2)),
    "weights that are the same": lambda: ce(weight=torch.full((5,), 2.0, dtype=torch.float64)),
    "weights with another divisor": lambda: ce(weight=WEIGHTS) * (WEIGHTS[LABELS[LABELS >= 0]].sum() / NUM_TARGETS),
    "a sum by targets": lambda: ce(reduction="sum") / ((LABELS >= 0).sum() + 1e-8),
    "a sum of losses by targets": lambda: ce(weight=WEIGHTS, reduction="none").sum() / NUM_TARGETS,
    "means of two sequences": lambda: (of_first(3) * 2 + F.cross_entropy(LOGITS[3:], LABELS[3:]) * 2) / NUM_TARGETS,
    "beside a penalty": lambda: ce() + LOGITS.square().mean() + LOGITS.sum() / 9,
    "made again in the backward": lambda: checkpoint(ce, use_reentrant=False),
}


def micro_batch_of(*made):
    return SimpleNamespace(
        shard=SimpleNamespace(passes=[SimpleNamespace(noted=SimpleNamespace(made_by=x)) for x in made])
    )


@pytest.mark.parametrize("name", OTHERS)
def test_a_mean_by_another_divisor_than_the_number_of_targets_is_refused_by_name(name):
    make, problem = OTHERS[name]
    with pytest.raises(CheckError, match=problem):
        DivisorCheck().check(make(), micro_batch_of(), NUM_TARGETS, what="targets")


@pytest.mark.parametrize("name", SAME)
def test_a_mean_over_targets_is_taken_in_whatever_form_it_comes(name):
    loss = SAME[name]()
    DivisorCheck().check(loss, micro_batch_of(), NUM_TARGETS, what="targets")
    loss.backward()


def test_what_a_forward_returned_is_not_looked_into():
    loss = ce(weight=WEIGHTS)
    DivisorCheck().check(loss * 2, micro_batch_of(None, loss.grad_fn), NUM_TARGETS, what="targets")


def test_the_host_waits_for_few_divisors_on_a_device_and_for_no_weights(monkeypatch):
    monkeypatch.setattr(MeanDivisor, "is_on_host", False)
    check, loss = DivisorCheck(), ce(reduction="none").mean()
    for _ in range(COMPARED_ON_DEVICE):
        check.check(ce(), micro_batch_of(), NUM_TARGETS, what="targets")
    check.check(loss, micro_batch_of(), NUM_TARGETS, what="targets")
    with pytest.raises(CheckError, match="class weights"):
        check.check(ce(weight=WEIGHTS), micro_batch_of(), NUM_TARGETS, what="targets")


BY_CLASS = torch.linspace(0.1, 3, VOCAB, dtype=torch.float64)


def weighted(model, micro_batch, step, *, weight=BY_CLASS):
    logits, _ = model(**micro_batch.inputs)
    return F.cross_entropy(logits[0], micro_batch.targets, weight=weight)


@pytest.mark.parametrize("planner", [ALONE_FIRST, TOGETHER])
def test_class_weights_of_a_loop_are_refused_under_any_plan(planner):
    with pytest.raises(CheckError, match="class weights"):
        trained(weighted, planner=planner, mean_over="targets")
    assert trained(lambda *args: weighted(*args, weight=None), planner=planner, mean_over="targets") == 5


def test_a_mean_over_targets_is_no_mean_over_tokens():
    with pytest.raises(CheckError, match=r"divided by \d+, .* tokens of this rank"):
        trained(lambda *args: weighted(*args, weight=None), planner=TOGETHER, mean_over="tokens")
