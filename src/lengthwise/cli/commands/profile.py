"""`lengthwise profile`: measure a model here, fit its cost, and say how well the fit holds."""

from pathlib import Path
from typing import Annotated

import typer

from lengthwise.cli.launch import check_torch, is_rank, split_arguments, torchrun
from lengthwise.cli.shared_options import tokens_from
from lengthwise.cli.tables.profile_table import print_profile, profile_document
from lengthwise.core.atomic_write import make_folder, remove_empty, shown
from lengthwise.core.cost import ProfileTable
from lengthwise.core.errors import InputError, LengthwiseError
from lengthwise.session.console import emit_json
from lengthwise.session.profile_model import errors_on_unseen_rows, longest_sequence, measure_as_rank

_TOKENS = tokens_from(32, 1 << 32)


def run(
    config: Annotated[Path | None, typer.Argument(help="YAML; print one with: lengthwise config")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value ...")] = None,
    out: Annotated[Path, typer.Option(help="file to write")] = Path("profile.json"),
    nproc: Annotated[int, typer.Option(min=1, max=1024, help="ranks that measure at once; as many as will train")] = 1,
    max_length: Annotated[
        int | None, typer.Option(parser=_TOKENS, metavar="TOKENS", help="longest sequence; default: the data's")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(parser=_TOKENS, metavar="TOKENS", help="most tokens of a pack; default: max length")
    ] = None,
    max_degree: Annotated[
        int | None, typer.Option(min=1, max=1024, help="most ranks that share a micro-batch; default: all of --nproc")
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
    longest = max_length or longest_sequence(resolved)
    if is_rank():
        measure_as_rank(
            resolved, out, longest=longest, max_tokens=max_tokens or longest, repeats=repeats, max_degree=max_degree
        )
        return
    if out.is_dir():
        raise InputError(f"--out {shown(out)} is a folder; name a file in it")
    check_torch()
    made = make_folder(out.parent, setting="--out in")
    sizes = ["--max-length", str(longest), "--max-tokens", str(max_tokens or longest), "--repeats", str(repeats)]
    sizes += ["--max-degree", str(max_degree or nproc)]
    arguments = ["profile", *([str(path)] if path else []), *changes, "--out", str(out), *sizes]
    ended = torchrun(arguments, nproc=nproc)
    if not ended:
        remove_empty(made)
        raise LengthwiseError(f"profiling failed: {ended.killed or 'see the messages above'}")
    table = ProfileTable.load(out)
    unseen = errors_on_unseen_rows(resolved, table) if leave_out else ()
    if as_json:
        emit_json(profile_document(table, fit(table), out, unseen))
    else:
        print_profile(table, fit(table), out, unseen)
