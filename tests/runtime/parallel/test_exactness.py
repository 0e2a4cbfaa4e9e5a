"""Every method, mixture and degree computes what one device computes: loss and every gradient, in float64."""

import pytest

from tests.runtime.model.cases import assert_same
from tests.runtime.parallel.cases import PACKS, SHARDED, WHOLE, on_one_device, on_ranks, small

EXACT = 1e-10
"""float64: sums in another order differ by rounding alone."""


def check(spec, lengths, methods, **options):
    expected_loss, expected = on_one_device(spec, lengths, scale=options.get("scale", 5.0))
    loss, grads = on_ranks(spec, lengths, methods, **options)
    assert_same(loss, expected_loss, tolerance=EXACT)
    assert_same(grads, expected, tolerance=EXACT)


def check_all(spec, method, **options):
    for lengths in PACKS.values():
        for recompute in ((), (True, True)):
            check(spec, lengths, (method,) * spec.num_layers, recompute=recompute, **options)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("method", [*SHARDED, *WHOLE])
def test_a_method_computes_what_one_device_computes(ranks, method, num_ranks, causal):
    spec = small() if causal else small(causal=False, family="transformer-1d", gated_ffn=False)
    ranks(num_ranks).run(check_all, spec, method)
