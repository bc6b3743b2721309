"""Which implementation of an operation torch takes: for ``run.deterministic``, one that always gives the same bits."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trainer.errors import RecipeError

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
WORKSPACES = ":4096:8"
"""Eight buffers of 4 MiB: one of the two settings with which cuBLAS gives the same bits in every run."""

REFUSED = re.compile(r"(\S+) does not have a deterministic implementation")


@contextmanager
def deterministic_algorithms(wanted: bool) -> Iterator[None]:
    """Inside of this context torch computes nothing that may differ from run to run; afterwards all is as before.

    Raises:
        RecipeError: naming an operation that has no such implementation.
    """
    if not wanted:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    own_setting = CUBLAS not in os.environ
    os.environ.setdefault(CUBLAS, WORKSPACES)
    try:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        yield
    except RuntimeError as error:
        found = REFUSED.search(str(error))
        if found is None:
            raise
        raise RecipeError(
            f"run.deterministic=true: {found[1]} has no deterministic implementation on this device: use "
            "run.deterministic false, or a model that does without it"
        ) from error
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
        if own_setting:
            del os.environ[CUBLAS]
