"""`lengthwise.compare`: every policy on the same global batches of some lengths; needs no torch."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from lengthwise.core.cost import CostError, error_of
from lengthwise.core.errors import InfeasibleError, InputError
from lengthwise.core.lengths import LengthIndex
from lengthwise.core.specs import ClusterSpec, ModelSpec
from lengthwise.core.wording import counted
from lengthwise.data.length_stats import histogram
from lengthwise.data.max_length import LengthLedger
from lengthwise.plan.policies import POLICIES
from lengthwise.plan.space.search_space import DEFAULT_METHODS
from lengthwise.report.charts.histogram import LengthBin
from lengthwise.report.pages.compare_results import ClusterResult, Comparison
from lengthwise.report.units import compact
from lengthwise.session.compare_policies import PolicyComparison
from lengthwise.session.plan_lengths import DEFAULT_STEPS, PlanningOptions, check_planning, comparison_of, step_budget
from lengthwise.session.planning_args import MOST_DEVICES, PYTHON, find_cluster
from lengthwise.session.provenance import provenance
from lengthwise.session.sweep import SweepPoint, as_list, make_budget, sweep_points
from lengthwise.sim.sim_options import SimOptions

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

OnClusterStep = Callable[[ClusterSpec, str, int], None]
"""Hears which policy plans on which cluster, and how many more steps it is done with."""


class CompareOptions(PlanningOptions, total=False):
    """Keyword arguments of `lengthwise.compare` alone, beside those of planning; each may be left out."""

    network_gbit_per_s: float | Sequence[float] | None
    link_gbyte_per_s: float | Sequence[float] | None
    jitter: float
    tokens: float | None
    price_per_hour: float | None


_HINTS = {"policies": str | Sequence[str] | None, "tokens_per_step": int | Sequence[int] | None}
_BIN_EDGES = tuple(1 << power for power in range(7, 21))


def compare(
    lengths: "str | Path | LengthIndex | ArrayLike",
    *,
    model: str | Path | ModelSpec,
    cluster: str | ClusterSpec | Sequence[str | ClusterSpec],
    policies: str | Sequence[str] | None = None,
    steps: int = DEFAULT_STEPS,
    tokens_per_step: int | Sequence[int] | None = None,
    **options: Unpack[CompareOptions],
) -> Comparison:
    """Plan and simulate the same global batches under every scheduling policy.

    Costs come from the data sheet of the device, or from a `profile`: no GPU is needed.

        comparison = lengthwise.compare("commoncrawl", model="llama-7b", cluster="8xH100-80GB", steps=2)
        for result in comparison.clusters[0].ranked:
            print(result.policy, round(result.tokens_per_s), f"{result.idle:.1%} idle")

    Args:
        lengths: tokens of each sequence, as an array; a .npy file of them; an index folder; or the name of a
            distribution, such as "commoncrawl".
        model: the name of a preset, a Hugging Face folder, or a `ModelSpec`.
        cluster: nodes x devices x device, such as "8x8xH100-80GB", where the device may be a YAML file, or a
            `ClusterSpec`; one or several.
        policies: which policies, or one; by default all.
        steps: global batches that every policy plans.
        tokens_per_step: most tokens of a global batch, one or several; by default 3,125 a device, or the longest
            sequence.
        network_gbit_per_s: rate of each device's network port instead of the device's own; one or several.
        link_gbyte_per_s: rate and direction of each device to the others of its node, likewise.
        jitter: sigma of a lognormal factor of mean 1 on the time of every simulated micro-batch; by default 0.
        tokens: tokens of the whole training, for its hours and its price.
        price_per_hour: the price of one device for an hour, instead of the device's own.
        options: max_length, over_length, max_degree, max_stages, methods, recompute, offload, shard_gradients,
            zero_bubble, slices, local_sequences, memory_margin, host_memory_gib, dtype, profile, overlap and seed, as
            in `lengthwise.plan`.

    Returns:
        A `Comparison`. Its `clusters` hold a result for each cluster, network and size of step, whose `ranked` has one
        for each policy, the fastest first, with tokens_per_s, step_time_s, idle, bubble, padding, gap and peak_bytes;
        `to_json()` gives plain values, with MFU, hours and cost.

    Raises:
        InputError: a name is not known, or a value is out of its range; the message says what is.
        InfeasibleError: no policy can run on any of the clusters.
    """
    check_planning(CompareOptions, options, _HINTS, policies=policies, steps=steps, tokens_per_step=tokens_per_step)
    networks, links = options.pop("network_gbit_per_s", None), options.pop("link_gbyte_per_s", None)
    rates = {"networks": as_list(networks, "network_gbit_per_s"), "links": as_list(links, "link_gbyte_per_s")}
    budget = make_budget(PYTHON, tokens=options.pop("tokens", None), price_per_hour=options.pop("price_per_hour", None))
    simulation = SimOptions(jitter=options.pop("jitter", 0.0), seed=options.get("seed", 0))
    clusters = _clusters_of(cluster, options.pop("memory_margin", None), options.pop("host_memory_gib", None))
    planning: PlanningOptions = options
    contest, ledger = comparison_of(lengths, model=model, policies=policies, steps=steps, spelling=PYTHON, **planning)
    contest = replace(contest, budget=budget, simulation=simulation)
    budgets = as_list(tokens_per_step, "tokens_per_step")
    points = sweep_points(clusters, budgets, PYTHON, **rates, profile=contest.profile)
    results = compare_points(contest, points)
    source = str(lengths) if isinstance(lengths, str | Path) else "lengths of the caller"
    return comparison_page(contest, clusters, results, source=source, ledger=ledger)


def _clusters_of(
    cluster: str | ClusterSpec | Sequence[str | ClusterSpec],
    memory_margin: float | None,
    host_memory_gib: float | None,
) -> list[ClusterSpec]:
    """One or several clusters by name, none of them too large to compare."""
    named = cluster if isinstance(cluster, Iterable) and not isinstance(cluster, str) else [cluster]
    clusters = list(dict.fromkeys(find_cluster(name, memory_margin, host_memory_gib) for name in named))
    if not clusters:
        raise InputError("cluster is an empty list; name at least one, such as '8x8xH100-80GB'")
    if (num_devices := max(spec.num_devices for spec in clusters)) > MOST_DEVICES:
        raise InputError(
            f"cluster has {num_devices:,} devices, and at most {MOST_DEVICES:,} are compared; for more, call "
            "lengthwise.plan with one policy"
        )
    return clusters


def compare_points(
    contest: PolicyComparison,
    points: Sequence[SweepPoint],
    *,
    with_steps: bool = False,
    on_step: OnClusterStep | None = None,
) -> list[ClusterResult]:
    """Results of every point of a sweep.

    Args:
        contest: what is compared.
        points: clusters, and tokens of a step.
        with_steps: also keep a typical step of every policy, of the first point alone, for the page.
        on_step: hears which policy plans on which cluster, and how many more steps it is done with.

    Raises:
        InfeasibleError: no policy can run on any of them.
    """
    results: list[ClusterResult] = []
    entries = [
        contest.enter(point.cluster, tokens_per_step=step_budget(contest, point.cluster, point.tokens_per_step))
        for point in points
    ]
    with contest.ahead(entries):
        for entry in entries:
            hear = partial(on_step or _ignore, entry.cluster)
            is_first = not any(result.ranked for result in results)
            results.append(contest.run(entry, with_steps=with_steps and is_first, on_step=hear))
    if not any(result.ranked for result in results):
        raise InfeasibleError(results[-1].policies[0].refused)
    return results


def comparison_page(
    contest: PolicyComparison,
    clusters: Sequence[ClusterSpec],
    results: Sequence[ClusterResult],
    *,
    source: str,
    ledger: LengthLedger,
) -> Comparison:
    """The results with what was asked, as the page shows them and ``to_json`` gives them."""
    error = error_of(contest.cost(clusters[0]))
    return Comparison(
        model=contest.model.name,
        device=clusters[0].device.name,
        source=source,
        num_steps=contest.num_steps,
        facts=tuple(_facts(contest, clusters, source, ledger, error)),
        clusters=tuple(results),
        length_bins=tuple(
            LengthBin(low=bin.low, high=bin.high, num_sequences=bin.num_sequences, num_tokens=bin.num_tokens)
            for bin in histogram(contest.lengths.lengths, edges=_BIN_EDGES)
        ),
        settings={
            "not_priced": contest.model.unpriced or None,
            "speed_error": error.of_times if error else None,
            "profile": contest.profile and contest.profile.path,
            "dtype": contest.dtype,
            "seed": contest.seed,
            "jitter": contest.simulation.jitter,
            "overlap": contest.overlap,
            "search_space": {
                "max_degree": contest.search_space.max_degree,
                "max_stages": contest.search_space.max_stages,
                "methods": [str(method) for method in contest.search_space.methods or DEFAULT_METHODS],
                "recompute": str(contest.search_space.recompute),
                "offload": str(contest.search_space.offload),
                "shard_gradients": str(contest.search_space.shard_gradients),
                "zero_bubble": str(contest.search_space.zero_bubble),
                "slices": str(contest.search_space.slices),
                "local_sequences": contest.search_space.local_sequences,
            },
            "ledger": ledger.to_json(),
        },
    )


def write_page(comparison: Comparison, path: Path) -> None:
    """Write the page with charts and where its numbers come from, whole or not at all."""
    from lengthwise.report.pages.compare_page import render_comparison
    from lengthwise.report.pages.run_text import start_facts
    from lengthwise.report.whole_file import write_whole

    page = replace(comparison, facts=(*comparison.facts, *start_facts(provenance())))
    write_whole({path: render_comparison(page).encode()})


def ledger_words(ledger: LengthLedger) -> str:
    """What became of sequences over the limit, in words."""
    return ledger.in_words or "every token of every sequence is kept"


def _facts(
    contest: PolicyComparison,
    clusters: Sequence[ClusterSpec],
    source: str,
    ledger: LengthLedger,
    error: CostError | None,
) -> Iterator[tuple[str, str]]:
    """What was asked, in words."""
    lengths, search_space, device = contest.lengths, contest.search_space, clusters[0].device
    limits = [
        f"{name} at most {limit}"
        for name, limit in (("degree", search_space.max_degree), ("stages", search_space.max_stages))
        if limit is not None
    ]
    yield "Model", f"{contest.model.name}, {compact(contest.model.num_params)} parameters, {contest.dtype}"
    if contest.model.unpriced:
        yield "Not priced", contest.model.unpriced
    names = dict.fromkeys(cluster.name for cluster in clusters)
    yield "Clusters", f"{', '.join(names)}, {device.memory_in_words} a device"
    yield "Costs", contest.profile.in_words(error) if contest.profile else device.error_in_words
    yield "Lengths", f"{source}: {counted(len(lengths), 'sequence')}, {counted(lengths.num_tokens, 'token')}"
    yield "Longest", f"{lengths.max_length:,} tokens; {ledger_words(ledger)}"
    schemes = [*map(str, search_space.methods or DEFAULT_METHODS), f"recompute {search_space.recompute}"]
    schemes += [f"offload {search_space.offload}", f"sharded gradients {search_space.shard_gradients}"]
    schemes += [f"zero bubble {search_space.zero_bubble}", f"slices {search_space.slices}", *limits]
    yield "Schemes", ", ".join(schemes)
    yield "Steps", f"{contest.num_steps} global batches, the same for every policy (seed {contest.seed})"
    if contest.overlap is not None:
        yield (
            "Overlap",
            f"{contest.overlap:.0%} of every update runs beneath computation, as far as passes are long enough",
        )
    if contest.simulation.in_words:
        yield "Simulated with", contest.simulation.in_words
    for name in contest.policies:
        yield name, POLICIES.get(name, "a policy of your own")


def _ignore(cluster: ClusterSpec, policy: str, num_done: int) -> None:
    """Where nobody watches the progress."""
