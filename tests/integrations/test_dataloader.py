"""A batch sampler for loops that are not ours."""

from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from lengthwise.core.errors import CheckError, InputError
from lengthwise.data.size_buckets import padded_lattice
from lengthwise.integrations.dataloader import BatchSampler
from tests.session import models

BUDGET = 96


def samplers(num_ranks, lengths=None, **options):
    lengths = [len(row) for row in models.rows()] if lengths is None else lengths
    options = {"tokens_per_micro_batch": BUDGET, "sequences_per_step": 13, "seed": 5} | options
    return [BatchSampler(lengths, rank=rank, num_ranks=num_ranks, **options) for rank in range(num_ranks)]


def walk(sampler):
    """What a loop sees in one epoch: step, items, weight, whether the step ends."""
    return [(sampler.step, tuple(ids), sampler.weight, sampler.is_last) for ids in sampler]


@pytest.mark.parametrize("padded", [False, True])
def test_every_sequence_once_an_epoch_within_the_budget_in_as_many_steps_on_all_ranks(padded):
    lengths = [len(row) for row in models.rows()]
    for num_ranks in (1, 2, 3):
        seen = [walk(sampler) for sampler in samplers(num_ranks, padded=padded)]
        counted = Counter(i for rank in seen for _, ids, weight, _ in rank for i in ids if weight)
        assert counted == Counter(range(40))
        for rank in seen:
            assert [step for step, *_, is_last in rank if is_last] == list(range(4))
            for _, ids, _, _ in rank:
                size = max(lengths[i] for i in ids) * len(ids) if padded else sum(lengths[i] for i in ids)
                assert size <= BUDGET
        for step in range(4):
            assert sum(weight for rank in seen for at, _, weight, _ in rank if at == step) == pytest.approx(1)


def test_no_rank_waits_for_work_that_another_could_have_done():
    lengths = np.random.default_rng(1).lognormal(5, 1, 400).astype(int) + 1
    one, work = lengths + lengths**2 / 1000, np.zeros((4, 5))
    options = {"sequences_per_step": 80, "tokens_per_micro_batch": 8192, "equal_at": 1000}
    longest = np.zeros(5)
    for rank, sampler in enumerate(samplers(4, lengths, **options)):
        for step, ids, _, _ in walk(sampler):
            work[rank, step] += one[list(ids)].sum()
            longest[step] = max(longest[step], one[list(ids)].max())
    assert (work.max(0) <= 1.01 * np.maximum(work.mean(0), longest)).all()


def test_weighted_mean_losses_sum_to_the_exact_gradient():
    rows, model = models.rows(), models.gpt()
    batch = [i for rank in samplers(1) for step, ids, _, _ in walk(rank) if step == 0 for i in ids]
    total = sum(len(rows[i]) - 1 for i in batch)
    (sum(models.sum_of_losses(model, rows[i]) for i in batch) / total).backward()
    exact = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    for sampler in samplers(3):
        loader = DataLoader(rows, batch_sampler=sampler, collate_fn=list)
        for items in sampler.follow(loader):
            if sampler.step == 0:
                targets = sum(len(row) - 1 for row in items)
                mean = sum(models.sum_of_losses(model, row) for row in items) / targets
                (mean * sampler.weight).backward()
                assert sampler.ddp_weight == pytest.approx(3 * sampler.weight)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, exact[name], rtol=0, atol=1e-14)


def test_targets_that_labels_leave_count_in_the_weights():
    counts = np.arange(40) % 5
    seen = [walk(sampler) for sampler in samplers(2, targets=counts)]
    batch = [i for rank in seen for step, ids, _, _ in rank if step == 1 for i in ids]
    for rank in seen:
        for step, ids, weight, _ in rank:
            if step == 1:
                assert weight == pytest.approx(counts[list(ids)].sum() / counts[batch].sum())


def test_more_ranks_than_sequences_compute_the_shortest_again_with_no_weight():
    seen = [walk(sampler) for sampler in samplers(4, [9, 4, 30], sequences_per_step=3)]
    assert Counter(ids for rank in seen for _, ids, weight, _ in rank if weight) == Counter([(0,), (1,), (2,)])
    assert sorted(len(rank) for rank in seen) == [1, 1, 1, 1]
    assert [ids for rank in seen for _, ids, weight, _ in rank if not weight] == [(1,)]


def test_a_loader_with_workers_that_ask_ahead_has_the_weight_of_the_current_batch():
    expected = walk(samplers(2)[1])
    sampler = samplers(2)[1]
    loader = DataLoader(range(40), batch_sampler=sampler, num_workers=2, prefetch_factor=4, collate_fn=tuple)
    assert len(loader) == len(expected)
    assert [(sampler.step, ids, sampler.weight, sampler.is_last) for ids in sampler.follow(loader)] == expected


def test_a_sampler_goes_on_at_the_step_it_was_in_and_on_other_ranks():
    whole = walk(samplers(2, tokens_per_micro_batch=64)[0])
    sampler = samplers(2, tokens_per_micro_batch=64)[0]
    place = next(number for number, part in enumerate(whole) if part[0] == 1 and not part[3])
    for _ in zip(range(place + 1), sampler):  # in the middle of step 1
        pass
    other = samplers(2, tokens_per_micro_batch=64)[0]
    other.load_state_dict(sampler.state_dict())
    assert walk(other) == [part for part in whole if part[0] >= 1]
    assert [step for step, *_, is_last in walk(other) if is_last] == [4, 5, 6, 7], "the next epoch"
    three = samplers(3)
    for each in three:
        each.load_state_dict(sampler.state_dict())
    ids = Counter(i for each in three for _, ids, weight, _ in walk(each) if weight for i in ids)
    first = Counter(i for each in samplers(2) for step, ids, *_ in walk(each) if step == 0 for i in ids)
    assert ids == Counter(range(40)) - first


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_micro_batches_of_one_shape_hold_every_sequence_once_and_fit_their_shape(num_ranks):
    lengths = np.random.default_rng(2).integers(1, 60, 101)
    options = {"padded": True, "equal_shapes": 4, "sequences_per_step": None, "tokens_per_micro_batch": 128}
    counted, shapes, counts = Counter(), [{} for _ in range(num_ranks)], Counter()
    for rank, sampler in enumerate(samplers(num_ranks, lengths, **options)):
        for ids in sampler:
            counted.update(ids if sampler.weight else [])
            rows, length = shapes[rank].setdefault(sampler.step, sampler.shape)
            assert sampler.shape == (rows, length) and rows * length <= 128
            assert len(ids) <= rows and lengths[ids].max() <= length
            counts[sampler.step] += 1
    assert counted == Counter(range(101))
    assert all(shape == shapes[0] for shape in shapes) and set(counts.values()) == {4}


def shaped(num_ranks, **options):
    lengths = np.random.default_rng(4).integers(1, 100, 300)
    lattice = padded_lattice(lengths, most=4, budget=400, multiple_of=4)
    given = {"tokens_per_micro_batch": 400, "padded": True, "shapes": lattice.shapes, "sequences_per_step": 20}
    return samplers(num_ranks, lengths, **given, **options)


def met_by(sampler):
    """The step in which each shape first comes to a rank, and all that the rank computes in an epoch."""
    first, seen = {}, []
    for ids in sampler:
        first.setdefault(sampler.shape, sampler.step)
        seen.append((sampler.step, tuple(ids)))
    return first, seen


@pytest.mark.parametrize("num_ranks", [3, 5])
def test_ranks_meet_all_shapes_in_the_first_steps_and_every_sequence_once_all_the_same(num_ranks):
    usual, early = ([met_by(s) for s in shaped(num_ranks, shapes_first=first)] for first in (False, True))
    assert max(max(first.values()) for first, _ in early) < max(max(first.values()) for first, _ in usual)
    for (_, before), (_, after) in zip(usual, early):
        assert Counter(ids for _, ids in before) == Counter(ids for _, ids in after)
        assert [step for step, _ in after] == sorted(step for step, _ in after)
        assert {step for step, _ in after} == set(range(15))


def test_epochs_with_shapes_first_are_resumed_within_on_any_number_of_ranks():
    (sampler,) = shaped(1, shapes_first=True)
    whole = [(sampler.step, tuple(ids)) for _ in range(2) for ids in sampler]
    (begun,) = shaped(1, shapes_first=True)
    head = []
    for ids in begun:
        head.append((begun.step, tuple(ids)))
        if begun.step == 4 and begun.is_last:
            break
    (resumed,) = shaped(1, shapes_first=True)
    resumed.load_state_dict(begun.state_dict())
    assert head + [(resumed.step, tuple(ids)) for _ in range(2) for ids in resumed] == whole
    done, rest = {i for _, ids in head for i in ids}, set()
    for other in shaped(2, shapes_first=True):
        other.load_state_dict(begun.state_dict())
        rest |= {i for ids in other for i in ids}
    assert not done & rest and done | rest == set(range(300))


def test_shapes_come_first_where_there_are_shapes():
    with pytest.raises(InputError, match="shapes_first=True is for micro-batches of few shapes"):
        samplers(1, shapes_first=True)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_micro_batches_have_the_shapes_of_a_lattice_and_no_other(num_ranks):
    lengths = np.random.default_rng(4).integers(1, 100, 300)
    lattice = padded_lattice(lengths, most=4, budget=400, multiple_of=4)
    options = {"tokens_per_micro_batch": 400, "padded": True, "shapes": lattice.shapes, "sequences_per_step": 40}
    counted, used = Counter(), set()
    for sampler in samplers(num_ranks, lengths, **options):
        for ids in sampler:
            rows, length = sampler.shape
            assert len(ids) <= rows and lengths[ids].max() <= length <= lattice.size_of(lengths[ids].max())
            counted.update(ids if sampler.weight or lengths[ids].max() == 1 else [])
            used.add(sampler.shape)
    assert counted == Counter(range(300)) and used == set(lattice.shapes) and len(used) == 4


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"padded": False}, "shapes need padded=True"),
        ({"max_sequences": 2}, "leave those out"),
        ({"shapes": [(2, 30)]}, "an item has 35 tokens, the longest of 1 shapes 30"),
        ({"shapes": []}, "shapes is empty; leave it out"),
        ({"shapes": [(1, 40), (9, 20)]}, r"the shape 9 x 20 has 180 tokens, over tokens_per_micro_batch=96"),
    ],
)
def test_shapes_that_cannot_be_kept_are_refused(wrong, said):
    with pytest.raises(InputError, match=said):
        samplers(1, [3, 9, 35], **{"padded": True, "shapes": [(2, 48)], **wrong})


def test_windows_and_limits_of_padded_micro_batches():
    lengths = np.random.default_rng(3).lognormal(4, 1, 2000).astype(int) + 1
    options = {"tokens_per_micro_batch": 8192, "sequences_per_step": 32, "padded": True}

    def waste(**more):
        batches = list(samplers(1, lengths, **options, **more)[0])
        assert sorted(i for ids in batches for i in ids) == list(range(2000))
        assert all(len(ids) <= more.get("max_sequences", 2000) for ids in batches)
        return sum(lengths[ids].max() * len(ids) for ids in batches) / lengths.sum()

    assert waste(order="windowed", window=1000) < 1.2 < 2 < waste()
    assert waste(max_sequences=4) < waste()


@pytest.mark.parametrize(
    "ordering",
    [{"order": "sorted"}, {"order": "curriculum", "pacing_start": 0.2}, {"order": "curriculum", "pacing": "natural"}],
)
def test_items_come_by_a_metric_of_the_user(ordering):
    difficulty = np.arange(40)[::-1].copy()
    seen = [ids for sampler in samplers(1, metric=difficulty, **ordering) for _, ids, _, _ in walk(sampler)]
    items = [i for ids in seen for i in ids]
    assert sorted(items) == list(range(40))
    if "pacing" not in ordering:
        assert np.corrcoef(difficulty[items], np.arange(40))[0, 1] > 0.7
    else:
        steps = {}
        for step, ids, *_ in walk(samplers(1, metric=difficulty, **ordering)[0]):
            steps.setdefault(step, set()).update(int(difficulty[i]) // 8 for i in ids)
        assert all(len(groups) == 1 for groups in steps.values())


def test_what_cannot_be_sampled_is_refused():
    with pytest.raises(InputError, match="max_sequences=3 is of micro-batches that are padded"):
        samplers(1, max_sequences=3)
    with pytest.raises(InputError, match="equal_shapes=3 micro-batches of a step cannot be shared evenly by 2 ranks"):
        samplers(2, padded=True, equal_shapes=3, sequences_per_step=None)
    with pytest.raises(InputError, match="a budget is given"):
        samplers(1, padded=True, equal_shapes=3)
    with pytest.raises(InputError, match="one number for each of 40 sequences"):
        samplers(1, order="sorted", metric=[1, 2])
    with pytest.raises(InputError, match=r"item 2 has 97 tokens, over tokens_per_micro_batch=96"):
        samplers(1, [3, 9, 97])
    with pytest.raises(InputError, match=r"3 numbers of targets for 2 items"):
        samplers(1, [3, 9], targets=[1, 2, 3])
    with pytest.raises(InputError, match="rank 2 of 2"):
        BatchSampler([3], tokens_per_micro_batch=9, sequences_per_step=1, rank=2, num_ranks=2)
    with pytest.raises(InputError, match="both rank and num_ranks"):
        BatchSampler([3], tokens_per_micro_batch=9, sequences_per_step=1, rank=0)
    with pytest.raises(InputError, match="exactly one of"):
        BatchSampler([3], tokens_per_micro_batch=9, rank=0, num_ranks=1)
    with pytest.raises(CheckError, match="no micro-batch was given out"):
        samplers(1)[0].weight  # noqa: B018
    with pytest.raises(InputError, match="state is of another run"):
        samplers(1)[0].load_state_dict(samplers(1, seed=6)[0].state_dict())
    with pytest.raises(InputError, match="metric is given and order is 'shuffled', which follows none"):
        samplers(1, [3, 9], metric=[1, 2])


def test_a_rank_that_is_not_known_yet_is_asked_for(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    with pytest.raises(InputError, match="not initialized yet"):
        BatchSampler([3], tokens_per_micro_batch=9, sequences_per_step=1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"lengths": [5.9, 3.2]}, "one row of integers"), ({"lengths": ["5"]}, "one row of integers"),
        ({"lengths": 5}, "one row of integers"), ({"targets": [0.5, 0.5]}, "one whole number for each of 2 items"),
        ({"targets": [-1, 2]}, "item 0 has -1 targets"), ({"tokens_per_micro_batch": float("nan")}, "=nan: give a"),
        ({"sequences_per_step": 2.5}, r"=2\.5: give a whole number"), ({"seed": None}, "seed=None"),
        ({"rank": 0.5, "num_ranks": 2}, r"rank=0\.5"), ({"equal_at": 0}, "equal_at=0"), ({"order": "windowed",
        "window": 2.5}, r"window=2\.5"),
    ],
)  # fmt: skip
def test_wrong_numbers_are_refused_by_name(wrong, message):
    with pytest.raises(InputError, match=message):
        BatchSampler(**{"lengths": [5, 3], "tokens_per_micro_batch": 8, "sequences_per_step": 2, **wrong})
