"""Integer environment variables that launchers set: read and validated in one place."""

from __future__ import annotations

import os
from collections.abc import Mapping

from trainer.errors import RecipeError

NUMBERS = (  # variables that this program or Lightning reads, some of them during the import
    *("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"),
    *("MASTER_PORT", "LT_CLI_USED", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"),
    *("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_RESTART_COUNT"),
    *("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES"),
)


def read_int_variable(name: str, default: int | None = None, environment: Mapping[str, str] = os.environ) -> int:
    """Return the variable ``name``, an integer of at least 0, or ``default`` if it is not set."""
    text = environment.get(name)
    if text is None:
        if default is not None:
            return default
        others = "other environment variables indicate that a launcher started this process"
        raise RecipeError(f"{name} is not set, but {others}: use that launcher, or unset those variables")
    largest = 65535 if name == "MASTER_PORT" else 2**32 - 1  # Slurm uses 2**32 - 1 for steps without a number
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and int(text) <= largest):
        shown = repr(text if len(text) < 40 else f"{text[:40]}…")
        fix = "unset it, or start the run with the launcher that sets it"
        raise RecipeError(f"{name}={shown} in the environment must be an integer from 0 to {largest}: {fix}")
    return int(text)


def require_numbers() -> None:
    """Reject invalid values of :data:`NUMBERS` before a library fails with a traceback."""
    for name in NUMBERS:
        read_int_variable(name, 0)


def is_local_rank_zero() -> bool:
    """Return whether this process is the first on its machine, according to the launcher's variables."""
    return all(os.environ.get(name, "0") == "0" for name in ("LOCAL_RANK", "SLURM_LOCALID"))


def is_first_process(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether no launcher has started this process as another rank than the first."""
    return all(environment.get(name, "0") == "0" for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"))
