"""Ranks of `lengthwise analyze`: started here, or one of those that torchrun started."""

import os
import signal
import sys
import tempfile
import traceback
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lengthwise.cli.launch import RUN_FOLDER_VARIABLE, torchrun
from lengthwise.core.errors import LengthwiseError
from lengthwise.core.run_folder import RunFolder
from lengthwise.session.console import stderr

if TYPE_CHECKING:
    from lengthwise.index.store import TokenStore
    from lengthwise.runtime.analyze.request import AnalysisRequest

KEPT = "finished blocks are kept: run the same command again to go on, also with another --nproc"
_OUTCOME = "outcome.json"


def _arguments_of(request: "AnalysisRequest") -> list[str]:
    """Options that ask for ``request``."""
    options = ["--metric", request.metric, "--name", request.name, "--dtype", request.dtype]
    options += ["--max-tokens", str(request.max_tokens)]
    options += [] if request.max_length is None else ["--max-length", str(request.max_length)]
    return options + (["--truncate"] if request.truncate else [])


def _analyze_on_ranks(arguments: list[str], *, nproc: int) -> dict[str, Any]:
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
            first = reports[0] if reports else {"error": f"{ended.killed or 'a rank died'}; {KEPT}"}
            error = LengthwiseError(first["error"])
            error.exit_code = int(first.get("exit_code", LengthwiseError.exit_code))
            raise error
        outcome = RunFolder(Path(folder)).read_json(_OUTCOME)
        if not outcome:  # a metric may call os._exit(0)
            raise LengthwiseError(f"the ranks left before the analysis was done; {KEPT}")
        return outcome


def analyze_as_rank(request: "AnalysisRequest", store: "TokenStore", *, device: str, restart: bool, json: bool) -> None:
    """Analyze as one rank under torchrun.

    Does not return after an error: peers may be in a collective this rank will never join.
    """
    from lengthwise.cli.rank_errors import is_first
    from lengthwise.cli.restart import end_with_parent
    from lengthwise.cli.tables.analysis_table import print_analysis
    from lengthwise.runtime.comm.world import stop_world
    from lengthwise.session.analyze_index import analyze_index

    end_with_parent(partial(os.kill, os.getpid(), signal.SIGTERM))
    folder = os.environ.get(RUN_FOLDER_VARIABLE)
    try:
        outcome = analyze_index(request, store, device=device, restart=restart)
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
        print_analysis(outcome, json=json)


def analyze_from_here(
    request: "AnalysisRequest", store: "TokenStore", *, nproc: int, device: str, restart: bool
) -> dict[str, Any]:
    """Analyze in this process, or on ``nproc`` ranks that are started, and return the figures of the metric."""
    from lengthwise.runtime.comm.world import stop_world
    from lengthwise.session.analyze_index import analyze_index, foreign_tokenizer

    if warning := foreign_tokenizer(request, store):
        stderr().print(f"warning: {warning}", soft_wrap=True)
    try:
        if nproc == 1:
            return analyze_index(request, store, device=device, restart=restart)
        options = ["--device", device, *(["--restart"] if restart else [])]
        return _analyze_on_ranks(["analyze", str(store.path), *_arguments_of(request), *options], nproc=nproc)
    except KeyboardInterrupt:
        stderr().print(KEPT)
        raise
    finally:
        if nproc == 1:
            stop_world()
