"""The first lines of an error: rank, step, phase, samples and cause, then the traceback."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from trainer.errors import RecipeError, RunError, text_of
from trainer.system.redact import redact
from trainer.system.text import escaped

LONGEST = 400


def note_place(error: BaseException, place: str) -> None:
    """Keep with ``error`` where it happened; Python 3.11 and later show it below the traceback."""
    notes = [*getattr(error, "__notes__", ()), place]
    vars(error).update(__notes__=notes, trainer_place=place)


@contextmanager
def placed(place: str) -> Iterator[None]:
    """Have an error that is raised meanwhile say that it happened at ``place``, unless it knows better."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if place_of(error) is None:
            note_place(error, place)
        raise


def place_of(error: BaseException) -> str | None:
    """Where ``error`` happened in a run, if it did in one."""
    return getattr(error, "trainer_place", None)


def report(error: BaseException) -> None:
    """Print ``error`` to standard error, once: a line, and the traceback of one that is nobody's setting or message."""
    if getattr(error, "trainer_reported", False):
        return
    vars(error)["trainer_reported"] = True
    place = place_of(error)
    if isinstance(error, RecipeError | RunError):
        say(in_one_line(error))
    elif place is None:
        say(cause(error))
    else:
        say(f"{place}: {cause(error)}")
    if not isinstance(error, RecipeError | RunError):
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
    print(f"{prefix}trainer: error: {escaped(redact(message))}", file=sys.stderr, flush=True)


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
