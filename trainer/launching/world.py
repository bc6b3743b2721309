"""Which processes take part: found out from the launcher's environment, and checked against what was asked for."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from trainer.errors import require
from trainer.launching.slurm import devices_per_node, require_srun, slurm_task
from trainer.recipe import Recipe
from trainer.system.environment import number

# The names that `fabric run --precision` also takes, and ours for them.
PRECISION_ALIASES = {"32": "32-true", "64": "64-true", "16": "16-mixed", "bf16": "bf16-mixed"}

ACCELERATE_PRECISION = {"no": None, "fp16": "16-mixed", "bf16": "bf16-mixed"}
"""``accelerate launch --mixed_precision``, and ``memory.precision`` for it; no leaves the recipe's."""

RAY_WORKER = ("RAY_JOB_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")
"""The environment of a worker of Ray Train's ``TorchTrainer``; any other of Ray's processes has only the first."""

FABRIC_STARTS = ("python", "accelerate launch")
"""Launchers that leave one process, from which Fabric starts the other ranks."""


@dataclass(frozen=True)
class World:
    """The processes of a run.

    Args:
        launcher: what started them: python (one process; Fabric starts the others), torchrun, fabric run,
            accelerate launch, accelerate launch (torchrun), ray or slurm.
        accelerator: cpu or cuda.
        devices, nodes: ranks on this node, and machines.
        fallback: why this accelerator was taken, where it is not the one that a person may expect.
        backend: of the process group, once there is one.
    """

    launcher: str
    accelerator: str
    devices: int
    nodes: int = 1
    fallback: str | None = field(default=None, compare=False)
    backend: str | None = field(default=None, compare=False)

    @property
    def size(self) -> int:
        """Ranks over all nodes."""
        return self.devices * self.nodes

    @property
    def started_by_fabric(self) -> bool:
        """Whether the other ranks are started from this process, or this one from the first."""
        return self.launcher in FABRIC_STARTS

    def describe(self, strategy: str) -> str:
        """What was found, in a line: ``torchrun: 2 ranks on 1 node (2 a node), cpu, gloo, ddp``."""
        ranks = f"{self.size} rank{'s' * (self.size > 1)} on {self.nodes} node{'s' * (self.nodes > 1)}"
        ranks += f" ({self.devices} a node)" if self.size > 1 else ""
        accelerator = self.accelerator + (f" ({self.fallback})" if self.fallback else "")
        return f"{self.launcher}: {ranks}, {accelerator}, {self.backend or 'no process group'}, {strategy}"


def find_world(recipe: Recipe, environment: MutableMapping[str, str] = os.environ) -> tuple[Recipe, World]:
    """The recipe with what the launcher was told, and the world that the two ask for, with a device for each rank.

    The variables of ``fabric run``, which starts the ranks with torchrun, are removed: as long as they are there,
    Fabric refuses every argument that says the same thing in another way, a strategy object among them.

    Raises:
        RecipeError: when they contradict each other.
    """
    if number("LT_CLI_USED", 0, environment):
        del environment["LT_CLI_USED"]
        recipe, world = _of_fabric_run(recipe, environment)
    else:
        world = detect_world(recipe, environment)
    if world.accelerator == "cuda":
        found = _devices_here("cuda")
        asked = "run.devices asks for" if world.started_by_fabric else f"{world.launcher} started"
        require(
            world.devices <= found,
            f"{asked} {world.devices} ranks on this node, and torch sees {found} GPU(s): use at most {found}, or check "
            "CUDA_VISIBLE_DEVICES and what the scheduler gives to each process",
        )
    return recipe, world


def _of_fabric_run(recipe: Recipe, environment: MutableMapping[str, str]) -> tuple[Recipe, World]:
    names = ("accelerator", "strategy", "precision", "devices", "num_nodes")
    asked = {name: environment.pop(f"LT_{name.upper()}", None) for name in names}
    accelerator, strategy, precision = asked["accelerator"], asked["strategy"], asked["precision"]
    run: dict[str, Any] = {}
    memory: dict[str, Any] = {}
    if accelerator not in (None, "auto"):
        run["accelerator"] = "cuda" if accelerator == "gpu" else accelerator
    if strategy not in (None, "auto"):
        memory["strategy"] = strategy
    if precision is not None:
        memory["precision"] = PRECISION_ALIASES.get(precision, precision)
    own = {"run": dataclasses.replace(recipe.run, **run), "memory": dataclasses.replace(recipe.memory, **memory)}
    recipe = recipe.replace(**own)
    world = detect_world(recipe, environment)
    require(
        world.launcher == "torchrun",
        "LT_CLI_USED in the environment says that fabric run started this process, but the variables of torchrun, "
        "which it starts, are not there: unset LT_CLI_USED",
    )
    for name, found in (("devices", world.devices), ("num_nodes", world.nodes)):
        wanted = asked[name] or ""  # or a list of devices, or auto
        require(
            not wanted.isdigit() or int(wanted) == found,
            f"LT_{name.upper()}={wanted} asks for another world than fabric run has started, whose {name} is {found}: "
            f"unset LT_{name.upper()}, or say fabric run --{name.replace('_', '-')} {wanted}",
        )
    return recipe, dataclasses.replace(world, launcher="fabric run")


def detect_world(recipe: Recipe, environment: Mapping[str, str] = os.environ) -> World:
    """The world that the launcher's environment and the recipe ask for; refused when they contradict each other."""
    accelerator, fallback = _accelerator(recipe, environment)
    wanted = recipe.run.devices
    accelerated = "ACCELERATE_DYNAMO_BACKEND" in environment  # which accelerate launch always sets
    if accelerated:
        _refuse_options_of_accelerate(recipe, environment)
    if "TORCHELASTIC_RUN_ID" in environment:
        name = "accelerate launch (torchrun)" if accelerated else "torchrun"
        devices, nodes = (number(f"{level}_WORLD_SIZE", environment=environment) for level in ("LOCAL", "GROUP"))
        world = World(name, accelerator, devices, nodes)
        size = number("WORLD_SIZE", world.size, environment)  # ranks are counted as those of this node times the nodes
        require(
            size == world.size,
            f"torchrun started {size} ranks on {nodes} node(s), {devices} of them on this one: start as many on every "
            "node, by the same --nproc-per-node",
        )
    elif all(name in environment for name in RAY_WORKER):
        workers, devices = (number(name, environment=environment) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        require(
            devices > 0 and workers % devices == 0,
            f"Ray has put {devices} of {workers} workers on this node, and another number on others: choose --workers "
            "and --cpus-per-worker so that every node has as many",
        )
        world = World("ray", accelerator, devices, workers // devices)
    elif (task := slurm_task(environment)) is not None:
        gpus = _devices_here(accelerator) if accelerator == "cuda" else None
        world = World("slurm", accelerator, devices_per_node(task, gpus), len(task.tasks_per_node))
    else:
        if wanted == "auto":
            require_srun(environment)
        devices = _devices_here(accelerator) if wanted == "auto" else wanted
        world = World("accelerate launch" if accelerated else "python", accelerator, devices)
        _refuse_unknown_launcher(world, environment)
    require(
        wanted in ("auto", world.devices),
        f"run.devices={wanted} contradicts the launcher: {world.launcher} started {world.devices} process(es) on this "
        "node; leave run.devices out, or start as many",
    )
    return dataclasses.replace(world, fallback=fallback)


def _refuse_unknown_launcher(world: World, environment: Mapping[str, str]) -> None:
    """Several processes that do not know of each other would be as many silent single runs."""
    for name in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "JSM_NAMESPACE_SIZE"):
        started = number(name, 1, environment)
        # Fabric tells the processes that it starts itself their WORLD_SIZE, too: that of run.devices.
        joined = name == "WORLD_SIZE" and "LOCAL_RANK" in environment and started == world.size
        require(
            started == 1 or joined,
            f"{name}={started} in the environment says that a launcher started {started} processes, but it is neither "
            "torchrun nor Slurm: start the run with torchrun, fabric run, srun or --run.devices, or unset the variable",
        )
    # For several processes on CPUs, accelerate launch starts one, says where the others would meet, and not how many.
    require(
        world.launcher != "accelerate launch" or world.size > 1 or "MASTER_ADDR" not in environment,
        "accelerate launch was asked for several processes and started one: start them with "
        "torchrun --nproc-per-node N -m trainer fit RECIPE, or with trainer fit RECIPE --run.devices N",
    )


def _refuse_options_of_accelerate(recipe: Recipe, environment: Mapping[str, str]) -> None:
    """What ``accelerate launch`` tells the library of that name means nothing here: no option is dropped silently."""
    name = environment.get("ACCELERATE_MIXED_PRECISION", "no")
    precision = ACCELERATE_PRECISION.get(name, "one of its values")
    require(
        precision in (None, recipe.memory.precision),
        f"accelerate launch --mixed_precision {name} contradicts memory.precision={recipe.memory.precision}: "
        f"say --memory.precision {precision}, and --mixed_precision no",
    )
    for option in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        require(
            environment.get(f"ACCELERATE_USE_{option}", "false").lower() not in ("true", "1"),
            f"accelerate launch --use_{option.lower()} is not for this trainer: leave it out, and say "
            "--memory.strategy fsdp",
        )


def _accelerator(recipe: Recipe, environment: Mapping[str, str]) -> tuple[str, str | None]:
    """``cpu`` or ``cuda``, and why it is the former where nobody has asked for it."""
    import torch

    if recipe.run.accelerator != "auto":
        require(
            recipe.run.accelerator != "cuda" or torch.cuda.is_available(),
            "run.accelerator=cuda, but torch sees no CUDA device: use run.accelerator cpu or auto",
        )
        return recipe.run.accelerator, None
    if environment.get("ACCELERATE_USE_CPU", "false").lower() in ("true", "1"):
        return "cpu", "as accelerate launch was told"
    if torch.cuda.is_available():
        return "cuda", None
    return "cpu", "this torch is built without CUDA" if torch.version.cuda is None else "torch sees no CUDA device"


def _devices_here(accelerator: str) -> int:
    import torch

    return torch.cuda.device_count() if accelerator == "cuda" else 1
