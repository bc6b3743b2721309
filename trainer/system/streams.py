"""Standard streams that survive a closed descriptor, a missing reader or a full disk.

The results of a run are in its files, so lost output must not end it. This covers every ``print``, also in libraries.
"""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from contextlib import suppress
from typing import Any

READER_GONE = (errno.EPIPE, errno.ECONNRESET, errno.ESHUTDOWN, errno.ENOTCONN, errno.EBADF)  # no process will read it


class SafeFile(io.FileIO):
    """Writes to a descriptor and drops output that cannot be written, for example while the disk is full."""

    lost: OSError | None = None  # the first error, unless the reader is gone
    has_reader = True

    def write(self, content: Any) -> int:
        """Write all of ``content``, waiting for a slow reader, and return its size even if output was dropped."""
        left = memoryview(content).cast("B")
        size = len(left)
        try:
            while left:
                written = super().write(left)
                if written is None:  # the descriptor is non-blocking
                    select.select([], [self.fileno()], [])
                else:
                    left = left[written:]
        except OSError as error:
            if error.errno in READER_GONE:
                self.has_reader = False
                redirect_to_devnull(self.fileno())  # also for C code
            else:
                self.lost = self.lost or error
        return size


def install_safe_streams() -> None:
    """Replace the standard streams of this process by streams that never raise OSError.

    Call this first: a descriptor that is closed (``2>&-``) would be reused by the next opened file, such as a
    checkpoint. Streams that a notebook or a test has replaced stay as they are.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            redirect_to_devnull(number)
        stream = getattr(sys, name)
        if number == 0:
            kept: Any = stream or open(0, closefd=False)  # noqa: SIM115
        elif stream is None or (type(stream) is io.TextIOWrapper and stream.fileno() == number):
            kept = opened(number, stream)
        else:
            continue
        setattr(sys, name, kept)
        setattr(sys, f"__{name}__", kept)


def opened(number: int, like: io.TextIOWrapper | None) -> io.TextIOWrapper:
    """Return a text stream for a :class:`SafeFile`, with encoding and buffering of the stream that it replaces."""
    if like is not None:
        with suppress(OSError):
            like.flush()
    descriptor = SafeFile(number, "w", closefd=False)
    descriptor.name = getattr(like, "name", number)  # <stdout>
    unbuffered = like is not None and like.write_through  # python -u
    binary: Any = descriptor if unbuffered else io.BufferedWriter(descriptor)
    encoding = like.encoding if like is not None else "utf-8"
    by_line = number == 2 or os.isatty(number)
    return io.TextIOWrapper(binary, encoding, "backslashreplace", line_buffering=by_line, write_through=unbuffered)


def redirect_to_devnull(number: int) -> None:
    """Open the null device as descriptor ``number``, inheritable by children."""
    null = os.open(os.devnull, os.O_RDWR)
    if null != number:
        os.dup2(null, number)
        os.close(null)
    os.set_inheritable(number, True)


def stdout_error() -> OSError | None:
    """Return the error because of which standard output is incomplete; ``None`` if it is complete or has no reader."""
    file = _flushed_stdout()
    return file.lost if file is not None else None


def flush_stdout() -> bool:
    """Flush standard output, and return whether it still has a reader: that of ``| head`` ends early."""
    file = _flushed_stdout()
    return file is None or file.has_reader


def _flushed_stdout() -> SafeFile | None:
    sys.stdout.flush()
    buffer = getattr(sys.stdout, "buffer", None)
    file = getattr(buffer, "raw", buffer)
    return file if isinstance(file, SafeFile) else None
