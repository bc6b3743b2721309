"""Standard streams by which no run ends: not by a reader that has gone, a full disk, nor a name that steers a terminal.

What a run makes is in its files; what it prints is for whoever reads it, if anybody does. So the streams take
everything, whichever ``print`` it comes from: of this program, of a library, of Python's own end.
"""

from __future__ import annotations

import errno
import io
import os
import re
import select
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar

from trainer.system.text import escaped

READER_GONE = (errno.EPIPE, errno.ECONNRESET, errno.ESHUTDOWN, errno.ENOTCONN, errno.EBADF)
"""Nobody will read it any more: what comes is not missed, and may go nowhere."""

MEANT = re.compile("(\x1b\\[[0-9;]*m|\\A\n*(?:\x1b\\[A)+\\Z)")
"""Escape sequences that a terminal may get: colours, and the way up by which tqdm comes back to the bar above."""


class Descriptor(io.FileIO):
    """Writes to a descriptor, and drops what the file behind it does not take. Unless its reader is gone (a full disk
    may have space again), the first error is kept in ``lost``."""

    lost: OSError | None = None

    def write(self, content: Any) -> int:
        """Write all of it, and wait for a reader that is slow."""
        left = memoryview(content).cast("B")
        size = len(left)
        try:
            while left:
                written = super().write(left)
                if written is None:  # the descriptor does not block
                    select.select([], [self.fileno()], [])
                else:
                    left = left[written:]
        except OSError as error:
            if error.errno in READER_GONE:
                lead_nowhere(self.fileno())  # C code writes there, too
            else:
                self.lost = self.lost or error
        return size


class Stream(io.TextIOWrapper):
    """Text for a :class:`Descriptor`: control characters, and what the encoding has no bytes for, are written out."""

    mode = "w"  # as Python's own have
    before_write: ClassVar[Callable[[], None] | None] = None
    """Makes room for what is written, on any of them: see :mod:`trainer.system.waiting`."""

    def __init__(self, number: int, like: io.TextIOWrapper | None) -> None:
        self.descriptor = Descriptor(number, "w", closefd=False)
        self.descriptor.name = getattr(like, "name", number)  # <stdout>
        self.terminal = os.isatty(number)
        unbuffered = like is not None and like.write_through  # python -u
        super().__init__(
            self.descriptor if unbuffered else io.BufferedWriter(self.descriptor),
            encoding=like.encoding if like is not None else "utf-8",
            errors="backslashreplace",
            line_buffering=number == 2 or self.terminal,
            write_through=unbuffered,
        )

    def write(self, text: str) -> int:
        """Write ``text``."""
        if not isinstance(text, str):
            return super().write(text)  # refused as by any text stream
        if Stream.before_write is not None:
            Stream.before_write()
        parts = MEANT.split(text) if self.terminal else [text]
        super().write("".join(part if at % 2 else escaped(part, "\n\r\t") for at, part in enumerate(parts)))
        return len(text)

    def close(self) -> None:
        """Only flush: somebody else has something to say afterwards."""
        self.flush()


def keep_streams() -> None:
    """Make the standard streams of this process such that nothing comes of printing to them but what is printed.

    Called first of all: a descriptor that was closed (``2>&-``) would be the next file's that is opened, a
    checkpoint's, say. Streams that somebody else has put in place, a notebook or a test, are left alone.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            lead_nowhere(number)
        stream = getattr(sys, name)
        if number == 0:
            kept: Any = stream or open(0, closefd=False)  # noqa: SIM115
        elif stream is None or (type(stream) is io.TextIOWrapper and stream.fileno() == number):
            if stream is not None:
                with suppress(OSError):
                    stream.flush()
            kept = Stream(number, stream)
        else:
            continue
        setattr(sys, name, kept)
        setattr(sys, f"__{name}__", kept)


def lead_nowhere(number: int) -> None:
    """Open the null device as descriptor ``number``, for children, too."""
    null = os.open(os.devnull, os.O_RDWR)
    if null != number:
        os.dup2(null, number)
        os.close(null)
    os.set_inheritable(number, True)


def lost_output() -> OSError | None:
    """Why standard output does not hold all that was written there; ``None`` when it does, or has no reader."""
    if not isinstance(sys.stdout, Stream):
        return None
    sys.stdout.flush()
    return sys.stdout.descriptor.lost
