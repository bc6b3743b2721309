"""What a command says before it has anything to show: what it is doing, at once and for as long as that takes."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from types import ModuleType

from trainer.system.redact import redact
from trainer.system.streams import Stream
from trainer.system.text import escaped

SECONDS_BETWEEN = 1.8  # between lines in a pipe; how long other output on a terminal is left alone
LIBRARIES = ("torch", "lightning.fabric", "torchvision", "transformers", "datasets", "peft")
"""Whose import takes long enough for a person to ask what goes on."""
RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID")

_begun: Waiting | None = None


class Waiting(MetaPathFinder):
    """One line on standard error that says where a command is: what changes on a terminal is repeated in a pipe.

    It begins when a library is imported that takes time, which this hears of as a finder of modules that finds none, or
    when :func:`doing` is called. Whatever else is printed clears the line; the file's descriptor is written to, so that
    no buffer's lock is held when this process forks.
    """

    def __init__(self, subject: str) -> None:
        self.subject, self.what, self.began = redact(subject), "", time.monotonic()
        self.terminal, self.drawn, self.last = os.isatty(2), False, 0.0
        self.ended = threading.Event()
        sys.meta_path.insert(0, self)
        Stream.before_write = self.clear

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        """Find nothing, and say what is being imported."""
        if name in LIBRARIES:
            self.doing(f"loading {name.removeprefix('lightning.')}")

    def doing(self, what: str) -> None:
        """Say that this is ``what`` goes on: at once, where it is the first thing that is said, or on a terminal."""
        first, self.what = not self.what, what
        if first or self.drawn:
            self._draw()
        if first:
            threading.Thread(target=self._repeat, name="waiting", daemon=True).start()

    def _repeat(self) -> None:
        while not self.ended.wait(0.2):
            if time.monotonic() - self.last >= (0.9 if self.drawn else SECONDS_BETWEEN):
                self._draw()

    def _draw(self) -> None:
        now = time.monotonic()
        seconds = f" {now - self.began:.0f} s" if now - self.began >= 1 else ""
        text = escaped(f"{self.subject} · {self.what} …{seconds}")
        if self.terminal:
            with suppress(OSError):
                width = os.get_terminal_size(2).columns
                text = text if not 0 < width <= len(text) else text[: width - 1]
        self.last, self.drawn = now, self.terminal
        with suppress(OSError):
            os.write(2, (f"\r{text}\x1b[K" if self.terminal else f"{text}\n").encode(errors="replace"))

    def clear(self) -> None:
        """Make room on a terminal for what is written next."""
        self.last = time.monotonic()
        if self.drawn:
            self.drawn = False
            with suppress(OSError):
                os.write(2, b"\r\x1b[K")

    def end(self) -> None:
        """Say nothing any more."""
        self.ended.set()
        self.clear()
        Stream.before_write = None
        with suppress(ValueError):
            sys.meta_path.remove(self)


def begin(subject: str, environment: Mapping[str, str] = os.environ) -> None:
    """Have a :class:`Waiting` for this command line, ``subject``, on the first of its ranks alone."""
    global _begun
    end()
    if isinstance(sys.stderr, Stream) and all(environment.get(name, "0") == "0" for name in RANKS):
        _begun = Waiting(subject)
        os.register_at_fork(after_in_child=_forget)


def doing(what: str) -> None:
    """Say what goes on, in words that fit before an ellipsis; nothing where no command line has begun."""
    if _begun is not None:
        _begun.doing(what)


def end() -> None:
    """There is something to show now."""
    global _begun
    if _begun is not None:
        _begun.end()
        _begun = None


def _forget() -> None:
    """In a process that was forked, which has no thread to go on with it."""
    global _begun
    if _begun is not None:
        _begun.drawn = False
        end()
