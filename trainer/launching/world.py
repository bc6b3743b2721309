"""Detects the processes of a run from the launcher's environment, and checks them against the recipe."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any

from trainer.errors import RecipeError, require
from trainer.launching.slurm import devices_per_node, require_srun, slurm_task
from trainer.recipe import Recipe
from trainer.system.environment import read_int_variable

# Short names that `fabric run --precision` also accepts, with the full names.
PRECISION_ALIASES = {"32": "32-true", "64": "64-true", "16": "16-mixed", "bf16": "bf16-mixed"}

ACCELERATE_PRECISION = {"no": None, "fp16": "16-mixed", "bf16": "bf16-mixed"}
"""``memory.precision`` for each ``accelerate launch --mixed_precision``; no keeps the recipe's."""

RAY_WORKER = ("RAY_JOB_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")
"""Environment variables of a worker of Ray Train's ``TorchTrainer``; other Ray processes have only the first."""


@dataclass(frozen=True)
class World:
    """The processes of a run."""

    launcher: str
    """python (one process; Fabric starts the others), torchrun, fabric run, accelerate launch, accelerate launch
    (torchrun), ray or slurm."""
    accelerator: str  # cpu or cuda
    devices: int  # number of ranks on this node
    nodes: int = 1  # number of machines
    fallback: str | None = field(default=None, compare=False)  # why it is cpu, if the recipe does not ask for it
    backend: str | None = field(default=None, compare=False)  # backend of the process group, once it exists

    @property
    def world_size(self) -> int:
        return self.devices * self.nodes

    @property
    def started_by_fabric(self) -> bool:
        """Whether the launcher starts one process, from which Fabric starts the other ranks."""
        return self.launcher in ("python", "accelerate launch")

    def describe(self, strategy: str) -> str:
        """Describe the world in one line: ``torchrun: 2 ranks on 1 node (2 per node), cpu, gloo, ddp``."""
        ranks = f"{self.world_size} rank{'s' * (self.world_size > 1)} on {self.nodes} node{'s' * (self.nodes > 1)}"
        ranks += f" ({self.devices} per node)" if self.world_size > 1 else ""
        accelerator = self.accelerator + (f" ({self.fallback})" if self.fallback else "")
        return f"{self.launcher}: {ranks}, {accelerator}, {self.backend or 'no process group'}, {strategy}"


def resolve_world(recipe: Recipe, environment: MutableMapping[str, str] = os.environ) -> tuple[Recipe, World]:
    """Return the recipe with the options of ``fabric run``, and the detected world. Remove the variables of ``fabric
    run``, because Fabric then rejects every argument that sets the same option, including a strategy object."""
    if read_int_variable("LT_CLI_USED", 0, environment):
        del environment["LT_CLI_USED"]
        recipe, world = _of_fabric_run(recipe, environment)
    else:
        world = detect_world(recipe, environment)
    if world.accelerator == "cuda":
        found = _devices_here("cuda")
        asked = "run.devices asks for" if world.started_by_fabric else f"{world.launcher} started"
        cause = f"{asked} {world.devices} ranks on this node, and torch sees {found} GPU(s)"
        fix = f"use at most {found}, or check CUDA_VISIBLE_DEVICES and which GPUs the scheduler gives to each process"
        require(world.devices <= found, f"{cause}: {fix}")
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
    recipe = recipe.replace(run=replace(recipe.run, **run), memory=replace(recipe.memory, **memory))
    world = detect_world(recipe, environment)
    require(world.launcher == "torchrun", "LT_CLI_USED=1 (fabric run) without torchrun's variables: unset LT_CLI_USED")
    for name, found in (("devices", world.devices), ("num_nodes", world.nodes)):
        wanted = asked[name] or ""  # or a list of devices, or auto
        if wanted.isdigit() and int(wanted) != found:
            key = f"LT_{name.upper()}"
            cause = f"{key}={wanted} asks for another world than fabric run has started, with {name}={found}"
            raise RecipeError(f"{cause}: unset {key}, or use fabric run --{name.replace('_', '-')} {wanted}")
    return recipe, replace(world, launcher="fabric run")


def detect_world(recipe: Recipe, environment: Mapping[str, str] = os.environ) -> World:
    """Return the world of the launcher's environment and the recipe; reject contradictions."""
    accelerator, fallback = _accelerator(recipe, environment)
    wanted = recipe.run.devices
    accelerated = "ACCELERATE_DYNAMO_BACKEND" in environment  # accelerate launch always sets it
    if accelerated:
        _refuse_options_of_accelerate(recipe, environment)
    if "TORCHELASTIC_RUN_ID" in environment:
        name = "accelerate launch (torchrun)" if accelerated else "torchrun"
        devices = read_int_variable("LOCAL_WORLD_SIZE", environment=environment)
        nodes = read_int_variable("GROUP_WORLD_SIZE", environment=environment)
        world = World(name, accelerator, devices, nodes)
        size = read_int_variable("WORLD_SIZE", world.world_size, environment)
        cause = f"torchrun started {size} ranks on {nodes} node(s), {devices} of them on this one"
        require(size == world.world_size, f"{cause}: use the same --nproc-per-node on every node")
    elif all(name in environment for name in RAY_WORKER):
        workers = read_int_variable("WORLD_SIZE", environment=environment)
        devices = read_int_variable("LOCAL_WORLD_SIZE", environment=environment)
        if not devices or workers % devices:
            cause = f"Ray has put {devices} of {workers} workers on this node, and other numbers on others"
            raise RecipeError(f"{cause}: choose --workers and --cpus-per-worker so that every node has the same number")
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
    started = f"{world.launcher} started {world.devices} process(es) on this node"
    cause = f"run.devices={wanted} contradicts the launcher: {started}"
    require(wanted in ("auto", world.devices), f"{cause}; leave out run.devices, or start {wanted}")
    return replace(world, fallback=fallback)


def _refuse_unknown_launcher(world: World, environment: Mapping[str, str]) -> None:
    """Reject several processes of an unknown launcher: each would silently be a single run."""
    for name in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "JSM_NAMESPACE_SIZE"):
        started = read_int_variable(name, 1, environment)
        # Fabric sets WORLD_SIZE to run.devices in the processes that it starts.
        joined = name == "WORLD_SIZE" and "LOCAL_RANK" in environment and started == world.world_size
        cause = f"{name}={started} in the environment is from a launcher that is neither torchrun nor Slurm"
        fix = "start the run with torchrun, fabric run, srun or --run.devices, or unset the variable"
        require(started == 1 or joined, f"{cause}: {fix}")
    # For several processes on CPUs, accelerate launch starts only one, and sets MASTER_ADDR but not their number.
    if world.launcher == "accelerate launch" and world.world_size == 1 and "MASTER_ADDR" in environment:
        ways = "torchrun --nproc-per-node N -m trainer fit RECIPE, or with trainer fit RECIPE --run.devices N"
        raise RecipeError(f"accelerate launch was asked for several processes and started one: start them with {ways}")


def _refuse_options_of_accelerate(recipe: Recipe, environment: Mapping[str, str]) -> None:
    """Reject options of ``accelerate launch`` that are for the library accelerate: none is dropped silently."""
    name = environment.get("ACCELERATE_MIXED_PRECISION", "no")
    precision = ACCELERATE_PRECISION.get(name, "one of its values")
    if precision not in (None, recipe.memory.precision):
        cause = f"accelerate launch --mixed_precision {name} contradicts memory.precision={recipe.memory.precision}"
        raise RecipeError(f"{cause}: use --memory.precision {precision}, and --mixed_precision no")
    for option in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        if environment.get(f"ACCELERATE_USE_{option}", "false").lower() in ("true", "1"):
            unused = f"accelerate launch --use_{option.lower()} is not for this trainer"
            raise RecipeError(f"{unused}: leave it out, and use --memory.strategy fsdp")


def _accelerator(recipe: Recipe, environment: Mapping[str, str]) -> tuple[str, str | None]:
    """Return ``cpu`` or ``cuda``, and the reason for ``cpu`` if the recipe does not ask for it."""
    import torch

    if recipe.run.accelerator != "auto":
        usable = recipe.run.accelerator != "cuda" or torch.cuda.is_available()
        require(usable, "run.accelerator=cuda, but no NVIDIA GPU found: use run.accelerator cpu or auto")
        return recipe.run.accelerator, None
    if environment.get("ACCELERATE_USE_CPU", "false").lower() in ("true", "1"):
        return "cpu", "set by accelerate launch"
    if torch.cuda.is_available():
        return "cuda", None
    return "cpu", "this torch is built without CUDA" if torch.version.cuda is None else "no NVIDIA GPU found"


def _devices_here(accelerator: str) -> int:
    import torch

    return torch.cuda.device_count() if accelerator == "cuda" else 1
