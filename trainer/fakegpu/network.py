"""Links between GPUs within a node and between nodes, and the time of collectives over them.

Bandwidths are those of standards and data sheets, times the fraction that is usually reached. Latencies and the formula
for the time of a collective are those that NCCL uses to choose its algorithms (``src/graph/tuning.cc``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.errors import RecipeError, require, suggest_name
from trainer.fakegpu.gpus import GPU, LINK_EFFICIENCY, PCIE_4, PCIE_5

BASE = 14e-6  # fixed seconds of a collective: ``baseLat`` of NCCL's LL128 protocol
# Seconds per hop of a ring: ``hwLat`` of the same protocol, for NVLink, PCIe and the network.
NVLINK_HOP, PCIE_HOP, RDMA_HOP = 1.9e-6, 2.5e-6, 4e-6
# Over TCP: 8 bytes took 38 to 46 µs between two nodes (github.com/NVIDIA/nccl-tests/issues/82), including ``BASE``.
TCP_HOP = 20e-6
# Fraction that NCCL reaches with TCP: "no more than 60 % of wire speed" at 32 Gbit/s, 4 to 6 of 12.5 GB/s at 100
# (github.com/NVIDIA/nccl/issues/209, /450). RDMA reaches ``LINK_EFFICIENCY``: 600 of 800 Gbit/s over RoCE (/495).
TCP = 0.6
TREE = 0.9  # bandwidth of a tree relative to a ring
DEFAULT_NETWORKS = "25gbe,100gbe,8x-ib-hdr"  # interconnects that are compared by default
DEFAULT_NETWORK = "ib-hdr"  # default interconnect of a single plan
MAX_RANKS = 16_384  # ranks of a loop or a script: torch's process groups list their members


@dataclass(frozen=True)
class Link:
    """A link between GPUs."""

    name: str  # name in flags
    title: str  # name in messages, with the source of its bandwidth
    bandwidth: float  # bytes/s in one direction in large collectives: per GPU within a node, per adapter between nodes
    latency: float  # seconds per hop


_WITHIN = (
    Link("pcie-4", "PCIe 4.0 x16 (PCI-SIG)", PCIE_4 * 1e9 * LINK_EFFICIENCY, PCIE_HOP),
    Link("pcie-5", "PCIe 5.0 x16 (PCI-SIG)", PCIE_5 * 1e9 * LINK_EFFICIENCY, PCIE_HOP),
    Link("nvlink-3", "NVLink 3, 300 GB/s each way (NVIDIA A100)", 300e9 * LINK_EFFICIENCY, NVLINK_HOP),
    Link("nvlink-4", "NVLink 4, 450 GB/s each way (NVIDIA H100)", 450e9 * LINK_EFFICIENCY, NVLINK_HOP),
)
_BETWEEN = (  # one adapter; a node with several is written ``8x-ib-hdr`` (DGX A100) or ``8x-ib-ndr`` (DGX H100)
    Link("10gbe", "10 Gbit/s Ethernet over TCP (IEEE 802.3ae)", 1.25e9 * TCP, TCP_HOP),
    Link("25gbe", "25 Gbit/s Ethernet over TCP (IEEE 802.3by)", 3.125e9 * TCP, TCP_HOP),
    Link("100gbe", "100 Gbit/s Ethernet over TCP (IEEE 802.3ba)", 12.5e9 * TCP, TCP_HOP),
    Link("roce-100", "100 Gbit/s Ethernet with RDMA (IEEE 802.3ba)", 12.5e9 * LINK_EFFICIENCY, RDMA_HOP),
    Link("ib-hdr", "InfiniBand HDR, 200 Gbit/s (IBTA)", 25e9 * LINK_EFFICIENCY, RDMA_HOP),
    Link("ib-ndr", "InfiniBand NDR, 400 Gbit/s (IBTA)", 50e9 * LINK_EFFICIENCY, RDMA_HOP),
)
WITHIN, BETWEEN = ({link.name: link for link in links} for links in (_WITHIN, _BETWEEN))


@dataclass(frozen=True)
class RankGroup:
    """The ranks of one collective."""

    ranks: int  # number of ranks
    nodes: int  # number of nodes, with equally many ranks on each
    concurrent_groups: int = 1  # number of groups that share the nodes' network at the same time, including this one


@dataclass(frozen=True)
class Interconnect:
    """The links of a cluster."""

    name: str  # name in flags: ``100gbe``, ``8x-ib-hdr``, ``pcie-4+25gbe``
    intra_node: Link  # from each GPU to the others in its node
    inter_node: Link  # between nodes, over all adapters of a node

    @property
    def describe_inter_node(self) -> str:
        """Description of the link between nodes."""
        between = self.inter_node
        return f"{between.title}, {between.bandwidth / 1e9:.3g} GB/s a node, {1e6 * between.latency:g} µs a hop"

    @property
    def describe_intra_node(self) -> str:
        """Description of the link within a node."""
        return f"{self.intra_node.title}, {self.intra_node.bandwidth / 1e9:.3g} GB/s a GPU"

    def to_json(self) -> dict[str, Any]:
        """Return the links in plain types, with bandwidths in GB/s and latencies in µs, for files."""
        links = {"within": self.intra_node, "between": self.inter_node}
        rates = {f"{name}_gb_s": link.bandwidth / 1e9 for name, link in links.items()}
        hops = {f"{name}_hop_us": round(1e6 * link.latency, 3) for name, link in links.items()}
        return {name: link.title for name, link in links.items()} | rates | hops

    def seconds(self, op: str, size: int, group: RankGroup) -> float:
        """Return the seconds of a collective of ``size`` bytes (whole tensor) as a ring or, if faster, as a tree.

        A ring enters and leaves each node once, so the data of each rank also leave the node, once per concurrent
        group. Trees are for all_reduce only.
        """
        if group.ranks == 1:
            return 0.0
        rounds = 2 if op == "all_reduce" else 1
        hops, between = rounds * (group.ranks - 1), rounds * (group.nodes - 1)
        rate = self.rate(group)
        latency = (hops - between) * self.intra_node.latency + between * self.inter_node.latency
        ring = latency + sent(op, size, group) / rate
        if op != "all_reduce":
            return BASE + ring
        levels = group.ranks // group.nodes - 1
        climbing = 2 * (levels * self.intra_node.latency + math.log2(group.nodes) * self.inter_node.latency)
        return BASE + min(ring, climbing + 2 * size / (TREE * rate))

    def rate(self, group: RankGroup) -> float:
        """Return the bytes/s that each rank of a group can send."""
        if group.nodes == 1:
            return self.intra_node.bandwidth
        network = self.inter_node.bandwidth / group.concurrent_groups
        return network if group.ranks == group.nodes else min(network, self.intra_node.bandwidth)


def sent(op: str, size: int, group: RankGroup) -> float:
    """Return the bytes that each rank sends in a ring for a collective of ``size`` bytes (whole tensor).

    All-gather and reduce-scatter over n ranks send ``(n - 1) / n`` of ``size``, all-reduce twice as much (Patarasuk and
    Yuan, 2009).
    """
    return (2 if op == "all_reduce" else 1) * (group.ranks - 1) / group.ranks * size


def interconnects(text: str, gpu: GPU) -> list[Interconnect]:
    """Parse ``--interconnect``: comma-separated ``BETWEEN`` or ``WITHIN+BETWEEN``, by default the GPU's own link."""
    names = [name.strip().lower() for name in text.split(",")]
    require(len(set(names)) == len(names), f"--interconnect={text} contains a name twice: give each once")
    return [_interconnect(name, gpu) for name in names]


def _interconnect(name: str, gpu: GPU) -> Interconnect:
    within, plus, between = name.rpartition("+")
    match = re.fullmatch(r"(?:(\d+)x-?)?(.+)", between)
    if match is None or match[2] not in BETWEEN or match[1] == "0":
        raise _unknown(name, between, [*BETWEEN, *(f"8x-{known}" for known in BETWEEN)], "between nodes", BETWEEN)
    if plus and within not in WITHIN:
        raise _unknown(name, within, [*WITHIN], "within a node", WITHIN)
    adapters, one = int(match[1] or 1), BETWEEN[match[2]]
    title = f"{adapters} × {one.title}" if adapters > 1 else one.title
    whole = Link(between, title, adapters * one.bandwidth, one.latency)
    return Interconnect(name, WITHIN[within] if plus else intra_node_link(gpu), whole)


def _unknown(name: str, part: str, near: list[str], where: str, known: Iterable[str]) -> RecipeError:
    error = f"--interconnect={name}: {part!r} is not a known link {where}{suggest_name(part, near) or '.'}"
    forms = "as in 100gbe, 8x-ib-hdr (eight adapters in a node) or pcie-4+25gbe"
    return RecipeError(f"{error} Known: {', '.join(known)}, {forms}")


def intra_node_link(gpu: GPU) -> Link:
    """Return the link between GPUs of this kind within a node, from the data sheet."""
    name, title, hop = ("nvlink", "NVLink", NVLINK_HOP) if gpu.link > gpu.bus else ("pcie", "PCIe", PCIE_HOP)
    return Link(name, f"{title} of the {gpu.title}", gpu.link, hop)


@dataclass(frozen=True)
class Cluster:
    """Devices on nodes, numbered node by node."""

    devices: int
    nodes: int

    def group(self, ranks: int = 0, stride: int = 1) -> RankGroup:
        """Return the group of a collective of ``ranks`` (0: all) with distance ``stride``."""
        ranks, here = ranks or self.devices, self.devices // self.nodes
        on_nodes = max(1, min(ranks, ranks * stride // here))
        return RankGroup(ranks, on_nodes, concurrent_groups=max(1, here * on_nodes // ranks))


def check_cluster(ranks: int, nodes: int, rank: int = 0) -> Cluster:
    """Return the cluster of a loop or a script; a ``RecipeError`` reports numbers that cannot be simulated."""
    whole = all(isinstance(one, int) for one in (ranks, nodes, rank))
    require(whole, f"ranks={ranks!r}, nodes={nodes!r} and rank={rank!r} must be integers")
    require(1 <= ranks <= MAX_RANKS, f"{ranks} ranks (devices) cannot be simulated: give 1 to {MAX_RANKS:,}")
    divides = nodes >= 1 and ranks % nodes == 0
    require(divides, f"{ranks} ranks (devices) on {nodes} nodes: the ranks must be a multiple of the nodes")
    require(0 <= rank < ranks, f"rank={rank} must be from 0 to {ranks - 1}, one of {ranks} ranks")
    return Cluster(ranks, nodes)


def clusters(devices: Sequence[int], nodes: Sequence[int] | None, per_node: int | None) -> list[Cluster]:
    """Return the clusters for ``--devices``, with one device as the first, for comparison.

    ``nodes`` has one number for all or one per number of devices. Without it, nodes have ``per_node`` devices,
    default 8. A ``RecipeError`` reports numbers that do not divide.
    """
    shown, here = ",".join(map(str, devices)), per_node or 8
    require(len(set(devices)) == len(devices), f"--devices={shown} contains a number twice: give each once")
    require(nodes is None or per_node is None, "--nodes and --per-node exclude each other: give one of them")
    if nodes is not None and len(nodes) not in (1, len(devices)):
        text = ",".join(map(str, nodes))
        raise RecipeError(f"--nodes={text} must be one number, or as many as --devices={shown}: {len(devices)}")
    found = []
    for number, count in enumerate(devices):
        if nodes is not None:
            machines = nodes[number % len(nodes)]
            require(count % machines == 0, f"--devices={count} must be a multiple of --nodes={machines}")
        else:
            machines = max(1, count // here)
            if count > here and count % here:
                raise RecipeError(f"--devices={count} must be a multiple of --per-node={here}, or at most {here}")
        found.append(Cluster(count, machines))
    found.sort(key=lambda one: one.devices)
    return found if found[0].devices == 1 else [Cluster(1, 1), *found]
