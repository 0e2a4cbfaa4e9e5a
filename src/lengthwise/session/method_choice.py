"""Which parallel methods the plans of a run may use, and whether its devices and measurements allow them."""

from lengthwise.config.prepare_options import PrepareOptions
from lengthwise.config.run_config import Config, PlanConfig
from lengthwise.core.cost import CostModel
from lengthwise.core.errors import InputError
from lengthwise.core.pipeline_config import WEIGHTS_OF, Method, WeightPlacement
from lengthwise.core.specs import ClusterSpec
from lengthwise.cost.corrected import CorrectedCost
from lengthwise.cost.profiled.measured_schemes import ProfiledCost
from lengthwise.plan.space.search_space import DEFAULT_METHODS, SHARDED_METHODS
from lengthwise.runtime.loop.plan_limits import PlanLimits

RANDOM = "random"
"""Instead of a method: one drawn for every layer of every micro-batch."""


def methods_of(plan: PlanConfig) -> tuple[Method, ...] | None:
    """The methods that plans choose from; None: those of any search space."""
    if plan.method == RANDOM or (plan.policy == "paradyse" and not plan.method and plan.methods is None):
        return SHARDED_METHODS
    if plan.methods is not None:
        return tuple(map(Method, dict.fromkeys(plan.methods)))
    return (Method(plan.method),) if plan.method else None


def plan_limits(options: PrepareOptions) -> PlanLimits:
    """What plans of a prepared model may have, as its comparison with the stock model left the ``options``."""
    is_any_method = options.methods is None and not options.check
    return PlanLimits(max_degree=options.max_degree, methods=None if is_any_method else options.sharing_methods)


def asked_methods(plan: PlanConfig) -> str:
    """The setting that names methods, as it was given."""
    return f"plan.method={plan.method}" if plan.method else f"plan.methods={','.join(plan.methods or SHARDED_METHODS)}"


def compiled_methods(config: Config, methods: tuple[Method, ...] | None) -> tuple[Method, ...]:
    """The parallel methods among ``methods`` that layers are compiled for.

    Raises:
        InputError: there is none, micro-batches have any size, or feed-forwards tiles.
    """
    if not config.plan.shapes:
        raise InputError(
            "train.compile=true compiles layers for fixed sizes, and micro-batches have any size; set plan.shapes, "
            "such as plan.shapes=8"
        )
    if config.plan.tile_tokens:
        raise InputError(
            f"train.compile=true with plan.tile_tokens={config.plan.tile_tokens}: compiled layers compute all tokens "
            "at once; leave one of the two out"
        )
    compilable = tuple(
        method
        for method in methods or DEFAULT_METHODS
        if WEIGHTS_OF.get(method, WeightPlacement.WHOLE) is WeightPlacement.WHOLE
    )
    if not compilable:
        raise InputError(
            f"train.compile=true with {asked_methods(config.plan)}: layers whose weights are sharded are not "
            "compiled, they are gathered while they compute; choose ulysses, ring or dense, or set "
            "train.compile=false"
        )
    return compilable


def check_degree(plan: PlanConfig, num_devices: int) -> None:
    """Check that the method, or methods, and degree that plans may use suit one another and the devices of the run.

    Raises:
        InputError: a method needs a degree, or that does not divide the devices.
    """
    if plan.degree and num_devices % plan.degree:
        fitting = ", ".join(str(degree) for degree in range(1, num_devices + 1) if num_devices % degree == 0)
        raise InputError(
            f"plan.degree={plan.degree} does not divide the number of devices of the run, {num_devices}; choose one of "
            f"{fitting}, or another number of ranks (--nproc)"
        )
    if plan.method and plan.degree is None and not (plan.method == RANDOM and plan.max_degree != 1):
        drawn = "; or leave plan.max_degree out to have it drawn for every step" if plan.method == RANDOM else ""
        raise InputError(
            f"plan.method={plan.method} needs plan.degree, the number of devices that share a layer{drawn}"
        )
    if plan.method == Method.DENSE and plan.degree != 1:
        raise InputError(f"plan.method=dense shares nothing: plan.degree must be 1, not {plan.degree}")


def check_methods(config: Config, cost: CostModel, cluster: ClusterSpec) -> None:
    """Check that the devices of the run and the profile suit the method, or methods, and degree that plans may use.

    Raises:
        InputError: a method needs a degree, that does not divide the devices, or neither was measured.
    """
    plan = config.plan
    check_degree(plan, cluster.num_devices)
    if plan.profile:
        cost = cost.base if isinstance(cost, CorrectedCost) else cost
        measured = max(scheme.degree for scheme in cost.tables) if isinstance(cost, ProfiledCost) else 1
        limits = {"plan.degree": (plan.degree, measured), "plan.max_degree": (plan.max_degree, measured)}
        limits["plan.max_stages"] = (plan.max_stages, 1)
        if asked := [f"{name}={count}" for name, (count, limit) in limits.items() if (count or 1) > limit]:
            devices = "one device" if measured == 1 else f"up to {measured} devices that share a layer"
            raise InputError(
                f"{plan.profile} was measured on {devices} and knows no cost of {' and '.join(asked)}; profile with "
                "a larger --nproc, or set plan.profile= (empty) for analytic costs"
            )
        if isinstance(cost, ProfiledCost) and plan.method != RANDOM and cluster.num_devices > 1:
            measured_methods = {method for scheme in cost.tables for method in scheme.methods}
            asked_for = (methods_of(plan) or ()) if plan.method or plan.methods else ()
            if missing := [method for method in asked_for if method not in measured_methods | {Method.DENSE}]:
                raise InputError(
                    f"{plan.profile} has no measurements of {', '.join(missing)}; profile again with "
                    f"{asked_methods(plan)} and --nproc {cluster.num_devices}, or set plan.profile= (empty) for "
                    "analytic costs"
                )
