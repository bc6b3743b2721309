"""A small file system of one's own, that can really be full."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_REC, MS_PRIVATE, MS_REMOUNT = 0x4000, 0x40000, 0x20
"""Of unshare(2) and mount(2)."""

SIZE, LARGER = 8 * 2**20, 64 * 2**20


class NoSmallDisk(RuntimeError):
    """The system allows this process no file system of its own."""


class SmallDisk:
    """A tmpfs at ``path`` that only this process and those it forks from now on can see, and that ends with
    them; whether root or not.

    Raises:
        NoSmallDisk: saying why the system does not allow it.
    """

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path, self.filler = path, path / "filler"
        self.libc = ctypes.CDLL(None, use_errno=True)
        user, group = os.getuid(), os.getgid()
        if user == 0:
            self._check(self.libc.unshare(CLONE_NEWNS), "unshare")
        else:
            self._check(self.libc.unshare(CLONE_NEWUSER | CLONE_NEWNS), "unshare")
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"0 {user} 1")
            Path("/proc/self/gid_map").write_text(f"0 {group} 1")
        self._mount(b"none", b"/", None, MS_REC | MS_PRIVATE, b"")
        self._mount(b"tmpfs", os.fsencode(path), b"tmpfs", 0, f"size={SIZE}".encode())

    def fill(self) -> None:
        """Leave no byte."""
        with open(self.filler, "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise

    def no_more_files(self) -> None:
        """Leave bytes, but no inode: what looks at free bytes sees nothing coming."""
        used = os.statvfs(self.path).f_files - os.statvfs(self.path).f_ffree
        self._remount(f"size={SIZE},nr_inodes={used + 1}")

    def make_room(self) -> None:
        """As a person would who reads what was said."""
        self.filler.unlink(missing_ok=True)
        self._remount(f"size={LARGER},nr_inodes=10000")

    def _remount(self, options: str) -> None:
        self._mount(b"tmpfs", os.fsencode(self.path), b"tmpfs", MS_REMOUNT, options.encode())

    def _mount(self, source: bytes, target: bytes, kind: bytes | None, flags: int, options: bytes) -> None:
        self._check(self.libc.mount(source, target, kind, ctypes.c_ulong(flags), options), "mount")

    def _check(self, result: int, call: str) -> None:
        if result:
            raise NoSmallDisk(f"{call}: {os.strerror(ctypes.get_errno())}")
