"""Seconds that bytes take between the ranks of a group, from the speeds of links and network ports.

A group of p ranks sits on consecutive ranks, so it lies within a node where p fits one. Beyond that, with m devices per
node: the rings of all-gather, reduce-scatter, broadcast and reduce are laid through every device's port, so a node
sends as fast as its m ports together; in an all-to-all each rank sends (p - m) / (p - 1) of its bytes through its own
port; a hop of a plain ring crosses from one node to the next through one port, and others of that ring stay within a
node, so the slower of link and port decides. Nodes of one device have no link.
"""

from dataclasses import dataclass, fields, replace
from math import inf

from lengthwise.core.cost import LinkSpeeds
from lengthwise.core.errors import InputError
from lengthwise.core.specs import ClusterSpec

LINK_EFFICIENCY = 0.8
"""Share of the data sheet's rate that large messages reach: NCCL's all-gather over eight A100s runs at 230-240 of 300
GB/s."""


@dataclass(frozen=True, kw_only=True)
class Sent:
    """Bytes that one rank sends, by kind of collective, and how many calls that takes."""

    all_gather: float = 0.0
    reduce_scatter: float = 0.0
    all_to_all: float = 0.0
    ring: float = 0.0
    """Point to point to the next rank."""
    broadcast: float = 0.0
    reduce: float = 0.0
    calls: int = 0
    """Collective calls, or hops of a ring."""
    ring_calls: int = 0
    """Of ``calls``, all-gathers, reduce-scatters, broadcasts and reduces, whose bytes pass every rank."""

    @property
    def num_bytes(self) -> float:
        """Bytes of all kinds."""
        return sum(getattr(self, field.name) for field in fields(self) if "calls" not in field.name)


SENT_NOTHING = Sent()


def with_measured_links(cluster: ClusterSpec, links: LinkSpeeds | None) -> ClusterSpec:
    """The cluster with the links that a profile measured, as far as it did."""
    device = cluster.device
    if links and (within := links.within):
        rate = within.bytes_per_s / LINK_EFFICIENCY
        device = replace(device, link_call_s=within.call_s, link_bytes_per_s=rate)
    if links and (across := links.across):
        rate = across.bytes_per_s / LINK_EFFICIENCY
        device = replace(device, network_call_s=across.call_s, network_bytes_per_s=rate)
    if links and (host := links.host):
        device = replace(device, host_bytes_per_s=host.bytes_per_s / LINK_EFFICIENCY)
    return replace(cluster, device=device)


def call_s(degree: int, cluster: ClusterSpec) -> float:
    """Seconds of a collective call of ``degree`` ranks that moves nothing."""
    device = cluster.device
    return device.link_call_s if degree <= cluster.devices_per_node else device.network_call_s


def ring_call_s(degree: int, cluster: ClusterSpec) -> float:
    """Seconds of an all-gather, reduce-scatter, broadcast or reduce of ``degree`` ranks that moves nothing.

    Its bytes pass every rank, so every node takes as long as one: NCCL counts 8.4 us, 3.4 us for each hop of NVLink
    and 9.6 us for each between nodes (``tuning.cc``), which is 32 us for 8 ranks, 66 us for 16, and 266 us for 64.
    """
    per_node = cluster.devices_per_node
    nodes = -(-degree // per_node) if per_node > 1 else 1
    return max(call_s(degree, cluster), nodes * cluster.device.link_call_s)


def calls_s(sent: Sent, *, degree: int, cluster: ClusterSpec) -> float:
    """Seconds of the calls of ``sent`` before their first bytes."""
    others = sent.calls - sent.ring_calls
    return others * call_s(degree, cluster) + sent.ring_calls * ring_call_s(degree, cluster)


def hop_bytes_per_s(degree: int, cluster: ClusterSpec) -> float:
    """Rate from one rank to the next in a group of ``degree``: that of its slowest hop."""
    device = cluster.device
    if degree <= cluster.devices_per_node:
        return LINK_EFFICIENCY * device.link_bytes_per_s
    return LINK_EFFICIENCY * min(_link_bytes_per_s(cluster), device.network_bytes_per_s)


def stage_hop_bytes_per_s(degree: int, num_devices: int, cluster: ClusterSpec) -> float:
    """Rate from a rank of one pipeline stage of ``degree`` ranks to its peer of the next: that of the slowest hop.

    The ``num_devices`` of a pipeline are consecutive. Where a stage takes whole nodes, every hop crosses nodes.
    """
    if degree < cluster.devices_per_node or num_devices <= cluster.devices_per_node:
        return hop_bytes_per_s(num_devices, cluster)
    return LINK_EFFICIENCY * cluster.device.network_bytes_per_s


def collective_bytes_per_s(degree: int, cluster: ClusterSpec) -> float:
    """Bytes that each rank sends per second in a ring collective of ``degree`` ranks."""
    device = cluster.device
    ports = device.network_bytes_per_s * _fewest_in_node(degree, cluster)
    if degree <= cluster.devices_per_node:
        return LINK_EFFICIENCY * device.link_bytes_per_s
    return LINK_EFFICIENCY * min(_link_bytes_per_s(cluster), ports)


def exchange_bytes_per_s(degree: int, cluster: ClusterSpec) -> float:
    """Bytes that each rank sends per second in an all-to-all of ``degree`` ranks."""
    device, per_node = cluster.device, cluster.devices_per_node
    if degree <= per_node:
        return LINK_EFFICIENCY * device.link_bytes_per_s
    outside = (degree - _fewest_in_node(degree, cluster)) / (degree - 1)
    inside = (per_node - 1) / (degree - 1)
    through_port = device.network_bytes_per_s / outside
    return LINK_EFFICIENCY * (min(through_port, device.link_bytes_per_s / inside) if inside else through_port)


def _link_bytes_per_s(cluster: ClusterSpec) -> float:
    """The data sheet's rate within a node; infinite in nodes of one device, where nothing takes it."""
    return cluster.device.link_bytes_per_s if cluster.devices_per_node > 1 else inf


def _fewest_in_node(degree: int, cluster: ClusterSpec) -> int:
    """Ranks that the smallest node has of a group over several: of one that takes all devices, those of the last."""
    needs_last = degree > cluster.num_devices - cluster.last_node_devices
    return cluster.last_node_devices if needs_last and cluster.last_node_devices else cluster.devices_per_node


def host_copy_bytes_per_s(cluster: ClusterSpec) -> float:
    """Rate of large copies of pinned memory to or from the host: 25 of 32 GB/s of sixteen lanes of PCIe 4.0, measured
    on an A100 (ZaidQureshi/bam#54).

    Raises:
        InputError: the device can put nothing there.
    """
    device = cluster.device
    if not device.host_bytes_per_s:
        raise InputError(f"nothing of a {device.name} can be put into host memory; plan without offload")
    return LINK_EFFICIENCY * device.host_bytes_per_s


def ring_s(sent: Sent, *, degree: int, cluster: ClusterSpec) -> float:
    """Seconds of the hops of a ring, latencies left out."""
    return sent.ring / hop_bytes_per_s(degree, cluster)


def collectives_s(sent: Sent, *, degree: int, cluster: ClusterSpec) -> float:
    """Seconds of everything but rings, latencies left out."""
    rings = sent.all_gather + sent.reduce_scatter + sent.broadcast + sent.reduce
    return rings / collective_bytes_per_s(degree, cluster) + sent.all_to_all / exchange_bytes_per_s(degree, cluster)
