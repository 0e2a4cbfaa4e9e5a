"""`lengthwise compare`: what every policy would make of some lengths, a model and a cluster; needs no torch."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lengthwise.cli import compare_options as its
from lengthwise.cli import shared_options as shared
from lengthwise.core.errors import InputError
from lengthwise.plan.space.search_space import RecomputeMode
from lengthwise.report.whole_file import check_place
from lengthwise.session.console import stderr
from lengthwise.session.planning_args import COMMAND_LINE, clusters_of, split_names
from lengthwise.sim.sim_options import SimOptions

if TYPE_CHECKING:
    from lengthwise.core.specs import ClusterSpec
    from lengthwise.session.compare_policies import PolicyComparison
    from lengthwise.session.sweep import SweepPoint


def run(
    model: shared.ModelName,
    device: shared.DeviceName,
    gpus: its.Gpus,
    lengths: its.Lengths = None,
    reach: its.Reach = False,
    max_length: its.MaxLength = None,
    over_length: its.OverLengthOption = None,
    tokens_per_step: its.TokensPerStep = None,
    network: its.Network = None,
    link: its.Link = None,
    tokens: its.Tokens = None,
    price_per_hour: its.PricePerHour = None,
    profile: its.ProfilePath = None,
    jitter: its.Jitter = 0.0,
    overlap: its.Overlap = None,
    steps: its.Steps = None,
    policies: its.Policies = None,
    hbm: shared.MemoryGib = None,
    memory_margin: shared.MemoryMargin = None,
    devices_per_node: shared.DevicesPerNode = None,
    max_degree: shared.MaxDegree = None,
    max_stages: shared.MaxStages = None,
    methods: shared.Methods = None,
    recompute: its.Recompute = RecomputeMode.AUTO,
    offload: shared.OffloadOption = shared.OffloadChoice.AUTO,
    shard_gradients: its.ShardGradients = its.GradientSharding.AUTO,
    zero_bubble: its.ZeroBubbleOption = its.ZeroBubble.AUTO,
    slices: its.SlicesOption = its.Slices.AUTO,
    host_memory: shared.HostMemoryGib = None,
    dtype: shared.DtypeOption = shared.Dtype.BFLOAT16,
    seed: its.Seed = 0,
    html: its.Html = None,
    json: shared.Json = False,
) -> None:
    """Plan and simulate the same global batches under every policy."""
    from lengthwise.cli.tables.compare_table import compare_with_progress, show_comparison
    from lengthwise.cli.tables.reach_table import show_reach
    from lengthwise.session.compare_lengths import comparison_page
    from lengthwise.session.plan_lengths import comparison_of
    from lengthwise.session.sweep import parse_budget

    memory = {"memory_gib": hbm, "memory_margin": memory_margin, "host_memory_gib": host_memory}
    clusters = clusters_of(device, gpus, devices_per_node=devices_per_node, **memory)
    budget: dict[str, Any] = {"tokens": tokens, "price_per_hour": price_per_hour}
    source = _source(lengths, reach=reach, html=html, **budget, steps=steps, over_length=over_length)
    contest, ledger = comparison_of(
        source, model=model, policies=_names(policies), steps=steps or its.DEFAULT_STEPS, spelling=COMMAND_LINE,
        max_length=max_length, over_length=(over_length or its.OverLength.SPLIT).value, max_degree=max_degree,
        max_stages=max_stages, methods=_names(methods), recompute=recompute.value, offload=offload.value,
        shard_gradients=shard_gradients.value, seed=seed, zero_bubble=zero_bubble.value, slices=slices.value,
        dtype=dtype.value, profile=profile, overlap=overlap,
    )  # fmt: skip
    points = _points(clusters, tokens_per_step, network, link, contest)
    contest = replace(contest, budget=parse_budget(**budget), simulation=SimOptions(jitter=jitter, seed=seed))
    if reach:
        return show_reach(contest, points, max_length=max_length, json=json)
    results = compare_with_progress(contest, points, with_steps=html is not None)
    page = comparison_page(contest, clusters, results, source=str(source), ledger=ledger)
    show_comparison(page, ledger, html, json=json)


def _names(text: str | None) -> list[str] | None:
    return None if text is None else split_names(text)


def _points(
    clusters: "list[ClusterSpec]",
    tokens_per_step: str | None,
    network: str | None,
    link: str | None,
    contest: "PolicyComparison",
) -> "list[SweepPoint]":
    """The clusters, tokens of a step and links that are compared, from the texts of options."""
    from lengthwise.session.sweep import parse_rates, parse_token_counts, sweep_points

    sizes, longest = parse_token_counts(tokens_per_step, "--tokens-per-step"), contest.lengths.max_length
    if sizes and min(sizes) < longest:
        stderr().print(
            f"warning: --tokens-per-step {min(sizes):,} is less than the longest sequence has, {longest:,} tokens: "
            "each sequence over it is a step by itself",
            soft_wrap=True,
        )
    networks, links = parse_rates(network, "--network", unit="Gbit/s"), parse_rates(link, "--link", unit="Gbyte/s")
    return sweep_points(clusters, sizes, COMMAND_LINE, networks=networks, links=links, profile=contest.profile)


def _source(lengths: str | None, *, reach: bool, html: Path | None, **of_lengths: object) -> str | list[int]:
    """Where lengths come from; for --reach any, as it makes its own, and none of the options ``of_lengths`` is for it.
    A page is looked for a place first.
    """
    check_place(html, "--html")
    if reach == (lengths is not None):
        raise InputError("give --lengths, or --reach for the speed over the length of sequences; one of them, not both")
    if lengths is not None:
        return lengths
    for name, value in {"html": html, **of_lengths}.items():
        if value is not None:
            option = f"--{name.replace('_', '-')}"
            raise InputError(f"{option} is for the lengths of a training, not for --reach; leave it out")
    return [1]
