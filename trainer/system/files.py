"""Files that somebody else may have put there or a crash may cut: regular, of a size that was thought of, whole."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import json
import os
import re
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from trainer.errors import RecipeError, RunError
from trainer.system.processes import boot_id
from trainer.system.text import escaped

CHUNK = 16 * 2**20
"""Bytes that are hashed at once."""

KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a directory",
}


def open_regular(path: str | Path, limit: int | None = None) -> BinaryIO:
    """Open a file of at most ``limit`` bytes to read them, without waiting for anybody to write it.

    A named pipe would be waited for, a device read for ever: whoever can place a file can place these. An OSError for
    what is no regular file (EINVAL) or is larger (EFBIG), as for one that cannot be read. Symlinks are followed.
    """
    descriptor, found = _opened(path, os.O_RDONLY)
    try:
        _require_size(found.st_size, path, limit)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: str | Path, limit: int) -> bytes:
    """The content of a file, as by :func:`open_regular`; one that grows while it is read is refused as well."""
    with open_regular(path, limit) as file:
        content = file.read(limit + 1)
    _require_size(len(content), path, limit)
    return content


def read_object(path: str | Path, limit: int) -> dict[str, Any]:
    """The JSON object in a regular file of at most ``limit`` bytes; empty where there is none."""
    try:
        return parsed_object(read_regular(path, limit), limit) or {}
    except OSError:
        return {}


def parsed_object(content: bytes, limit: int) -> dict[str, Any] | None:
    """The JSON object in ``content``, which may be anybody's; ``None`` for anything else, and beyond ``limit``."""
    try:
        found = json.loads(content) if len(content) <= limit else None
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else None


def open_own(path: str | Path, flags: int) -> int:
    """A descriptor of a file that this program writes in place: made, or one that nothing else leads to.

    A symlink (ELOOP) or a second hard link (EMLINK) there could lead to any file of the user's; EINVAL for what is no
    regular file. The ``flags`` of open(2) have no O_TRUNC, which would empty it before it is looked at.
    """
    try:
        descriptor, found = _opened(path, flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP:
            error.strerror = "it is a symbolic link: remove it"
        raise
    if found.st_nlink > 1:
        os.close(descriptor)
        raise OSError(errno.EMLINK, "it is a hard link to a file that has another name, too", str(path))
    return descriptor


def _opened(path: str | Path, flags: int) -> tuple[int, os.stat_result]:
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    try:
        found = os.fstat(descriptor)
        require_regular(found, path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, found


def require_regular(found: os.stat_result, path: str | Path) -> None:
    """Refuse what is no regular file: an OSError that says what it is instead."""
    if not stat.S_ISREG(found.st_mode):
        kind = KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))


def _require_size(size: int, path: str | Path, limit: int | None) -> None:
    if limit is not None and size > limit:
        raise OSError(errno.EFBIG, f"it is larger than the {limit / 1e6:g} MB that it may have", str(path))


def make_folder(key: str, path: Path) -> None:
    """Make a folder that the setting ``key`` names, unless it is there; refused where its name cannot be one, too."""
    try:
        os.fsencode(path).decode()  # what is written about it is UTF-8
        if not path.is_dir():
            path.mkdir(parents=True, exist_ok=True)
            with suppress(PermissionError):  # a folder that may be written to and not read
                sync_to_disk(path.parent)  # what is flushed in it would be lost with its name
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise RecipeError(f"{key}={escaped(str(path))} cannot be made ({why}): choose another directory") from error


def default_folder(reference: str | None, kind: str = "") -> str:
    """The folder of a run of the recipe that ``reference`` names, where none is given: another one every time."""
    folder = f"runs/{Path(reference or 'recipe').stem}/{kind}{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    more = (f"{folder}-{number}" for number in itertools.count(2))  # of one process and second
    return next(name for name in itertools.chain([folder], more) if not os.path.lexists(name))


def hash_file(path: str | Path) -> str:
    """The sha256 of a file, opened by :func:`open_regular`, in hexadecimal."""
    digest = hashlib.sha256()
    with open_regular(path) as file:
        buffer = memoryview(bytearray(min(CHUNK, max(4096, os.fstat(file.fileno()).st_size))))
        while size := file.raw.readinto(buffer):  # type: ignore[attr-defined]
            digest.update(buffer[:size])
    return digest.hexdigest()


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Have an error of the disk say that it was about ``path``: of write(2) and fsync(2) the system names no file."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


OS_ERROR = re.compile(r"\(os error (\d+)\)|\[Errno (\d+)\]|Not enough disk space")
"""In messages of errors without an errno: of safetensors, which is written in Rust, of shutil, and of ``datasets``."""


def errno_of(error: BaseException) -> int | None:
    """The errno of an error of the operating system; ``None`` for others, whose messages may quote any text."""
    is_known = isinstance(error, OSError) or type(error).__name__ == "SafetensorError"
    found = OS_ERROR.search(str(error)) if is_known else None
    return int(found[1] or found[2] or errno.ENOSPC) if found else None


@contextmanager
def room_in(folder: Path, fix: str) -> Iterator[None]:
    """Raise a RunError that names ``folder`` and the ``fix`` if a full or read-only disk has caused an error."""
    try:
        yield
    except Exception as error:
        found: BaseException | None = error
        while found is not None and errno_of(found) not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
        if found is None or isinstance(error, RunError):
            raise
        why = os.strerror(errno_of(found) or 0)
        raise RunError(f"{folder} cannot be written to ({why}): free some space, or {fix}") from error


HOST = socket.gethostname()
MACHINE = [hashlib.sha256(name.encode()).hexdigest()[:6] for name in (HOST, boot_id() or HOST)]
"""This machine and its current boot, in names of files: others that share a folder may not see the locks held here."""


def aside(path: Path, kind: str) -> Path:
    """A hidden name in the same folder, as only a move within one file system is atomic."""
    return path.with_name(f".{path.name}.{'-'.join(MACHINE)}-{secrets.token_hex(4)}.{kind}")


def sync_to_disk(path: Path) -> None:
    """Wait until the file, or the names in the folder, are on disk."""
    with naming(path):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it; of a link only itself, whatever it leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


# Files and folders that are there whole or not at all, also after a crash or a power cut.

LEFTOVER = re.compile(r"(\w{6})-(\w{6})-\w{8}\.(part|old)")  # the end of a name by aside()


def _lock(path: Path, until: ExitStack) -> None:
    """Lock a file or folder ``until`` then, or until this process ends in any way; an OSError if another one has."""
    access = os.O_RDONLY if path.is_dir() else os.O_RDWR  # NFS locks a file only for one who may write to it
    descriptor = os.open(path, access | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    until.callback(os.close, descriptor)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _remove_leftovers(target: Path) -> None:
    """Remove what killed writers of ``target`` have left. An old folder is moved back if nothing took its place."""
    begin = f".{target.name}."
    for name in os.listdir(target.parent):
        found = LEFTOVER.fullmatch(name.removeprefix(begin)) if name.startswith(begin) else None
        if found is not None and {found[1], found[2]} & {*MACHINE}:
            path = target.with_name(name)
            with suppress(OSError), ExitStack() as until:
                _lock(path, until)  # else its writer is alive, or it is another user's
                if found[3] == "old" and not os.path.lexists(target):
                    os.rename(path, target)
                else:
                    remove(path)


@contextmanager
def _part(target: Path, make: Callable[[Path], object]) -> Iterator[Path]:
    """A hidden path beside ``target`` that ``make`` makes, locked; removed at the end, unless it was moved."""
    with naming(target), ExitStack() as until:
        target.parent.mkdir(parents=True, exist_ok=True)
        with suppress(PermissionError):  # a folder that may be written to and not read
            _remove_leftovers(target)
        make(new := aside(target, "new"))
        with suppress(OSError):  # a file system without locks, on which leftovers stay
            _lock(new, until)
        part = new.rename(new.with_suffix(".part"))  # by which others find it
        try:
            yield part
        finally:
            with suppress(OSError):
                remove(part)


def scratch_folder(beside: Path) -> AbstractContextManager[Path]:
    """An empty hidden folder beside ``beside`` for this user alone; removed at the end, or by the next writer of it."""
    return _part(beside, partial(Path.mkdir, mode=0o700))


@contextmanager
def staged_file(path: Path, sync_folder: bool = True) -> Iterator[Path]:
    """An empty file beside ``path`` to write to; moved to ``path`` on success, removed on an exception.

    Its name cannot be foreseen, and a link at ``path`` is replaced, not followed. An error of the disk names a file.
    """
    with _part(path, Path.touch) as part:
        yield part
        sync_to_disk(part)
        os.replace(part, path)
        if sync_folder:
            sync_to_disk(path.parent)


def write_atomic(path: Path, content: str | bytes, sync_folder: bool = True) -> None:
    """Put ``content`` (text as UTF-8) at ``path``: a reader sees the old file or the new one, never a part of it.

    The folder is made if need be; without ``sync_folder`` the content is on disk when this returns, and perhaps not the
    file's name.
    """
    with staged_file(path, sync_folder) as part:
        part.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def staged_folder(target: Path) -> Iterator[Path]:
    """An empty folder beside ``target`` to fill; takes the place of ``target`` on success, removed on an exception.

    A link at ``target`` is replaced: what it leads to stays as it is.

    A folder cannot be replaced in one move. An old ``target`` is moved aside (``.NAME.*.old``) first and deleted after
    the new one stands in its place. If the machine dies between the two moves, the next writer of ``target`` moves the
    old one back, so a whole folder always exists.
    """
    with _part(target, Path.mkdir) as part:
        mode = part.stat().st_mode & 0o666
        yield part
        for path in part.rglob("*"):
            if path.is_file() and stat.S_IMODE(path.stat().st_mode) != mode:
                path.chmod(mode)  # safetensors makes files that only their owner can read
            sync_to_disk(path)
        sync_to_disk(part)
        swap_in(part, target)


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
