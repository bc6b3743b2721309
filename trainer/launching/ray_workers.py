"""The workers of Ray Train as ranks: known by their environment, in the process group that Ray has started."""

from __future__ import annotations

from collections.abc import Mapping

from trainer.errors import require
from trainer.system.environment import number

WORKER = ("RAY_JOB_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")
"""The environment of a worker of Ray Train's ``TorchTrainer``; any other of Ray's processes has only the first."""


def is_ray_worker(environment: Mapping[str, str]) -> bool:
    """Whether this is a worker of Ray Train, and not a process of a launcher that a worker has started."""
    return "TORCHELASTIC_RUN_ID" not in environment and all(name in environment for name in WORKER)


def ray_layout(environment: Mapping[str, str]) -> tuple[int, int]:
    """Workers on this node, and nodes.

    Raises:
        RecipeError: when the nodes have unequal numbers of workers, which Fabric has no words for.
    """
    workers, here = (number(name, environment=environment) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    require(
        here > 0 and workers % here == 0,
        f"Ray has put {here} of {workers} workers on this node, and another number on others: choose --workers and "
        "--cpus-per-worker so that every node has as many",
    )
    return here, workers // here
