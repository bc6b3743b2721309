"""Safe reading and atomic writing: files may come from another user, and a crash may interrupt a write."""

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

CHUNK = 16 * 2**20  # bytes that are read or written at once for hashing

KINDS = {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a directory"}
KINDS |= dict.fromkeys((stat.S_IFCHR, stat.S_IFBLK), "a device")


def open_regular(path: str | Path, limit: int | None = None) -> BinaryIO:
    """Open a regular file of at most ``limit`` bytes for reading; follow symlinks. A larger file raises EFBIG.

    Others raise an OSError with EINVAL: a named pipe would block, and a device could be read forever.
    """
    return os.fdopen(_opened(path, os.O_RDONLY, limit)[0], "rb")


def read_regular(path: str | Path, limit: int) -> bytes:
    """Return the content of a file, checked as in :func:`open_regular`, also if it grows while it is read."""
    with open_regular(path, limit) as file:
        content = file.read(limit + 1)
    _require_size(len(content), path, limit)
    return content


def read_json_object(path: str | Path, limit: int) -> dict[str, Any]:
    """Return the JSON object in a regular file of at most ``limit`` bytes, or an empty dict if there is none."""
    try:
        return parse_json_object(read_regular(path, limit), limit) or {}
    except OSError:
        return {}


def parse_json_object(content: bytes, limit: int) -> dict[str, Any] | None:
    """Return the JSON object in untrusted ``content``; ``None`` for anything else and beyond ``limit`` bytes."""
    try:
        found = json.loads(content) if len(content) <= limit else None
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else None


def open_writable(path: str | Path, flags: int) -> int:
    """Open or create a file that this program writes in place, and return its descriptor.

    A symlink (ELOOP) or a second hard link (EMLINK) is rejected, because it could lead to any file of the user. So is
    anything but a regular file (EINVAL). ``flags`` must not contain O_TRUNC, which would act before these checks.
    """
    try:
        descriptor, found = _opened(path, flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP:
            error.strerror = "it is a symbolic link: remove it"
        raise
    if found.st_nlink > 1:
        os.close(descriptor)
        raise OSError(errno.EMLINK, "it is a hard link to a file that has another name", str(path))
    return descriptor


def _opened(path: str | Path, flags: int, limit: int | None = None) -> tuple[int, os.stat_result]:
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    try:
        found = os.fstat(descriptor)
        require_regular(found, path)
        _require_size(found.st_size, path, limit)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, found


def require_regular(found: os.stat_result, path: str | Path) -> None:
    """Raise an OSError that names the kind of file unless it is a regular file."""
    if not stat.S_ISREG(found.st_mode):
        kind = KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))


def _require_size(size: int, path: str | Path, limit: int | None) -> None:
    if limit is not None and size > limit:
        raise OSError(errno.EFBIG, f"it is larger than the limit of {limit / 1e6:g} MB", str(path))


def make_folder(key: str, path: Path) -> None:
    """Create the folder that the setting ``key`` names unless it exists; raise a RecipeError if that fails."""
    try:
        os.fsencode(path).decode()  # files that mention its name are UTF-8
        if not path.is_dir():
            path.mkdir(parents=True, exist_ok=True)
            with suppress(PermissionError):  # the parent may be writable but not readable
                sync_to_disk(path.parent)  # otherwise a power cut could lose the folder with its synced files
    except (OSError, ValueError) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        raise RecipeError(f"{key}={escaped(str(path))} cannot be made ({cause}): choose another directory") from error


def default_folder(reference: str | None, kind: str = "") -> str:
    """Return a new, unused default folder for a run of the recipe ``reference``."""
    folder = f"runs/{Path(reference or 'recipe').stem}/{kind}{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    more = (f"{folder}-{number}" for number in itertools.count(2))  # several runs in one process and second
    return next(name for name in itertools.chain([folder], more) if not os.path.lexists(name))


def hash_file(path: str | Path) -> str:
    """Return the hexadecimal SHA-256 of a regular file."""
    digest = hashlib.sha256()
    with open_regular(path) as file:
        buffer = memoryview(bytearray(min(CHUNK, max(4096, os.fstat(file.fileno()).st_size))))
        while size := file.raw.readinto(buffer):  # type: ignore[attr-defined]
            digest.update(buffer[:size])
    return digest.hexdigest()


@contextmanager
def add_path_to_errors(path: Path) -> Iterator[None]:
    """Add ``path`` to an OSError without a file name, such as those of write(2) and fsync(2)."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


OS_ERROR = re.compile(r"\(os error (\d+)\)|\[Errno (\d+)\]|Not enough disk space")
"""Matches error messages without an errno: of safetensors (written in Rust), shutil and ``datasets``."""


def errno_of(error: BaseException) -> int | None:
    """Return the errno of an operating system error; ``None`` for other errors, whose messages may quote any text."""
    is_known = isinstance(error, OSError) or type(error).__name__ == "SafetensorError"
    found = OS_ERROR.search(str(error)) if is_known else None
    return int(found[1] or found[2] or errno.ENOSPC) if found else None


@contextmanager
def room_in(folder: Path, fix: str) -> Iterator[None]:
    """Turn an error that a full or read-only disk caused into a RunError that names ``folder`` and the ``fix``."""
    try:
        yield
    except Exception as error:
        found: BaseException | None = error
        while found is not None and errno_of(found) not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
        if found is None or isinstance(error, RunError):
            raise
        cause = os.strerror(errno_of(found) or 0)
        raise RunError(f"{folder} cannot be written to ({cause}): free some space, or {fix}") from error


HOST = socket.gethostname()
MACHINE = [hashlib.sha256(name.encode()).hexdigest()[:6] for name in (HOST, boot_id() or HOST)]
"""Hashes of this machine and of its current boot, used in file names.

Another machine that shares the folder may not see the locks of this one, so each cleans up only its own files.
"""


def temporary_path(path: Path, kind: str) -> Path:
    """Return a hidden path in the same folder, because only a move within one file system is atomic."""
    return path.with_name(f".{path.name}.{'-'.join(MACHINE)}-{secrets.token_hex(4)}.{kind}")


def sync_to_disk(path: Path) -> None:
    """Wait until the file's content, or the folder's list of names, is on disk."""
    with add_path_to_errors(path):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file, or a folder with its content. A symlink is removed, its target is not."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


# Atomic files and folders: after a crash or a power cut, either the old or the new one is complete.

LEFTOVER = re.compile(r"(\w{6})-(\w{6})-\w{8}\.(part|old)")  # the end of a name by temporary_path()


def _lock(path: Path, until: ExitStack) -> None:
    """Lock a file or folder until ``until`` closes or this process ends; raise an OSError if it is locked already."""
    access = os.O_RDONLY if path.is_dir() else os.O_RDWR  # NFS requires a writable descriptor
    descriptor = os.open(path, access | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    until.callback(os.close, descriptor)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _remove_leftovers(target: Path) -> None:
    """Remove the files of killed writers of ``target``; move an old folder back if ``target`` is missing."""
    begin = f".{target.name}."
    for name in os.listdir(target.parent):
        found = LEFTOVER.fullmatch(name.removeprefix(begin)) if name.startswith(begin) else None
        if found is not None and {found[1], found[2]} & {*MACHINE}:
            path = target.with_name(name)
            with suppress(OSError), ExitStack() as until:
                _lock(path, until)  # fails if its writer is alive or another user owns it
                if found[3] == "old" and not os.path.lexists(target):
                    os.rename(path, target)
                else:
                    remove(path)


@contextmanager
def _part(target: Path, make: Callable[[Path], object]) -> Iterator[Path]:
    """Create a locked, hidden path next to ``target`` with ``make``; remove it at the end unless it was moved."""
    with add_path_to_errors(target), ExitStack() as until:
        target.parent.mkdir(parents=True, exist_ok=True)
        with suppress(PermissionError):  # the folder may be writable but not readable
            _remove_leftovers(target)
        make(new := temporary_path(target, "new"))
        with suppress(OSError):  # without locks on this file system, leftovers stay
            _lock(new, until)
        part = new.rename(new.with_suffix(".part"))  # only now, locked, may other writers find it
        try:
            yield part
        finally:
            with suppress(OSError):
                remove(part)


def scratch_folder(beside: Path) -> AbstractContextManager[Path]:
    """Create an empty, private, hidden folder next to ``beside``; remove it at the end or, after a kill, later."""
    return _part(beside, partial(Path.mkdir, mode=0o700))


@contextmanager
def staged_file(path: Path, sync_folder: bool = True) -> Iterator[Path]:
    """Create an empty file next to ``path`` to write to; move it to ``path`` on success, remove it on an exception.

    Its name is random. A symlink at ``path`` is replaced, not followed. Disk errors name a file.
    """
    with _part(path, Path.touch) as part:
        yield part
        sync_to_disk(part)
        os.replace(part, path)
        if sync_folder:
            sync_to_disk(path.parent)


def write_atomic(path: Path, content: str | bytes, sync_folder: bool = True) -> None:
    """Write ``content`` (text as UTF-8) to ``path`` so that a reader sees the whole old or the whole new file.

    A missing folder is created. Without ``sync_folder``, the content is on disk on return, but the name may not be.
    """
    with staged_file(path, sync_folder) as part:
        part.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def staged_folder(target: Path) -> Iterator[Path]:
    """Create an empty folder next to ``target`` to fill; it replaces ``target`` on success and is removed on an error.

    A symlink at ``target`` is replaced; its target stays unchanged. A folder cannot be replaced in one move, so an old
    ``target`` is renamed to ``.NAME.*.old`` and deleted after the new one has its name. After a crash between the two
    moves, the next writer of ``target`` moves the old one back, so a complete folder always exists.
    """
    with _part(target, Path.mkdir) as part:
        mode = part.stat().st_mode & 0o666
        yield part
        for path in part.rglob("*"):
            if path.is_file() and stat.S_IMODE(path.stat().st_mode) != mode:
                path.chmod(mode)  # safetensors creates files that only their owner can read
            sync_to_disk(path)
        sync_to_disk(part)
        replace_folder(part, target)


def replace_folder(part: Path, target: Path) -> None:
    """Move ``part`` to ``target`` and remove the old ``target``."""
    old = temporary_path(target, "old") if os.path.lexists(target) else None
    if old is not None:
        os.rename(target, old)
    try:
        os.rename(part, target)
    except BaseException:
        if old is not None:
            os.rename(old, target)
        raise
    # The new name must be on disk before the old folder is removed.
    sync_to_disk(target.parent)
    if old is not None:
        remove(old)
