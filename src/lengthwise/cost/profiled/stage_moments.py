"""Bytes of one stage of a profiled model at each moment of a micro-batch, which is computed at once or in slices.

Under 1F1B stage s of S keeps what S - s micro-batches saved; of those in slices one, and S - s - 1 more of the largest
slices, each a share of one. What a pass has beside what was saved is that of the largest slice. Losses of all slices
wait on the last stage for the first backward. Keys and values of a layer, and their gradients in float32 at least, are
there for the whole micro-batch; a layer that is neither recomputed nor offloaded has saved its keys and values anyway.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from lengthwise.core.layer_profile import AttentionSizes
from lengthwise.core.pipeline_config import PipelineConfig
from lengthwise.core.sliced_passes import largest_share
from lengthwise.cost.memory_model import DTYPE_BYTES
from lengthwise.cost.profiled.degree_fit import LinearBytes
from lengthwise.cost.profiled.layer_gather_cost import Moment
from lengthwise.cost.profiled.stage_layers import StageLayers
from lengthwise.cost.separable import Line

Terms = list[tuple[float, LinearBytes]]
"""Lines, each so many times."""


def num_in_flight(scheme: PipelineConfig, stage: int) -> float:
    """Micro-batches that a stage keeps from their forwards to their backwards at most; slices count as shares."""
    return 1 + (scheme.num_stages - 1 - stage) * largest_share(scheme.slices)


def slice_keys(
    attention: AttentionSizes | None, scheme: PipelineConfig, layers: Sequence[StageLayers], dtype: str
) -> LinearBytes:
    """Keys and values of all slices of a micro-batch on one stage, and their gradients, beside what layers saved; and
    outputs of one layer over earlier keys and over the slice's own, while they are merged.

    ``attention``: of each layer; None: no micro-batch is in slices.
    """
    if attention is None or scheme.slices == 1:
        return LinearBytes(fixed=0.0, per_token=0.0, residuals=())
    width, wide = DTYPE_BYTES[dtype], max(4, DTYPE_BYTES[dtype])
    keys, queries = (
        -(-n // scheme.degree) * attention.head_size for n in (attention.num_kv_heads, attention.num_heads)
    )
    copies = (sum(part.num_layers for part in layers) + 1) * wide  # of one layer, as the kernel makes gradients
    copies += sum(part.recomputed + part.offloaded for part in layers) * width
    merged = 3 * queries * wide * largest_share(scheme.slices)
    return LinearBytes(fixed=0.0, per_token=2.0 * keys * copies + merged, residuals=())


def stage_moments(
    scheme: PipelineConfig, stage: int, layers: Sequence[StageLayers], keys: LinearBytes
) -> dict[Moment, Line]:
    """What a stage has at each moment: what its micro-batches in flight saved, and what the moment takes.

    ``keys``: see :func:`slice_keys`.
    """
    share, in_flight, is_sliced = largest_share(scheme.slices), num_in_flight(scheme, stage), scheme.slices > 1
    is_last, inputs = stage == scheme.num_stages - 1, layers[0].fit.inputs
    saved: Terms = [(in_flight * (not is_last) + 2 * share * (stage > 0), inputs), (float(is_sliced), keys)]
    for part in layers:
        saved += [(in_flight * count, line) for count, line in part.kept] + part.waiting(stage)
    moving_in_loss, moving = (_at_once([line for part in layers for line in part.moving(n)], share) for n in (1, 2))
    rest = [(part.rest, part.fit.rest) for part in layers]  # of many tokens, some at a time are as much
    losses = [(part.rest, _waiting_losses(part)) for part in layers if is_sliced]
    backwards = []
    for part in layers:
        of_layer = rest if part.fit.layer_backward is None else _at_once([(1.0, part.fit.layer_backward)], share)
        is_full = part.recomputed > 0 or (part.fit.layer_backward is None and not is_last)
        alive = _at_once([(float(is_full), part.alive)], share)
        backwards.append(sum_of([*saved, *losses, *moving, *of_layer, *alive]))
    backward = Line(max(line.fixed for line in backwards), max(line.per_token for line in backwards))
    moments = {Moment.BACKWARD: backward}
    if stage == 0:  # the layers of this micro-batch, or of one of its slices, keep nothing any more
        left = 1.0 if is_sliced else (in_flight - 1) / in_flight
        embedding = [(float(part.num_layers), part.fit.embedding_backward) for part in layers]
        num_layers = sum(part.num_layers for part in layers)
        others = [(n * left, line) for n, line in (*saved, *moving)]
        moments[Moment.EMBEDDING_BACKWARD] = sum_of(
            [*others, *((n / num_layers, line) for n, line in _at_once(embedding, share))]
        )
    if not is_last:
        return moments
    saved += [*losses, *moving_in_loss]
    loss_backward = _at_once([(part.rest, part.fit.loss_backward) for part in layers], share)
    return {Moment.LOSS: sum_of([*saved, *rest]), Moment.LOSS_BACKWARD: sum_of([*saved, *loss_backward]), **moments}


def _waiting_losses(part: StageLayers) -> LinearBytes:
    """What losses keep from their forward to their backward: no more than is there in either."""
    fit = part.fit
    return fit.rest if fit.layer_backward is None else min(fit.rest, fit.loss_backward, key=lambda line: line.per_token)


def sum_of(terms: Iterable[tuple[float, LinearBytes]]) -> Line:
    """The sum of lines, each so many times."""
    terms = list(terms)
    return Line(sum(n * line.fixed for n, line in terms), sum(n * line.per_token for n, line in terms))


def _at_once(terms: Terms, share: float) -> Terms:
    """Lines of what a pass has, which computes a share of the micro-batch."""
    return terms if share == 1 else [(n, replace(line, per_token=line.per_token * share)) for n, line in terms]
