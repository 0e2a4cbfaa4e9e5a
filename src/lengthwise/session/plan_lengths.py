"""`lengthwise.plan`: plans of steps from lengths, a model and a cluster, without a configuration; needs no torch.

The package imports this file, so it imports nothing heavy before the function is called.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, get_type_hints

from lengthwise.core.errors import errors_spelt

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from lengthwise.core.lengths import LengthIndex
    from lengthwise.core.specs import ClusterSpec, ModelSpec
    from lengthwise.core.step_plan import StepPlan
    from lengthwise.data.max_length import LengthLedger
    from lengthwise.session.compare_policies import PolicyComparison
    from lengthwise.session.planning_args import Spelling

DEFAULT_STEPS = 8
TOKENS_PER_DEVICE = 200_000 / 64
"""Tokens of a global batch by default: Hydraulis' 200K on 64 devices, 3.2M on 1024."""


class PlanningOptions(TypedDict, total=False):
    """Keyword arguments that `lengthwise.plan` and `lengthwise.compare` share; each may be left out."""

    max_length: int | None
    over_length: Literal["error", "drop", "truncate", "split"]
    max_degree: int | None
    max_stages: int | None
    methods: str | Sequence[str] | None
    recompute: Literal["auto", "none", "all"]
    offload: Literal["auto", "none", "all"]
    shard_gradients: Literal["none", "auto", "all"]
    zero_bubble: Literal["none", "auto", "all"]
    slices: Literal["none", "auto"]
    local_sequences: bool
    memory_margin: float | None
    host_memory_gib: float | None
    dtype: Literal["bfloat16", "float32"]
    profile: str | Path | None
    overlap: float | None
    seed: int


_HINTS = {"policy": str, "tokens_per_step": int | None}


def plan(
    lengths: "str | Path | LengthIndex | ArrayLike",
    *,
    model: "str | Path | ModelSpec",
    cluster: "str | ClusterSpec",
    policy: str = "auto",
    steps: int = DEFAULT_STEPS,
    tokens_per_step: int | None = None,
    **options: Unpack[PlanningOptions],
) -> "list[StepPlan]":
    """Plan the first steps of training on sequences of these lengths: one plan a step.

    Each plan says which ranks compute which sequences in which micro-batches, under which parallel configuration, how
    long that takes, and a time that no plan can beat. Costs come from the data sheet, and no GPU is needed.

        plans = lengthwise.plan([700, 90, 4000, 350], model="llama-7b", cluster="1x8xH100-80GB", steps=1)
        print(plans[0].time_s, plans[0].gap)

    Args:
        lengths: tokens of each sequence, as an array or a .npy file; an index folder; or a name, as "commoncrawl".
        model: the name of a preset, a Hugging Face folder, or a `ModelSpec`.
        cluster: nodes x devices x device, such as "8x8xH100-80GB", or a `ClusterSpec`.
        policy: the scheduling policy; "auto" is the fastest that the search finds.
        steps: global batches that are planned.
        tokens_per_step: most tokens of a global batch; by default 3,125 a device, or the longest sequence.
        max_length: the longest sequence that is trained; by default there is no limit.
        over_length: what becomes of sequences over `max_length`: "split" (the default), "truncate", "drop", "error".
        max_degree: most devices that share a layer; by default any number.
        max_stages: most pipeline stages; by default 8.
        methods: how devices share a layer; by default ulysses, ring and megatron_ts, or all to hold the longest.
        recompute: layers under activation checkpointing: "auto" (the default), "none" or "all".
        offload: layers whose saved tensors are in host memory meanwhile: "auto" (the default), "none" or "all".
        shard_gradients: over the ranks that share whole weights: "auto" (the default), where it pays, "none" or "all".
        zero_bubble: stages split backwards: "auto" (the default), where faster and not in experts, "none" or "all".
        slices: stages compute micro-batches in slices: "auto" (the default), where faster, or "none".
        local_sequences: whether short sequences may be whole on one of the devices that share a layer, where faster.
        memory_margin: share of each device's memory left free; by default 0.06 of a GPU, else none.
        host_memory_gib: memory of the host that plans may fill for each device; by default nine tenths of its share.
        dtype: what forward and backward compute in, "bfloat16" (the default) or "float32".
        profile: a file of `lengthwise profile` that costs are fitted to; schemes that it did not measure are left out.
        overlap: share of every update that passes hide, from 0 to 1; None (the default): as their lengths say.
        seed: of the order of the sequences; 0 by default.

    Raises:
        InputError: a name is not known, or a value is out of its range.
        InfeasibleError: the model's state or the longest sequence fits on the cluster under no parallel configuration.
    """
    from lengthwise.plan.planner import Planner
    from lengthwise.plan.policies import check_policies
    from lengthwise.session.planning_args import PYTHON, find_cluster

    check_planning(PlanningOptions, options, _HINTS, policy=policy, steps=steps, tokens_per_step=tokens_per_step)
    check_policies([policy], "policy")
    devices = find_cluster(cluster, options.pop("memory_margin", None), options.pop("host_memory_gib", None))
    comparison, _ = comparison_of(lengths, model=model, policies=[policy], steps=steps, spelling=PYTHON, **options)
    with errors_spelt(PYTHON):
        entry = comparison.enter(devices, tokens_per_step=step_budget(comparison, devices, tokens_per_step))
        if entry.problem is None:
            raise entry.refused or AssertionError("what is not planned is refused")
        return list(map(Planner(policy=policy, problem=entry.problem), comparison.batches(entry)))


def comparison_of(
    lengths: "str | Path | LengthIndex | ArrayLike",
    *,
    model: "str | Path | ModelSpec",
    policies: Sequence[str] | None,
    steps: int,
    spelling: "Spelling",
    **options: Unpack[PlanningOptions],
) -> "tuple[PolicyComparison, LengthLedger]":
    """What is planned on any cluster, and what ``max_length`` did to the sequences.

    Raises:
        InputError: a name is not known, or a value is out of its range.
    """
    from lengthwise.core.arguments import as_names
    from lengthwise.core.errors import InputError, errors_spelt
    from lengthwise.core.pipeline_config import Method
    from lengthwise.data.max_length import apply_max_length
    from lengthwise.models.hf_sizes import has_dense_layers, has_slices, is_causal_and_own
    from lengthwise.plan.policies import POLICIES, check_policies
    from lengthwise.plan.space.memory_ladder import OffloadMode
    from lengthwise.plan.space.search_space import RecomputeMode, SearchSpace
    from lengthwise.plan.space.sharded_gradients import GradientSharding
    from lengthwise.plan.space.sliced_packs import Slices
    from lengthwise.plan.space.split_backwards import ZeroBubble
    from lengthwise.session.compare_policies import PolicyComparison
    from lengthwise.session.measured_profile import MeasuredProfile
    from lengthwise.session.planning_args import METHODS, check_names, check_positions, find_lengths, find_model

    if policies is not None and not len(policies):
        raise InputError(f"{spelling('policies')} is an empty list; name at least one, such as auto, or leave it out")
    names = check_policies(list(POLICIES) if policies is None else as_names(policies), spelling("policies"))
    spec, methods, seed = find_model(model), options.get("methods"), options.get("seed", 0)
    dtype, path, splits = options.get("dtype", "bfloat16"), options.get("profile"), options.get("zero_bubble", "auto")
    with errors_spelt(spelling):
        space = SearchSpace(
            max_degree=options.get("max_degree"),
            max_stages=options.get("max_stages"),
            head_layers=spec.head_layers,
            methods=None
            if methods is None
            else tuple(map(Method, check_names(as_names(methods), METHODS, spelling("methods")))),
            recompute=RecomputeMode(options.get("recompute", "auto")),
            offload=OffloadMode(options.get("offload", "auto")),
            shard_gradients=GradientSharding(options.get("shard_gradients", "auto")),
            zero_bubble=ZeroBubble.NONE if splits == "auto" and not has_dense_layers(spec) else ZeroBubble(splits),
            slices=Slices(options.get("slices", "auto")) if has_slices(spec) else Slices.NONE,
            local_sequences=options.get("local_sequences", False) and is_causal_and_own(spec),
        )
        view = apply_max_length(
            find_lengths(lengths, seed=seed, spelling=spelling), max_length=options.get("max_length"),
            rule=options.get("over_length", "split"),
        )  # fmt: skip
        check_positions(spec.name, spec.max_positions, longest=view.lengths.max_length)
        profile = None if path is None else MeasuredProfile.open(path, dtype=dtype, recompute=str(space.recompute))
    comparison = PolicyComparison(
        model=spec, dtype=dtype, profile=profile, overlap=options.get("overlap"), search_space=space,
        policies=tuple(names), lengths=view.lengths, num_steps=steps, seed=seed, spelling=spelling,
    )  # fmt: skip
    return comparison, view.ledger


def check_planning(kinds: type, options: Mapping[str, Any], hints: Mapping[str, Any], **arguments: Any) -> None:
    """Raise for options that are not those of ``kinds``, and for values that are not of their type.

    Args:
        kinds: ``PlanningOptions``, or what has more.
        options: by name.
        hints: types of ``arguments``.
        arguments: the others of the function, among them steps.
    """
    from lengthwise.core.arguments import check_arguments
    from lengthwise.core.errors import InputError

    of_options = get_type_hints(kinds)
    if unknown := sorted(options.keys() - of_options.keys()):
        raise TypeError(
            f"no argument {', '.join(unknown)}; besides those of the signature there are {', '.join(of_options)}"
        )
    check_arguments({**of_options, **hints, "steps": int}, {**options, **arguments})
    if arguments["steps"] < 1:
        raise InputError(f"steps={arguments['steps']}: at least 1 step is planned")


def step_budget(comparison: "PolicyComparison", cluster: "ClusterSpec", tokens_per_step: int | None) -> int:
    """Tokens of a global batch: as asked, or so many a device, but at least the longest sequence."""
    if tokens_per_step is not None:
        return tokens_per_step
    return max(round(TOKENS_PER_DEVICE * cluster.num_devices), comparison.lengths.max_length)
