"""Sequences that share a micro-batch, and losses that couple them: what a plain loop over units trains."""

import numpy as np
import pytest
import torch

from lengthwise.core.batch import Pack
from lengthwise.core.errors import InfeasibleError, InputError, LengthwiseError
from lengthwise.core.lengths import LengthIndex
from lengthwise.data.sampler import Sampler
from lengthwise.integrations.dataloader import BatchSampler
from lengthwise.runtime.wrap.unit_members import Units
from lengthwise.session.collate import CollatedItems
from lengthwise.session.datasets import read_sequences
from tests.plan.costs import SimpleCost
from tests.session import models
from tests.session.loops import step_through
from tests.session.pairs import (
    STEPS,
    UNITS_A_STEP,
    Slow,
    contrast_plainly,
    dpo_alone,
    learn_preferences,
    pairs,
    prepared,
    reference,
    train_contrast,
    train_dpo,
    train_dpo_in_parts,
    train_llama_on_pairs,
    train_plainly,
    triplets,
)
from tests.session.test_prepare import assert_equal_weights

pytestmark = pytest.mark.usefixtures("unchecked")

EXACT = 1e-11


def batches_of(items, *, num_steps, units_a_step):
    index = LengthIndex(lengths=np.array([sum(len(member["input_ids"]) for member in unit) for unit in items]))
    sampler = Sampler(index, seed=3, sequences_per_step=units_a_step)
    return [next(sampler).ids for _ in range(num_steps)]


def dpo_plainly(num_steps=STEPS):
    items, frozen = pairs(), reference()
    return train_plainly(
        lambda model, ids: torch.stack([dpo_alone(model, frozen, items[i]) for i in ids]).mean(),
        batches_of(items, num_steps=num_steps, units_a_step=UNITS_A_STEP),
    )


@pytest.fixture(scope="module")
def alone():
    return dpo_plainly()


WAYS = (
    {"policy": "dcp-intra"},
    {"policy": "auto", "way": "step", "check": True},
    {"policy": "padded", "cost": SimpleCost(capacity=400, loss=0.4, c_s=5.0)},  # rows of several units, with padding
    {"policy": "packed", "packing": "always"},
    {"policy": "static", "packing": "never"},
)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.deep
def test_dpo_trains_what_a_plain_loop_over_pairs_trains(ranks, alone, num_ranks):
    expected = [sorted(ids) for ids in batches_of(pairs(), num_steps=STEPS, units_a_step=UNITS_A_STEP)]
    used = set()
    ways = [way | {"recompute": "auto" if num_ranks == 1 else "none"} for way in WAYS]
    if num_ranks > 1:  # one device does not hold the longest pair
        ways = [way for way in ways if way.get("packing") != "never"]
    if num_ranks == 3:
        ways = ways[1::2]  # by dcp-intra those of test_coupled.py and other files are planned
    for found in ranks(num_ranks).run(train_dpo, ways):
        for way, (losses, degrees, units, weights) in zip(ways, found):
            np.testing.assert_allclose(losses, alone[0], rtol=EXACT, err_msg=str(way))
            assert_equal_weights(weights, alone[1])
            assert units == expected, way
            used |= degrees
    assert used == set(range(1, num_ranks + 1))


def test_a_run_over_pairs_goes_on_with_another_number_of_ranks(ranks, alone, tmp_path):
    losses = []
    for number, last in ((2, 1), (1, 3)):
        found, weights = ranks(number).run(train_dpo_in_parts, tmp_path, first=last == 1, last=last)[0]
        losses += found
    np.testing.assert_allclose(losses, alone[0], rtol=EXACT)
    assert_equal_weights(weights, alone[1])


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.deep), 3])
def test_a_loss_over_embeddings_of_triplets_beside_one_over_tokens_is_exact(ranks, num_ranks):
    losses, weights = contrast_plainly(batches_of(triplets(), num_steps=STEPS, units_a_step=5))
    ways = [{"policy": policy, "recompute": "auto" if num_ranks == 1 else "none"} for policy in ("static", "dcp-intra")]
    used = set()
    for found in ranks(num_ranks).run(train_contrast, ways):
        for mine, degrees, theirs in found:
            np.testing.assert_allclose(mine, losses, rtol=EXACT)
            assert_equal_weights(theirs, weights)
            used |= degrees
    assert num_ranks == 1 or max(used) > 1


def test_labels_of_a_model_of_transformers_are_not_shifted_from_one_member_to_the_other(ranks):
    for loss, expected, weights, theirs in ranks(2).run(train_llama_on_pairs, "dcp-intra"):
        assert loss == pytest.approx(expected, rel=EXACT)
        assert_equal_weights(weights, theirs)


def test_members_are_sequences_of_their_own_and_units_are_planned_whole():
    items = pairs()
    members = [member for unit in items for member in unit]
    found = read_sequences(items)
    assert found.units.num_members == 2
    assert found.lengths.lengths.tolist() == [sum(len(member["input_ids"]) for member in unit) for unit in items]
    assert found.computed_lengths.lengths.tolist() == [len(member["input_ids"]) for member in members]
    for number, member in enumerate(members):
        assert found.tokens(number).tolist() == member["input_ids"].tolist()
        assert found.labels(number).tolist() == member["labels"].tolist()
    kept = [unit for unit in items if sum(len(member["input_ids"]) for member in unit) <= 14]
    dropped = read_sequences(items, max_length=14, over_length="drop")
    assert 1 < len(dropped.lengths) == len(kept) < len(items)
    for number, member in enumerate(member for unit in kept for member in unit):
        assert dropped.tokens(number).tolist() == member["input_ids"].tolist()
    flat = [{name: np.concatenate([m[name] for m in unit]) for name in ("input_ids", "labels")} for unit in items]
    assert read_sequences(flat).lengths.digest != found.lengths.digest, "a run does not go on with other sequences"


def test_films_may_be_members():
    films = models.films(6)
    found = read_sequences([({"tokens": a}, {"tokens": b}) for a, b in zip(films[::2], films[1::2])], slot_tokens=4)
    assert found.lengths.lengths.tolist() == [4 * (len(a) + len(b)) for a, b in zip(films[::2], films[1::2])]
    for number, film in enumerate(films):
        np.testing.assert_array_equal(found.tokens(number), film)


def test_padding_of_units_is_computed_at_the_end_of_their_pack():
    units = Units(offsets=np.array([0, 2, 4]), lengths=np.array([3, 1, 2, 2]))
    assert units.members(Pack(ids=(1, 0), lengths=(4, 4), padded_to=6)) == Pack(
        ids=(2, 3, 0, 1), lengths=(2, 2, 3, 1), filler=4
    )


def row(length, **columns):
    return {"input_ids": list(range(1, length + 1)), **columns}


REFUSED = {
    "and single ones": ([(row(3), row(2)), row(3)], {}, "item 1 is a single sequence, and item 0 is a unit; where"),
    "beside single ones": ([row(3), [row(3), row(2)]], {}, "item 1 is a unit, and item 0 is a single sequence"),
    "empty": ([()], {}, "item 0 is empty; leave items without tokens out"),
    "of a member without tokens": ([(row(3), row(0))], {}, "input_ids of member 1 of item 0 is empty"),
    "of rows": ([([1, 2], [3, 4, 5])], {}, r"item 0 is a tuple of 2 rows.*are a tuple of dictionaries"),
    "of rows of one length": ([[[1, 2], [3, 4]]], {}, "item 0 is a list of 2 rows"),
    "of tensors": ([(torch.ones(2).long(), torch.ones(3).long())], {}, "item 0 is a tuple of 2 rows"),
    "of a row among dictionaries": ([(row(3), [1, 2])], {}, "member 1 of item 0 is list, and others are dictionaries"),
    "nested": ([((row(3), row(2)), row(1))], {}, "member 0 of item 0 is tuple, and others are dictionaries"),
    "of units": ([((row(3),), (row(2),))], {}, "item 0 is a tuple of units; .* give all of its members in one tuple"),
    "labelled in part": (
        [(row(3, labels=[1, 2, 3]), row(2))], {}, "member 0 of item 0 has labels .* and member 1 has none"
    ),
    "with a wrong column": ([(row(3), row(2, labels=[1]))], {}, "member 1 of item 0 has 2 tokens and 1 labels"),
    "packed before": (
        [(row(3), row(4, position_ids=[0, 1, 0, 1]))], {}, "member 1 of item 0 holds 2 sequences packed into one row"
    ),
    "cut": ([(row(3), row(2))], {"max_length": 4, "over_length": "truncate"}, "items are units, which are not cut"),
    "too long": (
        [(row(3), row(2)), (row(4), row(3))], {"max_length": 6}, "item 1, a unit of 2, has 7 tokens in all, over max_l"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_units_that_cannot_be_used_are_refused(name):
    corpus, options, message = REFUSED[name]
    with pytest.raises(InputError, match=message):
        read_sequences(corpus, **options)


def test_a_unit_that_fits_no_device_is_refused_before_the_run():
    with pytest.raises(InfeasibleError, match=r"sequence \d+ \(60 tokens\) needs .* Items are units of 2 sequences"):
        prepared([(row(4), row(5)), (row(40), row(20))], recompute="none", steps=1)
    with pytest.raises(InputError, match=r"the longest sequence has 40 tokens, .* cut the members of units"):
        config = type("Config", (), {"max_position_embeddings": 30})()
        model = models.gpt()
        model.config = config
        prepared([(row(4), row(5)), (row(40), row(20))], model=model, steps=1)


def test_means_over_units_and_over_targets_need_the_number_of_targets():
    def mixed(run, way):
        for step in run.steps():
            for number, micro_batch in enumerate(step):
                logits, loss = run.model(**micro_batch.inputs)
                sums = micro_batch.per_sequence(logits[0].logsumexp(-1))
                of_units = sums[micro_batch.units].sum(1)
                if way == "together":
                    step.backward(loss, side=micro_batch.mean(of_units, over="units"))
                elif number:
                    step.backward(of_units.mean(), mean_over="units")
                else:
                    step.backward(loss)
            step.update()

    options = {"policy": "packed", "sequences_per_step": 12, "steps": 1, "recompute": "all"}
    for way in ("together", "apart"):
        run = prepared(pairs(), **options)
        with pytest.raises(InputError, match=r"a mean over units beside one over targets needs .*count_targets=True"):
            mixed(run, way)
        run.close()
        run = prepared(pairs(), count_targets=True, **options)
        mixed(run, way)
        run.close()


def test_a_step_whose_members_have_no_targets_has_a_loss_over_units():
    corpus = [(row(1), row(1)), (row(6), row(5))]
    run = prepared(corpus, sequences_per_step=1, steps=2)
    losses = []
    for step in run.steps():
        for micro_batch in step:
            sums = micro_batch.per_sequence(run.model(**micro_batch.inputs)[0][0].logsumexp(-1))
            step.backward(sums[micro_batch.units].diff().square().mean(), mean_over="units")
        losses.append((micro_batch.num_targets, step.update().loss))
    run.close()
    assert sorted(count for count, _ in losses) == [0, 9]
    assert dict(losses)[0] == pytest.approx(0, abs=1e-12) and dict(losses)[9] > 0.1


def test_costs_are_measured_on_sequences_no_longer_than_members(tmp_path):
    """The model has positions for 96 tokens, and the units have 120."""
    corpus = [tuple({"input_ids": np.arange(length) % models.VOCAB} for length in (60, 60)) for _ in range(4)]
    run = prepared(corpus, cost=None, profile=str(tmp_path / "profile.json"), sequences_per_step=2, steps=1)
    losses, *_ = step_through(run)
    run.close()
    assert np.isfinite(losses).all()


def test_what_is_no_value_for_each_slot_or_unit_is_refused():
    run = prepared(pairs(), sequences_per_step=2, steps=1)
    for step in run.steps():
        for micro_batch in step:
            logits, _ = run.model(**micro_batch.inputs)
            with pytest.raises(InputError, match=r"per_sequence needs one value for each of the \d+ slots of this r"):
                micro_batch.per_sequence(logits[0].T)
            with pytest.raises(InputError, match=r"per_sequence takes a tensor .* got list"):
                micro_batch.per_sequence([1.0])
            with pytest.raises(
                InputError, match=r"one value for each of the \d units of this micro-batch, \[\d\]; got"
            ):
                micro_batch.mean(micro_batch.per_sequence(logits[0].sum(-1)), over="units")
            break
        break
    run.close()
    with pytest.raises(InputError, match=r"units have 2 sequences, and these are \d .*Make a loss over units in the l"):
        prepared(pairs(), steps=1, check=True, loss=lambda output, m: output[0].sum() * len(m.whole().units))


@pytest.mark.deep  # by default: test_loader, test_item_columns
def test_workers_read_the_members_of_units(alone):
    ((losses, _, _, weights),) = train_dpo([{"policy": "auto", "workers": 1, "recompute": "auto"}])
    np.testing.assert_allclose(losses, alone[0], rtol=EXACT)
    assert_equal_weights(weights, alone[1])


def test_a_member_that_a_worker_cannot_read_is_named():
    frozen = reference()
    run = prepared(Slow(fails=5), workers=1, frozen=[frozen], sequences_per_step=12, steps=1, recompute="all")
    with pytest.raises(LengthwiseError, match=r"member \d of item 5 could not be read: OSError: the disk is gone"):
        learn_preferences(run, frozen)
    run.close()


def test_the_trainer_refuses_units():
    with pytest.raises(InputError, match=r"item 0 of train_dataset is a tuple of 2 .*lengthwise.prepare"):
        CollatedItems(pairs(), lambda items: items[0], needs_labels=True)


def test_a_batch_sampler_weighs_pairs_if_each_counts_as_one_target():
    lengths = [sum(len(member["input_ids"]) for member in unit) for unit in pairs()]
    total = 0.0
    for rank in range(2):
        sampler = BatchSampler(
            lengths, tokens_per_micro_batch=60, sequences_per_step=12, rank=rank, num_ranks=2, targets=[1] * 12
        )
        for ids in sampler:
            assert sampler.weight == pytest.approx(len(ids) / 12)
            total += sampler.weight
    assert total == pytest.approx(1.0)
    with pytest.raises(InputError, match="item 0 has 2 lengths; give each item one number, of a unit"):
        BatchSampler(
            [[len(member["input_ids"]) for member in unit] for unit in pairs()],
            tokens_per_micro_batch=60, sequences_per_step=12, rank=0, num_ranks=1,
        )  # fmt: skip
