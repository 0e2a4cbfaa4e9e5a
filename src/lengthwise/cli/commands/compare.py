"""`lengthwise compare`: what every policy would make of some lengths, a model and a cluster; needs no torch."""

from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lengthwise.cli.shared_options import (
    MAX_SEED,
    MAX_TOKENS,
    DeviceName,
    DevicesPerNode,
    Dtype,
    DtypeOption,
    Json,
    MaxDegree,
    MaxStages,
    MemoryGib,
    Methods,
    ModelName,
)  # fmt: skip
from lengthwise.core.errors import InfeasibleError, InputError
from lengthwise.core.specs import GIB, ClusterSpec, model_preset
from lengthwise.data.max_length import CorpusView, LengthLedger, apply_max_length
from lengthwise.plan.policies import POLICIES
from lengthwise.plan.space.search_space import RecomputeMode, SearchSpace
from lengthwise.session.console import emit_json, progress, stdout
from lengthwise.session.planning_args import make_cluster, open_source, parse_counts, parse_methods, parse_names

if TYPE_CHECKING:
    from lengthwise.report.pages.compare_results import ClusterResult
    from lengthwise.session.compare_policies import PolicyComparison

TOKENS_PER_DEVICE = 200_000 / 64
"""Of a global batch by default: Hydraulis' 200K tokens on 64 devices, 3.2M on 1024."""


MOST_DEVICES = 1024
"""All ten policies plan a step of so many devices in a quarter of a minute of processor time; of more, in minutes."""


class OverLength(StrEnum):
    """Choices of --over-length."""

    DROP = "drop"
    TRUNCATE = "truncate"
    SPLIT = "split"
    ERROR = "error"


def run(
    lengths: Annotated[
        str, typer.Option(metavar="FILE.npy|INDEX|NAME", help="Lengths in tokens; NAME: such as commoncrawl.")
    ],
    model: ModelName,
    device: DeviceName,
    gpus: Annotated[str, typer.Option(metavar="N[,N...]", help="Devices; several sizes show how policies scale.")],
    max_length: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_TOKENS, metavar="TOKENS", help="Longest sequence trained; default: no limit."),
    ] = None,
    over_length: Annotated[OverLength, typer.Option(help="What becomes of sequences over it.")] = OverLength.SPLIT,
    tokens_per_step: Annotated[
        int | None,
        typer.Option(
            min=1, max=MAX_TOKENS, metavar="TOKENS", help="Of a global batch; default: 3125 a device, or the longest."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, max=10_000, help="Global batches that every policy plans.")] = 8,
    policies: Annotated[str | None, typer.Option(metavar="A,B", help="Only these; default: all.")] = None,
    hbm: MemoryGib = None,
    devices_per_node: DevicesPerNode = 8,
    max_degree: MaxDegree = None,
    max_stages: MaxStages = None,
    methods: Methods = None,
    recompute: Annotated[RecomputeMode, typer.Option(help="Layers that schemes recompute.")] = RecomputeMode.AUTO,
    dtype: DtypeOption = Dtype.BFLOAT16,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Of the order of the sequences.")] = 0,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write a page with charts.")] = None,
    json: Json = False,
) -> None:
    """Plan and simulate the same global batches under every policy."""
    from lengthwise.report.whole_file import check_place
    from lengthwise.session.compare_policies import PolicyComparison

    spec = model_preset(model)
    counts = parse_counts(gpus, "--gpus")
    if max(counts) > MOST_DEVICES:
        raise InputError(
            f"--gpus {max(counts)}: at most {MOST_DEVICES:,} devices are compared, for the time that all policies plan "
            "them grows faster than their number; for more, plan and simulate one policy (lengthwise simulate CONFIG "
            f"plan.policy=NAME cluster.name=NxMx{device})"
        )
    clusters = [make_cluster(device, count, devices_per_node=devices_per_node, memory_gib=hbm) for count in counts]
    names = tuple(parse_names(policies, list(POLICIES), "--policies"))
    pool = SearchSpace(
        max_degree=max_degree, max_stages=max_stages, methods=parse_methods(methods), recompute=recompute,
        head_layers=spec.head_layers,
    )  # fmt: skip
    check_place(html, "--html")
    view = apply_max_length(open_source(lengths, seed=seed), max_length=max_length, rule=over_length.value)
    contest = PolicyComparison(
        model=spec, dtype=dtype.value, pool=pool, policies=names, lengths=view.lengths, num_steps=steps, seed=seed
    )
    budgets = [_budget(cluster, tokens_per_step, view) for cluster in clusters]
    results = _play(contest, clusters, budgets, with_steps=html is not None)
    if html is not None:
        _write_page(html, contest, clusters, lengths, view.ledger, results)
    if json:
        documents = [result.to_json() for result in results]
        about = _about(contest, lengths, view.ledger)
        emit_json({**(documents[0] if len(documents) == 1 else {}), "clusters": documents, **about})
    else:
        _print(results, view.ledger, html)


def _budget(cluster: ClusterSpec, wanted: int | None, view: CorpusView) -> int:
    return wanted or max(round(TOKENS_PER_DEVICE * cluster.num_devices), view.lengths.max_length)


def _play(
    contest: "PolicyComparison", clusters: list[ClusterSpec], budgets: list[int], *, with_steps: bool
) -> list["ClusterResult"]:
    """Results by cluster; timelines of the first alone, which a page can hold.

    Raises:
        InfeasibleError: no policy can run on any of them.
    """
    results: list[ClusterResult] = []
    entries = [contest.enter(cluster, tokens_per_step=tokens) for cluster, tokens in zip(clusters, budgets)]
    with contest.ahead(entries), progress() as bar:
        task = bar.add_task("plan", total=len(clusters) * len(contest.policies) * contest.num_steps)
        for entry in entries:

            def hear(policy: str, num_done: int, size: int = entry.cluster.num_devices) -> None:
                bar.update(task, advance=num_done, description=f"{size} devices, {policy}")

            is_first = not any(result.ranked for result in results)
            results.append(contest.run(entry, with_steps=with_steps and is_first, on_step=hear))
    if not any(result.ranked for result in results):
        raise InfeasibleError(results[-1].policies[0].refused)
    return results


def _about(contest: "PolicyComparison", source: str, ledger: LengthLedger) -> dict[str, Any]:
    return {
        "model": contest.model.name,
        "lengths": source,
        "num_steps": contest.num_steps,
        "dtype": contest.dtype,
        "seed": contest.seed,
        "ledger": ledger.to_json(),
    }


def _print(results: list["ClusterResult"], ledger: LengthLedger, html: Path | None) -> None:
    from lengthwise.report.pages.compare_results import headline

    console = stdout()
    for result in results:
        console.print(
            f"{result.cluster}, {result.tokens_per_step:,} tokens a step on average, {_ledger_words(ledger)}",
            soft_wrap=True,
        )
        if result.ranked:
            console.print(_table(result))
            console.print(headline(result), soft_wrap=True)
        for why, names in result.refusals.items():
            console.print(f"{', '.join(names)}: refused: {why}", soft_wrap=True)
        console.print()
    console.print("simulated on an analytic cost model, not measured")
    if html is not None:
        console.print(f"page: {html}", soft_wrap=True)


def _table(result: "ClusterResult") -> Any:
    """Policies that can run, the fastest first, in eighty columns."""
    from rich.table import Table

    from lengthwise.report.pages.compare_results import row

    shown = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    headings = ("policy", "tokens/s", "static", "step", "idle", "bubble", "padding", "gap", "peak", "plan")
    for heading in headings:
        shown.add_column(heading, justify="left" if heading == "policy" else "right", no_wrap=True)
    for one in result.ranked:
        shown.add_row(*row(result, one))
    return shown


def _ledger_words(ledger: LengthLedger) -> str:
    if not (ledger.dropped or ledger.truncated or ledger.split):
        return "every token of every sequence is kept"
    return {
        "drop": f"{ledger.dropped:,} sequences ({ledger.tokens_dropped:,} tokens) over {ledger.max_length:,} left out",
        "truncate": f"{ledger.truncated:,} sequences cut at {ledger.max_length:,}, losing {ledger.tokens_cut:,} tokens",
        "split": f"{ledger.split:,} sequences over {ledger.max_length:,} split into {ledger.pieces:,} pieces",
    }.get(ledger.rule, "")


def _write_page(
    html: Path, contest: "PolicyComparison", clusters: list[ClusterSpec], source: str, ledger: LengthLedger,
    results: list["ClusterResult"],
) -> None:  # fmt: skip
    from lengthwise.data.length_stats import histogram
    from lengthwise.report.charts.histogram import LengthBin
    from lengthwise.report.pages.compare_page import render_comparison
    from lengthwise.report.pages.compare_results import Comparison
    from lengthwise.report.whole_file import write_whole

    edges = tuple(1 << power for power in range(7, 21))
    bins = histogram(contest.lengths.lengths, edges=edges)
    comparison = Comparison(
        model=contest.model.name,
        device=clusters[0].device.name,
        source=source,
        num_steps=contest.num_steps,
        facts=tuple(_facts(contest, clusters, source, ledger)),
        clusters=tuple(results),
        length_bins=tuple(
            LengthBin(low=one.low, high=one.high, num_sequences=one.num_sequences, num_tokens=one.num_tokens)
            for one in bins
        ),
    )
    write_whole({html: render_comparison(comparison).encode()})


def _facts(
    contest: "PolicyComparison", clusters: list[ClusterSpec], source: str, ledger: LengthLedger
) -> Iterator[tuple[str, str]]:
    """What was asked, in words."""
    from lengthwise.report.units import compact

    lengths, pool, device = contest.lengths, contest.pool, clusters[0].device
    limits = [
        f"{name} at most {limit}"
        for name, limit in (("degree", pool.max_degree), ("stages", pool.max_stages))
        if limit is not None
    ]
    yield "Model", f"{contest.model.name}, {compact(contest.model.num_params)} parameters, {contest.dtype}"
    yield "Clusters", f"{', '.join(cluster.name for cluster in clusters)}, {device.memory_bytes / GIB:g} GiB a device"
    yield "Lengths", f"{source}: {len(lengths):,} sequences, {lengths.num_tokens:,} tokens"
    yield "Longest", f"{lengths.max_length:,} tokens; {_ledger_words(ledger)}"
    yield "Schemes", ", ".join([*map(str, pool.methods), f"recompute {pool.recompute}", *limits])
    yield "Steps", f"{contest.num_steps} global batches, the same for every policy (seed {contest.seed})"
    for name in contest.policies:
        yield name, POLICIES[name]
