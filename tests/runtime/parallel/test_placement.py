"""Sequences that plans place whole on one rank, or in pieces on some: exact under every method, and sent no further."""

import random
from dataclasses import replace

import pytest

from lengthwise.core.errors import InputError
from lengthwise.core.pipeline_config import WEIGHTS_OF, Method, uniform_scheme
from lengthwise.core.token_placement import Piece
from lengthwise.runtime.loop.planned_pipelines import check_executable as check_any_model
from tests.runtime.parallel.cases import SHARDED, WHOLE, able, execution_of, model_of, small, whole_group
from tests.runtime.parallel.test_exactness import FAMILIES, check
from tests.runtime.train.test_execute_pipeline import batch_of, plan_of
from tests.sim.random_plans import SPEC, random_placement


@pytest.mark.parametrize("num_ranks", [3, *(pytest.param(n, marks=pytest.mark.deep) for n in (2, 4))])
def test_any_placement_is_exact_under_any_methods(ranks, num_ranks):
    ranks(num_ranks).run(check_placements, seeds=range(6))


@pytest.mark.deep
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5])
def test_many_more_placements_are_exact(ranks, num_ranks):
    for first in range(100, 160, 10):  # fewer at a time than takes ranks to be said to hang
        ranks(num_ranks).run(check_placements, seeds=range(first, first + 10))


def check_placements(seeds):
    for seed in seeds:
        rng = random.Random(seed)
        heads, degree = rng.randint(1, 5), whole_group().size
        spec = small(num_heads=2 * heads, num_kv_heads=heads) if rng.random() < 0.8 else FAMILIES["bert"]
        lengths = [rng.choice((1, 2, rng.randint(1, 40))) for _ in range(rng.randint(1, 7))]
        methods = rng.choices(able(rng.choice((SHARDED, WHOLE)), spec, degree), k=2)
        recompute = [rng.random() < 0.3 for _ in range(2)]
        check(spec, lengths, methods, recompute=recompute, placement=random_placement(rng, lengths, degree))


@pytest.mark.parametrize("method", [Method.RING, Method.ALL_GATHER, Method.COLOSSAL_Z, Method.METP])
def test_attention_over_several_views_is_exact_under_a_placement(ranks, method):
    ranks(2).run(check_views, method)


def check_views(method):
    placement = ((Piece(1, 13),), (), (Piece(0, 3), Piece(1, 5)))
    check(FAMILIES["transformer-2d"], (13, 10, 8), (method,) * 2, placement=placement)


@pytest.mark.parametrize("method", [Method.RING, Method.ALL_GATHER])
def test_keys_and_values_of_sequences_on_one_rank_stay_there(ranks, method):
    ranks(2).run(check_bytes, method)


def check_bytes(method):
    group, spec, lengths = whole_group(), small(), (10, 8, 6, 4)
    model, sent = model_of(spec), []
    for placement in (
        (),
        ((), *((Piece(rank, length),) for rank, length in zip((0, 1, 1), lengths[1:]))),
        tuple((Piece(number % 2, length),) for number, length in enumerate(lengths)),
    ):
        whole_group()  # which counts anew
        execution = execution_of(model, group, lengths, (method,) * 2, WEIGHTS_OF[method], placement=placement)
        model.run(execution).backward()
        sent.append(sum(group.sent.num_bytes.values()))
    everything, of_the_first, nothing = sent
    assert of_the_first == pytest.approx(everything * lengths[0] / sum(lengths), rel=0.01)
    assert nothing == 0


def test_prepared_models_refuse_plans_with_a_placement():
    plan = plan_of(
        batch_of(9, 4, 7), ((0, 1), uniform_scheme(SPEC.num_layers, degree=2, method=Method.RING), [[0, 1, 2]], 0)
    )
    (pipeline,) = plan.pipelines
    placed = replace(pipeline.micro_batches[0], placement=((), (Piece(1, 4),), ()))
    plan = replace(plan, pipelines=(replace(pipeline, micro_batches=(placed,)),))
    with pytest.raises(InputError, match="has sequences whole on one of the ranks that share a layer, which this lib"):
        check_any_model(plan, SPEC.num_layers, 2, stage_problem="")
