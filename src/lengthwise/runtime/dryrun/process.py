"""The process of dry runs: reads requests from a file, writes what each rank did in each to another.

python -m lengthwise.runtime.dryrun.process REQUEST RESULT
"""

import gc
import json
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from lengthwise.core.errors import LengthwiseError, first_line
from lengthwise.core.processes import num_cores
from lengthwise.runtime.dryrun.shim import load_shim


def main(request_path: Path, result_path: Path) -> None:
    """Run every rank of every request; an error becomes ``{"error": message, "exit_code": n}``."""
    try:
        load_shim()
        document: dict[str, Any] = {"answers": _run(json.loads(request_path.read_text()))}
    except LengthwiseError as error:
        document = {"error": error.marked, "exit_code": error.exit_code}
    result_path.write_text(json.dumps(document))


def _run(requests: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    from lengthwise.runtime.dryrun import fake_cuda

    fake_cuda.install()
    work = [_work_of(request) for request in requests]
    jobs = [(number, rank) for number, request in enumerate(requests) for rank in request["ranks"]]
    gc.freeze()  # no process looks at what was imported, or copies it
    with ThreadPoolExecutor(min(num_cores(), len(jobs))) as pool:
        pending = [(number, pool.submit(in_own_process, work[number], rank)) for number, rank in jobs]
        rows: list[list[dict[str, Any]]] = [[] for _ in requests]
        for number, row in pending:
            rows[number].append(row.result())
    return rows


def in_own_process(work: Callable[[int], dict[str, Any]], rank: int) -> dict[str, Any]:
    """What ``work`` returns for a rank, in a process of its own: what the runtime caches for a device is of one rank.

    Raises:
        LengthwiseError: what ``work`` raised, of any class, or that the process ended.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as process:
        try:
            return process.submit(_with_plain_errors, work, rank).result()
        except BrokenProcessPool:
            raise LengthwiseError(
                f"rank {rank}: its process ended before the step did, as where the host's memory is not enough; run "
                "fewer ranks or a smaller model"
            ) from None


def _with_plain_errors(work: Callable[[int], dict[str, Any]], rank: int) -> dict[str, Any]:
    try:
        return work(rank)
    except LengthwiseError:
        raise
    except Exception as error:  # some errors of torch cannot be sent to another process
        frames, ours = traceback.extract_tb(error.__traceback__), str(Path(__file__).parent)
        places = [frame for frame in frames if "/torch/" not in frame.filename and ours not in frame.filename]
        where = f"{places[-1].filename}:{places[-1].lineno}" if places else "?"
        raise LengthwiseError(
            f"rank {rank}: the step cannot be run on fake tensors: {type(error).__name__} at {where}: "
            f"{first_line(error)}"
        ) from None


def _work_of(request: dict[str, Any]) -> Callable[[int], dict[str, Any]]:
    """The function that runs one rank: a step of an own or of a prepared model, or a profile of a prepared one."""
    from lengthwise.config.optimizer_settings import OptimizerSettings
    from lengthwise.core.layer_profile import LayerVariant
    from lengthwise.core.pass_order import PipelineSchedule
    from lengthwise.core.pipeline_config import Method
    from lengthwise.core.specs import ModelSpec
    from lengthwise.core.step_plan import StepPlan
    from lengthwise.core.typed_json import from_document

    optimizer = from_document(OptimizerSettings, request["optimizer"])
    shared: dict[str, Any] = {"optimizer": optimizer, "ranks_per_node": request["ranks_per_node"]}
    plan = StepPlan.from_json(request["plan"]) if "plan" in request else None
    if "stock" in request:
        from lengthwise.runtime.dryrun import prepared_step  # which imports all that prepares models

        settings = from_document(prepared_step.StockSettings, request["stock"])
        prepared_step.import_model(settings)  # once, before processes are forked
        if plan is None:
            packs = [
                (degree, Method(method), tuple(lengths), LayerVariant(**variant))
                for degree, method, lengths, variant in request["packs"]
            ]
            return partial(prepared_step.dry_profile, packs, settings, num_ranks=request["num_ranks"], **shared)
        shared |= {"num_kept": request["num_kept"], "state_on_host": request["state_on_host"]}
        return partial(prepared_step.dry_prepared_step, plan, settings, **shared)
    assert plan is not None, "a step has a plan"
    from lengthwise.runtime.dryrun import engine_step

    import_module("torch._dynamo")  # fake tensors do, which takes as long as a step: once, before processes are forked

    return partial(
        engine_step.dry_step,
        plan,
        from_document(ModelSpec, request["model"]),
        dtype=request["dtype"],
        schedule=PipelineSchedule(request["schedule"]),
        state_on_host=request["state_on_host"],
        **shared,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
