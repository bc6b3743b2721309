"""Numbers that launchers put in the environment: read in one way, and refused by name."""

from __future__ import annotations

import os
from collections.abc import Mapping

from trainer.errors import RecipeError

LARGEST = {"MASTER_PORT": 65535}
NUMBERS = (  # variables that this program or Lightning reads, some of them during the import
    *("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"),
    *("MASTER_PORT", "LT_CLI_USED", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"),
    *("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_RESTART_COUNT"),
    *("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES"),
)


def number(name: str, default: int | None = None, environment: Mapping[str, str] = os.environ) -> int:
    """The variable ``name``, an integer of at least 0, or ``default``; refused by name where it is none of these."""
    text = environment.get(name)
    if text is None:
        if default is not None:
            return default
        raise RecipeError(
            f"{name} is missing in the environment, where other variables say that a launcher has started this "
            "process: start the run with that launcher, or unset them"
        )
    most = LARGEST.get(name, 2**32 - 1)  # which is how Slurm numbers steps of no number
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and int(text) <= most):
        shown = repr(text if len(text) < 40 else f"{text[:40]}…")
        raise RecipeError(
            f"{name}={shown} in the environment must be an integer from 0 to {most}: unset it, or start the run with "
            "the launcher that sets it"
        )
    return int(text)


def require_numbers() -> None:
    """Refuse an environment in which one of :data:`NUMBERS` is none, before a library ends with a traceback."""
    for name in NUMBERS:
        number(name, 0)


def first_here() -> bool:
    """Whether this process is the first of its machine, as far as the launcher's variables tell."""
    return all(os.environ.get(name, "0") == "0" for name in ("LOCAL_RANK", "SLURM_LOCALID"))
