"""The knobs that a search may change, and the combinations worth predicting. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from itertools import product
from typing import Any

from trainer.engine.cut import data_parallel_rank
from trainer.fakegpu.network import Cluster
from trainer.memory.knobs import KNOBS, LOSSLESS_PLANNED, LOSSY, UNTESTED_WITH_TP, turned_off, undecided_knobs
from trainer.recipe import Memory, Recipe

Settings = dict[str, Any]  # recipe settings by key, such as ``{"memory.cpu_offload": "optimizer"}``
UNSET_VALUES = {knob.name: getattr(Memory(), knob.name) for knob in LOSSLESS_PLANNED}  # their default values


def wants_plan(recipe: Recipe) -> bool:
    """Return whether the planner has to decide something: the recipe has a budget, or a knob at ``auto``."""
    return recipe.memory.budget is not None or bool(undecided_knobs(recipe.memory))


def free_knobs(memory: Memory) -> list[str]:
    """Return the knobs that a search may change: with a budget those at auto or their default, else those at auto."""
    if memory.budget is None:
        return [name for name in UNSET_VALUES if getattr(memory, name) == "auto"]
    return [name for name, default in UNSET_VALUES.items() if getattr(memory, name) in ("auto", default)]


def combinations(recipe: Recipe, ranks: int, on_gpu: bool = True, nodes: int = 1) -> list[Settings]:
    """Return one dict of settings per combination of the free knobs; the first uses no technique.

    On one CPU, sharding and offloading change nothing. Each of several ``nodes`` may hold a sharded replica."""
    free = free_knobs(recipe.memory)
    knobs = [knob for knob in LOSSLESS_PLANNED if knob.name in free and (ranks > 1 or not knob.needs_ranks)]
    values = {knob.name: knob.values if on_gpu or not knob.to_host else knob.values[:1] for knob in knobs}
    # A value that equals the default need not be tried twice.
    values = {knob.name: tuple(value for value in values[knob.name] if value not in knob.noop_values) for knob in knobs}
    own = {"activation_checkpointing": ORDER[CHECKPOINTING], "replicas": (1, nodes) if 1 < nodes < ranks else (1,)}
    values |= {name: choice for name, choice in own.items() if name in values}
    if recipe.memory.tensor_parallel > 1:
        values |= {name: values[name][:1] for name in UNTESTED_WITH_TP if name in values}
    every = [dict(zip(values, choice, strict=True)) for choice in product(*values.values())]
    sensible = [one for one in every if is_sensible(dataclasses.replace(recipe.memory, **one), ranks)]
    if not sensible:  # the recipe's own settings are not: try all combinations with them
        sensible = [one for one in every if one.get("reshard_after_forward", True)]
    return [{f"memory.{name}": value for name, value in one.items()} for one in sensible]


def is_sensible(memory: Memory, ranks: int) -> bool:
    """Return whether a combination can be useful: some only cost time for memory that another knob saves anyway."""
    return all(knob.pays(memory, ranks) for knob in LOSSLESS_PLANNED if knob.is_on(memory))


CHECKPOINTING, OFFLOADED, REPLICAS = "memory.activation_checkpointing", "memory.activation_offload", "memory.replicas"
SYNC = "memory.sync_every_micro_step"
OVERLAPPING = [f"memory.{knob.name}" for knob in LOSSLESS_PLANNED if knob.overlaps]
LASTING = {f"memory.{knob.name}": knob.lasting for knob in KNOBS}
OFFLOAD = "memory.cpu_offload"
FRACTIONS = (0.25, 0.5, 0.75)  # shares of blocks to try: memory and time lie between those of none and full

ORDER = {f"memory.{knob.name}": knob.values for knob in LOSSLESS_PLANNED if knob.monotonic}
ORDER |= {CHECKPOINTING: ("none", *FRACTIONS, "selective", "full"), "memory.reshard_after_forward": (False, True)}
"""The values of each knob, fastest first: each computes and moves at least as much as the one before it."""


def num_changed_levels(settings: Mapping[str, Any]) -> int:
    """Return the sum over all knobs of how far each is from its fastest value."""
    return sum(values.index(settings[key]) for key, values in ORDER.items() if key in settings)


def is_slower_or_equal(settings: Mapping[str, Any], other: Mapping[str, Any], sharded: bool) -> bool:
    """Return whether ``settings`` do at least the work of ``other``: with the same cut they cannot be faster."""
    if sharded and any(settings.get(key) != other.get(key) for key in OVERLAPPING):
        return False  # either of the two may be faster
    if settings.get(OFFLOADED) and other.get(OFFLOADED) and settings.get(CHECKPOINTING) != other.get(CHECKPOINTING):
        return False  # checkpointed blocks have less to offload
    return saves_at_least(settings, other)


def saves_at_least(settings: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether every knob in ``settings`` saves at least as much memory as in ``other``."""
    return settings.keys() == other.keys() and all(_does(key, settings[key], other[key]) for key in settings)


def _does(key: str, value: Any, other: Any) -> bool:
    if value == other:
        return True
    if key == REPLICAS:  # more replicas: fewer ranks exchange weights, within a node instead of between nodes
        return value < other
    if key == CHECKPOINTING and "selective" in (value, other):
        return other == "none" or value == "full"
    order: tuple[Any, ...] = ORDER.get(key, ())
    return value in order and other in order and order.index(value) > order.index(other)


def state_settings(settings: Mapping[str, Any]) -> Settings:
    """Return the settings that decide which weights and optimizer state are on the device."""
    return {key: value for key, value in settings.items() if LASTING.get(key, "state") == "state"}


def update_settings(settings: Mapping[str, Any]) -> Settings:
    """Return the settings that decide the memory of an update, without those about the activations."""
    return {key: value for key, value in settings.items() if LASTING.get(key) != "forward"}


def micro_batch_sizes(recipe: Recipe, ranks: int) -> list[int | None]:
    """Return the different micro-batch sizes in samples, largest first; ``[None]`` if the recipe sets it."""
    given = recipe.memory.micro_batch_size != "auto" or recipe.accumulate is not None
    if given or recipe.batch_size is None or recipe.run.deterministic:  # deterministic: independent of the ranks
        return [None]
    share = -(-recipe.batch_size // data_parallel_rank(recipe.memory, 0, ranks)[1])
    return list(dict.fromkeys(-(-share // micro_steps) for micro_steps in range(1, share + 1)))


def lossy_steps(recipe: Recipe, faster: bool = False) -> list[Settings]:
    """Return the unused lossy settings, one by one, then together; ``faster`` adds those that only save time."""
    options: list[Settings] = []
    alone: list[Settings] = []
    for knob in LOSSY:
        if getattr(recipe.memory, knob.name) not in [turn.value for turn in knob.candidates]:
            turns = {knob.name: knob.candidates[0].value, **knob.candidates[0].implies}
            (options if knob.num_phases else alone).append({f"memory.{name}": value for name, value in turns.items()})
    together = {key: value for option in options for key, value in option.items()}
    own = alone if faster and recipe.memory.precision == "32-true" else []  # other precisions have few products in fp32
    return [*options, *([together] if len(options) > 1 else []), *own]


def apply_settings(recipe: Recipe, settings: Mapping[str, Any]) -> Recipe:
    memory = {key.removeprefix("memory."): value for key, value in settings.items()}
    return recipe.replace(memory=dataclasses.replace(recipe.memory, **memory))


def changed_settings(recipe: Recipe, settings: Mapping[str, Any]) -> Settings:
    memory = recipe.memory
    return {key: value for key, value in settings.items() if getattr(memory, key.removeprefix("memory.")) != value}


def non_default_settings(settings: Mapping[str, Any]) -> Settings:
    default = {f"memory.{name}": value for name, value in UNSET_VALUES.items()}
    return {key: value for key, value in settings.items() if default.get(key, ...) != value}


def without_size(settings: Mapping[str, Any]) -> Settings:
    return {key: value for key, value in settings.items() if key != "memory.micro_batch_size"}


def devices_of(recipe: Recipe) -> int:
    """Return the ranks that the recipe asks for; 1 if it leaves them open."""
    return 1 if recipe.run.devices == "auto" else recipe.run.devices


def strategies(memory: Memory, cluster: Cluster) -> dict[str, Settings]:
    """Return the strategies that the recipe leaves open, by name, with the settings of each."""
    if cluster.devices == 1:
        alone: Settings = {"memory.strategy": "auto", "memory.replicas": 1, "memory.reshard_after_forward": True}
        together = {f"memory.{name}": value for name, value in turned_off("tensor_parallel").items()}
        alone |= together if memory.tensor_parallel > 1 else {}
        return {"single": alone | {"memory.sync_every_micro_step": None}}
    sharded: Settings = {"memory.strategy": "fsdp"}
    if memory.replicas > 1:
        return {"hsdp": sharded}
    reshards, streams = memory.reshard_after_forward, memory.cpu_offload == "parameters"
    shards, several = memory.strategy != "ddp", 1 < cluster.nodes < cluster.devices
    options: dict[str, tuple[Settings, bool]] = {
        "ddp": ({"memory.strategy": "ddp"}, memory.strategy != "fsdp" and not streams and reshards),
        "fsdp": (sharded, shards and reshards),
        "fsdp*": (sharded | {"memory.reshard_after_forward": False}, shards),
        "hsdp": (sharded | {"memory.replicas": cluster.nodes}, shards and several and memory.tensor_parallel == 1),
    }
    return {name: settings for name, (settings, is_open) in options.items() if is_open}
