"""Devices on nodes, and the strategies that make sense on them. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainer.errors import require
from trainer.planner.events import Work
from trainer.planner.fabric import Group, group_of
from trainer.planner.knobs import Settings
from trainer.recipe import Memory


@dataclass(frozen=True)
class Cluster:
    """Devices, and the nodes that they are on."""

    devices: int
    nodes: int

    def group(self, item: Work) -> Group:
        """Who takes part in a collective, and where they are."""
        return group_of(item.ranks or self.devices, item.stride if item.ranks else 1, self.devices, self.nodes)


def clusters(devices: Sequence[int], nodes: Sequence[int] | None, per_node: int | None) -> list[Cluster]:
    """The devices with their nodes, one device first: the others are compared with it.

    Args:
        devices: ranks, over all nodes.
        nodes: machines, one number for all or as many as there are of ``devices``.
        per_node: devices of each machine; 8 if neither is given.

    Raises:
        RecipeError: for numbers that do not divide each other.
    """
    shown = ",".join(map(str, devices))
    require(len(set(devices)) == len(devices), f"--devices={shown} names a number twice")
    require(nodes is None or per_node is None, "--nodes and --per-node say the same: give one of them")
    if nodes is not None:
        text = ",".join(map(str, nodes))
        require(
            len(nodes) in (1, len(devices)),
            f"--nodes={text} must be one number, or as many as --devices={shown}: {len(devices)}",
        )
        each = [*nodes] if len(nodes) == len(devices) else [*nodes] * len(devices)
        for count, machines in zip(devices, each, strict=True):
            require(count % machines == 0, f"--devices={count} must be a multiple of --nodes={machines}")
    else:
        here = per_node or 8
        for count in devices:
            require(
                count <= here or count % here == 0,
                f"--devices={count} must be a multiple of --per-node={here}, or no more than that",
            )
        each = [max(1, count // here) for count in devices]
    found = sorted((Cluster(*pair) for pair in zip(devices, each, strict=True)), key=lambda one: one.devices)
    return found if found[0].devices == 1 else [Cluster(1, 1), *found]


def strategies(memory: Memory, cluster: Cluster) -> dict[str, Settings]:
    """The strategies that the recipe leaves open, by name, with the settings that make each."""
    if cluster.devices == 1:
        alone: Settings = {"memory.strategy": "auto", "memory.replicas": 1, "memory.reshard_after_forward": True}
        return {"single": alone | {"memory.sync_every_micro_step": None}}
    sharded: Settings = {"memory.strategy": "fsdp"}
    if memory.replicas > 1:
        return {"hsdp": sharded}
    options: dict[str, Settings] = {
        "ddp": {"memory.strategy": "ddp"},
        "fsdp": sharded,
        "fsdp*": sharded | {"memory.reshard_after_forward": False},
        "hsdp": sharded | {"memory.replicas": cluster.nodes},
    }
    if memory.strategy == "ddp":
        del options["fsdp"], options["fsdp*"], options["hsdp"]
    if memory.strategy == "fsdp" or memory.cpu_offload == "parameters" or not memory.reshard_after_forward:
        options.pop("ddp", None)
    if not memory.reshard_after_forward:
        options.pop("fsdp", None)
    if cluster.nodes == 1 or cluster.nodes == cluster.devices:
        options.pop("hsdp", None)
    return options
