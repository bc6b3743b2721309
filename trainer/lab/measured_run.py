"""Run one training in a separate process, and return its measurements or the reason of its failure."""

from __future__ import annotations

import csv
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import trainer
from trainer.errors import RecipeError
from trainer.system.error_reports import FailureReason
from trainer.system.files import open_writable, read_json_object
from trainer.system.machine import query_gpus_in_child
from trainer.system.processes import ProcessSession, trainer_command
from trainer.system.redact import redact, redact_words
from trainer.system.text import GB

# No torch here: a parent process that has opened the GPU would use some of its memory.

OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemoryError|Can(no|')t allocate memory|bad_alloc", re.I)
MALLOC_TRIM_ENV = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
"""For runs on a CPU: otherwise glibc keeps freed memory, and resident memory shows the largest use so far."""
CPU = {"accelerator": "cpu", "devices": 1, "device": "CPU", "device_memory_gb": None}
POLL_INTERVAL, MAX_JSON_BYTES = 1.0, 64 * 2**20
GRACE_SECONDS = 10.0  # time for an interrupted run to write its summary
Watch = Callable[[], str | None]  # returns the status with which to end the run, or ``None``


@dataclass(frozen=True)
class Trial:
    """The result of a run."""

    status: str  # finished, refused (the settings cannot work), out of memory, killed, too slow, or failed
    reason: str | None  # the first line that explains why the run did not finish
    command: list[str]  # repeats the run; ``to_json`` removes this machine's paths of Python and the run directory
    seconds: float  # wall time of the process
    plan: str | None = None  # the plan that the run printed
    steps: int = 0
    losses: list[float] = field(default_factory=list)  # the loss of each step, before its update
    samples_per_second: float | None = None  # over all ranks, without the first step (warm-up) if there are others
    memory: Mapping[str, Any] = field(default_factory=dict)  # as in ``summary.json``, in GB (1e9 bytes)

    @property
    def host_gb(self) -> float | None:
        """Peak resident memory above that of the idle process, in GB; the whole peak if the idle one is unknown."""
        peak, idle = self.memory.get("host_peak_gb"), self.memory.get("host_idle_gb")
        return peak if peak is None or idle is None else peak - idle

    @property
    def peak_gb(self) -> float | None:
        """Peak allocated memory of the device in GB; without a GPU :attr:`host_gb`."""
        allocated = self.memory.get("allocated_gb")
        return self.host_gb if allocated is None else allocated

    def to_json(self) -> dict[str, Any]:
        plain = ("status", "reason", "plan", "steps", "losses", "samples_per_second", "peak_gb")
        content = {name: getattr(self, name) for name in plain}
        command = shlex.join(map(_strip_paths, redact_words(self.command)))
        return {**content, "memory": dict(self.memory), "seconds": round(self.seconds, 2), "command": command}


def _strip_paths(word: str) -> str:
    if word == sys.executable:
        return "python"
    if word.startswith("--run.dir="):
        return f"--run.dir={Path(word).name}"
    return word.removeprefix(f"{Path.cwd()}{os.sep}")


def probe_machine() -> dict[str, Any]:
    """Return the accelerator (cpu or cuda), its devices and memory, detected in a child process."""
    found = query_gpus_in_child()
    if not found:
        return dict(CPU)
    memory = round(found[0]["total_memory"] / GB, 2)
    return {"accelerator": "cuda", "devices": len(found), "device": found[0]["name"], "device_memory_gb": memory}


def run_trial(
    arguments: Sequence[str],  # those of ``trainer fit``: the recipe and its flags, without ``run.dir``
    run_dir: Path,  # must not hold a run, unless that run is resumed
    *,
    seconds: float | None = None,  # wall time after which the run is ended as too slow
    entry: Sequence[str] | None = None,  # a script to start instead of the package, with its arguments
    environment: Mapping[str, str] | None = None,  # additional environment variables
    watch: Watch = lambda: None,  # called every second
    keep_model: bool = False,  # keep the trained model in ``run_dir`` instead of removing it
) -> Trial:
    """Train in a fresh process, which writes its output to ``run_dir.log``, and read its measurements."""
    words = ["fit", *arguments, f"--run.dir={run_dir}"]
    command = trainer_command(*words) if entry is None else [sys.executable, *entry, *words]
    here = str(Path(trainer.__file__).parent.parent)  # first, whether the package is installed or not
    path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    log = run_dir.with_name(f"{run_dir.name}.log")
    start = time.perf_counter()
    with _opened(log) as output:
        code = _run(command, output, seconds, {**os.environ, "PYTHONPATH": path, **(environment or {})}, watch)
    wall = time.perf_counter() - start
    if not keep_model:
        shutil.rmtree(run_dir / "model", ignore_errors=True)
    text = log.read_text(encoding="utf-8", errors="replace")
    status, reason = _outcome(code, text, seconds)
    plan = next((line.removeprefix("plan: ") for line in text.splitlines() if line.startswith("plan: ")), None)
    repeated = [sys.executable, *(entry or ("-m", "trainer")), *words]
    return Trial(status, reason and redact(reason), repeated, wall, plan, **_measurements(run_dir))


def _opened(log: Path) -> TextIO:
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        output = os.fdopen(open_writable(log, os.O_WRONLY | os.O_CREAT), "w", encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"{log} cannot be written ({error.strerror}): choose another folder") from error
    output.truncate()  # an older log may be longer
    return output


def _run(
    command: list[str], output: TextIO, seconds: float | None, environment: Mapping[str, str], watch: Watch
) -> int | str | None:
    """Run ``command``, then end all its processes; return its exit code, ``None`` after ``seconds``, or a status."""
    watched = ProcessSession(command, environment, stdout=output, stderr=output)
    until = math.inf if seconds is None else time.monotonic() + seconds
    try:
        while (left := until - time.monotonic()) > 0:
            with suppress(subprocess.TimeoutExpired):
                return watched.process.wait(min(left, POLL_INTERVAL))
            if (why := watch()) is not None:
                return why
        return None
    finally:
        if watched.process.poll() is None:
            watched.process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):  # time to write its summary
                watched.process.wait(GRACE_SECONDS)
        watched.kill()


def _outcome(code: int | str | None, text: str, seconds: float | None) -> tuple[str, str | None]:
    if isinstance(code, str):
        return code, None
    if code is None:
        return "too slow", f"not finished after {seconds:g} s"
    if code == 0:
        return "finished", None
    reason = FailureReason(text.splitlines()).reason or None
    if code == 2:
        return "refused", reason
    if OUT_OF_MEMORY.search(text):
        found = next((line.strip() for line in text.splitlines() if OUT_OF_MEMORY.search(line)), None)
        return "out of memory", reason if reason and OUT_OF_MEMORY.search(reason) else found
    if code < 0:
        name = signal.Signals(-code).name
        return "killed", f"ended by {name}" + (" (possibly because host memory ran out)" if name == "SIGKILL" else "")
    return "failed", reason or f"exit code {code}"


def _measurements(run_dir: Path) -> dict[str, Any]:
    summary = read_json_object(run_dir / "summary.json", MAX_JSON_BYTES)
    found: dict[str, Any] = {name: summary[name] for name in ("memory", "steps") if name in summary}
    if (run_dir / "metrics.csv").is_file():
        with open(run_dir / "metrics.csv", newline="") as file:
            rows = [row for row in csv.DictReader(file) if row.get("loss")]
        found["losses"] = [float(row["loss"]) for row in rows]
        size = summary["batch_size"] if found.get("memory") else 0
        so_far = [float(row["samples_per_second"]) for row in rows]  # averages since the start, one per step
        if so_far and all(so_far) and size:
            first, last = size / so_far[0], size * len(so_far) / so_far[-1]
            found["samples_per_second"] = size * (len(so_far) - 1) / (last - first) if last > first else so_far[-1]
    return found
