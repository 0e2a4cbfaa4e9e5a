"""The validation set of a configured run, and the plans by which its loss is computed."""

from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice

from lengthwise.config.run_config import Config
from lengthwise.core.batch import GlobalBatch
from lengthwise.core.errors import InfeasibleError, InputError
from lengthwise.core.specs import ModelSpec
from lengthwise.core.step_plan import StepPlan
from lengthwise.data.corpus import Corpus, open_validation
from lengthwise.models.stock_model import StockModel
from lengthwise.session.planning import make_sampler
from lengthwise.session.trained_model import check_model_holds

PlannerOf = Callable[[Config, Corpus], Callable[[GlobalBatch], StepPlan]]
"""Makes the planner of a corpus under a configuration."""


def validation_corpus(config: Config, spec: ModelSpec | StockModel) -> Corpus | None:
    """The sequences that the run is validated on; None if it is not.

    Raises:
        InputError: nothing in it has a loss, or the model cannot compute it.
    """
    corpus = open_validation(config.data)
    if corpus is None:
        return None
    corpus.check_tokens()
    check_model_holds(spec, corpus, is_of_folder=bool(config.model.hf))
    if not any(_batches(config, corpus)):
        raise InputError(
            f"the validation set has {len(corpus):,} sequences and no token with a loss; name a larger one in "
            "data.validation, or raise data.validation_share"
        )
    return corpus


def _batches(config: Config, corpus: Corpus) -> Iterator[GlobalBatch]:
    sampler = make_sampler(_in_corpus_order(config), corpus)
    return (batch for batch in islice(sampler, sampler.num_batches(1)) if batch.num_targets)


def _in_corpus_order(config: Config) -> Config:
    """``config`` for batches that follow no metric, compile nothing and change no learning rate."""
    changes = {
        "data": {"order": "corpus"},
        "plan": {"file": "", "shapes": None},
        "train": {"compile": False},
        "optim": {"lr_scaling": "none"},
    }
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=change) for name, change in changes.items()}
    )


def validation_plans(config: Config, corpus: Corpus, planner_of: PlannerOf) -> Callable[[], tuple[StepPlan, ...]]:
    """Make a function that plans the validation set in batches like those of training, once.

    Raises:
        InfeasibleError: a sequence fits nowhere.
    """
    config = _in_corpus_order(config)
    try:
        planner = planner_of(config, corpus)
    except InfeasibleError as error:
        raise error.with_message(f"the validation set cannot be computed: {error.marked}") from None

    @cache
    def plans() -> tuple[StepPlan, ...]:
        return tuple(planner(batch) for batch in _batches(config, corpus))

    return plans
