"""``lengthwise analyze``: one number for every sequence of an index, to order a training by."""

import os
import sys
import tempfile
import traceback
from enum import StrEnum
from filecmp import cmp
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lengthwise.cli.launch import RUN_FOLDER_VARIABLE, check_torch, is_rank, torchrun
from lengthwise.core.errors import LengthwiseError
from lengthwise.core.run_folder import RunFolder
from lengthwise.session.console import emit_json, progress, stderr, stdout

if TYPE_CHECKING:
    from lengthwise.index.store import TokenStore
    from lengthwise.runtime.analyze.request import AnalysisRequest

_KEPT = "finished blocks are kept: run the same command again to go on, also with another --nproc"
_OUTCOME = "outcome.json"


class ComputeDtype(StrEnum):
    """Choices of --dtype."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT64 = "float64"


class ComputeDevice(StrEnum):
    """Choices of --device."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


Index = Annotated[Path, typer.Argument(metavar="INDEX", help="A folder made by `lengthwise index`.")]
MetricName = Annotated[
    str,
    typer.Option(
        metavar="length|loss=FOLDER|MODULE:FUNCTION",
        help="The length; the mean loss under the model of a Hugging Face folder or of one of our runs; or your own "
        "function f(tokens, id) -> float, imported from the current folder.",
    ),
]
Name = Annotated[str | None, typer.Option(help="What to save it as; default: length, loss, or the function's name.")]
Nproc = Annotated[int, typer.Option(min=1, help="Ranks on this machine. The result does not depend on it.")]
MaxLength = Annotated[int | None, typer.Option(min=1, help="Longest sequence the model is given; default: any.")]
Truncate = Annotated[
    bool, typer.Option("--truncate", help="Score the first --max-length tokens of longer ones; else they are refused.")
]
MaxTokens = Annotated[
    int | None, typer.Option(min=1, help="Most tokens in one forward; a longer sequence goes alone. Default: 16,384.")
]
Dtype = Annotated[ComputeDtype, typer.Option(help="What the model computes in.")]
Device = Annotated[ComputeDevice, typer.Option(help="Where; auto: on GPUs where there are any.")]
Restart = Annotated[bool, typer.Option("--restart", help="Replace a metric of that name, finished or not.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]


def run(
    index: Index,
    metric: MetricName,
    name: Name = None,
    nproc: Nproc = 1,
    max_length: MaxLength = None,
    truncate: Truncate = False,
    max_tokens: MaxTokens = None,
    dtype: Dtype = ComputeDtype.FLOAT32,
    device: Device = ComputeDevice.AUTO,
    restart: Restart = False,
    json: Json = False,
) -> None:
    """Make the metric, or go on with an interrupted analysis, and show what came out."""
    from lengthwise.index.store import open_index
    from lengthwise.runtime.analyze.request import MAX_TOKENS, AnalysisRequest, parse_metric

    kind, target, usual_name = parse_metric(metric)
    request = AnalysisRequest(
        kind=kind,
        target=target,
        name=name or usual_name,
        max_length=max_length,
        truncate=truncate,
        max_tokens=max_tokens or MAX_TOKENS,
        dtype=dtype.value,
    )
    store = open_index(index)
    if is_rank():
        _analyze_as_rank(request, store, device=device.value, restart=restart, json=json)
        return
    _warn_of_tokenizer(request, store)
    check_torch()
    try:
        if nproc > 1:
            options = ["--device", device.value, *(["--restart"] if restart else [])]
            outcome = _launch(["analyze", str(index), *_arguments(request), *options], nproc=nproc)
        else:
            outcome = _analyze_alone(request, store, device=device.value, restart=restart)
    except KeyboardInterrupt:
        stderr().print(_KEPT)
        raise
    _show(outcome, json=json)


def _warn_of_tokenizer(request: "AnalysisRequest", store: "TokenStore") -> None:
    """Say so if the model's token ids are not those of the index."""
    models, indexs = (folder / "tokenizer.json" for folder in (Path(request.target), store.path))
    if request.kind == "loss" and models.is_file() and not (indexs.is_file() and cmp(models, indexs, shallow=False)):
        text = f"{request.target} has a tokenizer.json that {store.path} was not made with; losses may mean nothing"
        stderr().print(f"warning: {text}", markup=False, soft_wrap=True)


def _arguments(request: "AnalysisRequest") -> list[str]:
    """Options that ask for ``request``."""
    options = ["--metric", request.metric, "--name", request.name, "--dtype", request.dtype]
    options += ["--max-tokens", str(request.max_tokens)]
    options += [] if request.max_length is None else ["--max-length", str(request.max_length)]
    return options + (["--truncate"] if request.truncate else [])


def _launch(arguments: list[str], *, nproc: int) -> dict[str, Any]:
    """The outcome of the command ``arguments`` run by ``nproc`` ranks.

    Raises:
        LengthwiseError: with the message and exit code of the first rank that failed.
    """
    with tempfile.TemporaryDirectory(prefix="lengthwise-analyze-") as folder:
        ended = torchrun(arguments, nproc=nproc, variables={RUN_FOLDER_VARIABLE: folder})
        reports: list[dict[str, Any]] = [
            RunFolder(Path(folder)).read_json(path.name) for path in sorted(Path(folder).glob("rank_*.json"))
        ]
        if not ended:
            first = reports[0] if reports else {"error": f"{ended.killed or 'a rank died'}; {_KEPT}"}
            error = LengthwiseError(first["error"])
            error.exit_code = int(first.get("exit_code", LengthwiseError.exit_code))
            raise error
        outcome = RunFolder(Path(folder)).read_json(_OUTCOME)
        if not outcome:  # a metric may call os._exit(0)
            raise LengthwiseError(f"the ranks left before the analysis was done; {_KEPT}")
        return outcome


def _analyze_as_rank(
    request: "AnalysisRequest", store: "TokenStore", *, device: str, restart: bool, json: bool
) -> None:
    """Under torchrun. Does not return after an error: peers may be in a collective this rank will never join."""
    from lengthwise.cli.rank_errors import is_first
    from lengthwise.cli.restart import end_with_parent
    from lengthwise.runtime.comm.world import stop_world

    end_with_parent()
    folder = os.environ.get(RUN_FOLDER_VARIABLE)
    try:
        outcome = _analyze(request, store, device=device, restart=restart)
    except Exception as error:
        exit_code, message = LengthwiseError.exit_code, f"{type(error).__name__}: {error}"
        if isinstance(error, LengthwiseError):
            exit_code, message = error.exit_code, str(error)
        else:
            traceback.print_exc()
        if folder:
            name = f"rank_{int(os.environ['RANK']):05d}.json"
            RunFolder(Path(folder)).write_json(name, {"error": message, "exit_code": exit_code})
        elif is_first():
            sys.stderr.write(f"error: {message}\n")
        sys.stderr.flush()
        os._exit(exit_code)
    stop_world()
    if folder and is_first():
        RunFolder(Path(folder)).write_json(_OUTCOME, outcome)
    elif is_first():
        _show(outcome, json=json)


def _analyze_alone(request: "AnalysisRequest", store: "TokenStore", *, device: str, restart: bool) -> dict[str, Any]:
    """In this process."""
    from lengthwise.runtime.comm.world import stop_world

    try:
        return _analyze(request, store, device=device, restart=restart)
    finally:
        stop_world()


def _analyze(request: "AnalysisRequest", store: "TokenStore", *, device: str, restart: bool) -> dict[str, Any]:
    from lengthwise.runtime.analyze.analysis import analyze
    from lengthwise.runtime.comm.activity import told_to_peers
    from lengthwise.runtime.comm.world import start_world

    world = start_world(device)
    count = len(store)
    with told_to_peers(), progress() as bar:
        task = bar.add_task(request.name, total=None, visible=world.is_first)

        def show(sequences: int, tokens: int, total: int) -> None:
            words = f"{request.name}: {sequences:,}/{count:,} sequences, tokens"
            bar.update(task, completed=tokens, total=total, description=words)

        made = analyze(request, store, world, restart=restart, on_progress=show)
    return {
        "index": str(store.path),
        **made.info,
        "up_to_date": made.was_up_to_date,
        "num_resumed_blocks": made.num_resumed_blocks,
    }


def _show(outcome: dict[str, Any], *, json: bool) -> None:
    if json:
        emit_json(outcome)
        return
    log, index, name = stderr(), outcome["index"], outcome["name"]
    if outcome["up_to_date"]:
        log.print(f"metric {name} of {index} is up to date, nothing to do", markup=False, soft_wrap=True)
    elif outcome["num_resumed_blocks"]:
        kept_text = f"{outcome['num_resumed_blocks']:,} of {outcome['num_blocks']:,} blocks were kept"
        log.print(f"went on with an interrupted analysis: {kept_text}")
    middle = {share: outcome["quantiles"][share] for share in ("p5", "p25", "p50", "p75", "p95")}
    shown = {"min": outcome["min"], **middle, "max": outcome["max"], "mean": outcome["mean"]}
    console = stdout()
    console.print(
        f"{index}: {name} of {outcome['num_sequences']:,} sequences ({outcome['metric']})", markup=False, soft_wrap=True
    )
    console.print("  ".join(f"{word} {_number(value)}" for word, value in shown.items()), soft_wrap=True)
    console.print(_correlation(outcome["correlation_with_length"]), soft_wrap=True)
    settings = f"data.index={index} data.order=curriculum data.metric={name}"
    log.print(f"next: lengthwise train {settings}", markup=False, soft_wrap=True)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"


def _correlation(found: dict[str, float | None]) -> str:
    if found["spearman"] is None or found["pearson"] is None:
        return "correlation with length: none, as one of them is the same for all sequences"
    return f"correlation with length: {found['spearman']:+.2f} by rank, {found['pearson']:+.2f} linear"
