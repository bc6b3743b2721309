"""The first lines of an error: rank, step, phase, samples and cause, then the traceback; and how to read them."""

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
    """Keep with ``error`` where it happened; Python 3.11 and later show it below the traceback."""
    notes = [*getattr(error, "__notes__", ()), place]
    vars(error).update(__notes__=notes, trainer_place=place)


def place_of(error: BaseException) -> str | None:
    """Where ``error`` happened in a run, if it did in one."""
    return getattr(error, "trainer_place", None)


@contextmanager
def placed(place: str) -> Iterator[None]:
    """Have an error that is raised meanwhile say that it happened at ``place``, unless it knows better."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if place_of(error) is None:
            note_place(error, place)
        raise


def report(error: BaseException) -> None:
    """Print ``error`` to standard error, once: a line, and the traceback of one that is nobody's setting or message."""
    if getattr(error, "is_reported", False):
        return
    vars(error)["is_reported"] = True
    if isinstance(error, RecipeError | RunError):
        say(in_one_line(error))
        return
    place = place_of(error)
    say(cause(error) if place is None else f"{place}: {cause(error)}")
    vars(error).pop("__notes__", None)  # the first line says it
    print_traceback(type(error), error, error.__traceback__)


def print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """What Python prints of an error, without secrets: for ``sys.excepthook``, too."""
    text = redact("".join(traceback.format_exception(kind, error, trace)))
    own = text.replace("\ntrainer: ", "\n  trainer: ")  # a message's second line is none of ours
    print(escaped(own, "\n\t"), end="", file=sys.stderr, flush=True)


def say(message: str) -> None:
    """Print ``trainer: error: message``, one line without secrets; with its rank, where that is not the first."""
    told = (os.environ.get(name, "") for name in ("RANK", "LOCAL_RANK"))
    rank = next((text for text in told if text.isascii() and text.isdecimal() and len(text) < 10), "0")
    prefix = "" if rank == "0" else f"[rank {rank}] "
    print(f"{prefix}{ERROR}{escaped(redact(message))}", file=sys.stderr, flush=True)


def in_one_line(error: BaseException) -> str:
    """The message."""
    return " ".join(line.strip() for line in text_of(error).split("\n"))


def cause(error: BaseException) -> str:
    """Type and message, in one line that is not too long."""
    text = in_one_line(error)
    text = text if len(text) <= LONGEST else f"{text[:LONGEST]} …"
    if isinstance(error, RecipeError | RunError):
        return text
    if isinstance(error, SystemExit):
        return f"SystemExit: sys.exit({text}) was called, by which nothing is finished"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


RAISED = re.compile(r"(\[rank\d+\]: ?)?[\w.]*(Error|Exception)\b")
OTHER_RANK = "another rank ended"


class Said:
    """The lines of a program, as far as they say why it ended."""

    def __init__(self) -> None:
        self.own = ""
        """The first error of one line that is ours, of the rank that knows why where one does."""
        self._raised = self._last = ""

    def note(self, line: str) -> None:
        """Take in the next line."""
        line = line.strip()
        if ERROR in line:
            if not self.own or OTHER_RANK in self.own:
                self.own = line.partition(ERROR)[2]
        elif RAISED.match(line):
            self._raised = self._raised or line
        self._last = line or self._last

    @property
    def reason(self) -> str:
        """Our own error, or the end of the first traceback, or the last words; empty where nothing was said."""
        knows = self.own and OTHER_RANK not in self.own
        return self.own if knows else self._raised or self.own or self._last


def reason_in(text: str) -> str | None:
    """Why a program has ended, by all that it has said."""
    said = Said()
    for line in text.splitlines():
        said.note(line)
    return said.reason or None
