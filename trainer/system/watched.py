"""A program watched from outside: its processes, which end together, and what its lines say of why it ended."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from trainer.system.processes import end_with_parent

SECONDS_TO_VANISH = 5.0

ERROR = "trainer: error: "
RAISED = re.compile(r"(\[rank\d+\]: ?)?[\w.]*(Error|Exception)\b")
OTHER_RANK = "another rank ended"


class Watched:
    """A command in a session of its own: so all that it starts can be ended together, whatever state it is in.

    The kernel ends it when this process ends (on Linux), however that ends.

    Args:
        command: what to start.
        environment: all variables of it.
        output: as ``subprocess.Popen`` takes its ``stdout``.
        errors: the same for ``stderr``.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], output: Any, errors: Any) -> None:
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            env=environment,
            start_new_session=True,
            preexec_fn=partial(end_with_parent, os.getpid()),
        )
        self._gone = False

    def kill(self) -> None:
        """End all its processes, and wait until they are gone."""
        if self._gone:  # its number may be another group's by now
            return
        until = time.monotonic() + SECONDS_TO_VANISH
        with suppress(ProcessLookupError, PermissionError):  # the latter of what is left of ended ones, on macOS
            while time.monotonic() < until:  # where nobody waits for orphans, what is left of them stays
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.poll()
                time.sleep(0.01)
        self.process.wait()
        self._gone = True


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
