"""What Slurm tells the tasks that ``srun`` starts: which they are, and how many on which nodes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_fabric.plugins.environments import SLURMEnvironment

from trainer.errors import require
from trainer.system.environment import number

FIRST_PORT, PORTS, PORTS_BETWEEN_STEPS = 15000, 10000, 1009
"""Ports that the steps of jobs are dealt out to, below those that Linux gives to clients; by a prime, so that neither
the next steps of a job nor the next jobs meet on one."""


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
        """Of the ranks' meeting on the first node: every task can tell, and no two steps of a node share one soon."""
        return FIRST_PORT + (self.job + PORTS_BETWEEN_STEPS * self.step) % PORTS

    @property
    def variables(self) -> dict[str, str]:
        """What torchrun would tell this rank, as errors and helpers expect it, and Fabric where it is told to."""
        told = {"RANK": self.rank, "LOCAL_RANK": self.local_rank, "GROUP_RANK": self.node_rank, "WORLD_SIZE": self.size}
        return {name: str(number) for name, number in told.items()}

    @property
    def first_node(self) -> str:
        """Where the ranks meet."""
        return SLURMEnvironment.resolve_root_node_address(self.nodes)


def slurm_task(environment: Mapping[str, str]) -> SlurmTask | None:
    """This task of a step of several tasks; ``None`` in a process that no ``srun`` has started with others."""
    if not started_by_srun(environment):
        return None

    names = ("JOB_ID", "STEP_ID", "PROCID", "LOCALID", "NODEID", "STEP_NUM_TASKS")
    job, step, rank, local_rank, node_rank, size = (number(f"SLURM_{name}", environment=environment) for name in names)
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", "")):
        counts += [int(count)] * int(times or 1)  # 2(x3),1 is 2, 2, 2, 1
    nodes = environment.get("SLURM_STEP_NODELIST", "")
    return SlurmTask(job, step, rank, local_rank, node_rank, size, tuple(counts), nodes)


def started_by_srun(environment: Mapping[str, str]) -> bool:
    """Whether this process is one of several tasks of a step. A job's other variables are those of its allocation."""
    return "SLURM_STEP_ID" in environment and number("SLURM_STEP_NUM_TASKS", 1, environment) > 1


def devices_per_node(task: SlurmTask, gpus: int | None) -> int:
    """Ranks on this node, as many as on every other and in a row, each with one of the ``gpus`` that it sees."""
    counts = sorted(set(task.tasks_per_node))
    require(
        len(counts) == 1,
        f"Slurm put {', '.join(map(str, task.tasks_per_node))} tasks on the nodes {task.nodes}: as many on each are "
        "needed, say --nodes and --ntasks-per-node",
    )
    require(
        task.rank == task.node_rank * counts[0] + task.local_rank,
        "Slurm dealt the tasks out to the nodes in turn: say --distribution=block, for ranks in a row on each node",
    )
    require(
        gpus is None or gpus >= counts[0],
        f"Slurm started {counts[0]} tasks on this node, and this one sees {gpus} GPU(s): give the node as many with "
        f"--gpus-per-node={counts[0]}, leave --gpus-per-task out, and say --gpu-bind=none",
    )
    return counts[0]


def require_srun(environment: Mapping[str, str]) -> None:
    """Refuse to be one process in a job of several tasks: it would train alone, and the others' devices lie idle."""
    if "SLURM_JOB_ID" in environment and "SLURM_STEP_ID" not in environment:
        tasks = number("SLURM_NTASKS", 1, environment)
        require(
            tasks <= 1,
            f"this job of Slurm has {tasks} tasks, but srun did not start this process: write srun before the command, "
            "or say --run.devices for processes of this node alone",
        )
