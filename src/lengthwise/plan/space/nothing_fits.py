"""Why no scheme fits a device, and what would help."""

from collections.abc import Mapping, Sequence

from lengthwise.core.cost import CostModel
from lengthwise.core.errors import InfeasibleError, InputError, Setting
from lengthwise.core.pipeline_config import PipelineConfig
from lengthwise.core.specs import ClusterSpec
from lengthwise.core.wording import needed_and_available


def nothing_fits(
    schemes: Sequence[PipelineConfig],
    cost: CostModel,
    cluster: ClusterSpec,
    *,
    spare: CostModel | None,
    limits: Mapping[str, int | None],
) -> InfeasibleError:
    """The error that says what the leanest scheme needs before its first token, of a device or of its host.

    Args:
        schemes: none of which fits.
        cost: prices them.
        cluster: the devices.
        spare: prices them with the optimizer's state in host memory, if that was looked at.
        limits: of degrees and stages, None where there is none.
    """
    needed, reasons = dict[PipelineConfig, int](), list[str]()
    for scheme in schemes:
        if scheme.num_devices > cluster.num_devices:
            continue
        try:
            needed[scheme] = int(cost.peak_bytes(1, scheme, num_devices=cluster.num_devices))
        except InputError as error:  # no costs for it
            reasons.append(error.marked.rstrip("."))
    if not needed:
        why = f": {reasons[0]}. Or allow" if reasons else "; allow"
        return InfeasibleError(f"no scheme of the search space has costs{why} other methods, degrees or stages")
    if spare is not None and (host_bytes := _host_bytes(list(needed), spare, cluster)):
        return host_is_full(host_bytes, cluster)
    leanest = min(needed, key=lambda scheme: needed[scheme])
    limiting = " and ".join(name for name, limit in limits.items() if limit is not None)
    more = f", a higher limit of {limiting}" if limiting else ""
    least, available = needed_and_available(needed[leanest], cluster.device.memory_bytes)
    return InfeasibleError(
        f"no scheme fits: the leanest, {leanest.name}, takes {least} per device for weights, gradients and its share "
        f"of the optimizer, one token included; a device has {available}. Use devices with more memory, more of "
        f"them{more} or a smaller model.",
        what=leanest.name, value=needed[leanest], limit=cluster.device.memory_bytes, unit="bytes",
    )  # fmt: skip


def host_is_full(host_bytes: int, cluster: ClusterSpec) -> InfeasibleError:
    """The error that devices would have room if the host had ``host_bytes`` for each of them."""
    needed, available = needed_and_available(host_bytes, cluster.device.host_memory_bytes)
    return InfeasibleError(
        "no scheme fits: devices have room with the optimizer's state in host memory, where it takes at least "
        f"{needed} per device; a device's share of the host has {available}. Raise {Setting.HOST_MEMORY_GIB} if there "
        "is more, or use more or larger devices.",
        what="the optimizer's state", value=host_bytes, limit=cluster.device.host_memory_bytes, unit="bytes",
    )  # fmt: skip


def _host_bytes(schemes: Sequence[PipelineConfig], spare: CostModel, cluster: ClusterSpec) -> int:
    """Fewest bytes on the host of schemes whose first token fits a device with the state there; 0: none does."""
    host_bytes = getattr(spare, "host_bytes", None)
    if host_bytes is None:
        return 0
    num_devices, limit = cluster.num_devices, cluster.device.memory_bytes
    fitting = [scheme for scheme in schemes if spare.peak_bytes(1, scheme, num_devices=num_devices) <= limit]
    return min((int(host_bytes(1, scheme, num_devices=num_devices)) for scheme in fitting), default=0)
