"""Compare the loss of the corpus's longest sequence beyond the lengths whose gradients are compared.

What a model computes by position, such as a lag, a dilation or a window that its config does not name, may begin beyond
these, and ranks that share the sequence would compute it otherwise. Forwards alone are computed, so that this takes
little time and memory.
"""

import logging
from collections.abc import Sequence
from functools import partial
from math import sqrt

import torch

from lengthwise.core.errors import InfeasibleError
from lengthwise.core.head_split import shared_by
from lengthwise.core.pipeline_config import Method
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.verify.compute_settings import (
    SEEN_FORWARD,
    WORK,
    ComputeSetting,
    slots_with_gradients,
    within,
)
from lengthwise.runtime.verify.gradient_check import compare_settings
from lengthwise.runtime.verify.precision import Tolerance, compare_precisely, dtypes_of
from lengthwise.runtime.verify.verdict import NotInThisDtype
from lengthwise.runtime.verify.zero_weights import Fill

_log = logging.getLogger("lengthwise")

MOST_SLOTS = {"cpu": 8192, "cuda": SEEN_FORWARD}
"""Most slots of the sequence; memory of the host is not looked at."""
BESIDE = 5
"""Slots of the sequence that is beside it in the pack."""
MORE_WORK = {True: 3, False: 60}
"""How much more work a forward may be than a comparison by gradients, by whether it is computed in float64."""


def check_longest(
    run: PreparedModel, *, degrees: Sequence[int], methods: Sequence[Method], longest: int | None
) -> None:
    """Compare the loss of a sequence of ``longest`` slots with the stock model's, if it is longer than those whose
    gradients are compared; every rank calls this.

    As much of it as the work allows, and half as much where that does not fit into memory. At each of ``degrees``, by
    each of ``methods``.

    Raises:
        CheckError: it differs by more than rounding.
        InputError: the model cannot be computed so.
    """
    if longest is None or run.wrapped_model.by_sequence is not None or run.collator.compared_lengths:
        return
    compared = slots_with_gradients(run, longest)
    length = min(longest, slots_of_a_forward(run))
    if (most_slots := run.wrapped_model.most_slots) is not None:
        length = min(length, most_slots)
    while length > compared:
        try:
            compare_precisely(run, partial(_compare, run, length, sorted(set(degrees)), methods))
            break
        except InfeasibleError as error:
            _log.debug("a sequence of %s slots is not compared: %s", f"{length:,}", error)
            length //= 2


def _compare(
    run: PreparedModel,
    length: int,
    degrees: list[int],
    methods: Sequence[Method],
    tolerance: Tolerance,
    fill: Fill,
) -> None:
    lengths = within(run.wrapped_model.most_slots, (BESIDE, length))
    settings = [
        ComputeSetting(lengths=lengths, degree=degree, method=method, gradients=False)
        for degree in degrees
        for method in (methods[:1] if degree == 1 else shared_by(degree, methods))
    ]
    try:
        compare_settings(run, settings, tolerance, fill)
    except InfeasibleError as error:
        raise NotInThisDtype(error) from None


def slots_of_a_forward(run: PreparedModel) -> int:
    """Slots whose forward is as much work as is taken for it.

    Attention's part is that of layers as wide as the number of parameters makes them.
    """
    device = run.world.device.type
    is_precise = torch.float64 in dtypes_of(run) or device == "cpu"
    work = MORE_WORK[is_precise] * WORK.get(device, WORK["cuda"])
    by_slot = max(1, run.num_params)
    by_pair = 2 * sqrt(by_slot * run.wrapped_model.structure.num_layers / 12)
    slots = (sqrt(by_slot**2 + 4 * by_pair * work) - by_slot) / (2 * by_pair)
    return min(int(slots), MOST_SLOTS.get(device, SEEN_FORWARD))
