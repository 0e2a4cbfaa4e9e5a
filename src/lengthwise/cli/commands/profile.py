"""`lengthwise profile`: measure a model here, fit its cost, and say how well the fit holds."""

from pathlib import Path
from typing import Annotated

import typer

from lengthwise.cli.launch import check_rank_options, check_torch, is_rank, speaks_for_all, split_arguments, torchrun
from lengthwise.cli.shared_options import Json, Methods, tokens_from
from lengthwise.cli.tables.profile_table import accuracy_document, print_accuracy, print_profile, profile_document
from lengthwise.core.atomic_write import is_stream, make_folder, remove_empty, shown
from lengthwise.core.cost import ProfileTable
from lengthwise.core.errors import InputError, LengthwiseError
from lengthwise.session.console import emit_json
from lengthwise.session.planning_args import parse_methods
from lengthwise.session.profile_model import errors_on_unseen_rows, learned_accuracy, measure_as_rank, packs_to_measure

_TOKENS = tokens_from(32, 1 << 32)


def run(
    config: Annotated[Path | None, typer.Argument(help="YAML; print one with: lengthwise config")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value ...")] = None,
    out: Annotated[Path, typer.Option(help="file to write")] = Path("profile.json"),
    nproc: Annotated[
        int | None,
        typer.Option(min=1, max=1024, help="ranks that measure, as many as will train; default: --degree, or 1"),
    ] = None,
    methods: Methods = None,
    degree: Annotated[int | None, typer.Option(min=1, max=1024, help="exactly so many ranks share a layer")] = None,
    max_degree: Annotated[
        int | None, typer.Option(min=1, max=1024, help="most ranks that share a micro-batch; default: all of --nproc")
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="lengths to measure, or quantiles:N of the data's; default: doublings"),
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(parser=_TOKENS, metavar="TOKENS", help="longest sequence; default: the data's")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(parser=_TOKENS, metavar="TOKENS", help="most tokens of a pack; default: max length")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, max=10_000, help="measurements of each pack")] = 5,
    leave_out: Annotated[bool, typer.Option("--leave-out", help="errors of each cost model on unseen rows")] = False,
    as_json: Json = False,
) -> None:
    """Measure micro-batches and both parts of a layer over a ladder of lengths; fit T = a l^2 + b l + c."""
    from lengthwise.config.run_config import load
    from lengthwise.cost.profiled.fitted import fit

    check_rank_options(nproc)
    path, changes = split_arguments(config, overrides)
    changes += [f"plan.methods=[{','.join(chosen)}]"] if (chosen := parse_methods(methods)) else []
    changes += [f"plan.degree={degree}"] if degree else []
    resolved = load(path, changes)
    nproc = nproc or resolved.plan.degree or 1
    _check_out(out)
    packs = packs_to_measure(resolved, lengths, max_length=max_length, max_tokens=max_tokens)
    if is_rank():
        measure_as_rank(resolved, out, packs=packs, repeats=repeats, max_degree=max_degree)
        if not speaks_for_all():
            return
    else:
        options = {"lengths": lengths, "max-length": max_length, "max-tokens": max_tokens, "max-degree": max_degree}
        arguments = [*([str(path)] if path else []), *changes, "--repeats", str(repeats)]
        arguments += [f"--{name}={value}" for name, value in options.items() if value is not None]
        _measure_with_ranks(out, arguments, nproc=nproc)
    table = ProfileTable.load(out)
    unseen = errors_on_unseen_rows(resolved, table) if leave_out else ()
    if as_json:
        emit_json(profile_document(table, fit(table), out, unseen) | accuracy_document(*learned_accuracy(table)))
    else:
        print_profile(table, fit(table), out, unseen)
        print_accuracy(*learned_accuracy(table))


def _measure_with_ranks(out: Path, arguments: list[str], *, nproc: int) -> None:
    """Start ranks that write the profile; raise ``LengthwiseError`` if they fail."""
    if out.is_dir():
        raise InputError(f"--out {shown(out)} is a folder; name a file in it")
    check_torch()
    made = make_folder(out.parent, setting="--out in")
    if not (ended := torchrun(["profile", *arguments, "--out", str(out)], nproc=nproc)):
        remove_empty(made)
        raise LengthwiseError(f"profiling failed: {ended.killed or 'see the messages above'}")


def _check_out(out: Path) -> None:
    """Raise ``InputError`` if no profile can be written there, and read again."""
    from lengthwise.report.whole_file import check_place

    if is_stream(out):
        raise InputError(f"--out {shown(out)} is a device or pipe, and a profile is read again; name a file")
    check_place(out if out.is_dir() or out.parent.is_dir() else None, "--out")
