"""Files and folders that are there whole or not at all, also after a crash or a power cut."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.system.files import aside, naming, remove, staged_file, sync_to_disk


def write_atomic(path: Path, content: str | bytes, sync_folder: bool = True) -> None:
    """Put ``content`` (text as UTF-8) at ``path``: a reader sees the old file or the new one, never a part of it.

    Args:
        path: in a folder that is made if need be.
        content: all of it.
        sync_folder: whether the file's name is on disk, too, when this returns; not its content alone.
    """
    with staged_file(path, sync_folder) as part:
        part.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def staged_folder(target: Path) -> Iterator[Path]:
    """An empty folder beside ``target`` to fill; takes the place of ``target`` on success, removed on an exception.

    A link at ``target`` is replaced: what it leads to stays as it is.

    A folder cannot be replaced in one move. An old ``target`` is moved aside (``.NAME.*.old``) first and deleted after
    the new one stands in its place, so at every moment a whole folder exists: ``target`` itself, or, should the machine
    die between the two moves, the old one as ``.NAME.*.old`` and the new one, complete, as ``.NAME.*.part``.
    """
    with naming(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        part = aside(target, "part")
        part.mkdir()
        try:
            yield part
            for path in part.rglob("*"):
                sync_to_disk(path)
            sync_to_disk(part)
            swap_in(part, target)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise


def swap_in(part: Path, target: Path) -> None:
    """Move ``part`` to ``target``, and what was there out of the way."""
    old = aside(target, "old") if os.path.lexists(target) else None
    if old is not None:
        os.rename(target, old)
    try:
        os.rename(part, target)
    except BaseException:
        if old is not None:
            os.rename(old, target)
        raise
    # Before the old folder goes, the new name must be on disk.
    sync_to_disk(target.parent)
    if old is not None:
        remove(old)
