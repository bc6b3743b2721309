"""Status lines on standard error while a command starts, because imports and models may take seconds to load."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from trainer.system.environment import is_first_process
from trainer.system.redact import redact
from trainer.system.text import escaped

UPDATE_INTERVAL = 1.8  # minimum time between two lines

_subject = ""
_last = 0.0
_silent = False
_began: float | None = None


def start_status(subject: str, environment: Mapping[str, str] = os.environ) -> None:
    """Enable status lines that start with ``subject``; only on the first rank, and not in notebooks."""
    global _subject, _last, _began
    is_shown = is_first_process(environment) and sys.stderr is sys.__stderr__
    _subject, _last, _began = redact(subject) if is_shown else "", float("-inf"), time.monotonic()


def show_status(what: str) -> None:
    """Print what the command is doing now, unless the last line is younger than :data:`UPDATE_INTERVAL`."""
    global _last
    if _subject and time.monotonic() - _last >= UPDATE_INTERVAL:
        _last = time.monotonic()
        print(escaped(f"{_subject} · {what} …"), file=sys.stderr, flush=True)


def clear_status() -> None:
    """Disable status lines: the command prints its own output from now on."""
    global _subject
    _subject = ""


@contextmanager
def silenced(silent: bool) -> Iterator[None]:
    """Let :func:`say` print nothing within the block, if ``silent``."""
    global _silent
    before, _silent = _silent, silent
    try:
        yield
    finally:
        _silent = before


def say(text: str) -> None:
    """Print ``text`` about a run on standard output."""
    if not _silent:
        print(text, flush=True)


def start_clock(keep: bool) -> None:
    """Start to count the seconds of a run; with ``keep``, they are counted from the start of the command."""
    global _began
    _began = _began if keep and _began is not None else time.monotonic()


def elapsed() -> float | None:
    """Return the seconds since the start of the run, if they are counted."""
    return None if _began is None else time.monotonic() - _began
