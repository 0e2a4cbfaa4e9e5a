"""Cuts of packs have equal work; slices join a search space where they pay; their plans take what simulation says."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lengthwise
from lengthwise.core.pipeline_config import Method, uniform_scheme
from lengthwise.core.sliced_passes import largest_share
from lengthwise.core.specs import cluster_preset, model_preset
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.plan.space.candidate import Candidate, make_candidates, most_tokens
from lengthwise.plan.space.sliced_packs import (
    FEWEST_TOKENS,
    Slices,
    cut_pack,
    sliced_pipeline_end,
    smaller_packs,
    with_fewer_slices,
    with_slices,
)
from lengthwise.sim.engine import simulate

SPEC, CLUSTER = model_preset("llama-7b"), cluster_preset("2x8xH100-80GB")
COST = AnalyticCost(model=SPEC, cluster=CLUSTER)


def candidate(*, degree=4, stages=4, slices=1, recomputed=0, method=Method.ULYSSES):
    scheme = uniform_scheme(SPEC.num_layers, degree=degree, stages=stages, method=method, recomputed=recomputed)
    return Candidate(scheme=replace(scheme, slices=slices), cost=COST, num_cluster_devices=16)


SLICED = {count: candidate(slices=count) for count in (2, 4, 16, 64)}
LENGTHS = st.lists(st.integers(1, 200_000), min_size=1, max_size=6).map(lambda lengths: sorted(lengths, reverse=True))


@given(LENGTHS, st.sampled_from(sorted(SLICED)), st.floats(0.1, 100.0))
def test_slices_cover_their_pack_and_none_is_larger_than_memory_counts_on(lengths, count, time_s):
    slices = cut_pack(SLICED[count], lengths, time_s)
    num_tokens = sum(lengths)
    if num_tokens < 2 * FEWEST_TOKENS:
        assert slices == ()
        return
    sizes = [part.num_tokens for part in slices]
    assert sum(sizes) == num_tokens and min(sizes) >= 1 and len(slices) == min(count, num_tokens // FEWEST_TOKENS)
    assert max(sizes) <= np.ceil(largest_share(len(slices)) * num_tokens)
    assert sum(part.time_s for part in slices) == pytest.approx(time_s)


@given(st.integers(1, 4000), st.sampled_from([4, 16, 64]))
def test_every_rank_of_a_stage_has_tokens_of_every_slice(length, count):
    slices = cut_pack(candidate(degree=16, stages=1, slices=count), [length], 1.0)
    assert not slices or (
        min(part.num_tokens for part in slices) >= 16 and sum(part.num_tokens for part in slices) == length
    )
    assert slices or length < 4 * 16 * 4, "packs of more tokens are cut"


@pytest.mark.parametrize("count", sorted(SLICED))
@pytest.mark.parametrize("length", [8192, 131_072, 1_048_576])
def test_slices_of_a_sequence_have_equal_work(length, count):
    slices = cut_pack(SLICED[count], [length], 1.0)
    longest_token = float(SLICED[count].times_s(np.array([length - 1, length])) @ [-1, 1])
    a_token = longest_token / float(SLICED[count].times_s(np.array([length]))[0])
    sizes = [part.num_tokens for part in slices]
    if max(sizes) < largest_share(count) * length:
        assert all(abs(part.time_s - 1 / count) <= 2 * a_token for part in slices)
    else:
        assert count > 4 and max(part.time_s for part in slices) < 1.2 / count, "the first ones have fewer tokens"
    assert sizes == sorted(sizes, reverse=True) or max(np.diff(sizes)) <= 1, "later tokens see more"


@given(st.lists(LENGTHS, min_size=1, max_size=4), st.sampled_from([4, 16]))
def test_a_pipeline_of_slices_takes_no_less_than_its_bound_and_no_longer_than_pack_after_pack(packs, count):
    option = SLICED[count]
    lengths = sorted(packs, key=lambda pack: -float(option.times_s(np.array(pack)).sum()))
    times_s = [float(option.times_s(np.array(pack)).sum()) + option.overhead_s for pack in lengths]
    end_s = sliced_pipeline_end([option] * len(lengths), lengths, times_s).end_s
    certain_s = sum(times_s) + (option.least_stages - 1) * times_s[0]
    alone_s = option.alone_stages * times_s[0] + 2 / 3 * sum(times_s[1:])
    assert max(certain_s, alone_s) * (1 - 1e-9) <= end_s <= 4 * sum(times_s) * (1 + 1e-9)


@given(st.lists(LENGTHS, min_size=1, max_size=6))
def test_short_packs_have_slices_as_large_as_those_of_the_longest_and_all_fit(packs):
    option = SLICED[16]
    works_s = np.array([option.times_s(np.array(pack)).sum() for pack in packs])
    tokens = np.minimum([sum(pack) for pack in packs], option.max_tokens)
    runs = with_fewer_slices(option, works_s, tokens)
    assert runs[int(works_s.argmax())] is option
    for run, work_s, num_tokens in zip(runs, works_s, tokens.tolist()):
        count = run.scheme.slices
        assert run.max_tokens >= num_tokens and run.num_stages == option.num_stages
        assert work_s / count <= works_s.max() / 16 * (1 + 1e-9)
        is_needed = count == 1 or work_s / (count - 1) > works_s.max() / 16 * (1 - 1e-9)
        assert is_needed or option.in_slices(count // 2).max_tokens < num_tokens, "no finer than that"


@given(st.lists(LENGTHS, min_size=1, max_size=4), st.sampled_from([0.25, 1.0, 2.0]))
def test_smaller_packs_hold_all_sequences_once_and_no_more_than_they_should(packs, num_slices):
    option, lengths = SLICED[16], np.array([length for pack in packs for length in pack])
    times_s, ends = option.times_s(lengths), np.cumsum([len(pack) for pack in packs])
    positions = [tuple(range(end - len(pack), end)) for pack, end in zip(packs, ends.tolist())]
    smaller = smaller_packs(option, positions, times_s, num_slices)
    assert sorted(position for pack in smaller for position in pack) == list(range(len(lengths)))
    largest_s = times_s.max() / 16 * num_slices
    assert all(len(pack) == 1 or times_s[list(pack)].sum() <= 2 * largest_s * (1 + 1e-9) for pack in smaller)
    assert (int(times_s.argmax()),) in smaller, "the longest sequence shares its pack with none"


def test_memory_of_a_sequence_in_slices_is_that_of_all_its_tokens_once_and_not_once_for_each_stage():
    whole, sliced = candidate(), SLICED[64]
    state, length = whole.state_bytes, np.array(131_072)
    assert sliced.state_bytes - state <= 2 * 4 * SPEC.hidden_size * SPEC.vocab_size, "and the head's gradient"
    ratio = (sliced.peak_bytes(length) - state) / (whole.peak_bytes(length) - state)
    assert 1 / 4 < ratio < 1 / 4 * (1 + 3 / 8) * 1.6, "S - 1 of the largest slice more, keys and their gradients"
    assert sliced.max_tokens > 2 * whole.max_tokens


def test_overhead_is_paid_by_each_slice():
    assert SLICED[16].overhead_s == pytest.approx(16 * candidate().overhead_s)


def test_slices_join_where_they_pay_and_nowhere_else():
    cluster = cluster_preset("8x8xH100-80GB")
    cost = AnalyticCost(model=SPEC, cluster=cluster)

    def space_of(method, *sizes):
        schemes = [
            uniform_scheme(
                SPEC.num_layers, degree=degree, stages=stages, method=method if degree > 1 else Method.DENSE,
                recomputed=SPEC.num_layers,
            )
            for degree, stages in sizes
        ]  # fmt: skip
        return make_candidates(schemes, cost, num_devices=64)

    space = space_of(Method.ULYSSES, (1, 1), (8, 1), (64, 1), (32, 2), (8, 8))
    giant, short = np.array([524_288, 1000]), np.full(500, 1000)
    assert with_slices(space, Slices.NONE, samples=[giant], max_length=524_288) == space
    assert with_slices((), Slices.AUTO, samples=[giant], max_length=524_288) == (), (
        "what fits nothing is refused later, by name"
    )
    assert with_slices(space, Slices.AUTO, samples=[short], max_length=524_288) == space
    joined = with_slices(space, Slices.AUTO, samples=[short, giant], max_length=524_288)[len(space) :]
    assert joined and all(option.scheme.slices > 1 and option.num_stages > 1 for option in joined)
    assert all(option.max_tokens >= 524_288 for option in joined)
    ring = space_of(Method.RING, (8, 1), (64, 1), (8, 8))
    assert with_slices(ring, Slices.AUTO, samples=[giant], max_length=524_288) == ring, (
        "earlier keys are with other ranks"
    )


def test_slices_join_where_none_as_fast_takes_fewer_device_seconds():
    """Half the cluster for one giant, the others beside it: neither the fastest for it nor the cheapest."""
    cost = AnalyticCost(model=SPEC, cluster=cluster_preset("32x8xH100-80GB"))
    sizes = [(32, 8), (32, 4), (32, 2), (16, 4), (64, 2), (8, 1), (32, 1)]
    schemes = [uniform_scheme(SPEC.num_layers, degree=degree, stages=n, method=Method.ULYSSES) for degree, n in sizes]
    giant = np.array([131_072, *[1200] * 550])
    space = make_candidates(schemes, cost, num_devices=256)
    joined = with_slices(space, Slices.AUTO, samples=[giant], max_length=131_072)[len(space) :]
    assert {(32, 8), (32, 4), (32, 2)} <= {(option.scheme.degree, option.num_stages) for option in joined}


@pytest.mark.parametrize("shares", [[1.0], [1.0] * 2, [1.0, 0.999, 0.01], [0.1] * 20], ids=str)
def test_slices_join_where_they_alone_hold_the_longest_sequence_of_the_run(shares):
    """In a typical batch it may come once, several times or not at all."""
    cost = AnalyticCost(model=model_preset("llama-3-8b"), cluster=cluster_preset("1x3xH100-80GB"))
    schemes = [uniform_scheme(32, degree=1, stages=stages, method=Method.DENSE, recomputed=32) for stages in (1, 2)]
    space = make_candidates(schemes, cost, num_devices=3)
    longest = int(1.1 * most_tokens(space))
    joined = with_slices(space, Slices.AUTO, samples=[(longest * np.array(shares)).astype(int)], max_length=longest)
    assert most_tokens(joined) >= longest
    too_long = 10 * most_tokens(joined)
    refused = with_slices(space, Slices.AUTO, samples=[np.array([too_long])], max_length=too_long)
    assert most_tokens(space) < most_tokens(refused) < too_long, "the limit that a refusal tells"


def test_split_backwards_keep_no_slices_from_joining():
    cost = AnalyticCost(model=SPEC, cluster=cluster_preset("8x8xH100-80GB"))
    whole = [
        uniform_scheme(SPEC.num_layers, degree=degree, stages=stages, method=Method.ULYSSES)
        for degree, stages in ((16, 4), (32, 2))
    ]
    split = [replace(scheme, zero_bubble=True) for scheme in whole]
    giant = np.array([65_536, *[1000] * 50])
    joined = []
    for schemes in (whole, [*whole, *split]):
        space = make_candidates(schemes, cost, num_devices=64)
        found = with_slices(space, Slices.AUTO, samples=[giant], max_length=524_288)[len(space) :]
        joined.append({candidate.scheme for candidate in found})
    assert joined[0] and joined[1] == joined[0]


def test_a_plan_with_slices_is_faster_for_one_giant_and_takes_what_simulation_says():
    rng = np.random.default_rng(0)
    lengths = [524_288, *rng.integers(200, 8000, 60).tolist()]
    plans = {
        mode: lengthwise.plan(
            lengths, model="llama-7b", cluster="8x8xA800-80GB", steps=1, methods=["ulysses"],
            tokens_per_step=sum(lengths), max_stages=2, recompute="all", offload="none", slices=mode,
        )[0]
        for mode in ("none", "auto")
    }  # fmt: skip
    assert plans["auto"].time_s < 0.8 * plans["none"].time_s and plans["auto"].gap >= 0
    assert any(m.slices for line in plans["auto"].pipelines for m in line.micro_batches)
    assert simulate(plans["auto"]).step_time_s == pytest.approx(plans["auto"].time_s)


@pytest.mark.parametrize("policy", ["static", "packed", pytest.param("auto", marks=pytest.mark.deep)])
def test_policies_whose_systems_have_no_slices_have_them_only_where_nothing_else_holds_a_sequence(policy):
    """Groups of heads hold it too, and `auto` still has slices."""
    options = {
        "model": "llama-7b", "cluster": "1x8xH100-80GB", "steps": 1, "max_degree": 1, "recompute": "none",
        "offload": "none",
    }  # fmt: skip
    lengths = [49_921, 49_921, *[1000] * 100]
    (plan,) = lengthwise.plan(lengths, policy=policy, tokens_per_step=sum(lengths), **options)
    is_cut = any(micro_batch.slices for pipeline in plan.pipelines for micro_batch in pipeline.micro_batches)
    assert is_cut == (policy == "auto")


@pytest.mark.parametrize("is_trained", [False, pytest.param(True, marks=pytest.mark.deep)])
def test_models_that_are_priced_and_not_trained_here_have_no_slices(tmp_path, is_trained):
    """Those that are trained have some here: in deep runs, and of one giant above."""
    config = {
        "model_type": "mistral", "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 14_336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "sliding_window": 4096,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    (plan,) = lengthwise.plan(
        [400_000, *[2000] * 10], model="llama-7b" if is_trained else str(tmp_path), cluster="2x8xA800-80GB", steps=1,
        tokens_per_step=420_000, max_degree=4, methods=["ulysses"],
    )  # fmt: skip
    assert any(m.slices for pipeline in plan.pipelines for m in pipeline.micro_batches) == is_trained


def test_what_pays_beside_whole_gradients_joins_beside_sharded_ones_too():
    """Those hold the longest sequence on fewer device-seconds, and are worse for the others."""
    spec = model_preset("llama-32b")
    cost = AnalyticCost(model=spec, cluster=cluster_preset("8x8xH100-80GB"))

    def of(degree, stages, recomputed, shards=False):
        scheme = uniform_scheme(
            spec.num_layers, degree=degree, stages=stages, method=Method.ULYSSES, recomputed=recomputed
        )
        return Candidate(scheme=replace(scheme, shard_gradients=shards), cost=cost, num_cluster_devices=64)

    def joining(candidates):
        lengths = np.array([2000] * 100 + [61_700])
        space = with_slices(candidates, Slices.AUTO, samples=[lengths], max_length=61_700)
        return {option.scheme for option in space if option.scheme.slices > 1}

    whole = [*(of(8, 4, recomputed) for recomputed in (0, 16, 60)), of(8, 8, 0), of(8, 8, 16)]
    assert joining([*whole, of(64, 1, 60, shards=True)]) >= joining(whole) != set()
