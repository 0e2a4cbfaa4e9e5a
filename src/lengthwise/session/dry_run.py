"""The dry run of a configured step: plans it, runs chosen ranks in a process of its own, and puts what was predicted
beside what was counted.
"""

import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lengthwise.config.choices import HeldWeights
from lengthwise.config.run_config import Config
from lengthwise.core.errors import InputError, LengthwiseError, Setting
from lengthwise.core.layer_profile import AS_PREPARED, SPLIT_BACKWARD
from lengthwise.core.pass_order import PipelineSchedule
from lengthwise.core.specs import ClusterSpec, ModelSpec
from lengthwise.core.step_plan import StepPlan
from lengthwise.core.wording import counted as in_number
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.cost.analytic.rank_work import RankWork, rank_work
from lengthwise.data.corpus import Corpus, open_corpus
from lengthwise.models.stock_model import StockModel
from lengthwise.session.console import progress
from lengthwise.session.plan_steps import plan_steps
from lengthwise.session.planning import batch_stream, resolve_cluster
from lengthwise.session.prepared_dry_run import (
    PreparedDryRun,
    all_schemes,
    differences_of,
    largest_pack,
    num_kept_in,
    schemes_of,
    with_totals,
)
from lengthwise.session.simulate_plans import read_plans
from lengthwise.session.state_placement import is_on_host
from lengthwise.session.stock_planning import StockLayers, stock_options, stock_planner
from lengthwise.session.trained_model import trained_model
from lengthwise.sim.issued_collectives import differences_from_plan

_log = logging.getLogger(__name__)


def dry_run(
    config: Config, *, ranks: Sequence[int] = (), plan_file: Path | None = None, weights: HeldWeights = "auto"
) -> dict[str, Any]:
    """Run the first step of a configuration, or the first plan of a file, as ``ranks``; none: first, middle and last.

    ``weights``: what ranks hold of a model that transformers computes.

    Raises:
        InputError: a rank is not in the cluster, the plan is for another, or the process cannot be set up.
    """
    corpus, cluster = open_corpus(config.data), resolve_cluster(config)
    model = trained_model(config, corpus, needs_weights=False)
    plan = read_plans(plan_file, steps=1)[0] if plan_file else None
    if plan is None and isinstance(model, ModelSpec):
        states: list[Config] = []
        plan = next(plan_steps(config, 1, on_state=states.append))
        config = states[0]
    if plan is not None and plan.num_devices != cluster.num_devices:
        raise InputError(
            f"the plan is for {plan.num_devices:,} devices, cluster.name={config.cluster.name} has "
            f"{cluster.num_devices:,}; name a cluster of as many, or plan again"
        )
    if isinstance(model, ModelSpec):
        assert plan is not None
        return dry_run_plan(plan, model, cluster, config=config, ranks=ranks)
    return dry_run_stock(plan, model, cluster, config=config, corpus=corpus, ranks=ranks, weights=weights)


def dry_run_plan(
    plan: StepPlan, spec: ModelSpec, cluster: ClusterSpec, *, config: Config, ranks: Sequence[int] = ()
) -> dict[str, Any]:
    """What each rank did in the step of ``plan``, and what costs and plan say of it.

    Raises:
        InputError: a rank is not in the plan, or the process cannot be set up.
    """
    return dry_run_plans([PlanToRun(plan=plan, model=spec, cluster=cluster, config=config, ranks=tuple(ranks))])[0]


@dataclass(frozen=True, kw_only=True)
class PlanToRun:
    """A step of one of this library's own models, and the ranks that are to run it; none: first, middle and last."""

    plan: StepPlan
    model: ModelSpec
    cluster: ClusterSpec
    config: Config
    ranks: tuple[int, ...] = ()


def dry_run_plans(runs: Sequence[PlanToRun]) -> list[dict[str, Any]]:
    """Dry runs of several plans in one process, in turn as :func:`dry_run_plan` has each.

    Raises:
        InputError: a rank is not in its plan, or the process cannot be set up.
    """
    return [_document_of(run, counted) for run, counted in zip(runs, run_process(list(map(_request_of, runs))))]


def _request_of(run: PlanToRun) -> dict[str, Any]:
    config = run.config
    return {
        "plan": run.plan.to_json(),
        "model": asdict(run.model),
        "optimizer": asdict(config.optim.optimizer_settings),
        "dtype": config.train.dtype,
        "schedule": PipelineSchedule(config.train.schedule),
        "state_on_host": is_on_host(config.train.offload_state),
        "ranks": _ranks_of(run.plan, run.ranks),
        "ranks_per_node": run.cluster.devices_per_node,
    }


def _document_of(run: PlanToRun, counted: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What costs and plan say beside what each rank did."""
    plan, spec, config, dtype = run.plan, run.model, run.config, run.config.train.dtype
    cost = AnalyticCost(
        model=spec, cluster=run.cluster, dtype=dtype, state_on_host=is_on_host(config.train.offload_state),
        narrow_gradients=config.optim.optimizer_settings.narrow_gradients,
    )  # fmt: skip
    issued, schedule = {row["rank"]: row["collectives"] for row in counted}, PipelineSchedule(config.train.schedule)
    return {
        **_heading(spec.name, run.cluster, plan),
        "not_predicted": _not_predicted(plan, dtype),
        "differences": differences_from_plan(plan, issued, schedule=schedule, model=spec, dtype=dtype),
        "ranks": [_beside_prediction(row, rank_work(plan, row["rank"], cost)) for row in counted],
    }


def _not_predicted(plan: StepPlan, dtype: str) -> str | None:
    """What costs leave out of a step in ``dtype``; None: nothing."""
    is_merged = any(p.scheme.degree > 1 or any(m.slices for m in p.micro_batches) for p in plan.pipelines)
    if dtype in ("bfloat16", "float16") or (dtype == "float32" and not is_merged):
        return None
    where = "where ranks share it or it is cut into slices" if dtype == "float32" else "at all"
    return (
        f"GPUs have no fused kernel for attention in {dtype} {where}: all logits of a block are held at once, and "
        f"counted as activations, temporary bytes and products; {Setting.DTYPE}=bfloat16 has one"
    )


def dry_run_stock(
    plan: StepPlan | None,
    stock: StockModel,
    cluster: ClusterSpec,
    *,
    config: Config,
    corpus: Corpus | None = None,
    ranks: Sequence[int] = (),
    weights: HeldWeights = "auto",
    num_kept: int | None = None,
) -> dict[str, Any]:
    """What each rank did in the step of ``plan``, or of the first batch, for a model that transformers computes.

    ``corpus``: whose batches are planned, without a plan. ``num_kept``: how many of the last layers stay whole in a
    step where weights are gathered by layer; None: as many as memory is left for.

    Raises:
        InputError: transformers cannot build the model, its layers cannot be gathered, or a rank is not in the plan.
    """
    trial, options = PreparedDryRun(config, stock, cluster), stock_options(config, stock, quiet=True)
    pack: tuple[int, ...] = ()
    if plan is None:
        assert corpus is not None, "there is a plan or a corpus"
        longest = corpus.lengths.max_length
        schemes = all_schemes(cluster.num_devices, options.max_degree, options.sharing_methods)
    else:
        longest = max(max(m.pack.lengths) for pipeline in plan.pipelines for m in pipeline.micro_batches)
        schemes, pack = schemes_of(plan), largest_pack(plan)
    splits = plan is None or any(pipeline.scheme.zero_bubble for pipeline in plan.pipelines)
    variants = (AS_PREPARED, SPLIT_BACKWARD) if splits else (AS_PREPARED,)
    (profile,) = run_process([trial.profile_request(longest, schemes, pack, variants)])[0]
    if profile["by_sequence"]:
        _check_by_sequence(stock, profile["by_sequence"], [degree for degree, _ in schemes if plan], config)
        options = options.model_copy(update={"max_degree": 1})
    cost = trial.cost_of(profile, longest=longest, weights=weights)
    is_whole = cost.gather is None
    if not is_whole:
        options = options.model_copy(update={"shard_gradients": "none"})
    if plan is None:
        assert corpus is not None
        layers = StockLayers(num_layers=cost.table.num_layers, objective=stock.objective)
        max_stages = 1 if profile["stage_problem"] else options.max_stages
        planner = stock_planner(
            config, cost, layers, options=options, cluster=cluster, corpus=corpus, max_stages=max_stages
        )
        plan = planner(next(batch_stream(config, corpus, planner.problem)))
    num_kept = num_kept_in(cost, plan) if num_kept is None else num_kept
    request = trial.step_request(plan, _ranks_of(plan, ranks), num_kept=None if is_whole else num_kept)
    (counted,) = run_process([request])
    return {
        **_heading(stock.name, cluster, plan),
        "weights": "whole" if is_whole else "by-layer",
        "differences": differences_of(plan, counted),
        "ranks": [trial.beside_prediction(plan, cost, row, num_kept=num_kept) for row in counted],
    }


def _check_by_sequence(stock: StockModel, reason: str, planned_degrees: Sequence[int], config: Config) -> None:
    """Say that a model is computed sequence by sequence, as ``prepare`` does; of the reason what is no advice.

    Raises:
        InputError: the plan or the configuration has several ranks share a sequence.
    """
    asked, reason = config.plan.degree or 1, reason.partition("; ")[0]
    if asked > 1 or max(planned_degrees, default=1) > 1:
        which = f"plan.degree={asked}" if asked > 1 else f"the plan has {max(planned_degrees)} ranks share a sequence"
        raise InputError(
            f"{which}: {stock.architecture} is computed sequence by sequence, each on one rank; plan with "
            f"{Setting.MAX_DEGREE}=1. In packs it would not be exact: {reason}"
        )
    _log.warning(
        "%s is computed sequence by sequence: exact, but no two ranks share a sequence, so each must hold the longest. "
        "In packs it would not be exact: %s", stock.architecture, reason,
    )  # fmt: skip


def _ranks_of(plan: StepPlan, ranks: Sequence[int]) -> list[int]:
    last = plan.num_devices - 1
    ranks = sorted(set(ranks or (0, last // 2, last)))
    if outside := [rank for rank in ranks if rank > last]:
        raise InputError(f"rank {outside[0]} is none of the plan's {plan.num_devices:,} ranks; name one up to {last}")
    return ranks


def _heading(model: str, cluster: ClusterSpec, plan: StepPlan) -> dict[str, Any]:
    return {
        "model": model,
        "cluster": cluster.name,
        "policy": plan.policy,
        "num_devices": plan.num_devices,
        "memory_bytes": cluster.device.memory_bytes,
    }


def run_process(requests: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Run requests of :mod:`lengthwise.runtime.dryrun.process` in one process; what each rank did in each.

    Raises:
        LengthwiseError: what the process says.
    """
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("request.json", "result.json")]
        paths[0].write_text(json.dumps(requests))
        command = [sys.executable, "-m", "lengthwise.runtime.dryrun.process", *map(str, paths)]
        with progress() as bar:  # each operation takes about a millisecond, and large clusters have many
            ranks = in_number(sum(len(request["ranks"]) for request in requests), "rank")
            bar.add_task(f"run {ranks} on fake tensors", total=None)
            ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if not paths[1].is_file():
            raise LengthwiseError(
                f"the process of the dry run ended with code {ran.returncode}: {ran.stdout[-2000:].strip()}"
            )
        document = json.loads(paths[1].read_text())
    if "error" in document:
        error = InputError if document["exit_code"] == InputError.exit_code else LengthwiseError
        raise error(document["error"])
    answers: list[list[dict[str, Any]]] = document["answers"]
    return answers


def _beside_prediction(row: dict[str, Any], work: RankWork) -> dict[str, Any]:
    return {
        **with_totals(row),
        "predicted": {
            "peak_bytes": asdict(work.peak) if work.peak else None,
            "peak_total_bytes": work.peak.total if work.peak else None,
            "flops": {"products": work.matmul_flops, "attention": work.attention_flops},
            "sent_bytes": dict(work.sent_bytes),
        },
    }
