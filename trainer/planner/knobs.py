"""Which knobs a search may turn, and the combinations that are worth asking about. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from itertools import product
from typing import Any

from trainer.fakegpu.network import Cluster
from trainer.memory.knobs import KNOBS, LOSSY, SEARCHED, UNPROVEN, left_open, turned_off
from trainer.recipe import Memory, Recipe

Settings = dict[str, Any]  # of a recipe by their keys, such as ``{"memory.cpu_offload": "optimizer"}``
OPEN = {knob.name: getattr(Memory(), knob.name) for knob in SEARCHED}  # their default values


def wants_plan(recipe: Recipe) -> bool:
    """Whether the recipe leaves something to the planner: it has a budget, or a knob at ``auto``."""
    return recipe.memory.budget is not None or bool(left_open(recipe.memory))


def free_knobs(memory: Memory) -> list[str]:
    """The knobs that a search may turn: with a budget all that are not set to something, without one those at auto."""
    if memory.budget is None:
        return [name for name in OPEN if getattr(memory, name) == "auto"]
    return [name for name, default in OPEN.items() if getattr(memory, name) in ("auto", default)]


def combinations(recipe: Recipe, ranks: int, on_gpu: bool = True, nodes: int = 1) -> list[Settings]:
    """The settings of all free knobs, a dict for each combination; the first uses no technique. On one CPU sharding and
    offloading change nothing; with several ``nodes`` each may have its own copy of a sharded model."""
    free = free_knobs(recipe.memory)
    knobs = [knob for knob in SEARCHED if knob.name in free and (ranks > 1 or not knob.needs_ranks)]
    values = {knob.name: knob.values if on_gpu or not knob.to_host else knob.values[:1] for knob in knobs}
    # What is as the default need not be asked about twice.
    values = {knob.name: tuple(value for value in values[knob.name] if value not in knob.off) for knob in knobs}
    own = {"activation_checkpointing": ORDER[CHECKPOINTING], "replicas": (1, nodes) if 1 < nodes < ranks else (1,)}
    values |= {name: choice for name, choice in own.items() if name in values}
    if recipe.memory.tensor_parallel > 1:
        values |= {name: values[name][:1] for name in UNPROVEN if name in values}
    every = [dict(zip(values, choice, strict=True)) for choice in product(*values.values())]
    sensible = [one for one in every if is_sensible(dataclasses.replace(recipe.memory, **one), ranks)]
    if not sensible:  # for what the recipe itself sets is not: then all that go with it are asked about
        sensible = [one for one in every if one.get("reshard_after_forward", True)]
    return [{f"memory.{name}": value for name, value in one.items()} for one in sensible]


def is_sensible(memory: Memory, ranks: int) -> bool:
    """Whether a combination can be better than the others: some only cost time for memory that another saves."""
    return all(knob.pays(memory, ranks) for knob in SEARCHED if knob.is_on(memory))


CHECKPOINTING, OFFLOADED, REPLICAS = "memory.activation_checkpointing", "memory.activation_offload", "memory.replicas"
SYNC = "memory.sync_every_micro_step"
OVERLAPPING = [f"memory.{knob.name}" for knob in SEARCHED if knob.overlaps]
LASTING = {f"memory.{knob.name}": knob.lasting for knob in KNOBS}
OFFLOAD = "memory.cpu_offload"
FRACTIONS = (0.25, 0.5, 0.75)  # shares of blocks worth trying: memory and time lie between those of none and full

ORDER = {f"memory.{knob.name}": knob.values for knob in SEARCHED if knob.graded}
ORDER |= {CHECKPOINTING: ("none", *FRACTIONS, "selective", "full"), "memory.reshard_after_forward": (False, True)}
"""The values of each knob, the fastest first: none computes or moves less than the one before it."""


def intrusion(settings: Mapping[str, Any]) -> int:
    """How far the knobs are turned, all in all."""
    return sum(values.index(settings[key]) for key, values in ORDER.items() if key in settings)


def does_at_least(settings: Mapping[str, Any], other: Mapping[str, Any], sharded: bool) -> bool:
    """Whether settings compute and move all that ``other`` does: with the same cut they cannot be faster."""
    if sharded and any(settings.get(key) != other.get(key) for key in OVERLAPPING):
        return False  # either of the two may be faster
    if settings.get(OFFLOADED) and other.get(OFFLOADED) and settings.get(CHECKPOINTING) != other.get(CHECKPOINTING):
        return False  # checkpointed blocks have less to offload
    return is_turned_as_far(settings, other)


def is_turned_as_far(settings: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether no knob of ``other`` saves more memory than it does in settings."""
    return settings.keys() == other.keys() and all(_does(key, settings[key], other[key]) for key in settings)


def _does(key: str, value: Any, other: Any) -> bool:
    if value == other:
        return True
    if key == REPLICAS:  # the more, the fewer ranks exchange weights, within a node and not between nodes
        return value < other
    if key == CHECKPOINTING and "selective" in (value, other):
        return other == "none" or value == "full"
    order: tuple[Any, ...] = ORDER.get(key, ())
    return value in order and other in order and order.index(value) > order.index(other)


def keeps(settings: Mapping[str, Any]) -> Settings:
    """The settings that decide which weights and optimizer state are on the device."""
    return {key: value for key, value in settings.items() if LASTING.get(key, "state") == "state"}


def updates(settings: Mapping[str, Any]) -> Settings:
    """The settings that decide what memory an update needs: not those of what a forward keeps."""
    return {key: value for key, value in settings.items() if LASTING.get(key) != "forward"}


def micro_batch_sizes(recipe: Recipe, ranks: int) -> list[int | None]:
    """Samples of a micro-batch to consider, the most first: one for each number of micro-steps that makes a difference;
    ``[None]`` where the recipe decides."""
    given = recipe.memory.micro_batch_size != "auto" or recipe.accumulate is not None
    if given or recipe.batch_size is None or recipe.run.deterministic:  # for which it must not depend on the ranks
        return [None]
    from trainer.engine.window import share_of  # imports torch, and flags that cannot work are refused without

    share = -(-recipe.batch_size // share_of(recipe.memory, 0, ranks)[1])
    return list(dict.fromkeys(-(-share // micro_steps) for micro_steps in range(1, share + 1)))


def lossy_steps(recipe: Recipe, faster: bool = False) -> list[Settings]:
    """What would save more, at a loss that the recipe has not allowed: each by itself, then together. ``faster`` adds
    what saves time alone, on a GPU."""
    options: list[Settings] = []
    alone: list[Settings] = []
    for knob in LOSSY:
        if getattr(recipe.memory, knob.name) not in [turn.value for turn in knob.turns]:
            turns = {knob.name: knob.turns[0].value, **knob.turns[0].along}
            (options if knob.reach else alone).append({f"memory.{name}": value for name, value in turns.items()})
    together = {key: value for option in options for key, value in option.items()}
    own = alone if faster and recipe.memory.precision == "32-true" else []  # for others have few products in fp32
    return [*options, *([together] if len(options) > 1 else []), *own]


def applied(recipe: Recipe, settings: Mapping[str, Any]) -> Recipe:
    """The recipe with ``settings`` of ``memory``."""
    memory = {key.removeprefix("memory."): value for key, value in settings.items()}
    return recipe.replace(memory=dataclasses.replace(recipe.memory, **memory))


def changed(recipe: Recipe, settings: Mapping[str, Any]) -> Settings:
    """Those of ``settings`` that differ from what the recipe says already."""
    memory = recipe.memory
    return {key: value for key, value in settings.items() if getattr(memory, key.removeprefix("memory.")) != value}


def turned(settings: Mapping[str, Any]) -> Settings:
    """The settings without the knobs that are as if nobody had mentioned them."""
    return {key: value for key, value in settings.items() if OPEN.get(key.removeprefix("memory."), ...) != value}


def without_size(settings: Mapping[str, Any]) -> Settings:
    """The settings without the micro-batch."""
    return {key: value for key, value in settings.items() if key != "memory.micro_batch_size"}


def devices_of(recipe: Recipe) -> int:
    """The ranks that the recipe asks for; 1 where it leaves them open."""
    return 1 if recipe.run.devices == "auto" else recipe.run.devices


def strategies(memory: Memory, cluster: Cluster) -> dict[str, Settings]:
    """The strategies that the recipe leaves open, by name, with the settings that make each."""
    if cluster.devices == 1:
        alone: Settings = {"memory.strategy": "auto", "memory.replicas": 1, "memory.reshard_after_forward": True}
        together = {f"memory.{name}": value for name, value in turned_off("tensor_parallel").items()}
        alone |= together if memory.tensor_parallel > 1 else {}
        return {"single": alone | {"memory.sync_every_micro_step": None}}
    sharded: Settings = {"memory.strategy": "fsdp"}
    if memory.replicas > 1:
        return {"hsdp": sharded}
    reshards, streams = memory.reshard_after_forward, memory.cpu_offload == "parameters"
    options: dict[str, Settings] = {}
    if memory.strategy != "fsdp" and not streams and reshards:
        options["ddp"] = {"memory.strategy": "ddp"}
    if memory.strategy == "ddp":
        return options
    if reshards:
        options["fsdp"] = sharded
    options["fsdp*"] = sharded | {"memory.reshard_after_forward": False}
    if 1 < cluster.nodes < cluster.devices and memory.tensor_parallel == 1:
        options["hsdp"] = sharded | {"memory.replicas": cluster.nodes}
    return options
