"""Opening files that somebody else may have put there: regular ones only, of a size that was thought of."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from trainer.errors import RecipeError
from trainer.system.text import escaped

KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a directory",
}


def open_regular(path: str | Path, limit: int | None = None) -> BinaryIO:
    """Open a file to read its bytes, without waiting for anybody to write it.

    A named pipe would be waited for, a device read for ever: whoever can place a file can place these.

    Args:
        path: of the file; symlinks are followed.
        limit: bytes that it may have.

    Raises:
        OSError: for what is no regular file (EINVAL) or is larger (EFBIG), as for one that cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        require_regular(found, path)
        _require_size(found.st_size, path, limit)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: str | Path, limit: int) -> bytes:
    """The content of a regular file of at most ``limit`` bytes.

    Raises:
        OSError: as :func:`open_regular`, also for a file that grows while it is read.
    """
    with open_regular(path, limit) as file:
        content = file.read(limit + 1)
    _require_size(len(content), path, limit)
    return content


def open_own(path: str | Path, flags: int, mode: int = 0o644) -> int:
    """A descriptor of a file that this program writes in place: made, or one that nothing else leads to.

    Args:
        path: of the file. A symlink or a second hard link there could lead to any file of the user's.
        flags: of open(2), besides those that keep it to this.
        mode: of a file that is made.

    Raises:
        OSError: ELOOP for a symlink, EINVAL for what is no regular file, EMLINK for one with several names.
    """
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    try:
        found = os.fstat(descriptor)
        require_regular(found, path)
        _require_one_name(found, path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def make_folder(key: str, path: Path) -> None:
    """Make a folder that a setting names, unless it is there.

    Raises:
        RecipeError: naming ``key``, when its name cannot be one, or it cannot be made.
    """
    try:
        os.fsencode(path).decode()  # what is written about it is UTF-8
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise RecipeError(f"{key}={escaped(str(path))} cannot be made ({why}): choose another directory") from error


def require_regular(found: os.stat_result, path: str | Path) -> None:
    """Refuse what is no regular file.

    Raises:
        OSError: saying what it is instead.
    """
    if not stat.S_ISREG(found.st_mode):
        kind = KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))


def _require_size(size: int, path: str | Path, limit: int | None) -> None:
    if limit is not None and size > limit:
        raise OSError(errno.EFBIG, f"it is larger than the {limit / 1e6:g} MB that it may have", str(path))


def _require_one_name(found: os.stat_result, path: str | Path) -> None:
    if found.st_nlink > 1:
        raise OSError(errno.EMLINK, "it is a hard link to a file that has another name, too", str(path))
