"""What the configured order does to sampling, and what a run would do less of than its user may think."""

from collections.abc import Iterator

from pydantic import BaseModel

from lengthwise.config.run_config import Config
from lengthwise.core.lengths import LengthIndex
from lengthwise.data.corpus import Corpus
from lengthwise.data.order import CURRICULUM, WINDOWED, OrderSettings, make_order
from lengthwise.data.sampling_bias import SamplingReport, safety_of
from lengthwise.data.sort_key import LENGTH, by_length, of_corpus
from lengthwise.session.planning import make_sampler, sampler_of

FEW_HELD_OUT = 8
"""Sequences of a validation set below which its loss is mostly chance."""


def sampling_report(config: Config, corpus: Corpus) -> SamplingReport:
    """The report on the run's first epoch; of the order's metric too, if it is not length."""
    name = config.data.metric
    metric = None if name == LENGTH else of_corpus(corpus, name).values
    return safety_of(make_sampler(config, corpus), corpus.lengths, metric=metric, metric_name=name)


def safety_of_lengths(config: Config, lengths: LengthIndex) -> SamplingReport:
    """The sampling report where there is no corpus, and so no metric but length."""
    order = make_order(OrderSettings.of(config.data), by_length(lengths))
    return safety_of(sampler_of(config, lengths, order), lengths)


def training_warnings(config: Config, corpus: Corpus) -> Iterator[str]:
    """What a run would do less of than its user may think, in words."""
    ledger, warmup, steps = corpus.ledger, config.optim.warmup_steps, config.train.num_steps
    if ledger.dropped or ledger.truncated:
        yield f"{ledger.in_words}, of {ledger.sequences_in:,} with {ledger.tokens_in:,} tokens (data.over_length)"
    if warmup >= steps > 1:
        yield f"optim.warmup_steps is {warmup:,} and the run has {steps:,} steps, so it never reaches optim.lr"
    if 0 < ledger.held_out < FEW_HELD_OUT:
        yield (
            f"data.validation_share={config.data.validation_share:g} holds out {ledger.held_out} of "
            f"{ledger.sequences_in:,} sequences; their loss says little, raise it"
        )
    yield from unused_settings(config)
    yield from without_targets(corpus)


def without_targets(corpus: Corpus) -> list[str]:
    """How many sequences have no token with a loss, in words, if there are any."""
    targets = corpus.lengths.targets
    if targets is None or not (count := int((targets == 0).sum())):
        return []
    return [
        f"{count:,} of {len(corpus):,} sequences have no token with a loss since data.max_length cut them: they are "
        "computed and teach nothing; data.over_length=drop leaves long ones out"
    ]


def unused_settings(config: Config) -> list[str]:
    """Settings that others make meaningless, in words."""
    order, scaling = config.data.order, config.optim.lr_scaling
    why = f"data.order is {order}"
    needs_metric = OrderSettings.of(config.data).needs_metric
    return [
        *_unused("data", config.data, ("metric",), needs_metric, why),
        *_unused("data", config.data, _OF_CURRICULUM, order == CURRICULUM, why),
        *_unused("data", config.data, ("window",), order == WINDOWED, why),
        *_unused("optim", config.optim, _OF_SCALING, scaling != "none", f"optim.lr_scaling is {scaling}"),
    ]


_OF_CURRICULUM = ("pacing", "pacing_start", "pacing_stages", "curriculum_epochs")
_OF_SCALING = ("lr_scaling_by", "lr_reference", "lr_clamp")


def _unused(section: str, settings: BaseModel, names: tuple[str, ...], is_used: bool, why: str) -> list[str]:
    set_ = [name for name in names if getattr(settings, name) != type(settings).model_fields[name].default]
    return [] if is_used else [f"{section}.{name}={getattr(settings, name)} is not used: {why}" for name in set_]
