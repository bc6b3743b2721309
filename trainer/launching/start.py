"""Starts the ranks of a run if no launcher did, joins them in a process group, and checks their number."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from subprocess import Popen
from typing import Any

import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments import ClusterEnvironment, LightningEnvironment, TorchElasticEnvironment

from trainer.errors import RecipeError, require
from trainer.launching.local_store import RENDEZVOUS_TIMEOUT, join_local_store
from trainer.launching.slurm import slurm_task, started_by_srun
from trainer.launching.world import World
from trainer.memory.plan import Plan
from trainer.memory.precision import precision_plugin
from trainer.memory.sharding import fabric_strategy
from trainer.system.environment import read_int_variable
from trainer.system.machine import cores
from trainer.system.processes import LAUNCHER, SUPERVISOR, ProcessId, end_with_parent

Watch = Callable[[list[Popen[bytes]]], None]
"""A function that receives the growing list of the processes that Fabric starts."""


def launch(
    plan: Plan, world: World, watch: Watch = lambda started: None, seconds: float = RENDEZVOUS_TIMEOUT
) -> Fabric:
    """Start Fabric with the strategy and precision of ``plan``, and the other ranks if no launcher started them. Call
    ``watch`` before. Wait at most ``seconds`` for this machine's ranks. Raise RecipeError if the number of ranks
    differs from the request, which could mean N independent single runs."""
    if "TORCHELASTIC_RUN_ID" in os.environ:  # reject invalid values before Fabric reads them
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            read_int_variable(name)
    if world.launcher != "ray":  # Ray ends its workers itself
        _end_with_launcher()
    if world.accelerator == "cuda":
        set_expandable_segments(plan.memory.expandable_segments)
    environment = _environment(world)
    store = None
    if plan.strategy != "single" and world.nodes == 1 and world.launcher != "ray" and not dist.is_initialized():
        store = join_local_store(world, seconds)
    options: dict[str, Any] = {"accelerator": world.accelerator, "devices": world.devices, "num_nodes": world.nodes}
    plugins: Any = [precision_plugin(plan.memory, world.accelerator), *environment]
    fabric = Fabric(strategy=fabric_strategy(plan, world.accelerator), plugins=plugins, **options)
    started = getattr(fabric.strategy.launcher, "procs", None)
    if started is not None and world.world_size > 1:
        watch(started)
    with _launching():
        fabric.launch()
    del store  # the process group uses it now
    if fabric.world_size != world.world_size:
        fix = "check run.devices and the launcher (under Slurm, ntasks-per-node must equal run.devices)"
        raise RecipeError(f"{world.world_size} rank(s) were requested and {fabric.world_size} started: {fix}")
    return fabric


def set_expandable_segments(value: bool | None) -> None:
    """Add ``memory.expandable_segments`` to the settings of torch's allocator, before it allocates on a GPU."""
    if value is not None:  # torch resets the settings that are not given again
        names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
        given = next(filter(None, map(os.environ.get, names)), "")
        torch._C._accelerator_setAllocatorSettings(f"{given},expandable_segments:{value}".lstrip(","))


def _end_with_launcher() -> None:
    """Make this process end when torchrun or Fabric, which started it, ends: killed, they would leave it running. The
    supervisor may already have ended, and with it the first rank, before this rank was bound to it."""
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    if by_torchrun or (os.environ.get("LOCAL_RANK", "0") != "0" and not started_by_srun(os.environ)):
        end_with_parent()
    text = os.environ.get(SUPERVISOR)
    if text is None:
        return
    try:
        supervisor = ProcessId.from_dict(json.loads(text))
    except (ValueError, RecursionError):
        raise RecipeError(f"{SUPERVISOR}={text!r} in the environment was not set by trainer run: unset it") from None
    if supervisor.is_visible() and supervisor.state() == "gone":
        print("trainer: error: the supervisor of this run has ended", file=sys.stderr, flush=True)
        os._exit(1)


def describe_launch(world: World, plan: Plan, say: Callable[[str], None]) -> World:
    """Print the world, and return it with the backend of the process group."""
    if dist.is_initialized():
        by_device = dict(part.split(":") for part in dist.get_backend_config().split(","))
        world = dataclasses.replace(world, backend=by_device[world.accelerator])
    replicas = plan.memory.replicas
    say(world.describe(plan.strategy + (f", {replicas} replicas" if replicas > 1 else "")))
    return world


def host_threads(world: World, plan: Plan, environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of threads with which a rank updates offloaded weights; ``None`` keeps torch's number. Only GPU
    ranks of torchrun, which sets ``OMP_NUM_THREADS=1``, get one: their share of the cores, less one for kernels."""
    by_torchrun = "TORCHELASTIC_RUN_ID" in environment and environment.get("OMP_NUM_THREADS") == "1"
    if not (by_torchrun and world.devices > 1 and world.accelerator == "cuda" and plan.memory.cpu_offload != "none"):
        return None
    return max(1, cores() // world.devices - 1)


def local_rank_zero_first(fabric: Fabric, action: Callable[[], Any]) -> None:
    """Run ``action`` on the first rank of every node, then on the others; its error is raised on all ranks. With only a
    barrier in between, the others would wait for a failed rank until the process group's timeout."""
    error: BaseException | None = None
    if fabric.local_rank == 0:
        try:
            action()
        except (Exception, SystemExit) as caught:
            error = caught
    failed = error is not None
    if fabric.world_size > 1:
        count = torch.tensor(float(failed), device=fabric.device)
        dist.all_reduce(count)
        failed = bool(count.item())
    if error is not None:
        raise error
    require(not failed, "preparing model and data failed on the first rank of a node: see that rank's error")
    if fabric.local_rank != 0:
        action()


def _environment(world: World) -> list[ClusterEnvironment]:
    """Return the cluster environment for Fabric. Ranks of Slurm and Ray get the variables that torchrun would set.

    Fabric detects torchrun itself. Its Slurm plugin does not fit: it uses the variables of the whole job, requires
    ``--ntasks-per-node``, starts silent single runs in a job named ``bash`` or ``interactive``, and gives all steps of
    a job the same port. Ray's plugin is for Lightning's Trainer and would require importing Ray in every run. An
    existing process group is used as it is.
    """
    task = slurm_task(os.environ) if world.launcher == "slurm" else None
    if task is not None:
        os.environ.update(task.torchrun_env)
        os.environ["MASTER_ADDR"] = os.environ.get("MASTER_ADDR") or task.first_node
        os.environ["MASTER_PORT"] = str(read_int_variable("MASTER_PORT", task.port))
    elif world.launcher == "ray":
        os.environ["GROUP_RANK"] = str(read_int_variable("NODE_RANK"))
    else:
        return [LightningEnvironment()] if world.started_by_fabric else []
    return [TorchElasticEnvironment()]


@contextmanager
def _launching() -> Iterator[None]:
    """Tell ranks that Fabric starts in the block with which process to end, and mute Fabric's log about the group."""
    loggers = map(logging.getLogger, ("lightning_fabric", "lightning.fabric", "lightning.pytorch"))
    before = [(logger, logger.level) for logger in loggers]
    os.environ[LAUNCHER] = str(os.getpid())
    try:
        for logger, _ in before:
            logger.setLevel(logging.WARNING)
        yield
    finally:
        os.environ.pop(LAUNCHER, None)
        for logger, level in before:
            logger.setLevel(level)
