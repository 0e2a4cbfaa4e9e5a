"""Every method, mixture and degree computes what one device computes: outputs, loss and every gradient, in float64."""

import random
from functools import lru_cache

import pytest
import torch

from lengthwise.core.pipeline_config import Method
from lengthwise.runtime.parallel.sharded_execution import StageExecution
from tests.runtime.models.cases import assert_same
from tests.runtime.parallel.cases import (
    PACKS,
    SHARDED,
    WHOLE,
    able,
    model_of,
    on_one_device,
    on_ranks,
    operation_on_one_device,
    operation_on_ranks,
    pack_of,
    small,
    whole_group,
)

EXACT = 1e-10
"""float64: sums in another order differ by rounding alone."""
CLOSE = {
    # 8 bits: partial sums are rounded where one device rounds once, and the other way round. Measured: up to 0.018; one
    # device in bfloat16 is 0.022 away from itself in float64.
    torch.bfloat16: 0.03,
    # 24 bits; sums of a few hundred terms. Measured: up to 6e-7, one device 4e-7.
    torch.float32: 2e-6,
}
"""Largest difference relative to the largest entry."""
LARGE = 12.0
"""Weights times this give logits beyond what exp can take; the published ring attention gave NaN there."""

CAUSAL = small()
BIDIRECTIONAL = small(causal=False, family="bert", gated_ffn=False, max_positions=40)
FAMILIES = {
    "gpt": small(family="gpt", gated_ffn=False, max_positions=40, tied_embeddings=True),
    "bert": small(family="bert", gated_ffn=False, max_positions=40, causal=False, tied_embeddings=True),
    "transformer-1d": small(family="transformer-1d", gated_ffn=False, qkv_bias=False),
    "transformer-2d": small(family="transformer-2d", gated_ffn=False, causal=False, qkv_bias=False, frame_size=5),
    "tied llama": small(tied_embeddings=True),
}


# Methods are compared with the same operation, in one process after the other.
operation_alone = lru_cache(maxsize=16)(operation_on_one_device)


def check(spec, lengths, methods, *, tolerance=EXACT, **options):
    given = {name: options[name] for name in ("scale", "dtype") if name in options}
    expected_loss, expected = on_one_device(spec, lengths, **given)
    loss, grads = on_ranks(spec, lengths, methods, **options)
    assert torch.isfinite(loss)
    assert_same(loss, expected_loss, tolerance=tolerance)
    assert_same(grads, expected, tolerance=tolerance)


SPECS = {"causal": CAUSAL, "bidirectional": BIDIRECTIONAL}
QUICK = ((1, "causal"), (1, "bidirectional"), (3, "causal"))
EVERY_METHOD = [
    pytest.param(
        method, num_ranks, SPECS[name], id=f"{method}-{num_ranks}-{name}",
        # Any two of the three meet in the others and in the families below, one of which attends both ways.
        # Four ranks are in the mixtures.
        marks=[pytest.mark.deep] * ((num_ranks, name) not in QUICK or (number + num_ranks + (name == "causal")) % 2),
    )
    for number, method in enumerate((*SHARDED, *WHOLE)) for num_ranks in (1, 2, 3, 4) for name in SPECS
]  # fmt: skip


@pytest.mark.first_cells(3)
@pytest.mark.parametrize(("method", "num_ranks", "spec"), EVERY_METHOD)
def test_a_method_computes_what_one_device_computes(ranks, method, num_ranks, spec):
    ranks(num_ranks).run(check_method, spec, method)


def check_method(spec, method):
    for name, lengths in PACKS.items():
        for operation in ("attention", "ffn"):
            expected = operation_alone(spec, lengths, operation)
            assert_same(operation_on_ranks(spec, lengths, method, operation), expected, tolerance=EXACT)
        for recompute in ((), (True, True)) if name == "ragged" else ((),):
            check(spec, lengths, (method,) * spec.num_layers, recompute=recompute)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.deep] * (name != "bert")) for name in FAMILIES],
)
@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.deep), 3])
def test_every_family_runs_under_every_method(ranks, num_ranks, name):
    ranks(num_ranks).run(check_family, FAMILIES[name])


def check_family(spec):
    for method in (*SHARDED, *WHOLE):
        check(spec, (13, 1, 8), (method,) * spec.num_layers)


@pytest.mark.parametrize("num_ranks", [*(pytest.param(n, marks=pytest.mark.deep) for n in (2, 3)), 4])
def test_any_mixture_of_methods_and_recompute_is_exact(ranks, num_ranks):
    ranks(num_ranks).run(check_mixtures, seeds=range(3))


@pytest.mark.deep
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5, 6])
def test_many_more_mixtures_are_exact(ranks, num_ranks):
    for first in range(100, 160, 10):  # fewer at a time than takes ranks to be said to hang
        ranks(num_ranks).run(check_mixtures, seeds=range(first, first + 10))


def check_mixtures(seeds):
    for seed in seeds:
        rng = random.Random(seed)
        heads, group = rng.randint(1, 7), rng.randint(1, 3)
        spec = small(
            num_layers=4, num_heads=heads * group, num_kv_heads=heads, ffn_size=rng.randint(1, 30),
            vocab_size=rng.randint(2, 40), tied_embeddings=rng.random() < 0.5,
        )  # fmt: skip
        lengths = [rng.choice((1, 2, rng.randint(1, 40))) for _ in range(rng.randint(1, 6))]
        methods = rng.choices(able(rng.choice((SHARDED, WHOLE)), spec, whole_group().size), k=4)
        check(spec, lengths, methods, recompute=[rng.random() < 0.5 for _ in range(4)])


FEW_HEADS = ((6, 2), (2, 2), (3, 1), (1, 1))


@pytest.mark.parametrize(
    ("num_ranks", "cases"),
    [
        (3, FEW_HEADS[:2]),
        *(pytest.param(n, cases, marks=pytest.mark.deep) for n, cases in ((3, FEW_HEADS[2:]), (4, FEW_HEADS))),
    ],
)
def test_fewer_heads_than_ranks_are_shared_or_stay_idle(ranks, num_ranks, cases):
    ranks(num_ranks).run(check_few_heads, cases)


def check_few_heads(cases):
    for heads, kv_heads in cases:
        spec = small(num_heads=heads, num_kv_heads=kv_heads)
        for method in able((*SHARDED, *WHOLE), spec, whole_group().size):
            check(spec, (11, 4), (method,) * spec.num_layers)


def test_megatron_ts_says_what_to_do_where_there_are_too_few_heads(ranks):
    ranks(3).run(check_refusal)


def check_refusal():
    from lengthwise.core.errors import InputError

    with pytest.raises(InputError, match="too few for degree 3; choose a lower degree or another method"):
        on_ranks(small(num_heads=4, num_kv_heads=2), (9,), (Method.MEGATRON_TS,) * 2)


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.deep), 3])
def test_large_logits_stay_finite_and_right(ranks, num_ranks):
    ranks(num_ranks).run(check_large)


def check_large():
    for method in (*SHARDED, *WHOLE):
        check(CAUSAL, (24, 3), (method,) * 2, scale=5.0 * LARGE)


@pytest.mark.deep  # by default: tests/runtime/train/test_exactness.py, in mixed precision
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_lower_precision_stays_within_its_rounding(ranks, dtype):
    ranks(3).run(check_precision, dtype)


def check_precision(dtype):
    for method in (*SHARDED, *WHOLE):
        check(CAUSAL, (24, 3), (method,) * 2, dtype=dtype, tolerance=CLOSE[dtype])


def test_evaluation_without_gradients_gives_the_same_loss(ranks):
    ranks(2).run(check_evaluation)


def check_evaluation():
    import torch.distributed as dist

    expected, _ = on_one_device(CAUSAL, (9, 5))
    for method in WHOLE:
        model, (tokens_T, targets_T, cu_seqlens) = model_of(CAUSAL), pack_of((9, 5), CAUSAL)
        with torch.no_grad():
            execution = StageExecution(
                model, whole_group(), tokens_T=tokens_T, targets_T=targets_T, cu_seqlens=cu_seqlens,
                methods=(method,) * 2, weights="whole",
            )  # fmt: skip
            dist.all_reduce(loss := model.run(execution))
        assert_same(loss, expected, tolerance=EXACT)
