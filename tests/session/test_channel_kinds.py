"""A model is compared on frames and columns of several items, the unusual ones among them."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lengthwise as lw
from lengthwise.core.errors import CheckError
from lengthwise.runtime.wrap.corpus_window import LONGEST
from lengthwise.session import channel_kinds
from lengthwise.session.channel_kinds import MOST_CHANNELS, ChannelKinds
from tests.plan.costs import SimpleCost
from tests.runtime.harness import with_check
from tests.session.loops import as_started_by_torchrun

WIDTH, PLACES, CHANNELS = 8, 4, 3
LENGTHS = (6, 5, 9, 1, 8, 7)
OPTIONS = {
    "cost": SimpleCost(capacity=1000), "memory_gib": 40, "steps": 1, "sequences_per_step": 6, "packing": "always",
    "policy": "static", "verbose": False, "objective": "every-token",
}  # fmt: skip


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).transpose(1, 2).chunk(3, -1)
        return x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


class Film(nn.Module):
    """Adds a function of all flagged frames, [1, frames, places, channels], to each."""

    def __init__(self, unusual):
        super().__init__()
        self.unusual, self.first = unusual, nn.Linear(CHANNELS, WIDTH)
        self.blocks, self.last = nn.ModuleList(Block() for _ in range(2)), nn.Linear(WIDTH, 2)

    def forward(self, x):
        x, is_unusual = self.first(x), self.unusual(x[..., 2:]).to(x.dtype)
        x = x + (x * is_unusual).sum((1, 2), keepdim=True)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def is_flagged(value):
    return value != 0


def is_far(value):
    return value > 5


def films(kind, number, in_columns=False):
    """Films of which one has a channel that is unusual in one of its frames."""
    rng = np.random.default_rng(0)
    made = [rng.normal(size=(length, PLACES, CHANNELS)) for length in LENGTHS]
    for film in made:
        film[..., 2] = 0.0 if kind is is_flagged else film[..., 2].clip(-2, 2)
    made[number][-1, :, 2] = 7.0
    return [{"input_ids": np.zeros(len(film), dtype=int), "film": film[:, :1]} for film in made] if in_columns else made


def options_of(in_columns):
    def values(micro_batch):
        if in_columns:
            return micro_batch.column("film")
        return micro_batch.own(np.concatenate(micro_batch.sequences))

    return OPTIONS | {
        "inputs": lambda micro_batch: {"x": values(micro_batch)[None]},
        "loss": lambda output, micro_batch: F.mse_loss(output[0], values(micro_batch)[..., :2]),
        **({"loss_columns": ("film",)} if in_columns else {"slot_tokens": PLACES}),
    }


@pytest.mark.parametrize("in_columns", [False, True], ids=["frames", "columns"])
@pytest.mark.parametrize("number", [0, pytest.param(2, marks=pytest.mark.deep), 5])
@pytest.mark.parametrize("kind", [is_flagged, is_far])
def test_what_packs_change_at_one_unusual_frame_of_any_item_is_noticed_before_the_run(kind, number, in_columns):
    torch.manual_seed(0)
    with pytest.raises(CheckError, match="learns something else from packs"):
        lw.prepare(Film(kind).double(), films(kind, number, in_columns), **options_of(in_columns))


def outcome(number):
    as_started_by_torchrun()
    torch.manual_seed(0)
    try:
        lw.prepare(Film(is_flagged).double(), films(is_flagged, number), **options_of(False))
    except CheckError as error:
        return str(error)


def test_every_rank_compares_the_same_frames(ranks):
    first, second = ranks(2).run(with_check, outcome, 4)
    assert first == second and "learns something else from packs" in first


def never(value):
    return torch.zeros_like(value)


@pytest.mark.parametrize("in_columns", [False, True], ids=["frames", "columns"])
@pytest.mark.parametrize("packing", ["always", "never"])
def test_a_model_without_such_a_rule_passes_whatever_its_items_hold(in_columns, packing):
    torch.manual_seed(0)
    given = options_of(in_columns) | {"packing": packing}
    run = lw.prepare(Film(never).double(), films(is_flagged, 4, in_columns), **given)
    assert (run.wrapped_model.by_sequence is not None) == (packing == "never")
    run.close()


def looked_at(items, bounds=None):
    kinds = ChannelKinds(len(items))
    for number, item in enumerate(items):
        kinds.add(number, {"tokens": item}, ("tokens",), bounds or (0, len(item)))
    return kinds


def test_the_slots_of_each_sign_and_of_the_least_and_greatest_value_are_kept_once():
    items = [np.array([[1.0], [1.5]]), np.array([[0.0], [3.0], [0.0]]), np.array([[-2.0], [-2.0], [9.0]])]
    assert looked_at(items).slots()["tokens"].ravel().tolist() == [1.0, 0.0, -2.0, 9.0]
    images = [np.ones((2, 3, 4, 5)), np.ones((2, 3, 4, 5))]
    images[1][1, 2] = 0.0  # a whole channel
    assert len(looked_at(images).slots()["tokens"]) == 2
    assert looked_at([np.ones((2, 1)), np.ones((2, 1))]).slots()["tokens"].tolist() == [[1.0]]
    wide = [np.ones((2, MOST_CHANNELS + 1)), np.ones((2, MOST_CHANNELS + 1))]
    wide[1][0, 5] = 0.0
    assert len(looked_at(wide).slots()["tokens"]) == 2
    assert len(looked_at([np.ones((3, 2)), np.zeros((3, 4))]).slots()["tokens"]) == 1  # of one form
    assert looked_at([np.zeros((3, 0))]).slots() == {}


def test_windows_are_of_the_first_unusual_sequence_of_the_first_item_and_of_others():
    items = [np.full((20, 1), float(number + 1)) for number in range(9)]
    items[3][15] = 0.0
    windows = looked_at(items).windows()
    assert [window.columns["tokens"].max() for window in windows] == [4.0, 1.0, 9.0, 5.0]
    assert all(len(window.columns["tokens"]) == LONGEST for window in windows)
    for num_slots in (1, 2, 5, 7):
        cut = windows[0].cut("tokens", num_slots)
        assert len(cut) == num_slots and (cut == 0).sum() == 1
    (short,) = looked_at([np.arange(3.0)[:, None]]).windows()
    assert short.cut("tokens", 5).ravel().tolist() == [0.0, 1.0, 2.0, 0.0, 1.0]
    rows = looked_at([np.arange(12.0)[:, None] - 8.0], bounds=(0, 7, 12)).windows()
    assert rows[0].columns["tokens"].ravel().tolist() == [-8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0]


def test_of_many_large_items_some_are_looked_at_and_little_is_kept(monkeypatch):
    monkeypatch.setattr(channel_kinds, "LOOKED_AT", 0)
    monkeypatch.setattr(channel_kinds, "MOST_BYTES", 3 * 8)
    items = [np.full((1, 1), float(number)) for number in range(1000)]
    kinds = looked_at(items)
    assert kinds.slots()["tokens"].ravel().tolist() == [0.0, 999.0]
    assert kinds._looked_at == channel_kinds.SPREAD * 8
    monkeypatch.setattr(channel_kinds, "MOST_BYTES", 0)
    assert looked_at(items).slots() == {}
