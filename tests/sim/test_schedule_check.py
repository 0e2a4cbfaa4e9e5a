"""What ranks do in a step is proven to match from the plan alone; whatever does not match is named on both sides."""

import random
from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.core.batch import Pack
from lengthwise.core.errors import CheckError
from lengthwise.core.pass_order import PipelineSchedule
from lengthwise.core.pipeline_config import Method, uniform_scheme
from lengthwise.core.planned_micro_batch import PlannedMicroBatch
from lengthwise.core.step_plan import Pipeline, StepPlan
from lengthwise.core.token_placement import share_size
from lengthwise.core.zero_bubble import pass_orders
from lengthwise.runtime.parallel.tokens import shard_tokens
from lengthwise.sim.schedule_check import (
    PASSES,
    OperationKind,
    check_matching,
    operations,
    weight_phases_of,
)
from tests.sim.random_plans import SPEC, random_batch, random_plan

PULL, FORWARD, BACKWARD, WEIGHTS, SEND, RECEIVE, PUSH = OperationKind


def checked(plan, schedule=PipelineSchedule.ONE_F_ONE_B):
    planned = operations(plan, schedule)
    for _, lists in planned:
        check_matching(lists, step=plan.step)
    return planned


def any_plan(seed, num_ranks):
    rng = random.Random(seed)
    return random_plan(rng, random_batch(rng, seed), num_ranks)


@pytest.mark.first_cells(6)
@pytest.mark.parametrize("schedule", PipelineSchedule)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5, 7, 8, 12, 16])
def test_any_plan_matches(num_ranks, schedule):
    for seed in range(60):
        checked(any_plan(seed, num_ranks), schedule)


@pytest.mark.deep
@pytest.mark.parametrize("schedule", PipelineSchedule)
def test_many_more_plans_match(schedule):
    for seed in range(1000, 6000):
        checked(any_plan(seed, 1 + seed % 24), schedule)


@given(st.integers(0, 10**6), st.integers(1, 16), st.sampled_from(PipelineSchedule))
def test_every_rank_of_a_stage_runs_the_passes_of_each_micro_batch_in_the_order_of_the_schedule(
    seed, num_ranks, schedule
):
    plan = any_plan(seed, num_ranks)
    found = {}
    for _, lists in operations(plan, schedule):
        for rank, steps in enumerate(lists):
            assert [one.kind for one in steps].count(PULL) == [one.kind for one in steps].count(PUSH) == 1
            assert (steps[0].kind, steps[-1].kind) == (PULL, PUSH)
            for one in steps:
                if one.kind in PASSES.values():
                    found.setdefault((one.pipeline, rank), []).append((one.kind, one.number))
    for position, pipeline in enumerate(plan.pipelines):
        for stage, order in enumerate(pass_orders(pipeline, schedule)):
            for rank in pipeline.ranks_of(stage):
                assert found.pop((position, rank), []) == [(PASSES[kind], number) for kind, number in order]
    assert not found, "no rank computes in a pipeline that it is not in"


@given(st.integers(0, 10**6), st.integers(2, 16))
def test_messages_go_to_the_same_place_of_the_next_stage_and_back(seed, num_ranks):
    plan = any_plan(seed, num_ranks)
    for _, lists in operations(plan):
        for rank, steps in enumerate(lists):
            for one in steps:
                if one.kind not in (SEND, RECEIVE):
                    continue
                pipeline = plan.pipelines[one.pipeline]
                assert rank == one.ranks[one.kind is RECEIVE]
                (a, place), (b, other) = (
                    next(
                        (stage, pipeline.ranks_of(stage).index(each))
                        for stage in range(pipeline.scheme.num_stages)
                        if each in pipeline.ranks_of(stage)
                    )
                    for each in one.ranks
                )
                assert (b - a, place) == (-1 if one.is_backward else 1, other)


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(1, 9), st.booleans(), st.integers(0, 50),
    st.integers(0, 3),
)  # fmt: skip
def test_message_sizes_are_the_token_shares_of_the_ranks(lengths, degree, causal, padded_to, more_rows):
    padded_to = padded_to if padded_to >= max(lengths) else 0
    pack = Pack(
        ids=tuple(range(len(lengths))), lengths=tuple(lengths), padded_to=padded_to,
        rows=len(lengths) + more_rows if padded_to and more_rows else 0,
    )  # fmt: skip
    sizes = tuple(share_size(pack.num_tokens, place, degree) for place in range(degree))
    assert sizes == shard_tokens(pack.cu_seqlens, degree=degree, causal=causal).sizes
    apart = tuple(accumulate((n for length in lengths for n in (length, padded_to - length) if n > 0), initial=0))
    if padded_to and not pack.rows:  # where padding is a sequence of its own
        assert sizes == shard_tokens(apart, degree=degree, causal=causal).sizes


# ---- planted mismatches


def scheme(degree=1, stages=1, method=Method.DENSE):
    return uniform_scheme(SPEC.num_layers, degree=degree, stages=stages, method=method)


def plan_of(*lanes, step=7):
    """``lanes``: ranks, scheme, number of micro-batches, phase; every micro-batch is one sequence."""
    pipelines, number = [], 0
    for ranks, each, count, phase in lanes:
        packs = [Pack(ids=(number + i,), lengths=(5 + i,)) for i in range(count)]
        number += count
        pipelines.append(
            Pipeline(
                ranks=ranks, scheme=each, phase=phase,
                micro_batches=tuple(PlannedMicroBatch(pack=pack, time_s=1.0, peak_bytes=1) for pack in packs),
            )
        )  # fmt: skip
    return StepPlan(
        step=step, policy="by hand", pipelines=tuple(pipelines), loss_normaliser=1, update_s=0.0, time_s=1.0,
        lower_bound_s=1.0,
    )  # fmt: skip


def two_stages_of_two(count=3):
    """Ranks 0 and 1, then 2 and 3, and an idle rank 4."""
    return plan_of(((0, 1, 2, 3), scheme(2, 2, Method.ULYSSES), count, 0), ((4,), scheme(), 0, 0))


def lists_of(plan, schedule=PipelineSchedule.ONE_F_ONE_B):
    ((_, lists),) = operations(plan, schedule)
    return [list(each) for each in lists]


def place_of(steps, kind, micro_batch, is_backward=None):
    return next(
        place
        for place, one in enumerate(steps)
        if (one.kind, one.micro_batch) == (kind, micro_batch) and is_backward in (None, one.is_backward)
    )


def refusal(lists):
    with pytest.raises(CheckError, match=r"^step 7 is not run, its ranks would wait for ever: next, ") as caught:
        check_matching(lists, step=7)
    return str(caught.value)


def test_a_dropped_send_is_named_with_what_both_ranks_do_next():
    lists = lists_of(two_stages_of_two())
    del lists[1][place_of(lists[1], SEND, 2)]
    assert refusal(lists).endswith(
        "rank 1 would receive the gradient of micro-batch 2 of pipeline 0 from rank 3, 3 tokens; rank 3 would receive "
        "the output of micro-batch 2 of pipeline 0 from rank 1, 3 tokens"
    )


def test_a_dropped_send_that_a_later_one_takes_the_place_of_is_noticed():
    lists = lists_of(two_stages_of_two())
    del lists[0][place_of(lists[0], SEND, 0)]
    message = refusal(lists)
    assert "rank 0 would send the output of micro-batch 1 of pipeline 0 to rank 2, 3 tokens; " in message
    assert "rank 2 would receive the output of micro-batch 0 of pipeline 0 from rank 0, 3 tokens" in message


def test_a_send_that_nobody_receives_is_named():
    lists = lists_of(two_stages_of_two())
    sent = lists[0][place_of(lists[0], SEND, 2)]
    lists[0].insert(-1, replace(sent, micro_batch=3, what="the output of micro-batch 3 of pipeline 0"))
    assert refusal(lists).endswith(
        "rank 0 would send the output of micro-batch 3 of pipeline 0 to rank 2, 4 tokens; rank 2 would do nothing more"
    )


def test_swapped_operations_are_named_on_both_sides():
    lists = lists_of(two_stages_of_two())
    steps = lists[3]
    forward, backward = place_of(steps, FORWARD, 1), place_of(steps, BACKWARD, 0)
    steps[forward], steps[backward] = steps[backward], steps[forward]
    message = refusal(lists)
    assert "rank 2 would run the backward of micro-batch 0 of pipeline 0, stage 1" in message
    assert "rank 3 would run the forward of micro-batch 1 of pipeline 0, stage 1" in message


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("kind", [FORWARD, BACKWARD])
def test_another_method_on_one_rank_is_named_with_both_methods(rank, kind):
    lists = lists_of(two_stages_of_two())
    place = place_of(lists[rank], kind, 1)
    one = lists[rank][place]
    lists[rank][place] = replace(one, what=one.what.replace("by ulysses", "by ring"))
    message, peer = refusal(lists), rank ^ 1
    said = f"run the {kind} of micro-batch 1 of pipeline 0, stage {rank // 2}: sequences 1, layers"
    for who, method in ((rank, "ring"), (peer, "ulysses")):
        assert f"rank {who} would {said}" in message
        assert f"by {method}, recompute 00 with ranks {rank // 2 * 2},{rank // 2 * 2 + 1}" in message


@pytest.mark.parametrize("change", ["methods", "recompute", "pack"])
def test_whatever_decides_the_collectives_of_a_pass_is_compared(change):
    plan = two_stages_of_two()
    first = plan.pipelines[0].micro_batches[0]
    other = {
        "methods": replace(first, methods=(Method.ULYSSES, Method.RING, Method.ULYSSES, Method.ULYSSES)),
        "recompute": replace(first, recompute=(False, True, False, False)),
        "pack": replace(first, pack=Pack(ids=(50,), lengths=first.pack.lengths)),
    }[change]
    pipeline = replace(plan.pipelines[0], micro_batches=(other, *plan.pipelines[0].micro_batches[1:]))
    changed = lists_of(replace(plan, pipelines=(pipeline, *plan.pipelines[1:])))
    lists = lists_of(plan)
    lists[1] = changed[1]
    message = refusal(lists)
    assert (
        "rank 0 would run the forward of micro-batch 0" in message
        and "rank 1 would run the forward of micro-batch 0" in message
    )


@pytest.mark.parametrize("kind", [SEND, RECEIVE])
@pytest.mark.parametrize("is_backward", [False, True])
def test_another_number_of_tokens_is_named_with_both_numbers(kind, is_backward):
    lists = lists_of(two_stages_of_two())
    rank = 2 if (kind is SEND) is is_backward else 0
    place = place_of(lists[rank], kind, 1, is_backward)
    lists[rank][place] = replace(lists[rank][place], num_tokens=1_000)
    message = refusal(lists)
    what = f"the {'gradient' if is_backward else 'output'} of micro-batch 1 of pipeline 0"
    source, target = (2, 0) if is_backward else (0, 2)
    sent, received = ("1,000", "3") if kind is SEND else ("3", "1,000")
    assert f"rank {source} would send {what} to rank {target}, {sent} tokens; " in message
    assert f"rank {target} would receive {what} from rank {source}, {received} tokens" in message


@pytest.mark.parametrize("rank", range(5))
def test_a_missing_push_is_named(rank):
    lists = lists_of(two_stages_of_two())
    lists[rank].pop()
    message = refusal(lists)
    assert f"rank {rank} would do nothing more" in message
    assert (
        f"rank {0 if rank else 1} would run the push of weight phase 0 (phases 0 to 0) with ranks 0,1,2,3,4" in message
    )


def test_the_two_ranks_that_disagree_are_named_and_not_one_that_waits_for_them():
    lists = lists_of(two_stages_of_two())
    place = place_of(lists[3], BACKWARD, 2)
    lists[3][place] = replace(lists[3][place], what="something else")
    message = refusal(lists)
    assert (
        "rank 2 would run the backward of micro-batch 2" in message
        and "rank 3 would run the backward something else" in message
    )


def test_an_idle_rank_that_misses_the_pull_is_named():
    lists = lists_of(two_stages_of_two())
    del lists[4][0]
    message = refusal(lists)
    assert "rank 4 would run the push of" in message and "rank 0 would run the pull of weight phase 0" in message


def test_pipelines_that_share_ranks_must_be_met_in_one_order():
    """Two stages of two ranks each, met in opposite order: every list is fine by itself."""
    plan = plan_of(((0, 1), scheme(2, 1, Method.RING), 1, 0), ((0, 1), scheme(2, 1, Method.ULYSSES), 1, 1))
    lists = lists_of(plan)
    pull, *passes, push = lists[1]
    lists[1] = [pull, *passes[2:], *passes[:2], push]
    message = refusal(lists)
    assert "pipeline 0" in message and "pipeline 1" in message


@pytest.mark.parametrize("seed", range(40))
def test_any_operation_that_is_missing_or_changed_on_one_rank_is_noticed(seed):
    """In random plans: whatever others take part in cannot be left out, doubled or changed."""
    rng = random.Random(seed)
    plan = any_plan(seed, rng.randint(2, 12))
    for _, original in operations(plan, rng.choice(list(PipelineSchedule))):
        for _ in range(10):
            lists = [list(each) for each in original]
            rank = rng.randrange(len(lists))
            shared = [place for place, one in enumerate(lists[rank]) if len(one.ranks) > 1]
            place = rng.choice(shared)
            change = rng.choice(["leave out", "double", "change"])
            if change == "leave out":
                del lists[rank][place]
            elif change == "double":
                lists[rank].insert(place, lists[rank][place])
            else:
                one = lists[rank][place]
                lists[rank][place] = replace(one, what="another", num_tokens=one.num_tokens + 1)
            with pytest.raises(CheckError, match=r"rank \d+ would .+; rank \d+ would "):
                check_matching(lists, step=0)


# ---- few micro-batches, stages of one rank, phases


@pytest.mark.parametrize("schedule", PipelineSchedule)
@pytest.mark.parametrize("count", [0, 1, 2, 9])
@pytest.mark.parametrize(("degree", "stages"), [(1, 4), (2, 4), (4, 1), (1, 1), (3, 2)])
def test_any_number_of_micro_batches_matches_in_any_number_of_stages(degree, stages, count, schedule):
    method = Method.DENSE if degree == 1 else Method.RING
    checked(plan_of((tuple(range(degree * stages)), scheme(degree, stages, method), count, 0)), schedule)


def test_phases_that_need_no_other_weights_are_one_stretch():
    ring, one, two = scheme(2, 1, Method.RING), scheme(), scheme(1, 2)
    same = plan_of(((0, 1), ring, 1, 0), ((0,), one, 1, 1), ((1,), one, 0, 1))
    assert [weight_phase.phases for weight_phase in weight_phases_of(same)] == [range(0, 2)]
    other = plan_of(((0, 1), ring, 1, 0), ((1, 0), two, 1, 1), ((0, 1), two, 1, 2), ((0, 1), ring, 0, 3))
    found = weight_phases_of(other)
    assert [weight_phase.phases for weight_phase in found] == [range(0, 1), range(1, 2), range(2, 4)]
    assert [[held.first for held in weight_phase.holdings] for weight_phase in found] == [[0, 0], [2, 0], [0, 2]]


def test_a_rank_that_is_idle_first_holds_what_it_computes_with_later():
    plan = plan_of(((0,), scheme(), 1, 0), ((1,), scheme(), 0, 0), ((0,), scheme(), 0, 1), ((1,), scheme(), 1, 1))
    (weight_phase,) = weight_phases_of(plan)
    assert weight_phase.phases == range(0, 2)
    assert all(held.has_input and held.has_output and held.num_shards == 1 for held in weight_phase.holdings)


def test_phases_run_in_order_however_a_plan_lists_them():
    plan = plan_of(
        ((0,), scheme(), 1, 1), ((1,), scheme(), 1, 1), ((0, 1), scheme(2, 1, Method.RING), 2, 0),
    )  # fmt: skip
    ((weight_phase, lists),) = checked(plan)
    assert weight_phase.phases == range(0, 2)
    for steps in lists:
        phases = [plan.pipelines[one.pipeline].phase for one in steps if one.kind in (FORWARD, BACKWARD)]
        assert phases == sorted(phases) and set(phases) == {0, 1}
