"""The checkpoints of a run: finding them, deciding which to keep, and creating them atomically."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from trainer.checkpoint.manifest import MANIFEST, CorruptCheckpointError, folder_name, read_manifest
from trainer.errors import RecipeError, RunError
from trainer.system.files import remove, replace_folder, sync_to_disk, temporary_path
from trainer.system.text import format_bytes

NAME = re.compile(r"step-\d{8,}")
MARGIN = 2**20  # bytes for JSON files and the file system's metadata, in addition to the tensors

Score = Callable[[Mapping[str, float]], tuple[float, float]]


class CheckpointFolder:
    """``RUN_DIR/checkpoints``: one folder per checkpoint, such as ``step-00000100``, always complete.

    A new checkpoint is written to a hidden folder on the same file system. It is renamed when its manifest, the last
    file, is on disk. Only the process that holds the lock of the run directory may change anything here.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def newest_first(self) -> list[Path]:
        """Return all checkpoints by the step in their names, newest first, without opening them."""
        if not os.path.isdir(self.path):  # also false for an invalid name
            return []
        found = [path for path in self.path.iterdir() if NAME.fullmatch(path.name) and path.is_dir()]
        return sorted(found, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)

    def make(self) -> None:
        """Create the folder and flush its name to disk, so that files in it cannot be lost with it."""
        if not os.path.isdir(self.path):  # also false for an invalid name
            self.path.mkdir(parents=True, exist_ok=True)
            sync_to_disk(self.path.parent)

    def require_not_linked(self) -> None:
        """Reject a link to another run's checkpoints, which would be resumed and deleted; other links are fine."""
        home = Path(os.path.realpath(self.path)).parent
        if self.path.is_symlink() and (home / "recipe.yaml").exists():
            fix = f"remove it, and use --run.resume {home} to resume from there"
            raise RecipeError(f"{self.path} is a link to the checkpoints of another run, {home}: {fix}")

    def clean(self) -> list[str]:
        """Remove incomplete checkpoints of a dead run, and restore replaced ones; return a message for each failure."""
        for path in self._hidden("old"):
            home = self.path / path.name.split(".")[1]
            if not os.path.lexists(home):
                os.rename(path, home)
        return self._remove_all(self._hidden("*"), remove)

    def _hidden(self, kind: str) -> list[Path]:
        return list(self.path.glob(f".step-*.{kind}")) if self.path.is_dir() else []

    def _remove_all(self, paths: Iterable[Path], remove_one: Callable[[Path], None]) -> list[str]:
        problems = []
        for path in paths:
            try:
                remove_one(path)
            except OSError as error:  # noqa: PERF203
                problems.append(f"{path} could not be removed: {error.strerror} ({error.filename or path})")
        return problems

    def staging(self, step: int, attempt: str) -> Path:
        """Return the hidden folder for the new checkpoint of ``step``; ``attempt`` identifies this start of the run."""
        return self.path / f".{folder_name(step)}.{attempt}.part"

    def commit(self, staging: Path, step: int) -> None:
        """Rename a complete checkpoint, replacing one with that name from before the run was resumed."""
        sync_to_disk(staging)
        replace_folder(staging, self.path / folder_name(step))

    def rotate(self, keep_last: int, keep_best: int, score: Score) -> list[str]:
        """Delete all checkpoints except the newest and the best; return a message for each that cannot be removed.

        A checkpoint with an unreadable manifest is kept, for the user to inspect. Ties go to the later step.
        """
        metrics: dict[Path, Mapping[str, float] | None] = {}  # metrics by checkpoint, newest first
        for path in self.newest_first():
            with suppress(CorruptCheckpointError):
                metrics[path] = read_manifest(path).figures
        rated = {path: found for path, found in metrics.items() if found}
        newest = list(metrics)[:keep_last]
        best = sorted(rated, key=lambda path: (score(rated[path]), path.name), reverse=True)
        kept = {*newest, *best[:keep_best]}
        if keep_best:  # a run that resumes from one of the newest needs the best checkpoint up to that step
            kept |= {next((path for path in best if path.name <= at.name), at) for at in newest}
        left = self._remove_all(self._hidden("gone"), remove)  # the disk may have recovered
        return left + self._remove_all(sorted(metrics.keys() - kept), self.remove)

    def remove(self, path: Path) -> None:
        """Rename a checkpoint, then delete it, so no half-deleted one is used; of a link, delete only the link."""
        doomed = temporary_path(path, "gone")
        os.rename(path, doomed)
        remove(doomed)

    def rename_aside(self, path: Path, why: str) -> Path:
        """Rename a checkpoint that must not be used again, to a name such as ``step-00000100.corrupt``."""
        target = path.with_name(f"{path.name}.{why}")
        target = target.with_name(f"{target.name}-{secrets.token_hex(4)}") if target.exists() else target
        os.rename(path, target)
        return target


def disk_space_shortfall(folder: Path, needed: int) -> int:
    """Return how many bytes the file system of ``folder`` lacks for ``needed`` more; 0 if there is enough space."""
    return max(0, needed + MARGIN - shutil.disk_usage(folder).free)


def disk_full_message(folder: Path, step: int, needed: int, missing: int) -> RunError:
    """Return the error for a checkpoint that does not fit on the disk."""
    why = f"it needs {format_bytes(needed)}, and the file system of {folder} lacks {missing:,} bytes"
    fix = "Free some space, lower checkpoint.keep_last, or set run.best last to keep no best checkpoint, then resume"
    return RunError(f"no space for the checkpoint of step {step}: {why}. Older checkpoints are unchanged. {fix}")


def is_checkpoint(path: Path) -> bool:
    """Return whether ``path`` looks like a single checkpoint rather than a run directory."""
    return os.path.exists(path / MANIFEST) or NAME.fullmatch(path.name) is not None
