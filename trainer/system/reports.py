"""Error reports: one line with rank, step, phase, samples and cause, then the traceback; and how to parse them."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from trainer.errors import RecipeError, RunError, text_of
from trainer.system.redact import redact
from trainer.system.text import escaped

ERROR = "trainer: error: "
LONGEST = 400


def note_place(error: BaseException, place: str) -> None:
    """Attach the place where ``error`` happened; Python 3.11 and later show it below the traceback."""
    notes = [*getattr(error, "__notes__", ()), place]
    vars(error).update(__notes__=notes, trainer_place=place)


def place_of(error: BaseException) -> str | None:
    """Return the place in a run where ``error`` happened, if it is known."""
    return getattr(error, "trainer_place", None)


@contextmanager
def placed(place: str) -> Iterator[None]:
    """Attach ``place`` to an error that is raised in the block, unless it already has a place."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if place_of(error) is None:
            note_place(error, place)
        raise


def report(error: BaseException) -> None:
    """Print ``error`` to standard error, once; with a traceback unless it is a RecipeError or RunError."""
    if getattr(error, "is_reported", False):
        return
    vars(error)["is_reported"] = True
    if isinstance(error, RecipeError | RunError):
        say(in_one_line(error))
        return
    place = place_of(error)
    say(cause(error) if place is None else f"{place}: {cause(error)}")
    vars(error).pop("__notes__", None)  # already in the first line
    print_traceback(type(error), error, error.__traceback__)


def print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error's traceback without secrets; also usable as ``sys.excepthook``."""
    text = redact("".join(traceback.format_exception(kind, error, trace)))
    own = text.replace("\ntrainer: ", "\n  trainer: ")  # a line of the user's message must not look like ours
    print(escaped(own, "\n\t"), end="", file=sys.stderr, flush=True)


def say(message: str) -> None:
    """Print ``trainer: error: message`` in one line without secrets, with the rank unless it is the first."""
    given = (os.environ.get(name, "") for name in ("RANK", "LOCAL_RANK"))
    rank = next((text for text in given if text.isascii() and text.isdecimal() and len(text) < 10), "0")
    prefix = "" if rank == "0" else f"[rank {rank}] "
    print(f"{prefix}{ERROR}{escaped(redact(message))}", file=sys.stderr, flush=True)


def in_one_line(error: BaseException) -> str:
    """Return the error's message in one line."""
    return " ".join(line.strip() for line in text_of(error).split("\n"))


def cause(error: BaseException) -> str:
    """Return type and message in one line of limited length."""
    text = in_one_line(error)
    text = text if len(text) <= LONGEST else f"{text[:LONGEST]} …"
    if isinstance(error, RecipeError | RunError):
        return text
    if isinstance(error, SystemExit):
        return f"SystemExit: sys.exit({text}) was called before the run was finished"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


RAISED = re.compile(r"(\[rank\d+\]: ?)?[\w.]*(Error|Exception)\b")
OTHER_RANK = "another rank ended"


class Said:
    """Collects a program's output lines and finds the reason why it ended."""

    def __init__(self) -> None:
        self.own = ""
        """The first ``trainer: error:`` message, preferably not one about the end of another rank."""
        self._raised = self._last = ""

    def note(self, line: str) -> None:
        """Process the next line."""
        line = line.strip()
        if ERROR in line:
            if not self.own or OTHER_RANK in self.own:
                self.own = line.partition(ERROR)[2]
        elif RAISED.match(line):
            self._raised = self._raised or line
        self._last = line or self._last

    @property
    def reason(self) -> str:
        """Our own error, else the end of the first traceback, else the last line; empty without output."""
        knows = self.own and OTHER_RANK not in self.own
        return self.own if knows else self._raised or self.own or self._last


def reason_in(text: str) -> str | None:
    """Return the reason why a program ended, from its whole output."""
    said = Said()
    for line in text.splitlines():
        said.note(line)
    return said.reason or None
