"""How hard sequences are: the metric that an order follows, one number for each sequence of a run."""

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np

from lengthwise.core.errors import InputError
from lengthwise.core.lengths import LengthIndex
from lengthwise.data.corpus import Corpus
from lengthwise.data.order import OrderSettings
from lengthwise.index.sequence_metrics import open_metric

LENGTH = "length"
"""The metric that every corpus has."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MetricValues:
    """One number per sequence, all finite."""

    values: np.ndarray = field(repr=False)
    digest: str
    """Its name, and what tells its values from others."""


def difficulty(given: Any, lengths: LengthIndex, settings: OrderSettings) -> MetricValues:
    """Difficulty from numbers that a user passes; None: the lengths.

    Raises:
        InputError: they are not one finite number per sequence, or the order follows none.
    """
    if given is None:
        return by_length(lengths)
    if not settings.needs_metric:
        raise InputError(
            f"metric is given and order is {settings.order!r}, which follows none; leave it out, or take "
            "order='curriculum', 'sorted' or 'windowed'"
        )
    return of_values(given, len(lengths))


def by_length(lengths: LengthIndex) -> MetricValues:
    """The lengths themselves."""
    return MetricValues(values=lengths.lengths, digest=f"{LENGTH} {lengths.digest}")


def of_corpus(corpus: Corpus, metric: str) -> MetricValues:
    """The lengths, or the metric of this name that was saved beside every index of the corpus.

    A piece of a sequence is as hard as the whole.

    Raises:
        InputError: an index has no such metric, or a damaged one.
    """
    if metric == LENGTH:
        return by_length(corpus.lengths)
    saved = [open_metric(part.store.path, metric, digest=part.store.digest) for part in corpus.parts]
    values = [saved_metric.values[part.view.base_ids] for saved_metric, part in zip(saved, corpus.parts)]
    return MetricValues(
        values=np.concatenate(values), digest=f"{metric} {'+'.join(saved_metric.digest for saved_metric in saved)}"
    )


def of_values(given: Any, num_sequences: int) -> MetricValues:
    """Numbers that a user computed.

    Raises:
        InputError: they are not one finite number per sequence.
    """
    values = np.asarray(given)
    if values.shape != (num_sequences,) or values.dtype.kind not in "biuf":
        raise InputError(
            f"metric is {values.dtype} of shape {values.shape}; give one number for each of {num_sequences:,} sequences"
        )
    if not (finite := np.isfinite(values)).all():
        where = int(np.argmin(finite))
        raise InputError(f"the metric of sequence {where} is {values[where]}, which has no place in an order")
    mark = blake2b(f"{values.dtype.str}".encode(), digest_size=8)
    mark.update(np.ascontiguousarray(values).tobytes())
    return MetricValues(values=values, digest=f"given {mark.hexdigest()}")
