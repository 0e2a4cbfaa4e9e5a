"""What `lengthwise simulate` is given: a configuration, whose steps are planned, or plans that were made before."""

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lengthwise.config.run_config import load, load_saved
from lengthwise.core.device_file import resolve_device
from lengthwise.core.device_spec import DEVICES, DeviceSpec
from lengthwise.core.errors import InputError
from lengthwise.core.run_folder import PROVENANCE, RunFolder
from lengthwise.core.specs import ModelSpec
from lengthwise.core.step_plan import StepPlan
from lengthwise.data.corpus import open_corpus
from lengthwise.report.pages.compare_results import ClusterResult, PolicyResult, TrainingBudget
from lengthwise.session.console import stderr
from lengthwise.session.plan_steps import DEFAULT_STEPS, plan_steps
from lengthwise.session.planning import resolve_cluster
from lengthwise.session.planning_args import find_model
from lengthwise.session.simulate_plans import ends_within_line, read_plans
from lengthwise.session.trained_model import resolve_model


def plans_of(path: Path | None, changes: list[str], *, steps: int | None) -> list[StepPlan]:
    """Read the plans of a file, or plan the first steps of a configuration.

    Raises:
        InputError: the file holds no plan, or settings are given beside it.
    """
    if path is None or path.suffix != ".jsonl":
        return list(plan_steps(load(path, changes), steps or DEFAULT_STEPS))
    if changes:
        raise InputError(f"{changes[0]} does not apply to {path}, whose plans are made; plan again with it")
    plans = read_plans(path, steps=steps)
    if len(plans) != steps and ends_within_line(path):
        stderr().print(f"{path} ends within a line, which is left out: {len(plans):,} plans are whole", soft_wrap=True)
    return plans


def model_of_plans(path: Path | None, changes: list[str], *, preset: str | None) -> tuple[ModelSpec, str]:
    """The model that plans were made for and its compute dtype: of a preset, a configuration, or the run beside them.

    Raises:
        InputError: a file of plans lies in no run folder, and no preset is named.
    """
    if preset is not None:
        return find_model(preset), "bfloat16"
    if path is None or path.suffix != ".jsonl":
        config = load(path, changes)
        return resolve_model(config, open_corpus(config.data), only_priced=True), config.train.dtype
    run = RunFolder(path.parent)
    if not run.config.is_file():
        raise InputError(
            f"--chakra needs the sizes of the model, and {path} lies in no run folder; add --model NAME, or simulate "
            "the configuration that the plans were made from"
        )
    return run.read_spec(), load_saved(run.config).train.dtype


def check_device(path: Path | None, name: str | None) -> None:
    """Raise ``InputError`` if there is no device of that name, or a configuration names its own."""
    if name is None:
        return
    if path is None or path.suffix != ".jsonl":
        raise InputError("--device is for files of plans, which name none; set cluster.name of the configuration")
    resolve_device(name)


def device_of_plans(path: Path | None, changes: list[str], *, name: str | None = None) -> DeviceSpec | None:
    """The device of the configured cluster, of a preset or file, or of the run that plans lie in; None: not known."""
    if path is None or path.suffix != ".jsonl":
        return resolve_cluster(load(path, changes)).device
    return DEVICES.get(str(_start_of_run(path).get("device"))) if name is None else resolve_device(name)


def device_bytes_of(path: Path | None, changes: list[str], *, name: str | None = None) -> int | None:
    """Memory of a device that is named, of the configured cluster, or of the run that the plans lie in; None: not
    known, or a CPU.
    """
    if name is not None or path is None or path.suffix != ".jsonl":
        device = device_of_plans(path, changes, name=name)
        return None if device is None or device.name == "cpu" else device.memory_bytes
    num_bytes = _start_of_run(path).get("device_memory_bytes")
    return num_bytes if isinstance(num_bytes, int) and num_bytes > 0 else None


def _start_of_run(plans: Path) -> dict[str, Any]:
    """The last start in provenance.json of the run that a file of plans lies in; empty: there is none."""
    starts = RunFolder(plans.parent).read_json(PROVENANCE).get("starts")
    start = starts[-1] if isinstance(starts, list) and starts else None
    return start if isinstance(start, dict) else {}


def training_outlook(
    plans: Sequence[StepPlan], tokens_per_s: float, path: Path | None, changes: list[str], *,
    preset: str | None, device_name: str | None, budget: TrainingBudget,
) -> dict[str, float | None]:  # fmt: skip
    """MFU, and hours and cost of a whole training, as `lengthwise compare` reckons them; None: not known.

    Tells what has to be named for an MFU.
    """
    device, model, dtype = device_of_plans(path, changes, name=device_name), None, ""
    with suppress(InputError) if preset is None else nullcontext():  # outside of a run, the model is not known
        model, dtype = model_of_plans(path, changes, preset=preset)
    if unknown := [f"--{what} NAME" for what, spec in (("model", model), ("device", device)) if spec is None]:
        stderr().print(f"MFU: {path} does not say all that it takes; add {' and '.join(unknown)}", soft_wrap=True)
    lengths = [n for plan in plans for line in plan.pipelines for m in line.micro_batches for n in m.pack.lengths]
    if device is not None and budget.price_per_hour is None:
        budget = replace(budget, price_per_hour=device.price_per_hour)
    result = PolicyResult(policy=plans[0].policy, tokens_per_s=tokens_per_s)
    cluster = ClusterResult(
        num_devices=plans[0].num_devices,
        cluster="",
        tokens_per_step=round(sum(lengths) / len(plans)),
        policies=(result,),
        flops_per_token=float(model.train_flops(np.asarray(lengths)).sum()) / sum(lengths) if model else 0.0,
        peak_flops_per_s=device.peak_flops_per_s(dtype) if model and device else 0.0,
        budget=budget,
    )
    return {"mfu": cluster.mfu(result), "hours": cluster.hours(result), "cost": cluster.cost(result)}
