"""How the ranks that ``srun`` started find each other, for Fabric."""

from __future__ import annotations

import os

from lightning.fabric.plugins.environments import ClusterEnvironment, SLURMEnvironment

from trainer.launching.slurm import SlurmTask
from trainer.system.environment import number


class SlurmEnvironment(ClusterEnvironment):
    """A step of Slurm.

    Fabric's own reads the variables of the whole job, which need not be those of the step, demands
    ``--ntasks-per-node``, makes silent single runs of steps in a job that is called ``bash`` or ``interactive``, and
    gives all steps of a job one port.

    Args:
        task: this one.
    """

    def __init__(self, task: SlurmTask) -> None:
        super().__init__()
        self.task = task

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        """The first node, or ``MASTER_ADDR``."""
        return os.environ.get("MASTER_ADDR") or SLURMEnvironment.resolve_root_node_address(self.task.nodes)

    @property
    def main_port(self) -> int:
        """That of the step, or ``MASTER_PORT``."""
        return number("MASTER_PORT", self.task.port)

    @staticmethod
    def detect() -> bool:
        """It is given to Fabric, never found by it."""
        return False

    def world_size(self) -> int:
        return self.task.size

    def set_world_size(self, size: int) -> None:
        """Slurm has decided it."""

    def global_rank(self) -> int:
        return self.task.rank

    def set_global_rank(self, rank: int) -> None:
        """Slurm has decided it."""

    def local_rank(self) -> int:
        return self.task.local_rank

    def node_rank(self) -> int:
        return self.task.node_rank
