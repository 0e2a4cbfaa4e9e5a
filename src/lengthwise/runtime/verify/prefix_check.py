"""Check before training that sequences which share what they begin with give the gradients of each by itself."""

from functools import partial

from lengthwise.core.errors import CheckError
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.loop.synthetic_branches import branches_alone, branches_shared
from lengthwise.runtime.verify.precision import Tolerance, compare_precisely
from lengthwise.runtime.verify.stock_call import gradients_of_pack
from lengthwise.runtime.verify.verdict import on_every_rank
from lengthwise.runtime.verify.worst_difference import worst_difference
from lengthwise.runtime.verify.zero_weights import Fill, finite


def check_shared_prefixes(run: PreparedModel) -> None:
    """Compare three sequences that begin alike, laid out once, with each of them whole; every rank calls this.

    Raises:
        CheckError: loss or gradients differ by more than rounding.
        InputError: the model cannot compute what sequences share once.
    """
    what = "three sequences that begin alike"

    def compare(tolerance: Tolerance, fill: Fill) -> None:
        with branches_alone(run) as pack:
            expected = partial(finite, partial(gradients_of_pack, run, pack.lengths), fill)
            alone = on_every_rank(run, expected, what)
        with branches_shared(run) as pack:
            shared = on_every_rank(run, partial(gradients_of_pack, run, pack.lengths), what)
        worst = worst_difference(run, shared, alone, tolerance)
        if worst.ratio > 1.0:
            raise CheckError(
                f"{type(run.model).__name__} learns something else from {what} with what they share computed once "
                f"than from each of them: {worst.name} differs by {worst.relative:.1e} (limit "
                f"{tolerance.relative:.0e}), so its tokens meet elsewhere than in causal attention; leave "
                "share_prefixes out"
            )

    compare_precisely(run, compare)
