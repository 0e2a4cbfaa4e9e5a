"""Measure the model of a configured run: how long sequences get, one rank's measurements, errors on unseen rows."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lengthwise.config.run_config import Config
from lengthwise.core.cost import ProfileTable
from lengthwise.core.errors import InputError
from lengthwise.core.pipeline_config import Method, uniform_scheme
from lengthwise.core.profile_packs import SHORTEST, ladder, packs_of
from lengthwise.core.read_file import brief
from lengthwise.core.specs import ModelSpec, cluster_preset
from lengthwise.core.wording import parse_tokens, whole_number
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.cost.profiled.fitted import too_alike
from lengthwise.data.corpus import open_corpus
from lengthwise.models.hf_config import UnsupportedModelError
from lengthwise.plan.space.candidate import degrees_of
from lengthwise.plan.space.search_space import DEFAULT_METHODS
from lengthwise.session.console import progress
from lengthwise.session.method_choice import methods_of
from lengthwise.session.planning import resolve_cluster
from lengthwise.session.trained_model import resolve_model

if TYPE_CHECKING:
    from lengthwise.cost.profiled.accuracy import Extrapolation, ModelErrors

LONGEST = 1 << 32
"""The longest length that can be asked for."""
QUANTILES, MOST_QUANTILES = 8, 64
"""How many quantiles of the data's lengths are measured where no number is given, and at most."""
DEFAULT_MAX_LENGTH = 4096
"""Where neither the option nor the data says how long sequences get."""


def _longest_sequence(config: Config) -> int:
    """Length of the longest sequence that the data of a configuration has, or may have."""
    if config.data.max_length:
        return config.data.max_length
    return open_corpus(config.data).lengths.max_length if _has_corpus(config) else DEFAULT_MAX_LENGTH


def packs_to_measure(
    config: Config, lengths: str | None, *, max_length: int | None = None, max_tokens: int | None = None
) -> list[tuple[int, ...]]:
    """The packs of ``--lengths``, which lists lengths or asks for quantiles of the data's; of a ladder without it.

    Raises:
        InputError: it is no list of lengths and no number of quantiles, there is no data to take them of, the longest
            length is given too, or the packs are too few for a fit.
    """
    if lengths is None:
        longest = max_length or _longest_sequence(config)
        packs = ladder(longest, max_tokens or longest)
        if reason := too_alike(packs):
            raise InputError(f"a ladder up to {longest} tokens: {reason}; raise --max-length or --max-tokens")
        return packs
    if max_length is not None:
        raise InputError(f"--lengths {lengths} says what is measured; leave --max-length out")
    chosen = _parse_lengths(config, lengths)
    packs = packs_of(chosen, max(max_tokens or 0, *chosen))
    if reason := too_alike(packs):
        raise InputError(f"--lengths {lengths}: {reason}; name two lengths, such as --lengths 1024,8192")
    return packs


def _parse_lengths(config: Config, words: str) -> list[int]:
    """The lengths of ``1024,8K``, or of ``quantiles`` (``quantiles:N``) of the data's."""
    if words.partition(":")[0] != "quantiles":
        lengths = [parse_tokens(word.strip()) for word in words.split(",")]
        if not all(length and SHORTEST <= length <= LONGEST for length in lengths):
            raise InputError(
                f"--lengths {brief(words)} is no list of lengths from {SHORTEST} to {LONGEST:,} tokens, such as "
                "1024,8K,64K, and not quantiles:8"
            )
        return [length for length in lengths if length]
    number = whole_number(words.partition(":")[2] or str(QUANTILES))
    if number is None or not 2 <= number <= MOST_QUANTILES:
        raise InputError(f"--lengths {brief(words)}: the number of quantiles is from 2 to {MOST_QUANTILES}")
    if not _has_corpus(config):
        raise InputError("--lengths quantiles needs data to take them of; set data.index")
    epoch = open_corpus(config.data).epoch_lengths(config.seed)
    lengths = np.quantile(epoch.lengths, np.linspace(0, 1, number), method="higher")
    return np.unique(np.maximum(lengths, SHORTEST)).tolist()


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


def learned_accuracy(table: ProfileTable) -> "tuple[tuple[ModelErrors, ...], tuple[Extrapolation, ...]]":
    """Cross-validated errors of fitted and hybrid costs, and how sure they are beyond what was measured.

    None of either where the profile has too few rows for it, or scikit-learn is not there.
    """
    from lengthwise.cost.profiled.accuracy import can_cross_validate, cross_validation_errors, extrapolations

    if find_spec("sklearn") is None or not can_cross_validate(table):
        return (), ()
    return cross_validation_errors(table), extrapolations(table)


def measure_as_rank(
    config: Config, out: Path, *, packs: list[tuple[int, ...]], repeats: int, max_degree: int | None = None
) -> None:
    """Measure micro-batches as one rank; the first one writes the profile to ``out``.

    Also those that ranks share, by every method that plans may use and every degree up to ``max_degree`` (None: all
    ranks) that divides the ranks, and the links between them.
    """
    from lengthwise.runtime.comm.activity import told_to_peers
    from lengthwise.runtime.comm.world import start_world, stop_world
    from lengthwise.runtime.profile.measure import num_measurements, profile
    from lengthwise.session.run_model import build

    spec = _spec(config)
    world = start_world(config.train.device, timeout_s=config.train.timeout_s)
    per_node = world.ranks_per_node or world.size
    shared = shared_schemes(config, spec, num_ranks=world.size, per_node=per_node, max_degree=max_degree)
    with told_to_peers(), progress() as bar:
        task = bar.add_task(
            "profile", total=num_measurements(packs, repeats, num_shared=len(shared)), visible=world.is_first
        )
        table = profile(
            build(config, spec, world),
            spec,
            world,
            packs=packs,
            recompute=config.plan.recompute == "all",
            repeats=repeats,
            shared=shared,
            on_row=lambda: bar.advance(task),
        )
    if world.is_first:
        out.parent.mkdir(parents=True, exist_ok=True)
        table.save(out)
    stop_world(world)


def shared_schemes(
    config: Config, spec: ModelSpec, *, num_ranks: int, per_node: int, max_degree: int | None = None
) -> list[tuple[int, Method]]:
    """Degrees above 1 that divide the ranks and suit nodes, and methods that plans of the run may use at each.

    Raises:
        InputError: the one degree that is asked for is none of these, or no method can share the model's layers by it.
    """
    plan, limit = config.plan, min(config.plan.max_degree or num_ranks, max_degree or num_ranks)
    degrees = [degree for degree in degrees_of(num_ranks, min(per_node, num_ranks)) if num_ranks % degree == 0]
    if plan.degree is not None:
        if plan.degree not in degrees:
            raise InputError(
                f"plan.degree={plan.degree}: {num_ranks} ranks can share layers by {', '.join(map(str, degrees))}; "
                "choose one of these, or another --nproc"
            )
        degrees, limit = [plan.degree], plan.degree
    cost = AnalyticCost(model=spec, cluster=cluster_preset(f"{num_ranks}xcpu"))

    def can_run(degree: int, method: Method) -> bool:
        try:
            cost.overhead_s(uniform_scheme(spec.num_layers, degree=degree, method=method))
        except InputError:
            return False
        return True

    methods = [method for method in methods_of(plan) or DEFAULT_METHODS if method is not Method.DENSE]
    shared: list[tuple[int, Method]] = [
        (degree, method) for degree in degrees for method in methods if 1 < degree <= limit and can_run(degree, method)
    ]
    if not shared and methods and plan.degree not in (None, 1):
        raise InputError(
            f"plan.degree={plan.degree}: no such number of ranks shares the layers of {spec.name} by "
            f"{', '.join(methods)}, for it has {spec.num_heads} heads and {spec.num_kv_heads} key/value heads"
        )
    return shared
