"""Which processes take part: found out from the launcher's environment, asked of Fabric, and checked."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from lightning.fabric import Fabric

from trainer.errors import RecipeError, require
from trainer.memory.plan import Plan
from trainer.memory.precision import precision_plugin
from trainer.memory.sharding import fabric_strategy
from trainer.processes import end_with_launcher
from trainer.ray_workers import RayEnvironment, is_ray_worker, ray_layout
from trainer.recipe import Recipe

# The names that `fabric run --precision` also takes, and ours for them.
PRECISION_ALIASES = {"32": "32-true", "64": "64-true", "16": "16-mixed", "bf16": "bf16-mixed"}


@dataclass(frozen=True)
class World:
    """The processes of a run.

    Args:
        launcher: what started them: plain (one process, or Fabric starts the others), torchrun, ray or slurm.
        accelerator: cpu or cuda.
        devices: ranks on this node.
        nodes: machines.
    """

    launcher: str
    accelerator: str
    devices: int
    nodes: int = 1

    @property
    def size(self) -> int:
        """Ranks over all nodes."""
        return self.devices * self.nodes


def adopt_fabric_run(recipe: Recipe, environment: MutableMapping[str, str] = os.environ) -> Recipe:
    """Take over the options of ``fabric run``, which leaves them in variables and starts the ranks with torchrun.

    The variables are removed: as long as they are there, Fabric refuses every argument that says the same thing in
    another way, a strategy object among them.
    """
    if not int(environment.pop("LT_CLI_USED", "0")):
        return recipe
    given = {
        key: environment.pop(f"LT_{key.upper()}", None)
        for key in ("accelerator", "strategy", "precision", "devices", "num_nodes")
    }
    accelerator, strategy, precision = given["accelerator"], given["strategy"], given["precision"]
    run: dict[str, Any] = {}
    memory: dict[str, Any] = {}
    if accelerator not in (None, "auto"):
        run["accelerator"] = "cuda" if accelerator == "gpu" else accelerator
    if strategy not in (None, "auto"):
        memory["strategy"] = strategy
    if precision is not None:
        memory["precision"] = PRECISION_ALIASES.get(precision, precision)
    return recipe.replace(
        run=dataclasses.replace(recipe.run, **run), memory=dataclasses.replace(recipe.memory, **memory)
    )


def detect_world(recipe: Recipe, environment: MutableMapping[str, str] = os.environ) -> World:
    """The world that the launcher's environment and the recipe ask for.

    Raises:
        RecipeError: when they contradict each other.
    """
    accelerator = _accelerator(recipe)
    wanted = recipe.run.devices
    if "TORCHELASTIC_RUN_ID" in environment:
        world = World(
            "torchrun", accelerator, int(environment["LOCAL_WORLD_SIZE"]), int(environment["GROUP_WORLD_SIZE"])
        )
    elif is_ray_worker(environment):
        world = World("ray", accelerator, *ray_layout(environment))
    elif int(environment.get("SLURM_NTASKS", "1")) > 1:
        nodes = int(environment.get("SLURM_NNODES", "1"))
        world = World("slurm", accelerator, int(environment["SLURM_NTASKS"]) // nodes, nodes)
    else:
        world = World("plain", accelerator, _devices_here(accelerator) if wanted == "auto" else wanted)
        _refuse_unknown_launcher(world, environment)
    require(
        wanted in ("auto", world.devices),
        f"run.devices={wanted} contradicts the launcher: {world.launcher} started {world.devices} process(es) on this "
        "node; leave run.devices out, or start as many",
    )
    return world


def _refuse_unknown_launcher(world: World, environment: MutableMapping[str, str]) -> None:
    """Several processes that do not know of each other would be as many silent single runs."""
    for name in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        started = int(environment.get(name, "1"))
        # Fabric tells the processes that it starts itself their WORLD_SIZE, too: that of run.devices.
        joined = name == "WORLD_SIZE" and "LOCAL_RANK" in environment and started == world.size
        require(
            started == 1 or joined,
            f"{name}={started} in the environment says that a launcher started {started} processes, but it is neither "
            "torchrun nor Slurm: start the run with torchrun, fabric run, srun or --run.devices, or unset the variable",
        )


def launch(plan: Plan, world: World) -> Fabric:
    """Start Fabric, and with it the other processes where no launcher has.

    Raises:
        RecipeError: when the world that came out is not the one asked for: N silent single runs would be the result.
    """
    if world.launcher != "ray":  # which ends its workers itself
        end_with_launcher()
    fabric = Fabric(
        accelerator=world.accelerator,
        devices=world.devices,
        num_nodes=world.nodes,
        strategy=fabric_strategy(plan, world.accelerator),
        plugins=[
            precision_plugin(plan.memory, world.accelerator),
            *([RayEnvironment()] if world.launcher == "ray" else []),
        ],
    )
    fabric.launch()
    require(
        fabric.world_size == world.size,
        f"{world.size} rank(s) were asked for and {fabric.world_size} came up: check run.devices and the launcher "
        "(under Slurm, ntasks-per-node must equal run.devices)",
    )
    return fabric


def on_first_rank_first(fabric: Fabric, action: Callable[[], Any]) -> None:
    """Run ``action`` on the first rank of every node, then on the others; an error on it becomes everybody's.

    With a bare barrier in between, the others would wait for a failed rank until the process group's timeout.
    """
    error: Exception | None = None
    if fabric.local_rank == 0:
        try:
            action()
        except Exception as caught:
            error = caught
    failed = _any_rank(fabric, error is not None)
    if error is not None:
        raise error
    if failed:
        raise RecipeError("preparing model and data failed on the first rank of a node, which says why")
    if fabric.local_rank != 0:
        action()


def _any_rank(fabric: Fabric, flag: bool) -> bool:
    import torch

    if fabric.world_size == 1:
        return flag
    count = torch.tensor(float(flag), device=fabric.device)
    torch.distributed.all_reduce(count)
    return bool(count.item())


def _accelerator(recipe: Recipe) -> str:
    import torch

    if recipe.run.accelerator != "auto":
        require(
            recipe.run.accelerator != "cuda" or torch.cuda.is_available(),
            "run.accelerator=cuda, but torch sees no CUDA device: use run.accelerator cpu or auto",
        )
        return recipe.run.accelerator
    return "cuda" if torch.cuda.is_available() else "cpu"


def _devices_here(accelerator: str) -> int:
    import torch

    return torch.cuda.device_count() if accelerator == "cuda" else 1
