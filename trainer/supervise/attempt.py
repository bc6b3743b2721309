"""One attempt of a supervised run: its processes, its output and its end."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from trainer.checkpoint.folder import CheckpointFolder
from trainer.checkpoint.manifest import MAX_JSON_BYTES
from trainer.errors import require
from trainer.system.error_reports import FailureReason
from trainer.system.files import read_json_object, write_atomic
from trainer.system.processes import SUPERVISOR, ProcessId, ProcessSession
from trainer.system.redact import redact, redact_words
from trainer.system.text import escaped

LAUNCHERS = ("LT_", "TORCHELASTIC_", "MASTER_")
RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
"""Environment variables of a rendezvous, which are removed because each attempt creates a new one."""
STATUS = "status.json"  # a run's status file
STOP_NOTICE = "received: saving a checkpoint"  # printed by a run after a stop signal
POLL_INTERVAL = 0.05

CUT = ("batch_size", "accumulate", "memory.micro_batch_size")  # settings that define the micro-batches


class FitCommand(NamedTuple):
    """A ``trainer fit`` command that resumes automatically. ``flags`` are the user's flags, without those of the other
    fields. ``cut`` is (batch size, micro-batch size) if the supervisor has reduced the micro-batches."""

    recipe: str
    flags: tuple[str, ...]
    run_dir: str
    allow_change: tuple[str, ...] = ()
    cut: tuple[int, int] | None = None

    def argv(self) -> list[str]:
        """Return the command line without the program's name."""
        words = ["fit", self.recipe, *self.flags, "--run.dir", self.run_dir, "--run.resume", "auto"]
        allowed = list(self.allow_change)
        if self.cut is not None:
            words += ["--batch_size", str(self.cut[0]), "--memory.micro_batch_size", str(self.cut[1])]
            allowed += [key for key in CUT if key not in allowed]
        return [*words, *(["--run.allow_change", json.dumps(allowed)] if allowed else [])]

    def with_smaller_micro_batch(self, batch_size: int, micro_batch_size: int) -> FitCommand:
        """Return the command with smaller micro-batches and an explicit batch size, which ``accumulate`` may define."""
        flags = self.flags
        for name in CUT:
            _, flags = pop_flag(flags, name)
        return self._replace(flags=flags, cut=(batch_size, micro_batch_size))


def pop_flag(flags: tuple[str, ...], name: str) -> tuple[str | None, tuple[str, ...]]:
    """Return the last value of ``--name`` and the flags without it."""
    kept, value, words = [], None, iter(flags)
    for word in words:
        flag, equals, text = word.partition("=")
        if flag == f"--{name}":
            value = text if equals else next(words, None)
            require(value is not None, f"flag --{name} needs a value")
        else:
            kept.append(word)
    return value, tuple(kept)


class AttemptResult(NamedTuple):
    """The end of an attempt."""

    code: int  # exit code, or minus the number of the signal that killed the attempt
    cause: str  # the first error or the last line; empty for a killed attempt that reported no error

    @property
    def exit_code(self) -> int:
        """The exit code as in a shell: 128 plus the number of a signal."""
        return self.code if self.code >= 0 else 128 - self.code

    def describe(self) -> str:
        """Return ``exit code 1`` or ``killed by SIGKILL``, with the cause."""
        how = f"exit code {self.code}" if self.code >= 0 else f"killed by {signal.Signals(-self.code).name}"
        return f"{how}: {self.cause}" if self.cause else how


class Attempt(ProcessSession):
    """A run that ends with this process and whose standard error is forwarded."""

    def __init__(self, command: Sequence[str]) -> None:
        kept = [name for name in os.environ if not name.startswith(LAUNCHERS) and name not in RANKS]
        environment = {name: os.environ[name] for name in kept}
        environment[SUPERVISOR] = json.dumps(ProcessId.current().to_dict())
        super().__init__(command, environment, stderr=subprocess.PIPE)
        assert self.process.stderr is not None
        self._pipe, self._line = self.process.stderr, b""
        self.said, self.noted = FailureReason(), False

    def wait(self, seconds: float = POLL_INTERVAL) -> AttemptResult | None:
        """Forward output for about ``seconds``. If the run has ended, kill its processes and return its end."""
        self._pass_on(seconds)
        if self.process.poll() is None:
            return None
        self.kill()
        while self._pass_on(0.0):
            pass
        self._pipe.close()
        self._note(self._line)
        code = self.process.returncode  # the last line of a killed run is no cause
        return AttemptResult(code, self.said.reason if code > 0 else self.said.trainer_error)

    def _pass_on(self, seconds: float) -> bool:
        """Forward the output of at most ``seconds``; return whether there was any."""
        if not select.select([] if self._pipe.closed else [self._pipe], [], [], seconds)[0]:
            return False
        content = os.read(self._pipe.fileno(), 65536)
        if not content:
            self._pipe.close()
            return False
        tell(content)
        *lines, self._line = (self._line + content).split(b"\n")
        for line in lines:
            self._note(line)
        return True

    def _note(self, content: bytes) -> None:
        line = content.decode(errors="replace")
        self.said.add_line(line)
        self.noted = self.noted or STOP_NOTICE in line


def tell(content: bytes) -> None:
    sys.stderr.buffer.write(content)
    sys.stderr.buffer.flush()


def print_message(text: str) -> None:
    tell(f"trainer run: {escaped(redact(text))}\n".encode())


# Detecting out of memory from outside: the run's error, or the kernel's count of killed processes.

VMSTAT, CGROUPS, CGROUP_ROOT = Path("/proc/vmstat"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def count_oom_kills() -> int:
    """Return the number of processes that the kernel's out-of-memory killer has killed. It counts this cgroup or, if
    unknown, this machine; 0 if both are unknown. Only a difference between two calls is meaningful."""
    counters = [VMSTAT]
    with suppress(OSError, StopIteration):
        line = next(line for line in CGROUPS.read_text().splitlines() if line.startswith("0::"))
        counters.insert(0, CGROUP_ROOT / line.removeprefix("0::").lstrip("/") / "memory.events")
    for path in counters:  # lines of name and number
        with suppress(OSError, ValueError, KeyError):
            return int(dict(line.split(maxsplit=1) for line in path.read_text().splitlines())["oom_kill"])
    return 0


def ran_out_of_memory(ending: AttemptResult, kills: int) -> bool:
    """Return whether an attempt ran out of memory; ``kills`` is the growth of :func:`count_oom_kills` during it."""
    reported = ending.code == 1 and "out of memory" in ending.cause.lower()
    return reported or (kills > 0 and (ending.code == -signal.SIGKILL or "was killed" in ending.cause))


def attempts(run_dir: Path) -> int:
    """Return the number of runs started in the directory, according to ``status.json``."""
    found = read_json_object(run_dir / STATUS, MAX_JSON_BYTES).get("attempt")
    return found if type(found) is int else 0


def known_cut(run_dir: Path, before: int) -> tuple[int, int] | None:
    """Return (batch size, micro-batch size) of the attempt that followed ``before`` others. ``None`` if the batch size
    changes per epoch, or if the attempt ended before the sizes were decided."""
    cut = read_json_object(run_dir / STATUS, MAX_JSON_BYTES).get("cut")
    if attempts(run_dir) == before or not isinstance(cut, dict):
        return None
    batch, micro_batch = cut.get("batch_size"), cut.get("micro_batch_size")
    return (batch, micro_batch) if type(batch) is int and type(micro_batch) is int else None


class Journal:
    """The file ``supervisor.json`` with all attempts, including those of earlier supervisors."""

    def __init__(self, run_dir: Path, command: list[str]) -> None:
        self.path = run_dir / "supervisor.json"
        earlier = read_json_object(self.path, MAX_JSON_BYTES).get("attempts")
        self.content: dict[str, Any] = {"command": redact_words(command), "status": "running"}
        self.content["attempts"] = earlier if isinstance(earlier, list) else []

    def begin(self, step: int, command: list[str]) -> None:
        """Record the start of an attempt with the newest checkpoint at ``step`` (-1: none)."""
        at = step if step >= 0 else None
        entry = {"start": _now(), "end": None, "exit_code": None, "cause": None, "from_step": at, "step": None}
        self.content["attempts"].append({**entry, "command": redact_words(command)})
        self._write()

    def end(self, exit_code: int, cause: str, step: int) -> None:
        """Record the end of the attempt; a negative exit code is minus the number of a signal."""
        ended = {"end": _now(), "exit_code": exit_code, "cause": redact(cause) or None}
        self.content["attempts"][-1] |= {**ended, "step": step if step >= 0 else None}
        self._write()

    def close(self, status: str) -> None:
        """Record the final status: finished, stopped, interrupted or failed."""
        self.content["status"] = status
        self._write()

    def _write(self) -> None:
        try:
            write_atomic(self.path, json.dumps(self.content, indent=1, ensure_ascii=False) + "\n")
        except OSError as error:  # the disk may be full now but not later, so supervision continues
            print_message(f"{self.path} could not be written: {error.strerror or error}")


def newest_step(run_dir: Path) -> int:
    """Return the step of the newest checkpoint, from its name; -1 if there is none."""
    names = [path.name for path in CheckpointFolder(run_dir / "checkpoints").newest_first()]
    return int(names[0].removeprefix("step-")) if names else -1


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")
