"""Measure the model of a configured run: how long sequences get, one rank's measurements, errors on unseen rows."""

from pathlib import Path
from typing import TYPE_CHECKING

from lengthwise.config.run_config import Config
from lengthwise.core.cost import ProfileTable
from lengthwise.core.errors import InputError
from lengthwise.core.read_file import brief
from lengthwise.core.specs import ModelSpec, cluster_preset
from lengthwise.data.corpus import open_corpus
from lengthwise.models.hf_config import UnsupportedModelError
from lengthwise.session.console import progress
from lengthwise.session.planning import resolve_cluster
from lengthwise.session.trained_model import resolve_model

if TYPE_CHECKING:
    from lengthwise.cost.profiled.accuracy import ModelErrors

DEFAULT_MAX_LENGTH = 4096
"""Where neither the option nor the data says how long sequences get."""


def longest_sequence(config: Config) -> int:
    """Length of the longest sequence that the data of a configuration has, or may have."""
    if config.data.max_length:
        return config.data.max_length
    return open_corpus(config.data).lengths.max_length if _has_corpus(config) else DEFAULT_MAX_LENGTH


def _has_corpus(config: Config) -> bool:
    return bool(config.data.index or config.data.mixture)


def _spec(config: Config) -> ModelSpec:
    try:
        return resolve_model(config, open_corpus(config.data) if _has_corpus(config) else None)
    except UnsupportedModelError:
        raise InputError(
            f"`lengthwise profile` measures this library's own models (llama, qwen2, gpt2, bert), and "
            f"model.hf={brief(config.model.hf)} is another; `lengthwise train` measures it by itself, before its first "
            "step"
        ) from None


def errors_on_unseen_rows(config: Config, table: ProfileTable) -> "tuple[ModelErrors, ...]":
    """How far off each cost model is on rows of the profile that it was not fitted to."""
    from lengthwise.cost.profiled.accuracy import leave_out_errors

    on_cpu = table.device.startswith("cpu") and not config.cluster.name
    cluster = cluster_preset(f"{table.num_ranks}xcpu") if on_cpu else resolve_cluster(config)
    return leave_out_errors(table, model=_spec(config), cluster=cluster)


def measure_as_rank(
    config: Config, out: Path, *, longest: int, max_tokens: int, repeats: int, max_degree: int = 1
) -> None:
    """Measure micro-batches as one rank; the first one writes the profile to ``out``.

    With a ``max_degree`` above 1 also micro-batches that ranks share, for every number up to it that divides theirs.
    """
    from lengthwise.runtime.comm.activity import told_to_peers
    from lengthwise.runtime.comm.world import start_world, stop_world
    from lengthwise.runtime.profile.measure import ladder, num_measurements, profile
    from lengthwise.session.run_model import build

    spec = _spec(config)
    world = start_world(config.train.device, timeout_s=config.train.timeout_s)
    packs = ladder(longest, max_tokens)
    degrees = [degree for degree in range(1, max_degree + 1) if world.size % degree == 0]
    with told_to_peers(), progress() as bar:
        task = bar.add_task(
            "profile", total=num_measurements(packs, repeats, num_degrees=len(degrees)), visible=world.is_first
        )
        table = profile(
            build(config, spec, world),
            spec,
            world,
            packs=packs,
            recompute=config.plan.recompute == "all",
            repeats=repeats,
            degrees=degrees,
            on_row=lambda: bar.advance(task),
        )
    if world.is_first:
        out.parent.mkdir(parents=True, exist_ok=True)
        table.save(out)
    stop_world(world)
