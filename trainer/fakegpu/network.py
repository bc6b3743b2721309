"""Links between GPUs, in a node and between nodes, and how long a collective takes over them.

Bandwidths are those of the standards and data sheets times what is typically reached; latencies, and the way in which
both make the time of a collective, are those by which NCCL itself chooses its algorithms (``src/graph/tuning.cc``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainer.errors import RecipeError, nearest, require
from trainer.fakegpu.gpus import ACHIEVED, GPU, PCIE_4, PCIE_5

BASE = 14e-6  # seconds of any collective: ``baseLat`` of NCCL's LL128 protocol
# Seconds of one hop of a ring: ``hwLat`` of the same protocol, for NVLink, PCIe and the network.
NVLINK_HOP, PCIE_HOP, RDMA_HOP = 1.9e-6, 2.5e-6, 4e-6
# Over TCP: 8 bytes took 38 to 46 µs between two nodes (github.com/NVIDIA/nccl-tests/issues/82), with ``BASE``.
TCP_HOP = 20e-6
# What NCCL reaches of Ethernet over TCP: "no more than 60 % of wire speed" at 32 Gbit/s, 4 to 6 of 12.5 GB/s at 100
# (github.com/NVIDIA/nccl/issues/209 and /450). RDMA reaches ``ACHIEVED``: 600 of 800 Gbit/s over RoCE (issue 495).
TCP = 0.6
TREE = 0.9  # what a tree reaches of the bandwidth of a ring
USUAL, ONE = "25gbe,100gbe,8x-ib-hdr", "ib-hdr"  # compared by default; joins the devices of a single plan


@dataclass(frozen=True)
class Link:
    """What joins GPUs."""

    name: str  # as a flag
    title: str  # as a person says it, with the source of its bandwidth
    bandwidth: float  # bytes a second in one direction, of large collectives: of a GPU in a node, an adapter between
    latency: float  # seconds of a hop


_WITHIN = (
    Link("pcie-4", "PCIe 4.0 x16 (PCI-SIG)", PCIE_4 * 1e9 * ACHIEVED, PCIE_HOP),
    Link("pcie-5", "PCIe 5.0 x16 (PCI-SIG)", PCIE_5 * 1e9 * ACHIEVED, PCIE_HOP),
    Link("nvlink-3", "NVLink 3, 300 GB/s each way (NVIDIA A100)", 300e9 * ACHIEVED, NVLINK_HOP),
    Link("nvlink-4", "NVLink 4, 450 GB/s each way (NVIDIA H100)", 450e9 * ACHIEVED, NVLINK_HOP),
)
_BETWEEN = (  # one adapter; a node with several is written ``8x-ib-hdr`` (DGX A100) or ``8x-ib-ndr`` (DGX H100)
    Link("10gbe", "10 Gbit/s Ethernet over TCP (IEEE 802.3ae)", 1.25e9 * TCP, TCP_HOP),
    Link("25gbe", "25 Gbit/s Ethernet over TCP (IEEE 802.3by)", 3.125e9 * TCP, TCP_HOP),
    Link("100gbe", "100 Gbit/s Ethernet over TCP (IEEE 802.3ba)", 12.5e9 * TCP, TCP_HOP),
    Link("roce-100", "100 Gbit/s Ethernet with RDMA (IEEE 802.3ba)", 12.5e9 * ACHIEVED, RDMA_HOP),
    Link("ib-hdr", "InfiniBand HDR, 200 Gbit/s (IBTA)", 25e9 * ACHIEVED, RDMA_HOP),
    Link("ib-ndr", "InfiniBand NDR, 400 Gbit/s (IBTA)", 50e9 * ACHIEVED, RDMA_HOP),
)
WITHIN, BETWEEN = ({link.name: link for link in links} for links in (_WITHIN, _BETWEEN))


@dataclass(frozen=True)
class Group:
    """The ranks of one collective."""

    ranks: int  # that take part
    nodes: int  # that they are on, evenly
    beside: int = 1  # groups that do the same at the same time and share the network of the nodes with this one


@dataclass(frozen=True)
class Interconnect:
    """What joins the GPUs of a cluster."""

    name: str  # as a flag: ``100gbe``, ``8x-ib-hdr``, ``pcie-4+25gbe``
    within: Link  # of each GPU to the others of its node
    between: Link  # what leaves a node, over all its adapters

    @property
    def across(self) -> str:
        """What joins nodes, in words."""
        between = self.between
        return f"{between.title}, {between.bandwidth / 1e9:.3g} GB/s a node, {1e6 * between.latency:g} µs a hop"

    @property
    def inside(self) -> str:
        """What joins the GPUs of a node, in words."""
        return f"{self.within.title}, {self.within.bandwidth / 1e9:.3g} GB/s a GPU"

    def seconds(self, op: str, size: int, group: Group) -> float:
        """Seconds of a collective of ``size`` bytes (of the whole tensor): of a ring or, if faster, of a tree.

        A ring enters and leaves each node once, so that what each rank sends also leaves the node, once for each of
        the groups beside. Trees are for all_reduce only.
        """
        if group.ranks == 1:
            return 0.0
        rounds = 2 if op == "all_reduce" else 1
        hops, between = rounds * (group.ranks - 1), rounds * (group.nodes - 1)
        rate = self.rate(group)
        ring = (hops - between) * self.within.latency + between * self.between.latency + sent(op, size, group) / rate
        if op != "all_reduce":
            return BASE + ring
        levels = group.ranks // group.nodes - 1
        climbing = 2 * (levels * self.within.latency + math.log2(group.nodes) * self.between.latency)
        return BASE + min(ring, climbing + 2 * size / (TREE * rate))

    def rate(self, group: Group) -> float:
        """Bytes a second that each rank of a group can send."""
        if group.nodes == 1:
            return self.within.bandwidth
        network = self.between.bandwidth / group.beside
        return network if group.ranks == group.nodes else min(network, self.within.bandwidth)


def sent(op: str, size: int, group: Group) -> float:
    """Bytes that each rank sends for a collective of ``size`` bytes (of the whole tensor), as a ring: ``(n - 1) / n``
    of them for an all-gather or reduce-scatter over n ranks, twice that for all-reduce (Patarasuk and Yuan, 2009)."""
    return (2 if op == "all_reduce" else 1) * (group.ranks - 1) / group.ranks * size


def interconnects(text: str, gpu: GPU) -> list[Interconnect]:
    """What ``--interconnect`` names, separated by commas: each ``BETWEEN`` or ``WITHIN+BETWEEN``; without ``WITHIN`` it
    is the link of the GPU's data sheet. A ``RecipeError`` for a name that is unknown, or there twice."""
    names = [name.strip().lower() for name in text.split(",")]
    require(len(set(names)) == len(names), f"--interconnect={text} names one of them twice")
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
    return Interconnect(name, WITHIN[within] if plus else own_link(gpu), whole)


def _unknown(name: str, part: str, near: list[str], where: str, known: Iterable[str]) -> RecipeError:
    said = f"--interconnect={name}: {part!r} is not known {where}{nearest(part, near) or '.'}"
    return RecipeError(
        f"{said} There are: {', '.join(known)}, as in 100gbe, 8x-ib-hdr (eight adapters in a node) or pcie-4+25gbe"
    )


def own_link(gpu: GPU) -> Link:
    """The link between GPUs of its kind in one node, by its data sheet."""
    name, title, hop = ("nvlink", "NVLink", NVLINK_HOP) if gpu.link > gpu.bus else ("pcie", "PCIe", PCIE_HOP)
    return Link(name, f"{title} of the {gpu.title}", gpu.link, hop)


@dataclass(frozen=True)
class Cluster:
    """Devices, and the nodes that they are on, numbered node by node."""

    devices: int
    nodes: int

    def group(self, ranks: int = 0, stride: int = 1) -> Group:
        """Those of a collective of ``ranks``, 0 for all, that are ``stride`` apart."""
        ranks, here = ranks or self.devices, self.devices // self.nodes
        on_nodes = max(1, min(ranks, ranks * stride // here))
        return Group(ranks, on_nodes, beside=max(1, here * on_nodes // ranks))


def clusters(devices: Sequence[int], nodes: Sequence[int] | None, per_node: int | None) -> list[Cluster]:
    """The devices with their nodes, one device first, to compare with. ``nodes`` are as many as ``devices``, or one
    number for all; else machines have ``per_node`` devices, or 8. A ``RecipeError`` if numbers do not divide."""
    shown, here = ",".join(map(str, devices)), per_node or 8
    require(len(set(devices)) == len(devices), f"--devices={shown} names a number twice")
    require(nodes is None or per_node is None, "--nodes and --per-node say the same: give one of them")
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
            fits = count <= here or count % here == 0
            require(fits, f"--devices={count} must be a multiple of --per-node={here}, or no more than that")
        found.append(Cluster(count, machines))
    found.sort(key=lambda one: one.devices)
    return found if found[0].devices == 1 else [Cluster(1, 1), *found]
