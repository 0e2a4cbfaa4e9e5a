"""The dry run of a configured step: plans it, runs chosen ranks in a process of its own, and puts what was predicted
beside what was counted.
"""

import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lengthwise.config.run_config import Config
from lengthwise.core.errors import InputError, LengthwiseError
from lengthwise.core.pipeline_config import PipelineSchedule
from lengthwise.core.specs import ClusterSpec, ModelSpec
from lengthwise.core.step_plan import StepPlan
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.cost.analytic.rank_work import RankWork, rank_work
from lengthwise.data.corpus import open_corpus
from lengthwise.session.plan_steps import plan_steps
from lengthwise.session.planning import resolve_cluster
from lengthwise.session.simulate_plans import read_plans
from lengthwise.session.trained_model import resolve_model
from lengthwise.sim.issued_collectives import differences_from_plan


def dry_run(config: Config, *, ranks: Sequence[int] = (), plan_file: Path | None = None) -> dict[str, Any]:
    """Run the first step of a configuration, or the first plan of a file, as ``ranks``; none: first, middle and last.

    Raises:
        InputError: a rank is not in the cluster, the plan is for another, or the process cannot be set up.
    """
    spec, cluster = resolve_model(config, open_corpus(config.data)), resolve_cluster(config)
    plan = read_plans(plan_file, steps=1)[0] if plan_file else next(plan_steps(config, 1))
    if plan.num_devices != cluster.num_devices:
        raise InputError(
            f"the plan is for {plan.num_devices:,} devices, cluster.name={config.cluster.name} has "
            f"{cluster.num_devices:,}; name a cluster of as many, or plan again"
        )
    return dry_run_plan(plan, spec, cluster, config=config, ranks=ranks)


def dry_run_plan(
    plan: StepPlan, spec: ModelSpec, cluster: ClusterSpec, *, config: Config, ranks: Sequence[int] = ()
) -> dict[str, Any]:
    """What each rank did in the step of ``plan``, and what costs and plan say of it.

    Raises:
        InputError: a rank is not in the plan, or the process cannot be set up.
    """
    last = plan.num_devices - 1
    ranks = sorted(set(ranks or (0, last // 2, last)))
    if outside := [rank for rank in ranks if rank > last]:
        raise InputError(f"rank {outside[0]} is none of the plan's {plan.num_devices:,} ranks; name one up to {last}")
    dtype, schedule = config.train.dtype, PipelineSchedule(config.train.schedule)
    counted = run_process(
        {
            "plan": plan.to_json(),
            "model": asdict(spec),
            "optimizer": asdict(config.optim.optimizer_settings),
            "dtype": dtype,
            "schedule": schedule,
            "ranks": ranks,
            "ranks_per_node": cluster.devices_per_node,
        }
    )
    cost = AnalyticCost(model=spec, cluster=cluster, dtype=dtype)
    return {
        "model": spec.name,
        "cluster": cluster.name,
        "policy": plan.policy,
        "num_devices": plan.num_devices,
        "memory_bytes": cluster.device.memory_bytes,
        "differences": differences_from_plan(
            plan, {row["rank"]: row["collectives"] for row in counted}, schedule=schedule, model=spec, dtype=dtype
        ),
        "ranks": [_beside_prediction(row, rank_work(plan, row["rank"], cost)) for row in counted],
    }


def run_process(request: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a request of :mod:`lengthwise.runtime.dryrun.process`; what each rank did.

    Raises:
        LengthwiseError: what the process says.
    """
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("request.json", "result.json")]
        paths[0].write_text(json.dumps(request))
        command = [sys.executable, "-m", "lengthwise.runtime.dryrun.process", *map(str, paths)]
        ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if not paths[1].is_file():
            raise LengthwiseError(
                f"the process of the dry run ended with code {ran.returncode}: {ran.stdout[-2000:].strip()}"
            )
        document = json.loads(paths[1].read_text())
    if "error" in document:
        error = InputError if document["exit_code"] == InputError.exit_code else LengthwiseError
        raise error(document["error"])
    ranks: list[dict[str, Any]] = document["ranks"]
    return ranks


def _beside_prediction(row: dict[str, Any], work: RankWork) -> dict[str, Any]:
    sent: Counter[str] = Counter()
    for collective in row["collectives"]:
        sent[collective["kind"]] += collective["sent_bytes"]
    return {
        **row,
        "peak_total_bytes": sum(row["peak_bytes"].values()),
        "sent_bytes": dict(sent),
        "predicted": {
            "peak_bytes": asdict(work.peak) if work.peak else None,
            "peak_total_bytes": work.peak.total if work.peak else None,
            "flops": {"products": work.matmul_flops, "attention": work.attention_flops},
            "sent_bytes": dict(work.sent_bytes),
        },
    }
