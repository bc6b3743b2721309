"""One start of a supervised run: its processes, what it says, and how it ended."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from trainer.processes import SUPERVISOR, ProcessId, end_with_parent
from trainer.redact import redact
from trainer.system.text import escaped

LAUNCHERS = ("LT_", "TORCHELASTIC_", "MASTER_")
RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
"""Variables of a rendezvous: each attempt makes one of its own."""

ERROR = "trainer: error: "
NOTED = "received: saving a checkpoint"
"""What a run says when a signal has asked it to stop."""

PLAN = re.compile(r"batch (\d+) = .*?micro-batch(?:es)? of (\d+)")
SMALLER = re.compile(r"in micro-batches of at most (\d+)")
"""How a plan says how batches are cut, and a recovery that they are cut smaller."""

SECONDS_BETWEEN_LOOKS = 0.05
SECONDS_TO_VANISH = 5.0


@dataclass(frozen=True)
class Sizes:
    """How batches are cut: the samples of a batch, and of a micro-batch."""

    batch: int
    micro_batch: int


@dataclass(frozen=True)
class Ending:
    """How an attempt ended.

    Args:
        code: as subprocess gives it: an exit code, or minus the number of the signal that killed it.
        cause: its first error, or its last words; empty for one that was killed without any.
    """

    code: int
    cause: str

    @property
    def exit_code(self) -> int:
        """As a shell gives it: 128 and the number of the signal."""
        return self.code if self.code >= 0 else 128 - self.code

    def describe(self) -> str:
        """``exit code 1`` or ``killed by SIGKILL``, and the cause."""
        how = f"exit code {self.code}" if self.code >= 0 else f"killed by {signal.Signals(-self.code).name}"
        return f"{how}: {self.cause}" if self.cause else how


class Attempt:
    """A run in a process group of its own, which ends when this process does; what it says on stderr is passed on.

    Args:
        command: what to start.
    """

    def __init__(self, command: Sequence[str]) -> None:
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS) and name not in RANKS
        }
        environment[SUPERVISOR] = json.dumps(ProcessId.own().to_dict())
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
            preexec_fn=partial(end_with_parent, os.getpid()),
        )
        assert self.process.stderr is not None
        self._pipe = self.process.stderr.fileno()
        self._open = True
        self._line = b""
        self._first_error = self._last_words = ""
        self._gone = self.noted = False
        self.sizes: Sizes | None = None

    def wait(self, seconds: float = SECONDS_BETWEEN_LOOKS) -> Ending | None:
        """Pass on what it says for about so long; how it ended, if it has, and none of its processes is left then."""
        self._pass_on(seconds)
        if self.process.poll() is None:
            return None
        self.kill()
        while self._open and self._pass_on(0.0):
            pass
        self._pipe_closed()
        code = self.process.returncode
        words = self._last_words if code > 0 else ""  # of an error that was not the trainer's; a signal comes unsaid
        return Ending(code, self._first_error or words)

    def signal(self, number: int) -> None:
        """Pass a signal on to the first rank: the ranks agree on what follows, and those that do not know it yet end
        with it."""
        self.process.send_signal(number)

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

    def _pass_on(self, seconds: float) -> bool:
        """Pass on what there is within ``seconds``; whether there was something."""
        if not self._open:
            time.sleep(seconds)
            return False
        if not select.select([self._pipe], [], [], seconds)[0]:
            return False
        content = os.read(self._pipe, 65536)
        if not content:
            self._open = False
            return False
        tell(content)
        *lines, self._line = (self._line + content).split(b"\n")
        for line in lines:
            self._note(line.decode(errors="replace").strip())
        return True

    def _pipe_closed(self) -> None:
        self._open = False
        if self.process.stderr is not None:
            self.process.stderr.close()
        self._note(self._line.decode(errors="replace").strip())

    def _note(self, line: str) -> None:
        """Remember what matters of a line: the first error, the last words, and how batches are cut."""
        if ERROR in line:
            self._first_error = self._first_error or line.partition(ERROR)[2]
        self._last_words = line or self._last_words
        self.noted = self.noted or NOTED in line
        self.sizes = sizes_in(line) or self.sizes
        if self.sizes is not None and (smaller := SMALLER.search(line)):
            self.sizes = Sizes(self.sizes.batch, int(smaller[1]))


def tell(content: bytes) -> None:
    """Write to standard error."""
    sys.stderr.buffer.write(content)
    sys.stderr.buffer.flush()


def say(text: str) -> None:
    """Tell the person, without secrets."""
    tell(f"trainer run: {escaped(redact(text))}\n".encode())


def sizes_in(text: str) -> Sizes | None:
    """What a plan, as it is printed, says of how batches are cut."""
    found = PLAN.search(text)
    return Sizes(int(found[1]), int(found[2])) if found else None
