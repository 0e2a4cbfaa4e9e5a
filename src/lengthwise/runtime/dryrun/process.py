"""The process of a dry run: reads a request from a file, writes what each rank did to another.

python -m lengthwise.runtime.dryrun.process REQUEST RESULT
"""

import json
import sys
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from lengthwise.core.errors import LengthwiseError
from lengthwise.core.processes import num_cores
from lengthwise.runtime.dryrun.shim import load_shim


def main(request_path: Path, result_path: Path) -> None:
    """Run every requested rank; an error becomes ``{"error": message, "exit_code": n}``."""
    try:
        load_shim()
        document: dict[str, Any] = {"ranks": _run(json.loads(request_path.read_text()))}
    except LengthwiseError as error:
        document = {"error": error.marked, "exit_code": error.exit_code}
    result_path.write_text(json.dumps(document))


def _run(request: dict[str, Any]) -> list[dict[str, Any]]:
    from lengthwise.config.optimizer_settings import OptimizerSettings
    from lengthwise.core.pipeline_config import PipelineSchedule
    from lengthwise.core.specs import ModelSpec
    from lengthwise.core.step_plan import StepPlan
    from lengthwise.core.typed_json import from_document
    from lengthwise.runtime.dryrun import fake_cuda
    from lengthwise.runtime.dryrun.engine_step import dry_step

    fake_cuda.install()
    run_rank = partial(
        dry_step,
        StepPlan.from_json(request["plan"]),
        from_document(ModelSpec, request["model"]),
        dtype=request["dtype"],
        optimizer=from_document(OptimizerSettings, request["optimizer"]),
        schedule=PipelineSchedule(request["schedule"]),
        ranks_per_node=request["ranks_per_node"],
    )
    num_processes = min(num_cores(), len(request["ranks"]))
    # A process a rank: what the runtime caches for a device is of one rank.
    with get_context("fork").Pool(num_processes, maxtasksperchild=1) as pool:
        return pool.map(run_rank, request["ranks"], chunksize=1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
