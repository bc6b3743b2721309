"""One start of a supervised run: its processes, what it says, and how it ended."""

from __future__ import annotations

import dataclasses
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
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from trainer.checkpoint.folder import CheckpointFolder
from trainer.checkpoint.manifest import MOST_BYTES, CorruptCheckpoint, read_manifest
from trainer.errors import require
from trainer.system.files import read_regular, write_atomic
from trainer.system.processes import SUPERVISOR, ProcessId, end_with_parent
from trainer.system.redact import redact, redact_words
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


CUT = ("batch_size", "accumulate", "memory.micro_batch_size")
"""Settings that say how batches are cut."""


@dataclass(frozen=True)
class FitCommand:
    """A ``trainer fit`` that resumes by itself.

    Args:
        recipe: what names it.
        flags: of ``trainer fit``, as they were given, without those below.
        run_dir: the run directory.
        allow_change: ``run.allow_change``, as it was given.
        cut: samples of a batch and of a micro-batch, where the supervisor has changed how batches are cut.
    """

    recipe: str
    flags: tuple[str, ...]
    run_dir: str
    allow_change: tuple[str, ...] = ()
    cut: tuple[int, int] | None = None

    def words(self) -> list[str]:
        """The command line, without the program's name."""
        allowed = list(self.allow_change)
        cut: list[str] = []
        if self.cut is not None:
            cut = ["--batch_size", str(self.cut[0]), "--memory.micro_batch_size", str(self.cut[1])]
            allowed += [key for key in CUT if key not in allowed]
        allow = ["--run.allow_change", json.dumps(allowed)] if allowed else []
        return ["fit", self.recipe, *self.flags, "--run.dir", self.run_dir, "--run.resume", "auto", *cut, *allow]

    def cut_smaller(self, batch_size: int, micro_batch_size: int) -> FitCommand:
        """The same batch in smaller micro-batches. It is said, too: where accumulate alone gave it, it would change."""
        flags = self.flags
        for name in CUT:
            _, flags = take(flags, name)
        return dataclasses.replace(self, flags=flags, cut=(batch_size, micro_batch_size))


def take(flags: tuple[str, ...], name: str) -> tuple[str | None, tuple[str, ...]]:
    """The value of ``--name``, the last one if there are several, and the flags without it."""
    kept, value = [], None
    words = list(flags)
    while words:
        word = words.pop(0)
        if word == f"--{name}":
            require(bool(words), f"flag --{name} needs a value")
            value = words.pop(0)
        elif word.startswith(f"--{name}="):
            value = word.partition("=")[2]
        else:
            kept.append(word)
    return value, tuple(kept)


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


# Out of memory, as it looks from outside: the run's own words, or the kernel's count of what it had to kill.

VMSTAT, CGROUPS, CGROUP_ROOT = Path("/proc/vmstat"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
NO_SCHEDULE = re.compile(r"^accumulate: (null|\d+)$", re.MULTILINE)
"""How ``recipe.yaml`` says that all epochs have the same batch."""


def kernel_kills() -> int:
    """How many processes the kernel has killed because memory ran out: of this control group, or else of this machine.

    0 where neither is told. Only a difference between two calls means something.
    """
    own = None
    with suppress(OSError, StopIteration):
        line = next(line for line in CGROUPS.read_text().splitlines() if line.startswith("0::"))
        own = _entry(CGROUP_ROOT / line.removeprefix("0::").lstrip("/") / "memory.events")
    return _entry(VMSTAT) or 0 if own is None else own


def _entry(path: Path) -> int | None:
    """The number beside ``oom_kill`` in a file of names and numbers."""
    try:
        entries = dict(line.split(maxsplit=1) for line in path.read_text().splitlines())
        return int(entries["oom_kill"])
    except (OSError, ValueError, KeyError):
        return None


def ran_out_of_memory(ending: Ending, kills: int) -> bool:
    """Whether an attempt ended for want of memory.

    Args:
        ending: of the attempt.
        kills: of the kernel, while the attempt lasted.
    """
    if ending.code == 1 and "out of memory" in ending.cause.lower():
        return True
    return kills > 0 and (ending.code == -signal.SIGKILL or "was killed" in ending.cause)


def known_sizes(run_dir: Path, attempt: Attempt, since: float) -> Sizes | None:
    """How the batches of ``attempt`` were cut in the end, if that is known and micro-batches can be made smaller.

    From its ``summary.json``, if it was written after ``since`` (seconds since the epoch); else from what it said; else
    from the manifest of the newest checkpoint. ``None`` for a schedule of ``accumulate``, which gives each epoch a
    batch of its own.
    """
    if _has_schedule(run_dir):
        return None
    summary = run_dir / "summary.json"
    with suppress(OSError, ValueError, KeyError):
        if summary.stat().st_mtime >= since:
            found = json.loads(read_regular(summary, MOST_BYTES))
            return Sizes(int(found["batch_size"]), int(found["micro_batch_size"]))
    if attempt.sizes is not None:
        return attempt.sizes
    for path in CheckpointFolder(run_dir / "checkpoints").newest_first():
        with suppress(CorruptCheckpoint):
            return sizes_in(read_manifest(path).plan)
    return None


def _has_schedule(run_dir: Path) -> bool:
    with suppress(OSError):
        return NO_SCHEDULE.search(read_regular(run_dir / "recipe.yaml", MOST_BYTES).decode(errors="replace")) is None
    return False


# ``supervisor.json``: every attempt of a supervised run, as far as it has come.

NAME = "supervisor.json"


class Journal:
    """Written anew whenever an attempt begins or ends, without secrets. What an earlier supervisor wrote is kept.

    Args:
        run_dir: where it is written.
        command: of the run, as it is started first.
    """

    def __init__(self, run_dir: Path, command: list[str]) -> None:
        self.path = run_dir / NAME
        self.content: dict[str, Any] = {"command": redact_words(command), "status": "running"}
        self.content["attempts"] = _earlier(self.path)

    def begin(self, step: int, command: list[str]) -> None:
        """An attempt begins, with the newest checkpoint at ``step`` (-1: none)."""
        entry = {"start": _now(), "end": None, "exit_code": None, "cause": None, "from_step": _or_none(step)}
        self.content["attempts"].append({**entry, "step": None, "command": redact_words(command)})
        self._write()

    def end(self, exit_code: int, cause: str, step: int) -> None:
        """It has ended, with the newest checkpoint at ``step``; minus a signal's number for one that was killed."""
        ended = {"end": _now(), "exit_code": exit_code, "cause": redact(cause) or None, "step": _or_none(step)}
        self.content["attempts"][-1].update(ended)
        self._write()

    def close(self, status: str) -> None:
        """No attempt follows: finished, stopped, interrupted or failed."""
        self.content["status"] = status
        self._write()

    def _write(self) -> None:
        try:
            write_atomic(self.path, json.dumps(self.content, indent=1, ensure_ascii=False) + "\n")
        except OSError as error:  # a full disk may be what the run has died of, and may have space again
            say(f"{self.path} could not be written: {error.strerror or error}")


def newest_step(run_dir: Path) -> int:
    """Of the newest checkpoint, by its name; -1 when there is none."""
    names = [path.name for path in CheckpointFolder(run_dir / "checkpoints").newest_first()]
    return int(names[0].removeprefix("step-")) if names else -1


def _earlier(path: Path) -> list[dict[str, Any]]:
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads(read_regular(path, MOST_BYTES))["attempts"]
        return found if isinstance(found, list) else []
    return []


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def _or_none(step: int) -> int | None:
    return step if step >= 0 else None
