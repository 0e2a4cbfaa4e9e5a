"""Why no scheme fits a device, what the leanest takes, and what it would take under other settings."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lengthwise.core.cost import CostModel
from lengthwise.core.errors import InfeasibleError, InputError, Setting
from lengthwise.core.pipeline_config import Method, PipelineConfig
from lengthwise.core.specs import ClusterSpec
from lengthwise.core.wording import bytes_in_words, needed_and_available
from lengthwise.cost.analytic.analytic_cost import AnalyticCost

LESS = 0.99
"""Share of what the leanest scheme takes that another setting has to get below to be named."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """What a scheme takes before its second token."""

    scheme: PipelineConfig
    device_bytes: int
    """Of each device."""
    host_bytes: int
    """Of the host, for each device."""
    is_on_host: bool
    """Whether the optimizer's state is in host memory."""


def nothing_fits(
    schemes: Sequence[PipelineConfig],
    costs: Sequence[CostModel],
    cluster: ClusterSpec,
    *,
    wider: Sequence[PipelineConfig] = (),
    methods: Sequence[Method] | None = None,
    subject: str = "",
) -> InfeasibleError:
    """The error that says what the leanest scheme takes with one token, of a device or of its host.

    Args:
        schemes: none of which fits.
        costs: what prices them: with the optimizer's state on the device, and in host memory if that was looked at.
        cluster: the devices.
        wider: schemes that other settings would allow.
        methods: those that settings name; None: they name none.
        subject: what the schemes are of, for the beginning of the message.
    """
    reasons: list[str] = []
    needs = list(_needs(schemes, costs, cluster, reasons))
    if not needs:
        why = f": {reasons[0]}. Or allow" if reasons else "; allow"
        return InfeasibleError(
            f"{subject}no scheme of the search space has costs{why} other methods, degrees or stages"
        )
    leanest, limit = _least(needs), cluster.device.memory_bytes
    on_host = [need for need in needs if need.is_on_host and need.device_bytes <= limit]
    if on_host:
        return _host_is_full(min(need.host_bytes for need in on_host), cluster, needs, subject)
    least, available = needed_and_available(leanest.device_bytes, limit)
    return InfeasibleError(
        f"{subject}no scheme fits: the leanest, {leanest.scheme.name}, takes {least} per device for "
        f"{_what(leanest, needs)}; a device has {available}."
        f"{_on_host_instead(leanest, schemes, costs, cluster)}"
        f"{_with_other_settings(leanest, schemes, costs, cluster, wider, methods)} Use devices with more memory, more "
        "of them or a smaller model.",
        what=leanest.scheme.name, value=leanest.device_bytes, limit=limit, unit="bytes",
    )  # fmt: skip


def _host_is_full(host_bytes: int, cluster: ClusterSpec, needs: Sequence[Need], subject: str) -> InfeasibleError:
    """The error that devices would have room if the host had ``host_bytes`` for each of them."""
    needed, available = needed_and_available(host_bytes, cluster.device.host_memory_bytes)
    return InfeasibleError(
        f"{subject}no scheme fits: devices have room with the optimizer's state in host memory, where it takes at "
        f"least {needed} per device; a device's share of the host has {available}.{_all_on_device(needs)} Raise "
        f"{Setting.HOST_MEMORY_GIB} if there is more, or use more or larger devices.",
        what="the optimizer's state", value=host_bytes, limit=cluster.device.host_memory_bytes, unit="bytes",
    )  # fmt: skip


def _needs(
    schemes: Sequence[PipelineConfig], costs: Sequence[CostModel], cluster: ClusterSpec, reasons: list[str]
) -> Iterator[Need]:
    """What each of the schemes takes that the cluster has the devices for; why others have no costs joins
    ``reasons``.
    """
    num_devices = cluster.num_devices
    for cost in costs:
        host_bytes = getattr(cost, "host_bytes", None)
        for scheme in schemes:
            if scheme.num_devices > num_devices:
                continue
            try:
                device_bytes = int(cost.peak_bytes(1, scheme, num_devices=num_devices))
            except InputError as error:  # no costs for it
                reasons.append(error.marked.rstrip("."))
                continue
            yield Need(
                scheme=scheme,
                device_bytes=device_bytes,
                host_bytes=int(host_bytes(1, scheme, num_devices=num_devices)) if host_bytes else 0,
                is_on_host=getattr(cost, "state_on_host", False),
            )


def _least(needs: Sequence[Need]) -> Need:
    return min(needs, key=lambda need: need.device_bytes)


def _what(leanest: Need, needs: Sequence[Need]) -> str:
    """What the bytes of the leanest scheme are for, with those that it would take with all state on the device."""
    if not leanest.is_on_host:
        return "weights, gradients and its share of the optimizer, one token included"
    others = [need for need in needs if not need.is_on_host]
    beside = f"; on the device, {_rounded(_least(others).device_bytes)} in all" if others else ""
    return (
        "weights and gradients, one token included, with the optimizer's state in host memory "
        f"({_rounded(leanest.host_bytes)} per device{beside})"
    )


def _all_on_device(needs: Sequence[Need]) -> str:
    """What the leanest scheme takes that has the optimizer's state on the device."""
    on_device = [need for need in needs if not need.is_on_host]
    if not on_device:
        return ""
    leanest = _least(on_device)
    return f" With it on the device, the leanest, {leanest.scheme.name}, takes {_rounded(leanest.device_bytes)}."


def _on_host_instead(
    leanest: Need, schemes: Sequence[PipelineConfig], costs: Sequence[CostModel], cluster: ClusterSpec
) -> str:
    """What the leanest scheme takes with the optimizer's state in host memory, where that is not allowed and is less.

    Of costs by closed forms: others are of the state where it was measured.
    """
    cost = _by_closed_forms(costs)
    if cost is None or leanest.is_on_host or len(costs) > 1 or not cluster.device.host_bytes_per_s:
        return ""
    placed = _least(list(_needs(schemes, [cost.with_state_on_host()], cluster, [])))
    if placed.device_bytes >= LESS * leanest.device_bytes:
        return ""
    return (
        f" With {Setting.OFFLOAD_STATE}=auto the optimizer's state may be in host memory: {placed.scheme.name} then "
        f"takes {_rounded(placed.device_bytes)} of a device, and {_rounded(placed.host_bytes)} of its share of the "
        f"host, which has {bytes_in_words(cluster.device.host_memory_bytes)}."
    )


def _with_other_settings(
    leanest: Need,
    schemes: Sequence[PipelineConfig],
    costs: Sequence[CostModel],
    cluster: ClusterSpec,
    wider: Sequence[PipelineConfig],
    methods: Sequence[Method] | None,
) -> str:
    """What the leanest of ``wider`` takes, where that is less, and which settings allow it.

    Of costs by closed forms: others know nothing of schemes that were not measured.
    """
    needs = list(_needs(wider, costs, cluster, [])) if _by_closed_forms(costs) is not None else []
    if not needs or (least := _least(needs)).device_bytes >= LESS * leanest.device_bytes:
        return ""
    scheme, settings = least.scheme, list[str]()
    if scheme.degree > max(other.degree for other in schemes):
        settings.append(f"{Setting.MAX_DEGREE}={scheme.degree}")
    if scheme.num_stages > max(other.num_stages for other in schemes):
        settings.append(f"{Setting.MAX_STAGES}={scheme.num_stages}")
    if scheme.degree > 1 and methods is not None and scheme.methods[0] not in methods:
        settings.append(f"{scheme.methods[0]} among {Setting.METHODS}")
    if scheme.shard_gradients and not any(other.shard_gradients for other in schemes):
        settings.append(f"{Setting.SHARD_GRADIENTS}=auto")
    allowed_by = " and ".join(settings) or f"{Setting.RECOMPUTE}=auto"
    return f" With {allowed_by}, {scheme.name} takes {_rounded(least.device_bytes)}."


def _by_closed_forms(costs: Sequence[CostModel]) -> AnalyticCost | None:
    cost = getattr(costs[0], "base", costs[0])  # beneath an overlap
    return cost if isinstance(cost, AnalyticCost) else None


def _rounded(num_bytes: int) -> str:
    """A need in words, never less than it is."""
    return needed_and_available(num_bytes, 0)[0]
