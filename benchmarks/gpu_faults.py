"""What can go wrong on one GPU: ``python benchmarks/gpu.py faults``. At most eight minutes on an H200.

A run is killed and resumed, runs out of memory and goes on, or says what to try; then ``tests/gpu``, under torch's
sanitizer of streams first. Results are written after every row.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from common import Record, environment_here, fit_words, table, workplace
from gpu_judge import MET, Found
from gpu_rows import FEW_GAPS, TINY, memory
from gpu_tasks import Task, chosen, command_line, measure, read_arguments
from planner_runs import probe_gpu

from trainer.lab.measured_run import Trial, run_trial
from trainer.system.processes import ProcessSession

HERE = Path(__file__).parent
SECONDS = 470.0
STEPS, KILLED_AT, SAVED_EVERY = 6, 5, 2
CAP_GB = 4.0
"""Too little for 64 images at once of ViT-B/16, and enough for half or a quarter of them."""
SAME = 1e-3
"""Relative: losses of a run that was resumed; on a GPU some sums have no fixed order."""
ROUNDED = 1e-2
"""Relative: losses of smaller micro-batches in bf16-mixed."""


@dataclass
class Faults:
    """What all rows share.

    Args:
        device: cuda or cpu.
        tiny: whether models are small.
        work: a folder for the runs.
        end: ``time.monotonic()`` at which no run goes on any more.
    """

    device: str
    tiny: bool
    work: Path
    end: float

    def run(self, name: str, *options: str, environment: Mapping[str, str] | None = None, **settings: Any) -> Trial:
        """Train in the folder ``name``; settings have two underscores for the dot."""
        chosen: dict[str, Any] = {
            "max_steps": STEPS,
            "checkpoint.every": "null",
            **memory(16),
            "model.name": "vit_b_16",
            **(TINY["vit_l_16"] if self.tiny else {}),
            **{key.replace("__", "."): value for key, value in settings.items()},
        }
        arguments = fit_words("vit_l_16", self.device, chosen)
        entry = [str(HERE / "measured_run.py"), f"--out={self.work / name}.json", *options]
        left = max(1.0, self.end - time.monotonic())
        return run_trial(arguments, self.work / name, seconds=left, entry=entry, environment=environment)

    def resumed(self, **settings: Any) -> Found:
        """Killed as by ``kill -9`` between two checkpoints, and resumed: the losses are those of a run in one go."""
        name = "-".join(["resumed", *map(str, settings.values())])
        # Before training goes on: what the kill finds is always the same.
        saved = {"checkpoint__every": SAVED_EVERY, "checkpoint__asynchronous": "false", **settings}
        whole = self.run(f"{name}-whole", **settings)
        killed = self.run(name, f"--kill={KILLED_AT}", **saved)
        again = self.run(name, run__resume="auto", **saved)
        found = _beside(again, whole) | {"killed": killed.status, "went_on_from": self._first_step(name)}
        went_on = 0 < found["went_on_from"] < KILLED_AT
        return found | {"met": killed.status == "killed" and went_on and _alike(found, SAME)}

    def _first_step(self, name: str) -> int:
        """How many steps the process that resumed did not take itself."""
        measured = self.work / f"{name}.json"
        own = len(json.loads(measured.read_text())["step_seconds"]) + 1 if measured.is_file() else 0
        return STEPS - own

    def recovered(self, strategy: str) -> Found:
        """Out of memory under a cap: the step is taken again in smaller micro-batches, and the losses stay."""
        whole = self.run(f"{strategy}-uncapped", memory__micro_batch_size=64)
        capped = self.run(
            f"{strategy}-capped",
            f"--cap={CAP_GB}",
            environment=FEW_GAPS,
            memory__micro_batch_size=64,
            memory__strategy=strategy,
            run__recover="true",
        )
        summary = self.work / f"{strategy}-capped" / "summary.json"
        recoveries = json.loads(summary.read_text())["recoveries"] if summary.is_file() else 0
        found = _beside(capped, whole) | {"recoveries": recoveries}
        return found | {"met": recoveries > 0 and _alike(found, ROUNDED)}

    def out_of_memory(self) -> Found:
        """Out of memory without recovery: the run ends as such, and names the flags to try."""
        trial = self.run("out-of-memory", f"--cap={CAP_GB}", memory__micro_batch_size=64)
        named = "--memory." in (trial.reason or "")
        return {**trial.to_json(), "met": trial.status == "out of memory" and named}

    def tests(self, chosen: str, sanitizer: bool = False) -> Found:
        """``tests/gpu``, as far as its names say ``chosen``."""
        variables = {"TORCH_CUDA_SANITIZER": "1"} if sanitizer else {}
        left = max(1.0, self.end - time.monotonic())
        return run_tests(["tests/gpu"], left, self.work / "tests.log", chosen, variables)


TEST_PACKAGES = ("pytest", "hypothesis", "filelock", "packaging")
"""What ``tests/conftest.py`` imports besides torch and the package."""


def run_tests(
    files: Sequence[str], seconds: float, log: Path, chosen: str = "", variables: Mapping[str, str] | None = None
) -> Found:
    """Run tests in a process of their own; if the time is up, the counts are those so far.

    Args:
        files: tests, relative to the repository.
        seconds: limit.
        log: where pytest's output goes.
        chosen: an expression for ``-k``.
        variables: to set in the environment.
    """
    missing = [name for name in TEST_PACKAGES if find_spec(name) is None]
    if missing:
        how = "not installed; launch/gpu_wheels.sh fetches what a machine without a network lacks"
        return {"status": "not run", "reason": f"{', '.join(missing)}: {how}", "met": None}
    words = [*files, "-v", "--tb=short", "-p", "no:cacheprovider", "-o", "addopts=", "-m", "not slow"]
    words += ["-k", chosen] if chosen else []
    environment = {**environment_here(), "PYTHONUNBUFFERED": "1"}
    environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **(variables or {})}  # xdist would hide what is done so far
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        command = [sys.executable, "-m", "pytest", *words]
        watched = ProcessSession(command, environment, cwd=HERE.parent, stdout=output, stderr=output)
        try:
            code: int | None = watched.process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            watched.kill()
    said = log.read_text(errors="replace")
    lines = said.splitlines()
    counts = Counter(re.findall(r"^tests\S*::.* (PASSED|FAILED|ERROR|SKIPPED)\b", said, re.M))
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    failed = failed or re.findall(r"^(tests\S*::.*) (?:FAILED|ERROR)\b", said, re.M)
    status = {0: "finished", 5: "no test has such a name", None: "late"}.get(code, "failed")
    reason = lines[-1].strip("= ") if lines else f"exit code {code}"
    if code is None:
        reason = f"the time was up after {sum(counts.values())} tests"
    shown = {} if status == "finished" else {"output": said[-4000:]}
    found = {"status": status, "reason": reason, "counts": {key.lower(): n for key, n in counts.items()}}
    return {**found, "failed": failed, **shown, "met": False if failed else status == "finished"}


def _beside(trial: Trial, whole: Trial) -> Found:
    """A run and how far its losses are from those of another."""
    pairs = list(zip(trial.losses, whole.losses, strict=False))
    complete = len(pairs) == len(whole.losses) == STEPS
    apart = max((abs(own / other - 1) for own, other in pairs), default=None) if complete else None
    return {**trial.to_json(), "losses_in_one_go": whole.losses, "loss_difference": apart}


def _alike(found: Found, limit: float) -> bool:
    apart = found["loss_difference"]
    return found["status"] == "finished" and apart is not None and apart <= limit


def tasks(faults: Faults) -> list[Task]:
    """All rows."""
    streamed = {"memory__cpu_offload": "parameters"}
    sanitized = partial(faults.tests, "offload", sanitizer=True)
    works: list[tuple[str, bool, Callable[[], Found]]] = [
        ("killed and resumed", False, faults.resumed),
        ("out of memory, recovered", True, partial(faults.recovered, "single")),
        ("out of memory, said so", True, faults.out_of_memory),
        ("tests of offloading, streams sanitized", True, sanitized),
        ("killed and resumed, weights streamed", False, partial(faults.resumed, **streamed)),
        ("out of memory, recovered under FSDP", True, partial(faults.recovered, "fsdp")),
        ("tests/gpu but the planner's", True, partial(faults.tests, "not test_planner")),
        ("tests/gpu, the planner's", True, partial(faults.tests, "test_planner")),
    ]
    # Each run is limited by ``faults.end``.
    return [Task(name, math.inf, lambda _, work=work: work(), needs_gpu) for name, needs_gpu, work in works]


def main(argv: Sequence[str]) -> int:
    """The command line, after the word faults; returns the exit code, 1 when a row is not as asked."""
    parser = command_line("faults", __doc__, SECONDS)
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu tries out this file, with --tiny"
    )
    parser.add_argument("--tiny", action="store_true", help="small models")
    asked = read_arguments(parser, argv)
    gpu = probe_gpu() if asked.device == "cuda" else None
    if asked.device == "cuda" and gpu is None:
        print("torch sees no CUDA device here: there is nothing to measure")
        return 0
    record = Record("gpu_faults", {"only": asked.only, "tiny": asked.tiny}, asked.results)
    record.content["gpu"] = gpu
    with workplace(asked.work) as work:
        faults = Faults(asked.device, asked.tiny, work.absolute(), time.monotonic() + asked.time * SECONDS)
        wanted = chosen(tasks(faults), asked.only)
        if not wanted:
            parser.error(f"--only {asked.only}: no row has such a name")
        results = measure([(1, wanted)], record, faults.end, gpu is not None)
    shown = [(row["name"], row["status"], MET[row["met"]]) for row in results]
    print(table(("fault", "status", "as asked"), shown))
    print(f"written: {record.path}")
    return int(any(row["met"] is False for row in results))
