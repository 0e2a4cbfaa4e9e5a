"""Check before training that sequences which share what they begin with give the gradients of each by itself."""

from functools import partial

from lengthwise.core.errors import CheckError
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.loop.synthetic_branches import branches_alone, branches_shared
from lengthwise.runtime.verify.float64_mode import noise_free
from lengthwise.runtime.verify.gradient_check import dtypes_of, tolerance_of, worst_difference
from lengthwise.runtime.verify.stock_call import GradientResult, gradients_in_pack
from lengthwise.runtime.verify.verdict import NotInThisDtype, on_every_rank


def check_shared_prefixes(run: PreparedModel) -> None:
    """Compare three sequences that begin alike, laid out once, with each of them whole; every rank calls this.

    Raises:
        CheckError: loss or gradients differ by more than rounding.
        InputError: the model cannot compute what sequences share once.
    """
    dtypes = dtypes_of(run)
    what = "three sequences that begin alike"
    for dtype in dtypes:
        try:
            with noise_free(run, dtype):
                with branches_alone(run) as pack:
                    alone = on_every_rank(run, partial(_gradients, run, pack.lengths), what)
                with branches_shared(run) as pack:
                    shared = on_every_rank(run, partial(_gradients, run, pack.lengths), what)
                worst = worst_difference(run, shared, alone, tolerance := tolerance_of(dtype, run.state.compute_dtype))
            if worst.ratio > 1.0:
                raise CheckError(
                    f"{type(run.model).__name__} learns something else from {what} with what they share computed once "
                    f"than from each of them: {worst.name} differs by {worst.relative:.1e} (limit "
                    f"{tolerance.relative:.0e}), so its tokens meet elsewhere than in causal attention; leave "
                    "share_prefixes out"
                )
            return
        except NotInThisDtype as error:
            if dtype == dtypes[-1]:
                raise error.reason from None


def _gradients(run: PreparedModel, lengths: tuple[int, ...]) -> GradientResult:
    result, _ = gradients_in_pack(run, lengths, run.alone)
    assert result is not None, "this rank is in its own group"
    return result
