"""The check before training: what counts as a difference, and which lengths, degrees and recomputes are looked at."""

import random
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from lengthwise.core.errors import CheckError, InputError
from lengthwise.runtime.comm.world import start_world
from lengthwise.runtime.verify import gradient_check as exact
from lengthwise.runtime.verify.compute_settings import RECOMPUTE, settings_of
from lengthwise.runtime.verify.gradient_check import check_exact
from lengthwise.runtime.verify.precision import TOLERANCES
from lengthwise.runtime.verify.stock_call import GradientResult
from tests.runtime.harness import with_check
from tests.runtime.loop.odd_modules import Odd
from tests.runtime.loop.runs import Case, prepared
from tests.runtime.loop.test_plain_modules import LOGITS, built

NAMES = ("large", "small", "zero")
ALONE = GradientResult(
    loss=2.0,
    gradients=[torch.tensor(values, dtype=torch.float64) for values in ([3.0, 4.0], [3e-2, 4e-2], [0.0, 0.0])],
)


def worst(loss=0.0, **added):
    """Of a pack that learns this much more."""
    wrapped_model = SimpleNamespace(structure=SimpleNamespace(parameters=NAMES))
    run = SimpleNamespace(gather=None, state=None, wrapped_model=wrapped_model)
    gradients = [value + added.get(name, 0.0) for name, value in zip(NAMES, ALONE.gradients)]
    packed = GradientResult(loss=ALONE.loss + loss, gradients=gradients)
    return exact.worst_difference(run, packed, ALONE, TOLERANCES[torch.float64])


@pytest.mark.parametrize(
    ("added", "is_refused", "name"),
    [
        ({"loss": 1e-10}, False, None),
        ({"loss": 1e-7}, True, "the loss"),
        ({"loss": float("nan")}, True, "the loss"),
        ({"large": 1e-10}, False, None),
        ({"large": 1e-7}, True, "the gradient of large"),
        ({"small": 1e-12}, False, None),
        ({"small": 1e-9}, True, "the gradient of small"),
        ({"small": float("nan")}, True, "the gradient of small"),
        ({"zero": 1e-12}, False, None),
        ({"zero": 1e-9}, True, "the gradient of zero"),
    ],
)
def test_a_difference_counts_over_1e_8_of_its_own_gradient_or_1e_11_of_all(added, is_refused, name):
    found = worst(**added)
    assert (found.ratio > 1.0) == is_refused
    assert name is None or found.name == name


class AlmostExact(Odd):
    """Adds a millionth of what the length is."""

    def forward(self, tokens, positions=None):
        return super().forward(tokens, positions) * (1.0 + 1e-7 * tokens.shape[1])


class Drawing(Odd):
    """Draws by a generator that nobody answers for, to no effect."""

    def forward(self, tokens, positions=None):
        random.random()
        return super().forward(tokens, positions)


@pytest.mark.parametrize(
    ("kind", "error", "named"),
    [
        (AlmostExact, CheckError, r"limit 1e-08"),
        (Drawing, InputError, "draws random numbers from Python's random in a way"),
    ],
)
def test_a_small_difference_and_a_draw_without_effect_are_refused(kind, error, named):
    with pytest.raises(error, match=named):
        with_check(prepared, Case(build=partial(built, kind, "none"), **LOGITS), (), start_world("cpu"))


class Asked(Exception):  # noqa: N818 - carries an answer
    """What would be compared."""


@pytest.mark.parametrize(
    ("by_sequence", "size", "expected"),
    [(None, 12, [1, 2, 3, 4, 6, 12]), (None, 3, [1, 2, 3]), (None, 10, [1, 2, 3, 4, 5, 10]), (object(), 12, [1])],
)
def test_every_degree_up_to_4_and_every_divisor_is_compared(monkeypatch, by_sequence, size, expected):
    def ask(run, *, degrees, **options):
        raise Asked(degrees)

    monkeypatch.setattr(exact, "settings_of", ask)
    run = SimpleNamespace(world=SimpleNamespace(size=size), wrapped_model=SimpleNamespace(by_sequence=by_sequence))
    with pytest.raises(Asked) as asked:
        check_exact(run)
    assert asked.value.args == (expected,)


def settings(config, longest, *, scalars=0, degrees=(1, 2, 4)):
    run = SimpleNamespace(
        wrapped_model=SimpleNamespace(
            rules=SimpleNamespace(scalars=scalars), by_sequence=None, structure=None, most_slots=None
        ),
        collator=SimpleNamespace(kinds={}, borders=(), longest=None, compared_lengths=()), num_params=1000,
        world=SimpleNamespace(device=torch.device("cpu")),
        model=SimpleNamespace(config=SimpleNamespace(to_dict=lambda: config)),
    )  # fmt: skip
    return settings_of(run, degrees=degrees, recompute=RECOMPUTE, longest=longest)


def test_lengths_beyond_those_that_a_config_names_are_compared_by_their_loss():
    config = {"sliding_window": 4096, "hidden_size": 4000, "rope": {"original_max_position_embeddings": 3000}}
    found = settings(config, 5000)
    lengths = [(each.lengths, each.degree) for each in found if not each.gradients]
    assert lengths == [((5, 3000 + 375 + 1), 4), ((5, 4096 + 512 + 1), 4)]
    assert [(each.lengths, each.degree) for each in settings(config, 3100) if not each.gradients] == [((5, 3100), 4)]
    assert {each.degree for each in found if each.lengths == (5, 2048)} == {1, 4}
    assert not [each for each in settings(config, 11) if len(each.lengths) == 2]
    assert [each.lengths for each in settings({}, 100) if len(each.lengths) == 2] == [(5, 100)] * 2


def test_all_recomputes_are_compared_at_the_lowest_and_the_highest_degree_and_layers_that_are_left_out():
    found = [(each.degree, each.recompute) for each in settings({}, None)]
    assert found == [*((1, name) for name in RECOMPUTE), (2, RECOMPUTE[-1]), *((4, name) for name in RECOMPUTE)]
    assert [each.scalar for each in settings({}, None, scalars=1)][-1] == 0.0
    run = SimpleNamespace(wrapped_model=SimpleNamespace(structure=SimpleNamespace(num_layers=3)))
    assert [exact._flags(run, name) for name in RECOMPUTE] == [(), (True,) * 3, (True, False, True)]
