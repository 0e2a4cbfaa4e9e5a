"""Mixtures: every pass is counted exactly, runs resume to the bit, and what was seen is what was dealt."""

import json
from contextlib import nullcontext
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.config.run_config import DataConfig, PartConfig, check, load
from lengthwise.core.batch import Pack
from lengthwise.core.errors import CheckError, InputError
from lengthwise.core.lengths import LengthIndex
from lengthwise.core.pipeline_config import uniform_scheme
from lengthwise.core.planned_micro_batch import PlannedMicroBatch
from lengthwise.core.step_plan import Pipeline, StepPlan
from lengthwise.data.corpus import open_corpus
from lengthwise.data.curriculum import PACINGS
from lengthwise.data.mixture import Mixture, solve_repeats
from lengthwise.data.order import ORDERS, EverySequence, OrderSettings, make_order
from lengthwise.data.run_ledger import RunLedger
from lengthwise.data.sampler import Sampler
from lengthwise.plan.dcp.form_batches import FormedBatches
from lengthwise.plan.prefetch import PlanAhead
from tests.index.build import build, write_jsonl
from tests.plan.costs import SimpleCost, make_problem

repeats = st.sampled_from(["1", "2", "1/2", "5/2", "1/3", "7/10", "0", "3"]).map(Fraction)
mixtures = (
    st.lists(st.tuples(st.integers(1, 12), repeats), min_size=1, max_size=3)
    .filter(lambda parts: any(size * repeat >= 1 for size, repeat in parts))
    .flatmap(
        lambda parts: st.builds(
            Mixture,
            sizes=st.just(tuple(size for size, _ in parts)),
            repeats=st.just(tuple(repeat for _, repeat in parts)),
            seed=st.integers(0, 1 << 40),
        )
    )
)


def by_part(mixture, ids):
    """How often each sequence of each part is in ``ids``."""
    counts = np.bincount(ids, minlength=sum(mixture.sizes))
    return np.split(counts, np.cumsum(mixture.sizes)[:-1])


@given(mixture=mixtures, num_epochs=st.integers(1, 7))
def test_after_any_number_of_epochs_each_sequence_was_taken_the_passes_rounded_down_or_up(mixture, num_epochs):
    epochs = [mixture.ids(epoch) for epoch in range(num_epochs)]
    assert all(np.array_equal(ids, np.sort(ids)) for ids in epochs)
    for size, repeat, counts in zip(mixture.sizes, mixture.repeats, by_part(mixture, np.concatenate(epochs))):
        passes = num_epochs * repeat
        assert counts.sum() == passes * size // 1
        assert set(counts.tolist()) <= {passes // 1, -(-passes // 1)}


@given(mixture=mixtures, epoch=st.integers(0, 5))
def test_an_epoch_takes_from_each_part_what_its_passes_come_to_so_far_less_what_they_did_before(mixture, epoch):
    lengths = np.random.default_rng(0).integers(1, 99, sum(mixture.sizes))
    ids = mixture.ids(epoch)
    starts = np.cumsum([0, *mixture.sizes])
    for part, (size, repeat) in enumerate(zip(mixture.sizes, mixture.repeats)):
        own = ids[(ids >= starts[part]) & (ids < starts[part + 1])]
        assert len(own) == (epoch + 1) * repeat * size // 1 - epoch * repeat * size // 1
        of_part = lengths[starts[part] : starts[part + 1]]
        before, after = (mixture.tokens_taken(part, number, of_part) for number in (epoch, epoch + 1))
        assert after - before == lengths[own].sum()


def test_every_pass_of_a_part_is_in_another_order_and_parts_have_orders_of_their_own():
    mixture = Mixture(sizes=(100, 100), repeats=(Fraction(1, 2),) * 2, seed=5)
    first, _, second, _ = ([set(half.tolist()) for half in halves(mixture, epoch)] for epoch in range(4))
    assert first[0] != second[0] and first[0] != {id - 100 for id in first[1]}
    other = Mixture(sizes=(100, 100), repeats=(Fraction(1, 2),) * 2, seed=6)
    assert set(halves(other, 0)[0].tolist()) != first[0]


def halves(mixture, epoch):
    ids = mixture.ids(epoch)
    return ids[ids < 100], ids[ids >= 100]


def test_the_sequences_of_a_pass_are_those_of_the_first_release():
    mixture = Mixture(sizes=(10, 4), repeats=(Fraction(3, 10), Fraction(3, 2)), seed=1)
    assert [mixture.ids(epoch).tolist() for epoch in range(2)] == [
        [1, 4, 7, 10, 10, 11, 11, 12, 13],
        [2, 6, 8, 10, 11, 12, 12, 13, 13],
    ]


def test_one_part_passed_once_is_the_corpus():
    mixture = Mixture(sizes=(30,), repeats=(Fraction(1),), seed=3)
    lengths = LengthIndex(lengths=np.arange(1, 31))
    mixed, plain = (Sampler(lengths, seed=3, tokens_per_step=90, selection=one) for one in (mixture, EverySequence(30)))
    assert list(islice(mixed, 30)) == list(islice(plain, 30))


@given(st.lists(st.tuples(st.integers(1, 10**9), st.sampled_from([0.1, 0.3, 1.0, 2.5, 7.0])), min_size=1, max_size=4))
def test_shares_become_the_fewest_passes_whose_tokens_have_these_shares_exactly(parts):
    tokens, shares = zip(*parts)
    solved = solve_repeats(
        list(map(str, range(len(parts)))), repeats=[None] * len(parts), shares=shares, num_tokens=tokens
    )
    assert min(solved) == 1
    per_share = {repeat * count / Fraction(repr(share)) for repeat, count, share in zip(solved, tokens, shares)}
    assert len(per_share) == 1


def test_repeats_mean_what_is_written():
    assert solve_repeats(["a", "b"], repeats=[0.3, None], shares=[None, None], num_tokens=[10, 10]) == (
        Fraction(3, 10),
        Fraction(1),
    )


@dataclass(frozen=True)
class ByNumber:
    """A metric."""

    values: np.ndarray
    digest: str = "m"


@given(
    mixture=mixtures,
    name=st.sampled_from(ORDERS),
    pacing=st.sampled_from(PACINGS),
    budget=st.sampled_from([{"tokens_per_step": 60}, {"sequences_per_step": 3}]),
    stop=st.integers(0, 12),
)
def test_a_run_goes_on_with_the_same_batches_on_any_number_of_ranks(mixture, name, pacing, budget, stop):
    """Batches depend on seed and step alone; planners for other ranks get the same ones after a stop."""
    lengths = LengthIndex(lengths=np.random.default_rng(1).integers(1, 50, sum(mixture.sizes)))

    def ahead(num_ranks):
        settings = OrderSettings(order=name, pacing=pacing, pacing_stages=2, curriculum_epochs=2, window=5)
        order = make_order(settings, ByNumber(lengths.lengths % 7))
        stream = Sampler(lengths, seed=9, order=order, selection=mixture, **budget)
        planner = even_planner(num_ranks)
        return PlanAhead(stream, planner, fallback=planner, workers=0)

    whole = [(batch, covered(run, batch)) for run in [ahead(3)] for batch in islice(run, stop + 6)]
    first = ahead(2)
    for _ in range(stop):
        covered(first, next(first))
    rest = ahead(5)
    rest.load_state_dict(json.loads(json.dumps(first.state_dict())))
    after = [(batch, covered(rest, batch)) for batch in islice(rest, 6)]
    assert [batch for batch, _ in after] == [batch for batch, _ in whole[stop:]]
    assert {plan.num_devices for _, plan in after} == {5}


def covered(run, batch):
    plan = run(batch)
    plan.check_covers(batch)
    return plan


def even_planner(num_ranks):
    """Sequences dealt one by one to so many ranks."""
    scheme = uniform_scheme(1)

    def plan(batch):
        packs = [Pack(ids=(id,), lengths=(length,)) for id, length in zip(batch.ids, batch.lengths)]
        return StepPlan(
            step=batch.step, policy="even", loss_normaliser=max(1, batch.num_targets), update_s=0.0, time_s=1.0,
            lower_bound_s=1.0,
            pipelines=tuple(
                Pipeline(
                    ranks=(rank,), scheme=scheme,
                    micro_batches=tuple(
                        PlannedMicroBatch(pack=p, time_s=1.0, peak_bytes=1) for p in packs[rank::num_ranks]
                    ),
                )
                for rank in range(num_ranks)
            ),
        )  # fmt: skip

    return plan


@pytest.fixture(scope="module")
def indexes(tmp_path_factory):
    """Two of bytes, one of triplets, one of lengths alone, and two whose tokens come ready-made."""
    folder = tmp_path_factory.mktemp("parts")
    build(write_jsonl(folder / "a.jsonl", ["abcdefgh", "", "ab", "abcdefghijklm"]), folder / "a", on_empty="drop")
    build(write_jsonl(folder / "b.jsonl", ["x" * n for n in range(1, 8)]), folder / "b")
    (folder / "c.fasta").write_text(">one\nACGTACGT\n")
    build(folder / "c.fasta", folder / "c", tokenizer="3mer")
    np.save(folder / "d.npy", np.array([5, 20]))
    build(folder / "d.npy", folder / "d")
    build(write_jsonl(folder / "e.jsonl", [[1, 2, 3]], field="ids"), folder / "e", field="ids")
    build(write_jsonl(folder / "f.jsonl", [[1, 2, 300]], field="ids"), folder / "f", field="ids")
    return folder


def data(folder, *parts, **settings):
    return DataConfig(mixture=[PartConfig(index=str(folder / name), **part) for name, part in parts], **settings)


def test_the_parts_of_a_corpus_are_laid_end_to_end_after_the_length_rule(indexes):
    corpus = open_corpus(data(indexes, ("a", {}), ("b", {"repeat": 2.5}), max_length=5, over_length="split"))
    alone = [
        open_corpus(DataConfig(index=str(indexes / name), max_length=5, over_length="split")) for name in ("a", "b")
    ]
    tokens = [part.tokens(id).tolist() for part in alone for id in range(len(part))]
    assert [corpus.tokens(id).tolist() for id in range(len(corpus))] == tokens
    assert corpus.lengths.lengths.tolist() == [len(each) for each in tokens]
    assert corpus.part_of(np.arange(len(corpus))).tolist() == [0] * len(alone[0]) + [1] * len(alone[1])
    assert corpus.vocab_size == 257 and corpus.has_tokens
    assert len({corpus.digest, *(part.digest for part in alone)}) == 3
    assert corpus.ledger.tokens_in == sum(part.ledger.tokens_in for part in alone)
    assert [part.name for part in corpus.parts] == ["a", "b"] and corpus.parts[1].repeat == Fraction(5, 2)
    for id in (-1, len(corpus)):
        with pytest.raises(InputError, match="no sequence"):
            corpus.tokens(id)


def test_a_mixture_of_one_is_that_corpus(indexes):
    mixed, plain = open_corpus(data(indexes, ("a", {}))), open_corpus(DataConfig(index=str(indexes / "a")))
    assert mixed.digest == plain.digest


@pytest.mark.parametrize(
    ("parts", "settings", "said"),
    [
        ([("a", {}), ("c", {})], {}, "a was indexed with bytes, c with 3mer"),
        ([("a", {}), ("f", {})], {}, r"a has 257 \(bytes\), the tokens that f was indexed from are ids up to 300"),
        ([("a", {}), ("a", {})], {}, "2 parts of data.mixture are called a; give each its own name"),
        ([("a", {"repeat": 2, "share": 1})], {}, "part a of data.mixture has repeat 2 and share 1; leave one out"),
        ([("a", {"share": 1}), ("b", {})], {}, "part a of data.mixture has a share and part b has none"),
        ([("a", {}), ("nowhere", {})], {}, "no index at .*nowhere"),
        ([("b", {}), ("a", {})], {"max_length": 8}, "part a of data.mixture: sequence 0 has 9 tokens"),
        ([("a", {"repeat": 0.1}), ("b", {"repeat": 0.01})], {}, r"would hold no sequence \(0.1 of 3, 0.01 of 7\)"),
    ],
)
def test_parts_that_do_not_go_together_are_refused_by_name(indexes, parts, settings, said):
    with pytest.raises(InputError, match=said):
        open_corpus(data(indexes, *parts, **settings)).selection(0)


def test_ready_made_tokens_go_with_a_tokenizer_that_has_them_and_bare_lengths_are_for_planning(indexes):
    assert open_corpus(data(indexes, ("a", {}), ("e", {}))).vocab_size == 257
    assert open_corpus(data(indexes, ("e", {}), ("f", {}))).vocab_size == 301
    planned = open_corpus(data(indexes, ("a", {}), ("d", {})))
    assert not planned.has_tokens and planned.lengths.num_tokens > 25
    with pytest.raises(InputError, match=r"/d holds lengths alone; training needs"):
        planned.check_tokens()


def test_settings_of_a_part_are_checked_and_named():
    given = load(None, ["data.mixture=[{index: a, repeat: 0.5}, {index: b, share: 2}]"]).data.mixture
    assert (given[0].repeat, given[1].share) == (0.5, 2)
    with pytest.raises(InputError) as caught:
        check({"data": {"mixture": [{"index": "a", "repeats": 2}, {"index": "b", "repeat": 0}]}})
    assert "data.mixture.0.repeats: unknown key" in str(caught.value) and "data.mixture.0.repeat" in str(caught.value)
    assert "data.mixture.1.repeat: input should be greater than 0" in str(caught.value)


def ledger_run(indexes, *, steps, num_ranks=2, form=lambda sampler: sampler):
    config = data(indexes, ("a", {"repeat": 1.5}), ("b", {"repeat": 2}), max_length=9, over_length="drop")
    corpus = open_corpus(config)

    def sampler():
        return Sampler(corpus.lengths, seed=4, sequences_per_step=4, selection=corpus.selection(4))

    stream, plan = form(sampler()), even_planner(num_ranks)
    ledger = RunLedger(corpus, sampler, seed=4)
    for _ in range(steps):
        ledger.count(plan(next(stream)))
    return ledger, stream


@pytest.mark.parametrize("steps", [0, 3, 4, 8, 11])
def test_the_ledger_has_what_was_computed_and_it_is_what_was_dealt(indexes, steps):
    ledger, stream = ledger_run(indexes, steps=steps)
    ledger.check(stream.state_dict())
    document = json.loads(json.dumps(ledger.to_json(stream.state_dict())))
    a, b = document["parts"]
    assert (a["documents"], a["refused"], a["sequences_in"], a["dropped"]) == (4, {"empty": 1}, 3, 1)
    assert document["sequences_seen"] == a["sequences_seen"] + b["sequences_seen"]
    assert document["tokens_seen"] == a["tokens_seen"] + b["tokens_seen"]
    assert document["dropped"] == 1 and document["steps"] == steps


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_sequences_that_wait_for_a_formed_batch_have_not_been_seen(indexes, steps):
    problem = make_problem(SimpleCost(capacity=30), num_devices=2, stages=[1], max_length=9)
    ledger, stream = ledger_run(indexes, steps=steps, form=lambda sampler: FormedBatches(sampler, problem, window=3))
    state = json.loads(json.dumps(stream.state_dict()))
    ledger.check(state)
    assert ledger.to_json(state)["steps"] == steps and bool(state["held"]["waiting"]) == bool(steps)
    state["held"]["waiting"] = state["held"]["waiting"][1:]
    with pytest.raises(CheckError) if steps else nullcontext():
        ledger.check(state)


def test_whole_epochs_are_the_totals_of_the_index_times_the_repeats(indexes):
    ledger, stream = ledger_run(indexes, steps=0)
    plan = even_planner(2)
    while stream.epoch < 2:
        ledger.count(plan(next(stream)))
    document = ledger.to_json(stream.state_dict())
    for part, repeat in zip(document["parts"], (1.5, 2)):
        assert part["sequences_seen"] == 2 * repeat * part["sequences_out"]
        assert part["tokens_seen"] == 2 * repeat * part["tokens_out"]
        assert part["passes"] == 2 * repeat


def test_a_sequence_too_few_or_too_many_is_told_with_its_part_and_both_numbers(indexes):
    ledger, stream = ledger_run(indexes, steps=3)
    state = stream.state_dict()
    ledger.count(even_planner(1)(next(stream)))
    with pytest.raises(CheckError, match=r"part [ab]: \d+ sequences were computed, \d+ dealt by the sampler, which is"):
        ledger.check(state)
    ledger.check(stream.state_dict())


def test_a_step_trained_again_counts_once_as_the_ledger_goes_on_from_its_checkpoint(indexes):
    ledger, stream = ledger_run(indexes, steps=3)
    saved, at = json.loads(json.dumps(ledger.state_dict())), stream.state_dict()
    plan = even_planner(2)
    for _ in range(2):
        ledger.count(plan(next(stream)))
    again, stream = ledger_run(indexes, steps=0)
    again.load_state_dict(saved)
    stream.load_state_dict(at)
    for _ in range(2):
        again.count(plan(next(stream)))
    again.check(stream.state_dict())
    assert again.state_dict() == ledger.state_dict()
    with pytest.raises(InputError, match="2 parts"):
        again.load_state_dict({"sequences": [1], "tokens": [1]})


def test_an_epoch_of_more_sequences_than_memory_holds_is_refused():
    with pytest.raises(InputError, match=r"an epoch of the mixture would hold .* sequences .* lower repeat"):
        Mixture(sizes=(10, 1000), repeats=(Fraction(1), Fraction(10**9)), seed=0)
