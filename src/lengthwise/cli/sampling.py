"""What the configured order does to sampling."""

from lengthwise.cli.assemble import make_sampler
from lengthwise.config import Config
from lengthwise.data.corpus import Corpus
from lengthwise.data.difficulty import LENGTH, of_corpus
from lengthwise.data.safety import Safety, safety_of


def sampling_report(config: Config, corpus: Corpus) -> Safety:
    """The report on the run's first epoch; of the order's metric too, if it is not length."""
    name = config.data.metric
    metric = None if name == LENGTH else of_corpus(corpus, name).values
    return safety_of(make_sampler(config, corpus), corpus.lengths, metric=metric, metric_name=name)
