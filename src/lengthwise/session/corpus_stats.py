"""Statistics of an index, of the data of a run, or of a file of lengths."""

import os
from pathlib import Path

from lengthwise.config.run_config import Config, load
from lengthwise.core.errors import InputError
from lengthwise.core.lengths import LengthIndex
from lengthwise.data.corpus import open_corpus, views_of
from lengthwise.data.length_stats import LengthStats, length_stats
from lengthwise.data.sampling_bias import SamplingReport
from lengthwise.data.sort_key import LENGTH
from lengthwise.index.source_file import SourceFile
from lengthwise.index.work_units import open_lengths
from lengthwise.session.sampling_report import safety_of_lengths, sampling_report

_CONFIGS = (".yaml", ".yml")


def data_settings(source: Path, overrides: list[str]) -> Config:
    """The settings in ``source``, or of an index there, with ``overrides``; a file of lengths is no index."""
    if source.suffix in _CONFIGS and not os.path.isdir(source):
        return load(source, overrides)
    config = load(None, overrides)
    index = "" if _is_file_of_lengths(source) else str(source)
    return config.model_copy(update={"data": config.data.model_copy(update={"index": index})})


def stats_of(source: Path, config: Config, *, max_lengths: tuple[int, ...], num_ranks: int) -> LengthStats:
    """Statistics of the lengths after the length rule; of a mixture, those of its first epoch."""
    return length_stats(_lengths(source, config), max_lengths=max_lengths, num_ranks=num_ranks, seed=config.seed)


def sampling_of(source: Path, config: Config) -> SamplingReport:
    """What the configured order does to sampling.

    Raises:
        InputError: the order follows a metric, and there are lengths alone.
    """
    if not _is_file_of_lengths(source):
        return sampling_report(config, open_corpus(config.data))
    if config.data.metric != LENGTH:
        raise InputError(f"{source} holds lengths alone; metric {config.data.metric} is saved beside an index")
    return safety_of_lengths(config, _lengths(source, config))


def _is_file_of_lengths(source: Path) -> bool:
    """Whether ``source`` names a file of lengths; a folder is an index, whatever its name ends in."""
    return source.suffix == ".npy" and not os.path.isdir(source)


def _lengths(source: Path, config: Config) -> LengthIndex:
    """Lengths of the first epoch, after the length rule."""
    if not _is_file_of_lengths(source):
        return open_corpus(config.data).epoch_lengths(config.seed)
    if config.data.mixture:
        raise InputError(f"{source} holds the lengths of one corpus; give a configuration instead to see a mixture")
    if not source.is_file():
        raise InputError(f"no file at {source}; give an index folder or a .npy file of lengths")
    file = SourceFile(path=str(source), name=str(source), size=source.stat().st_size, mtime_ns=0)
    return views_of(config.data, LengthIndex(lengths=open_lengths(file)))[0].lengths
