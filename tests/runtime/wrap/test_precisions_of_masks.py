"""Scales and numbers that hide follow from the dtype that a model computes in, and may change with it."""

from contextlib import nullcontext

import pytest
import torch

from lengthwise.core.errors import InputError
from lengthwise.runtime.verify.float64_mode import NoiseFreeMode
from tests.runtime.loop.modules import BY_HAND, GPT
from tests.runtime.loop.test_plain_modules import built
from tests.runtime.wrap.test_custom_masks import computed, prepared

LENGTHS = (30, 20, 31)
"""More slots together than the table of the mask has."""
CLOSE = {torch.bfloat16: 0.1, torch.float32: 1e-5, torch.float64: 1e-6}
"""Rounding of a forward; in the last some of it is in float32."""
ROUNDED = 0.7


def of_its_dtype(logits, tril):
    """The scale is in the dtype of logits, the lowest number that of their dtype and of their cast to float32."""
    lowest = max(torch.finfo(dtype).min for dtype in (logits.dtype, logits.float().dtype))
    scale, hidden = (torch.tensor(number, dtype=logits.dtype) for number in (ROUNDED, lowest))
    return torch.where(tril.bool(), logits * scale, hidden)


@pytest.mark.parametrize(
    ("learned_in", "computed_in", "context"),
    [
        (torch.float64, torch.float64, lambda: NoiseFreeMode(double=True)),
        (torch.bfloat16, torch.float64, nullcontext),
        (torch.float32, torch.bfloat16, lambda: torch.autocast("cpu", torch.bfloat16)),
    ],
    ids=["casts to float32", "weights", "autocast"],
)
def test_numbers_by_dtype_are_those_of_what_is_computed_in_now(monkeypatch, learned_in, computed_in, context):
    monkeypatch.setitem(BY_HAND, "filled", of_its_dtype)
    model = prepared(built(GPT, num_layers=2, mask="filled").to(learned_in))
    computed(model, LENGTHS)
    model.to(torch.float32 if learned_in is torch.float32 else computed_in)
    with context(), torch.no_grad():
        logits = [computed(model, (length,), ids=(number,))[0] for number, length in enumerate(LENGTHS)]
        found = computed(model, LENGTHS)[0]
    assert found.isfinite().all()
    limit = CLOSE[computed_in]
    torch.testing.assert_close(found, torch.cat(logits, dim=1), rtol=limit, atol=limit)
    computed(model.to(learned_in), LENGTHS)


def test_a_scale_that_changes_within_a_precision_is_refused(monkeypatch):
    monkeypatch.setitem(BY_HAND, "filled", of_its_dtype)
    model = prepared(built(GPT, num_layers=1, mask="filled"))
    with NoiseFreeMode(double=True):
        computed(model, (9, 4))
        monkeypatch.setitem(BY_HAND, "filled", lambda logits, tril: of_its_dtype(logits * 1.1, tril))
        with pytest.raises(InputError, match=r"attention call 0 scales its logits by 0\.272"):
            computed(model, (30, 4))
