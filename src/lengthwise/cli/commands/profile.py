"""`lengthwise profile`: measure a model here, fit its cost, and say how well the fit holds."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lengthwise.cli.launch import check_torch, is_rank, split_arguments, torchrun
from lengthwise.core.atomic_write import make_folder, remove_empty, shown
from lengthwise.core.cost import ProfileTable
from lengthwise.core.errors import InputError, LengthwiseError
from lengthwise.data.corpus import open_corpus
from lengthwise.session.console import emit_json, progress, stdout

if TYPE_CHECKING:
    from lengthwise.config.run_config import Config
    from lengthwise.cost.profiled.accuracy import ModelErrors
    from lengthwise.cost.profiled.fitted import Fit

DEFAULT_MAX_LENGTH = 4096
"""Where neither the option nor the data says how long sequences get."""


def run(
    config: Annotated[Path | None, typer.Argument(help="YAML; print one with: lengthwise config")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value ...")] = None,
    out: Annotated[Path, typer.Option(help="file to write")] = Path("profile.json"),
    nproc: Annotated[int, typer.Option(min=1, max=1024, help="ranks that measure at once; as many as will train")] = 1,
    max_length: Annotated[
        int | None, typer.Option(min=32, max=1 << 32, help="longest sequence; default: the data's")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=32, max=1 << 32, help="most tokens of a pack; default: max length")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, max=10_000, help="measurements of each pack")] = 5,
    leave_out: Annotated[
        bool, typer.Option("--leave-out", help="how well each cost model predicts unseen rows")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON document on stdout")] = False,
) -> None:
    """Measure micro-batches over a ladder of lengths and fit T = a l^2 + b l + c."""
    from lengthwise.config.run_config import load
    from lengthwise.cost.profiled.fitted import fit
    from lengthwise.report.whole_file import check_place

    path, changes = split_arguments(config, overrides)
    resolved = load(path, changes)
    check_place(out if out.is_dir() or out.parent.is_dir() else None, "--out")
    longest = max_length or _longest(resolved)
    if is_rank():
        _measure(resolved, out, longest=longest, max_tokens=max_tokens or longest, repeats=repeats)
        return
    if out.is_dir():
        raise InputError(f"--out {shown(out)} is a folder; name a file in it")
    check_torch()
    made = make_folder(out.parent, setting="--out in")
    sizes = ["--max-length", str(longest), "--max-tokens", str(max_tokens or longest), "--repeats", str(repeats)]
    arguments = ["profile", *([str(path)] if path else []), *changes, "--out", str(out), *sizes]
    ended = torchrun(arguments, nproc=nproc)
    if not ended:
        remove_empty(made)
        raise LengthwiseError(f"profiling failed: {ended.killed or 'see the messages above'}")
    table = ProfileTable.load(out)
    accuracies = _leave_out(resolved, table) if leave_out else ()
    if as_json:
        errors = {accuracy.name: {"median": accuracy.median, "worst": accuracy.worst} for accuracy in accuracies}
        emit_json({**_document(table, fit(table), out), **({"leave_out": errors} if accuracies else {})})
    else:
        _print(table, fit(table), out)
        for accuracy in accuracies:
            stdout().print(
                f"rows it has not seen, {accuracy.name}: off by {accuracy.median:.1%} (median), "
                f"{accuracy.worst:.1%} (worst)"
            )


def _longest(config: "Config") -> int:
    if config.data.max_length:
        return config.data.max_length
    return open_corpus(config.data).lengths.max_length if _has_corpus(config) else DEFAULT_MAX_LENGTH


def _has_corpus(config: "Config") -> bool:
    return bool(config.data.index or config.data.mixture)


def _leave_out(config: "Config", table: ProfileTable) -> tuple["ModelErrors", ...]:
    from lengthwise.core.specs import cluster_preset
    from lengthwise.cost.profiled.accuracy import leave_out_errors
    from lengthwise.session.planning import resolve_cluster, resolve_model

    spec = resolve_model(config, open_corpus(config.data) if _has_corpus(config) else None)
    on_cpu = table.device.startswith("cpu") and not config.cluster.name
    cluster = cluster_preset(f"{table.num_ranks}xcpu") if on_cpu else resolve_cluster(config)
    return leave_out_errors(table, model=spec, cluster=cluster)


def _measure(config: "Config", out: Path, *, longest: int, max_tokens: int, repeats: int) -> None:
    from lengthwise.cli.worker import build
    from lengthwise.runtime.comm.activity import told_to_peers
    from lengthwise.runtime.comm.world import start_world, stop_world
    from lengthwise.runtime.profile.measure import ladder, num_measurements, profile
    from lengthwise.session.planning import resolve_model

    spec = resolve_model(config, open_corpus(config.data) if _has_corpus(config) else None)
    world = start_world(config.train.device, timeout_s=config.train.timeout_s)
    packs = ladder(longest, max_tokens)
    with told_to_peers(), progress() as bar:
        task = bar.add_task("profile", total=num_measurements(packs, repeats), visible=world.is_first)
        table = profile(
            build(config, spec, world),
            spec,
            world,
            packs=packs,
            recompute=config.plan.recompute == "all",
            repeats=repeats,
            on_row=lambda: bar.advance(task),
        )
    if world.is_first:
        out.parent.mkdir(parents=True, exist_ok=True)
        table.save(out)
    stop_world(world)


def _document(table: ProfileTable, fitted: "Fit", out: Path) -> dict:
    return {
        "profile": str(out),
        "model": table.model_name,
        "device": table.device,
        "dtype": table.dtype,
        "num_ranks": table.num_ranks,
        "update_s": table.update_s,
        "a_s": fitted.a_s,
        "b_s": fitted.b_s,
        "c_s": fitted.c_s,
        "bytes_per_token": fitted.bytes_per_token,
        "median_error": fitted.median_error,
        "rows": [
            {"lengths": row.lengths, "time_s": row.time_s, "kept_bytes": row.kept_bytes, "residual": residual}
            for row, residual in zip(table.rows, fitted.time_residuals)
        ],
    }


def _print(table: ProfileTable, fitted: "Fit", out: Path) -> None:
    from rich.table import Table

    shown = Table(title=f"{table.model_name} on {table.num_ranks} x {table.device}, {table.dtype}")
    for heading in ("pack", "time", "+-", "fit error", "kept"):
        shown.add_column(heading, justify="left" if heading == "pack" else "right")
    for row, residual in zip(table.rows, fitted.time_residuals):
        shown.add_row(
            pack_name(row.lengths), f"{row.time_s * 1e3:,.1f} ms", f"{row.spread_s / row.time_s:.0%}",
            f"{residual:+.1%}", f"{row.kept_bytes / 2**20:,.1f} MiB",
        )  # fmt: skip
    console = stdout()
    console.print(shown)
    console.print(
        f"T = {fitted.a_s:.3g} s l^2 + {fitted.b_s:.3g} s l per sequence + {fitted.c_s:.3g} s per micro-batch; "
        f"{fitted.bytes_per_token / 1024:,.1f} KiB per token; update {table.update_s * 1e3:.1f} ms; "
        f"median fit error {fitted.median_error:.1%}. Written to {out}",
        soft_wrap=True,
    )


def pack_name(lengths: tuple[int, ...]) -> str:
    """Runs of equal lengths, such as ``1 x 4,096 + 8 x 512``."""
    runs: list[list[int]] = []
    for length in lengths:
        if runs and runs[-1][1] == length:
            runs[-1][0] += 1
        else:
            runs.append([1, length])
    return " + ".join(f"{count} x {length:,}" for count, length in runs)
