"""What `lengthwise simulate` is given: a configuration, whose steps are planned, or plans that were made before."""

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lengthwise.config.run_config import load, load_saved
from lengthwise.core.device_file import resolve_device
from lengthwise.core.device_spec import DEVICES, DeviceSpec
from lengthwise.core.errors import InputError
from lengthwise.core.read_file import brief
from lengthwise.core.run_folder import PROVENANCE, RunFolder
from lengthwise.core.specs import ModelSpec
from lengthwise.core.step_plan import StepPlan, check_layers, most_devices, step_with_other_devices
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
    if path is None or not _holds_plans(path):
        return list(plan_steps(load(path, changes), steps or DEFAULT_STEPS))
    if changes:
        raise InputError(f"{changes[0]} does not apply to {path}, whose plans are made; plan again with it")
    plans = read_plans(path, steps=steps)
    if len(plans) != steps and ends_within_line(path):
        stderr().print(f"{path} ends within a line, which is left out: {len(plans):,} plans are whole", soft_wrap=True)
    return plans


@dataclass(frozen=True, kw_only=True)
class Named:
    """What options say of plans that lie in no run folder; None: they do not say it."""

    model: str | None = None
    """A preset or a Hugging Face folder."""
    device: str | None = None
    """A preset or a YAML file."""
    dtype: str | None = None
    """What forward and backward compute in."""

    def check(self, path: Path | None) -> None:
        """Raise ``InputError`` if there is no such model or device, or the configuration or the run at ``path`` names
        another.
        """
        settings = {"model": "model.*", "device": "cluster.name", "dtype": "train.dtype"}
        named = {option: value for option in settings if (value := getattr(self, option)) is not None}
        if named and not _holds_plans(path):
            option = next(iter(named))
            raise InputError(
                f"--{option} is for files of plans, which name none; set {settings[option]} of the configuration"
            )
        model = None if self.model is None else find_model(self.model)
        device = None if self.device is None else resolve_device(self.device)
        if path is None or not named:
            return
        own_model, own_device, own_dtype = _model_of_run(path), _start_of_run(path).get("device"), _dtype_of_run(path)
        of_run = {
            "model": own_model and own_model.name,
            "device": own_device if isinstance(own_device, str) else None,
            "dtype": own_dtype,
        }
        differs = {
            "model": model is not None and own_model is not None and model.digest != own_model.digest,
            "device": device is not None and of_run["device"] not in (None, device.name),
            "dtype": own_dtype not in (None, self.dtype),
        }
        for option, value in named.items():
            if differs[option]:
                raise InputError(
                    f"--{option} {brief(value)[1:-1]}: the run that {path} lies in has another {option}, "
                    f"{of_run[option]}; leave --{option} out"
                )


def model_of_plans(path: Path | None, changes: list[str], named: Named) -> tuple[ModelSpec, str]:
    """The model that plans were made for and its compute dtype: as named, of a configuration, or of the run beside.

    Raises:
        InputError: a file of plans lies in no run folder, and no model is named.
    """
    if path is None or not _holds_plans(path):
        config = load(path, changes)
        return resolve_model(config, open_corpus(config.data), only_priced=True), config.train.dtype
    if named.model is not None:
        return find_model(named.model), _dtype_of_run(path) or named.dtype or "bfloat16"
    run = RunFolder(path.parent)
    if not run.config.is_file():
        raise InputError(
            f"--chakra needs the sizes of the model, and {path} lies in no run folder; add --model NAME, or simulate "
            "the configuration that the plans were made from"
        )
    return run.read_spec(), load_saved(run.config).train.dtype


def device_of_plans(path: Path | None, changes: list[str], *, name: str | None = None) -> DeviceSpec | None:
    """The device of the configured cluster, of a preset or file, or of the run that plans lie in; None: not known."""
    if path is None or not _holds_plans(path):
        return resolve_cluster(load(path, changes)).device
    return DEVICES.get(str(_start_of_run(path).get("device"))) if name is None else resolve_device(name)


def device_bytes_of(path: Path | None, changes: list[str], *, name: str | None = None) -> int | None:
    """Memory of a device that is named, of the configured cluster, or of the run that the plans lie in; None: not
    known, or a CPU.
    """
    if name is not None or path is None or not _holds_plans(path):
        device = device_of_plans(path, changes, name=name)
        return None if device is None or device.name == "cpu" else device.memory_bytes
    num_bytes = _start_of_run(path).get("device_memory_bytes")
    return num_bytes if isinstance(num_bytes, int) and num_bytes > 0 else None


def _holds_plans(path: Path | None) -> bool:
    """Whether ``path`` is a file of plans, not a configuration."""
    return path is not None and path.suffix == ".jsonl"


def _model_of_run(plans: Path) -> ModelSpec | None:
    """The sizes of the model of the run that a file of plans lies in; None: there is none, or it has no costs."""
    with suppress(InputError):
        return RunFolder(plans.parent).read_spec()
    return None


def _dtype_of_run(plans: Path) -> str | None:
    """What the run that a file of plans lies in computes in; None: there is none."""
    run = RunFolder(plans.parent)
    return load_saved(run.config).train.dtype if run.config.is_file() else None


def _start_of_run(plans: Path) -> dict[str, Any]:
    """The last start in provenance.json of the run that a file of plans lies in; empty: there is none."""
    starts = RunFolder(plans.parent).read_json(PROVENANCE).get("starts")
    start = starts[-1] if isinstance(starts, list) and starts else None
    return start if isinstance(start, dict) else {}


def training_outlook(
    plans: Sequence[StepPlan], tokens_per_gpu_s: float, path: Path | None, changes: list[str], *,
    named: Named, budget: TrainingBudget,
) -> dict[str, float | None]:  # fmt: skip
    """MFU, and hours and cost of a whole training, as `lengthwise compare` reckons them; None: not known.

    Tells what has to be named for an MFU. ``tokens_per_gpu_s``: tokens per device-second of all steps.

    Raises:
        InputError: the plans are of another model than is named, or faster than devices as named could be; or they are
            of several numbers of devices, and a whole training is asked for.
    """
    if (other := step_with_other_devices(plans)) is not None and budget.num_tokens is not None:
        raise InputError(
            f"--tokens: step {other:,} of {path} is of another number of devices than the step before it, so it is not "
            f"known on how many a whole training would run; take --tokens out, or end before it with --steps"
        )
    device, model, dtype = device_of_plans(path, changes, name=named.device), None, ""
    with suppress(InputError) if named.model is None else nullcontext():  # outside of a run, the model is not known
        model, dtype = model_of_plans(path, changes, named)
    if model is not None:
        check_layers(plans, model.num_layers, model=model.name)
    if unknown := [f"--{what} NAME" for what, spec in (("model", model), ("device", device)) if spec is None]:
        stderr().print(f"MFU: {path} does not say all that it takes; add {' and '.join(unknown)}", soft_wrap=True)
    lengths = [n for plan in plans for line in plan.pipelines for m in line.micro_batches for n in m.pack.lengths]
    if device is not None and budget.price_per_hour is None:
        budget = replace(budget, price_per_hour=device.price_per_hour)
    num_devices = most_devices(plans)
    result = PolicyResult(policy=plans[0].policy, tokens_per_s=tokens_per_gpu_s * num_devices)
    cluster = ClusterResult(
        num_devices=num_devices,
        cluster="",
        tokens_per_step=round(sum(lengths) / len(plans)),
        policies=(result,),
        flops_per_token=float(model.train_flops(np.asarray(lengths)).sum()) / sum(lengths) if model else 0.0,
        peak_flops_per_s=device.peak_flops_per_s(dtype) if model and device else 0.0,
        budget=budget,
    )
    mfu = cluster.mfu(result)
    if model is not None and device is not None and (mfu or 0) > 1 and named != Named():
        raise InputError(
            f"the plans compute faster than {num_devices:,} {device.name} could at their peak if they were of "
            f"model {model.name} in {dtype}: an MFU of {mfu:.0%}; name the model, device and dtype that they were made "
            "for"
        )
    return {"mfu": mfu, "hours": cluster.hours(result), "cost": cluster.cost(result)}
