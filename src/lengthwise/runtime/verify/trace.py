"""Trace a model once before the run to find its attention, position and RNG calls, and its exchange script."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from lengthwise.core.batch import NEXT_TOKEN
from lengthwise.core.errors import CommunicationError, InputError
from lengthwise.runtime.loop.fsdp2 import Fsdp2State
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.loop.synthetic_batches import summed_loss, synthetic, traced_lengths
from lengthwise.runtime.verify.float64_mode import noise_free
from lengthwise.runtime.verify.learn_labels import learn_labels
from lengthwise.runtime.verify.learn_made_labels import learn_made_labels
from lengthwise.runtime.verify.observe_exchanges import observe_script
from lengthwise.runtime.verify.parameter_writes import RefuseParameterWrites
from lengthwise.runtime.verify.precision import dtypes_of
from lengthwise.runtime.verify.stock_call import stock_output
from lengthwise.runtime.verify.zero_weights import Fill
from lengthwise.runtime.wrap.label_convention import LabelConvention
from lengthwise.runtime.wrap.loss_check import check_has_gradient
from lengthwise.runtime.wrap.tiled_modules import TiledModules
from lengthwise.runtime.wrap.trained_outside import TrainedOutside
from lengthwise.runtime.wrap.user_functions import is_of_embedding, raised_by


def trace_model(run: PreparedModel, *, labels: LabelConvention | None = None, is_compared: bool = False) -> None:
    """Trace the model on two sequences, each on this rank alone, and derive the rules for its calls.

    ``labels``: how its loss uses labels; None: found out by the values of losses. ``is_compared``: packs of it are
    compared with single sequences next.

    Raises:
        InputError: it attends in a way that cannot be sharded, or has no row for one of their tokens or positions.
    """
    fill = Fill.SIGNED if labels is None else Fill.NOTHING  # a head of zeros has one loss, whatever the labels
    lengths = traced_lengths(run.collator)
    with noise_free(run, _dtype_of_labels(run) if labels is None else None, fill), _rows_named(run):
        with synthetic(run, lengths), _writes_refused(run):
            if labels is not None:
                run.wrapped_model.labels = labels
            elif run.wrapped_model.objective == NEXT_TOKEN:
                tokens = torch.from_numpy(run.collator.source.tokens(0).astype(np.int64))
                run.wrapped_model.labels = learn_labels(run, tokens.to(run.world.device))
        conventions = run.wrapped_model.labels
        if labels is None and (made := learn_made_labels(run)) is not None:
            conventions = run.wrapped_model.labels = replace(conventions, made=made)
        run.collator = replace(
            run.collator,
            shifts_labels=run.collator.shifts_labels and conventions.shifts,
            makes_labels=conventions.made is not None and conventions.made.is_mean,
        )
    with synthetic(run, lengths), noise_free(run), _rows_named(run):
        forward = partial(_forward, run, TrainedOutside(run.model))
        run.wrapped_model.learn([partial(forward, 0), partial(forward, 1)], lengths, is_compared=is_compared)
        if run.gather is not None:
            run.check_gathers()
        if run.wrapped_model.by_sequence is None:
            run.wrapped_model.script = observe_script(run, lengths[0])
    if run.wrapped_model.compiled is not None:
        run.wrapped_model.compiled.choose(type(run.model).__name__)
    if run.wrapped_model.tiles is not None:
        run.wrapped_model.tiles.choose(type(run.model).__name__)


def _dtype_of_labels(run: PreparedModel) -> torch.dtype | None:
    """The dtype in which losses of different labels are told apart; None: the model's own.

    One label of a sequence may change a loss by less than 16 bits tell, and what had no effect would have no loss.
    """
    if run.state.coarsest_dtype not in (torch.bfloat16, torch.float16):
        return None
    lengths = traced_lengths(run.collator)
    for dtype in filter(None, dtypes_of(run)):
        with noise_free(run, dtype), synthetic(run, lengths), torch.no_grad(), run.gathered():
            try:
                stock_output(run, lengths, 0)
            except CommunicationError:
                raise
            except Exception:  # it cannot be computed in this dtype
                continue
            return dtype
    return None


def trace_tiles(run: PreparedModel) -> str:
    """Find the feed-forward modules that plans may cut into tiles; returns why there are none, or an empty string.

    Every rank calls this, after :func:`trace_model` of a model that was prepared without tiles.
    """
    wrapped_model = run.wrapped_model
    tiles = wrapped_model.tiles = TiledModules(wrapped_model.structure.layers, 0, lambda: wrapped_model.is_plain)
    try:
        with synthetic(run, traced_lengths(run.collator)), noise_free(run), _rows_named(run):
            _forward(run, TrainedOutside(run.model), 0)
        tiles.choose(type(run.model).__name__)
    except InputError as error:
        tiles.release()
        wrapped_model.tiles = None
        return error.marked
    finally:
        run.discard()
    return ""


def _forward(run: PreparedModel, outside: TrainedOutside, sequence: int) -> None:
    with run.gathered(), _writes_refused(run):
        loss = summed_loss(run, (sequence,))
    check_has_gradient(loss)
    outside.check(loss)


def _writes_refused(run: PreparedModel) -> RefuseParameterWrites:
    """Clamping is let through where every rank has whole weights, whose changes are noticed."""
    may_clamp = run.gather is None and not isinstance(run.state, Fsdp2State)
    return RefuseParameterWrites(run.model, may_clamp=may_clamp)


@contextmanager
def _rows_named(run: PreparedModel) -> Iterator[None]:
    try:
        yield
    except IndexError as error:
        if raised_by(error) or not is_of_embedding(error):
            raise
        first, second = traced_lengths(run.collator)
        longest = max(first, run.collator.longest or 0)
        raise InputError(
            f"{type(run.model).__name__} looked up a row that one of its tables has not ({error}), in two sequences of "
            f"{first} and {second} slots with the corpus's own tokens. Give its embedding a row for every token id, "
            f"and its positions a row for each slot of the longest sequence, {longest:,}; or set max_length"
        ) from error
