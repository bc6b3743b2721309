"""Reads rank, size and nodes of a task from the environment variables that Slurm's ``srun`` sets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_fabric.plugins.environments import SLURMEnvironment

from trainer.errors import require
from trainer.system.environment import read_int_variable

FIRST_PORT, PORTS, PORTS_BETWEEN_STEPS = 15000, 10000, 1009
"""Range of ports for job steps, below Linux's ports for clients, and the distance between steps of a job.

The distance is a prime, so that consecutive steps and consecutive jobs get different ports."""


@dataclass(frozen=True)
class SlurmTask:
    """A task of a job step, which is a rank."""

    job: int
    step: int
    rank: int
    local_rank: int
    node_rank: int
    size: int
    tasks_per_node: tuple[int, ...]
    nodes: str  # as Slurm writes them, such as n[1-2]

    @property
    def port(self) -> int:
        """Port of the store on the first node. Every task computes the same; steps rarely share one."""
        return FIRST_PORT + (self.job + PORTS_BETWEEN_STEPS * self.step) % PORTS

    @property
    def torchrun_env(self) -> dict[str, str]:
        """The environment variables that torchrun would set, which error reports, helpers and Fabric read."""
        values = (self.rank, self.local_rank, self.node_rank, self.size)
        return dict(zip(("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE"), map(str, values), strict=True))

    @property
    def first_node(self) -> str:
        """The node that hosts the ranks' store."""
        return SLURMEnvironment.resolve_root_node_address(self.nodes)


def slurm_task(environment: Mapping[str, str]) -> SlurmTask | None:
    """Return this task of a step with several tasks; ``None`` if ``srun`` did not start several tasks."""
    if not started_by_srun(environment):
        return None
    names = ("JOB_ID", "STEP_ID", "PROCID", "LOCALID", "NODEID", "STEP_NUM_TASKS")
    numbers = (read_int_variable(f"SLURM_{name}", environment=environment) for name in names)
    job, step, rank, local_rank, node_rank, size = numbers
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", "")):
        counts += [int(count)] * int(times or 1)  # 2(x3),1 is 2, 2, 2, 1
    nodes = environment.get("SLURM_STEP_NODELIST", "")
    return SlurmTask(job, step, rank, local_rank, node_rank, size, tuple(counts), nodes)


def started_by_srun(environment: Mapping[str, str]) -> bool:
    """Return whether this process is one of several tasks of a step. Slurm's other variables describe the job."""
    return "SLURM_STEP_ID" in environment and read_int_variable("SLURM_STEP_NUM_TASKS", 1, environment) > 1


def devices_per_node(task: SlurmTask, gpus: int | None) -> int:
    """Return the number of ranks per node; reject unequal nodes, scattered ranks, or fewer ``gpus`` than ranks."""
    counts = sorted(set(task.tasks_per_node))
    cause = f"Slurm put {', '.join(map(str, task.tasks_per_node))} tasks on the nodes {task.nodes}"
    require(len(counts) == 1, f"{cause}: use the same number on each, with --nodes and --ntasks-per-node")
    count = counts[0]
    is_block = task.rank == task.node_rank * count + task.local_rank
    require(is_block, "Slurm distributed the tasks cyclically: use --distribution=block for consecutive ranks")
    cause = f"Slurm started {count} tasks on this node, and this one sees {gpus} GPU(s)"
    fix = f"give the node as many with --gpus-per-node={count}, leave out --gpus-per-task, and add --gpu-bind=none"
    require(gpus is None or gpus >= count, f"{cause}: {fix}")
    return count


def require_srun(environment: Mapping[str, str]) -> None:
    """Reject a single process in a job of several tasks: it would train alone while other devices are idle."""
    if "SLURM_JOB_ID" in environment and "SLURM_STEP_ID" not in environment:
        tasks = read_int_variable("SLURM_NTASKS", 1, environment)
        cause = f"this job of Slurm has {tasks} tasks, but srun did not start this process"
        require(tasks <= 1, f"{cause}: put srun before the command, or set --run.devices to use this node only")
