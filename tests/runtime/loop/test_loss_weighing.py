"""Each loss has the weight in the step that its mean says; what is not counted yet is refused."""

from types import SimpleNamespace

import pytest
import torch

from lengthwise.core.errors import InputError
from lengthwise.runtime.loop.loss_weighing import Uses, Weighing
from lengthwise.runtime.wrap.handed_out import HandedOut
from lengthwise.runtime.wrap.loss_terms import LossTotals

TOTALS = {"targets": 40, "slots": 50, "sequences": 10, "units": 5}


def weighing_of(*, is_exact=True):
    return Weighing(LossTotals(**TOTALS, is_exact=is_exact), torch.device("cpu"))


def micro_batch_of(*, num_targets=8, sequences=(0, 0, 1, -1), degree=2, means=(), shares=()):
    """Three slots of two units, and one of padding; ``means``, ``shares``: what were made of it."""
    return SimpleNamespace(
        num_targets=num_targets, degree=degree,
        shard=SimpleNamespace(tree=None, num_unpadded=sum(k >= 0 for k in sequences), part=None, passes=[]),
        num_units=2, means=set(means), handed_out=HandedOut(), shares=list(shares),
    )  # fmt: skip


def loss_of(value=3.0):
    return torch.tensor(value, dtype=torch.float64, requires_grad=True)


WEIGHTS = {None: 8 / 40, "targets": 8 / 40, "tokens": 3 / 50, "units": 2 / (5 * 2), "step": 1.0}


@pytest.mark.parametrize("mean_over", WEIGHTS)
def test_a_loss_has_the_weight_of_what_it_is_a_mean_over(mean_over):
    weighing, loss = weighing_of(), loss_of()
    for number in (1, 2):
        share = loss if mean_over != "step" else loss * 1.0
        (term,) = weighing.terms(micro_batch_of(shares=[share]), loss := share, None, mean_over)
        assert term.value is loss and term.weight == pytest.approx(WEIGHTS[mean_over])
        assert weighing.num_targets == 8 * number
        direct = 0.0 if mean_over in (None, "targets") else 3.0 * WEIGHTS[mean_over] * number
        assert weighing.direct == pytest.approx(direct)
        assert float(weighing.by_target) == (3.0 * 8 * number if mean_over in (None, "targets") else 0.0)


def test_a_side_term_counts_whole_beside_the_loss():
    weighing, share = weighing_of(), loss_of(0.25) * 1.0
    side = 2 * share
    terms = weighing.terms(micro_batch_of(shares=[share]), loss_of(), side, None)
    assert [term.weight for term in terms] == [8 / 40, 1.0] and terms[1].value is side
    assert weighing.direct == 0.5 and float(weighing.by_target) == 24.0
    with pytest.raises(InputError, match="takes the side as a tensor; got float"):
        weighing.terms(micro_batch_of(), loss_of(), 0.5, None)


@pytest.mark.parametrize(("side", "mean_over"), [(0.5, None), (None, "step")])
def test_a_term_that_is_no_share_of_the_step_is_refused_as_its_weight_would_depend_on_the_plan(side, mean_over):
    side = None if side is None else loss_of(side)
    for shares in ([], [loss_of() * 2.0]):
        with pytest.raises(InputError, match=r"is added as it is for every micro-batch.*micro_batch.mean\("):
            weighing_of().terms(micro_batch_of(shares=shares), loss_of() * 1.0, side, mean_over)


def test_a_mean_over_nothing_is_left_out():
    weighing, nothing = weighing_of(), torch.tensor(float("nan"), requires_grad=True)
    assert weighing.terms(micro_batch_of(num_targets=0), nothing, None, None) == []
    assert weighing.terms(micro_batch_of(sequences=(-1, -1)), nothing, None, "tokens") == []
    assert float(weighing.by_target) == 0.0 and weighing.direct == 0.0


def test_another_word_for_a_mean_is_refused():
    with pytest.raises(InputError, match="mean_over is 'targets', 'tokens', 'units' or 'step', not 'samples'"):
        weighing_of().terms(micro_batch_of(), loss_of(), None, "samples")


@pytest.mark.parametrize(
    ("mean_over", "means", "uses"),
    [
        (None, (), Uses.TARGETS),
        ("targets", (), Uses.TARGETS),
        ("tokens", (), Uses.TOKENS),
        ("units", (), Uses.UNITS),
        ("step", ("targets",), Uses.TARGETS),
        ("step", ("units",), Uses.UNITS),
        ("units", ("units",), Uses.UNITS),
        ("tokens", ("targets",), Uses.TARGETS | Uses.TOKENS),
        ("units", ("targets",), Uses.TARGETS | Uses.UNITS),
        (None, ("units",), Uses.TARGETS | Uses.UNITS),
    ],
)
def test_what_a_step_is_a_mean_over_is_noted(mean_over, means, uses):
    weighing = weighing_of()
    loss = loss_of() * 1.0
    weighing.terms(micro_batch_of(means=means, shares=[loss]), loss, None, mean_over)
    assert weighing.uses == uses


def test_means_beside_one_over_targets_need_their_number():
    for mean_over, means, over in (
        ("tokens", ("targets",), "tokens"), (None, ("sequences",), "tokens"), ("units", ("targets",), "units"),
        (None, ("units",), "u"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=f"a mean over {over}.* beside one over targets needs the number"):
            weighing_of(is_exact=False).terms(micro_batch_of(means=means), loss_of(), None, mean_over)
    weighing = weighing_of(is_exact=False)
    weighing.terms(micro_batch_of(means=("units",)), loss_of(), None, "units")
    with pytest.raises(InputError, match="a mean over units beside one over targets"):
        weighing.terms(micro_batch_of(), loss_of(), None, None)  # in another micro-batch of the step
    weighing = weighing_of(is_exact=False)
    assert len(weighing.coupled_terms(micro_batch_of(means=("tokens",)), loss_of(), None)) == 1


def test_the_gradient_is_scaled_by_the_counted_targets_unless_means_are_over_something_else():
    exact, counted_later = weighing_of(), weighing_of(is_exact=False)
    for weighing in (exact, counted_later):
        assert weighing.factor([Uses.TARGETS, Uses.TARGETS], 20) == 2.0
        assert weighing.factor([Uses(0)], 20) == 2.0
        assert weighing.factor([Uses.UNITS, Uses.UNITS], 20) == 1.0
        assert weighing.factor([Uses.TOKENS, Uses.TOKENS], 20) == 1.0, "a mean over tokens alone needs no targets"
    assert exact.factor([Uses.TARGETS, Uses.UNITS], 20) == 1.0
    with pytest.raises(InputError, match="a mean over units beside one over targets"):
        counted_later.factor([Uses.TARGETS, Uses.UNITS], 20)
    with pytest.raises(InputError, match="a mean over tokens or sequences beside one over targets"):
        counted_later.factor([Uses.TARGETS, Uses.TOKENS], 20)
    assert exact.factor([Uses.TARGETS | Uses.CHANGED], 20) == 2.0
    for other in (Uses.UNITS, Uses.TOKENS):
        with pytest.raises(InputError, match="a loop changed labels in place so that they have another number"):
            exact.factor([Uses.TARGETS | Uses.CHANGED, other], 20)


def test_labels_that_were_made_weigh_the_loss_that_was_checked():
    for mean_over, count in ((None, 2), ("targets", 8)):
        weighing, part = weighing_of(is_exact=False), micro_batch_of()
        part.shard.passes.append(SimpleNamespace(num_made_targets=2, noted=None))
        (term,) = weighing.terms(part, loss_of(), None, mean_over)
        assert weighing.num_targets == count and term.weight == pytest.approx(count / 40)


def test_labels_that_were_made_are_not_mixed_with_means_over_the_targets_of_items():
    part = micro_batch_of(means=("targets",))
    part.shard.passes.append(SimpleNamespace(num_made_targets=2, noted=None))
    with pytest.raises(
        InputError,
        match="or were changed in place, have 2 targets, and the micro-batch has 8",
    ):
        weighing_of(is_exact=False).terms(part, loss_of(), loss_of(), None)
