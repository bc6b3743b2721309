"""Error reports: one line with rank, step, phase, samples and cause, then the traceback; and how to parse them."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType

from trainer.errors import RecipeError, RunError, safe_message
from trainer.system.redact import redact
from trainer.system.text import escaped

ERROR = "trainer: error: "
MAX_MESSAGE_CHARS = 400


def set_location(error: BaseException, place: str) -> None:
    """Attach the place where ``error`` happened; Python 3.11 and later show it below the traceback."""
    vars(error).update(__notes__=[*getattr(error, "__notes__", ()), place], trainer_place=place)


def get_location(error: BaseException) -> str | None:
    """Return the place in a run where ``error`` happened, if it is known."""
    return getattr(error, "trainer_place", None)


@contextmanager
def error_location(place: str) -> Iterator[None]:
    """Attach ``place`` to an error that is raised in the block, unless it already has a place."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if get_location(error) is None:
            set_location(error, place)
        raise


def report(error: BaseException) -> None:
    """Print ``error`` to standard error, once; with a traceback unless it is a RecipeError or RunError."""
    if getattr(error, "is_reported", False):
        return
    vars(error)["is_reported"] = True
    if isinstance(error, RecipeError | RunError):
        print_error(one_line_message(error))
        return
    place = get_location(error)
    print_error(describe_error(error) if place is None else f"{place}: {describe_error(error)}")
    vars(error).pop("__notes__", None)  # already in the first line
    print_traceback(type(error), error, error.__traceback__)


def print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error's traceback without secrets; also usable as ``sys.excepthook``."""
    text = redact("".join(traceback.format_exception(kind, error, trace)))
    own = text.replace("\ntrainer: ", "\n  trainer: ")  # a line of the user's message must not look like ours
    print(escaped(own, "\n\t"), end="", file=sys.stderr, flush=True)


def print_error(message: str) -> None:
    """Print ``trainer: error: message`` in one line without secrets, with the rank unless it is the first."""
    given = (os.environ.get(name, "") for name in ("RANK", "LOCAL_RANK"))
    rank = next((text for text in given if text.isascii() and text.isdecimal() and len(text) < 10), "0")
    prefix = "" if rank == "0" else f"[rank {rank}] "
    print(f"{prefix}{ERROR}{escaped(redact(message))}", file=sys.stderr, flush=True)


def one_line_message(error: BaseException) -> str:
    return " ".join(line.strip() for line in safe_message(error).split("\n"))


def describe_error(error: BaseException) -> str:
    """Return type and message in one line of limited length."""
    text = one_line_message(error)
    text = text if len(text) <= MAX_MESSAGE_CHARS else f"{text[:MAX_MESSAGE_CHARS]} …"
    if isinstance(error, RecipeError | RunError):
        return text
    if isinstance(error, SystemExit):
        return f"SystemExit: sys.exit({text}) was called before the run was finished"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


RAISED = re.compile(r"(\[rank\d+\]: ?)?[\w.]*(Error|Exception)\b")
OTHER_RANK = "another rank ended"


class FailureReason:
    """Collects a program's output ``lines`` and finds the reason why it ended."""

    def __init__(self, lines: Iterable[str] = ()) -> None:
        self.trainer_error = ""
        """The first ``trainer: error:`` message, preferably not one about the end of another rank."""
        self._raised = self._last = ""
        for line in lines:
            self.add_line(line)

    def add_line(self, line: str) -> None:
        line = line.strip()
        if ERROR in line:
            if not self.trainer_error or OTHER_RANK in self.trainer_error:
                self.trainer_error = line.partition(ERROR)[2]
        elif RAISED.match(line):
            self._raised = self._raised or line
        self._last = line or self._last

    @property
    def reason(self) -> str:
        """Our own error, else the end of the first traceback, else the last line; empty without output."""
        knows = self.trainer_error and OTHER_RANK not in self.trainer_error
        return self.trainer_error if knows else self._raised or self.trainer_error or self._last
