"""``run.snapshot``: every allocation on the GPU with its stack, in torch's own format for pytorch.org/memory_viz."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from trainer.errors import require
from trainer.recipe import Recipe
from trainer.system.files import staged_file

MOST_EVENTS = 100_000
"""The last so many allocations and frees are kept: some hundreds of MB of host memory."""


def require_recordable(recipe: Recipe, accelerator: str) -> None:
    """Refuse ``run.snapshot`` where there is nothing to record.

    Raises:
        RecipeError: on any accelerator but cuda.
    """
    require(
        not recipe.run.snapshot or accelerator == "cuda",
        "run.snapshot=true records the history of torch's CUDA allocator, which a run on the CPU does not use: "
        "leave it out, or use run.accelerator cuda",
    )


def snapshot_path(run_dir: Path, rank: int, world_size: int) -> Path:
    """Where ``rank`` writes: a file of its own when there are several."""
    return run_dir / (f"memory_snapshot.rank{rank}.pickle" if world_size > 1 else "memory_snapshot.pickle")


@contextmanager
def recorded(target: Path) -> Iterator[None]:
    """Record within this context and write ``target`` at its end, also when that is an error.

    The file is a pickle, which is torch's choice; nothing here ever reads one.
    """
    torch.cuda.memory._record_memory_history(max_entries=MOST_EVENTS, stacks="python")
    try:
        yield
    finally:
        _write(target)
        torch.cuda.memory._record_memory_history(enabled=None)


def _write(target: Path) -> None:
    try:
        with staged_file(target) as part:
            torch.cuda.memory._dump_snapshot(str(part))
    except OSError as error:  # must not hide an error that the run ends with
        warnings.warn(f"{target} could not be written: {error}", stacklevel=2)
