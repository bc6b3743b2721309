"""The checkpoints of a run: which there are, which are kept, and how one comes to be there whole or not at all."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from trainer.checkpoint.manifest import MANIFEST, CorruptCheckpoint, folder_name, read_manifest
from trainer.errors import RunError, require
from trainer.system.files import aside, remove, swap_in, sync_to_disk
from trainer.system.text import gigabytes

NAME = re.compile(r"step-\d{8,}")
MARGIN = 2**20  # bytes that JSON files and the file system's own records may take, besides the tensors

Score = Callable[[Mapping[str, float]], float]


class CheckpointFolder:
    """``RUN_DIR/checkpoints``: a folder ``step-00000100`` a checkpoint, and nothing half-written under such a name.

    A new one grows in a hidden folder on the same file system and is moved to its name when its manifest, the last
    file, is on disk. Only the process that holds the run directory's lock may change anything here.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def newest_first(self) -> list[Path]:
        """All checkpoints, by the step in their names; none is opened."""
        if not os.path.isdir(self.path):  # also for a name that no folder can have
            return []
        found = [path for path in self.path.iterdir() if NAME.fullmatch(path.name) and path.is_dir()]
        return sorted(found, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)

    def make(self) -> None:
        """Make the folder, on disk: what is flushed in it would be lost with its name."""
        if not os.path.isdir(self.path):  # also for a name that no folder can have
            self.path.mkdir(parents=True, exist_ok=True)
            sync_to_disk(self.path.parent)

    def require_own(self) -> None:
        """Refuse a folder that is a link to that of another run, whose checkpoints would be taken up and removed.

        A link to anywhere else, such as a larger disk, is welcome: no name but those of checkpoints is touched there.
        """
        home = Path(os.path.realpath(self.path)).parent
        require(
            not self.path.is_symlink() or not (home / "recipe.yaml").exists(),
            f"{self.path} is a link to the checkpoints of another run, {home}: remove it; --run.resume {home} goes on "
            "from there",
        )

    def clean(self) -> list[str]:
        """Remove what a run that died here has left half-written, and put back what it was about to replace; what is
        wrong with what could not be removed."""
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
        """The hidden folder that the checkpoint of ``step`` grows in; ``attempt`` tells this start of the run."""
        return self.path / f".{folder_name(step)}.{attempt}.part"

    def commit(self, staging: Path, step: int) -> None:
        """Give a complete checkpoint its name. One of that name, of a run that was resumed before it, gives way."""
        sync_to_disk(staging)
        swap_in(staging, self.path / folder_name(step))

    def rotate(self, keep_last: int, keep_best: int, score: Score) -> list[str]:
        """Delete all but the newest and the best, by their manifests; one that cannot be read is left for a person.
        Of equally good ones the first counts. What is wrong with those that could not be removed: they take space, and
        harm nobody."""
        figures: dict[Path, Mapping[str, float] | None] = {}  # of the newest first
        for path in self.newest_first():
            with suppress(CorruptCheckpoint):
                figures[path] = read_manifest(path).figures
        rated = {path: found for path, found in figures.items() if found}
        newest = list(figures)[:keep_last]
        best = sorted(rated, key=lambda path: (-score(rated[path]), path.name))
        kept = {*newest, *best[:keep_best]}
        if keep_best:  # who goes on from one of the newest needs what was the best by then
            kept |= {next((path for path in best if path.name <= at.name), at) for at in newest}
        left = self._remove_all(self._hidden("gone"), remove)  # the disk may be well again
        return left + self._remove_all(sorted(figures.keys() - kept), self.remove)

    def remove(self, path: Path) -> None:
        """Delete a checkpoint: under another name first, so that half of it is never taken for one. Where a person has
        moved it elsewhere and left a link, the link alone goes."""
        doomed = aside(path, "gone")
        os.rename(path, doomed)
        remove(doomed)

    def set_aside(self, path: Path, why: str) -> Path:
        """Give a checkpoint that no run shall take up again another name, such as ``step-00000100.corrupt``."""
        target = path.with_name(f"{path.name}.{why}")
        if target.exists():
            target = path.with_name(f"{target.name}-{secrets.token_hex(4)}")
        os.rename(path, target)
        return target


def missing_space(folder: Path, needed: int) -> int:
    """Bytes that are missing on the file system of ``folder`` for ``needed`` more; 0 when there are enough."""
    return max(0, needed + MARGIN - shutil.disk_usage(folder).free)


def no_space(folder: Path, step: int, needed: int, missing: int) -> RunError:
    """What is said when a checkpoint does not fit."""
    return RunError(
        f"no space for the checkpoint of step {step}: it takes {gigabytes(needed)}, and {missing:,} bytes are "
        f"missing on the file system of {folder}. Older checkpoints are untouched: free some space, or lower "
        "checkpoint.keep_last, or keep no best one by run.best last, then resume"
    )


def is_checkpoint(path: Path) -> bool:
    """Whether ``path`` looks like a single checkpoint, rather than a run directory."""
    return os.path.exists(path / MANIFEST) or NAME.fullmatch(path.name) is not None
