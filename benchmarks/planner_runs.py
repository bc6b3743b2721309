"""Predictions and runs of the configurations of ``planner_configs.py``, each in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import environment_here, fit_words
from planner_configs import LLAMAS, Case
from recorded import compare
from recorded_run import read_recording

from trainer.errors import RecipeError
from trainer.fakegpu.gpus import gpu_of
from trainer.lab.measured_run import Trial, run_trial
from trainer.system.machine import query_gpus_in_child
from trainer.system.processes import ProcessSession

# No torch here: a parent that has opened the GPU holds some of its memory.

HERE = Path(__file__).parent
AT_ONCE = 4
"""Runs at the same time: peaks are counted for each process, and most of a run is starting Python."""
CASE_SECONDS = 100.0
PREDICTING = 0.5
"""Share of the time that predictions may take."""
LARGEST_TRACE = 300_000
"""Bytes of a compressed recording that is kept beside the results."""


def probe_gpu() -> dict[str, Any] | None:
    """The GPU as the planner knows it, its name and driver, found out by a process that has ended by then."""
    found = query_gpus_in_child()
    if not found:
        return None
    gpu = asdict(gpu_of(found[0]))
    return {"gpu": gpu, "name": found[0]["name"], "devices": len(found), "driver": _driver()}


def _driver() -> str | None:
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.split()[0] if done.stdout.split() else None


@dataclass
class Runs:
    """What all configurations share.

    Args:
        accelerator: cuda or cpu.
        work: a folder for the runs.
        traces: a folder for the recordings that are kept.
        end: ``time.monotonic()`` at which no run is begun any more.
    """

    accelerator: str
    work: Path
    traces: Path
    end: float

    def prepare(self, cases: Sequence[Case]) -> None:
        """Make the tokenizers and configurations that ``cases`` need."""
        sys.path.insert(0, str(HERE / "recipes"))
        from synthetic import make_llama, make_tokenizer

        for words in {case.vocabulary for case in cases if case.vocabulary}:
            make_tokenizer(self._tokenizer(words), words)
        for name in {case.llama for case in cases if case.llama}:
            make_llama(self.work / name, LLAMAS[name])

    def _tokenizer(self, words: int) -> Path:
        return self.work / f"tokenizer-{words}"

    def arguments(self, case: Case) -> list[str]:
        """Of ``trainer fit``."""
        settings: dict[str, Any] = {"run.predict": "true", **case.settings}
        if case.vocabulary:
            settings["model.tokenizer"] = self._tokenizer(case.vocabulary)
        if case.llama:
            settings["model.name"] = self.work / case.llama
        return fit_words(case.recipe, self.accelerator, settings)

    def predict(self, cases: Sequence[Case], gpu: Mapping[str, Any]) -> dict[str, Any]:
        """Predictions by name for ``gpu`` (the fields of a ``GPU``), from a process that sees none.

        Each has a ``prediction``, with memory in bytes or an ``error``, and ``requests`` if its run is recorded: how
        often the allocator would be asked for each number of bytes. What is not predicted in ``PREDICTING`` of the
        time that is left is not there.
        """
        asked, found = self.work / "asked.json", self.work / "predicted.json"
        wishes = [
            {
                "name": case.name,
                "arguments": self.arguments(case),
                "ranks": case.ranks,
                "environment": dict(case.environment),
                "counted": case.recorded,
            }
            for case in cases
        ]
        asked.write_text(json.dumps({"gpu": gpu, "cases": wishes}))
        environment = environment_here() | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(HERE / "predict_cases.py"), str(asked), str(found)]
        watched = ProcessSession(command, environment)
        try:
            code = watched.process.wait(max(1.0, PREDICTING * (self.end - time.monotonic())))
            if code != 0:
                raise subprocess.CalledProcessError(code, command)
        except subprocess.TimeoutExpired:
            print("  the time for predictions is used up: what is not predicted is not compared", flush=True)
        finally:
            watched.kill()  # with the processes that it has started
        return json.loads(found.read_text()) if found.is_file() else {}

    def measure(self, case: Case) -> dict[str, Any]:
        """Run ``case``; its peaks in bytes, ``None`` without a GPU, and what came of its recording."""
        left = self.end - time.monotonic()
        if left < 5:
            return {"status": "not run", "reason": "the time of the benchmark is used up"}
        run_dir = self.work / file_name(case.name)
        trace = self.work / f"{run_dir.name}.json.gz"
        threads = max(1, (os.cpu_count() or 1) // AT_ONCE)
        trial = run_trial(
            self.arguments(case),
            run_dir,
            seconds=min(left, CASE_SECONDS),
            entry=_entry(case, trace),
            environment={"OMP_NUM_THREADS": str(threads), **case.environment},
        )
        return {**_figures(trial, run_dir), "recording": self._replayed(trace) if trace.is_file() else None}

    def _replayed(self, trace: Path) -> dict[str, Any]:
        """The simulated allocator against the recording, which is kept if it is small."""
        try:
            recording = read_recording(trace)
            found = compare_recording(recording)
        except (RecipeError, OSError, ValueError, KeyError) as problem:
            return {"error": f"{type(problem).__name__}: {problem}"}
        kept = trace.stat().st_size <= LARGEST_TRACE
        if kept:
            self.traces.mkdir(parents=True, exist_ok=True)
            (self.traces / trace.name).write_bytes(trace.read_bytes())
        sizes = Counter(str(e["size"]) for e in recording["device_traces"][0] if e["action"] == "alloc")
        return {**found, "file": trace.name if kept else None, "file_bytes": trace.stat().st_size, "requests": sizes}


def _entry(case: Case, trace: Path) -> tuple[str, ...] | None:
    """The script that is started in the place of the package, with its arguments."""
    if case.recorded:
        return (str(HERE / "recorded_run.py"), str(trace))
    return (str(HERE / "fake_ranks.py"), str(case.ranks)) if case.ranks > 1 else None


def _figures(trial: Trial, run_dir: Path) -> dict[str, Any]:
    """What a run measured."""
    summary = run_dir / "summary.json"
    skipped = json.loads(summary.read_text())["skipped_steps"] if summary.is_file() else None
    found = {**trial.to_json(), "skipped_steps": skipped}
    for kind in ("allocated", "reserved"):
        gigabytes = trial.memory.get(f"{kind}_gb")
        found[kind] = None if gigabytes is None else round(gigabytes * 1e9)
    return found


def compare_recording(recording: Mapping[str, Any]) -> dict[str, Any]:
    """The peaks of a recording in bytes, and all in which the simulated allocator differs from it."""
    return asdict(compare(recording))


def other_requests(recorded: Mapping[str, int], predicted: Mapping[str, int], most: int = 12) -> list[dict[str, int]]:
    """The sizes that were asked for more often, or less often, than predicted; those with the most bytes first.

    Args:
        recorded: how often each number of bytes was asked for.
        predicted: how often it would be.
        most: how many to return.
    """
    counts = {int(size): (recorded.get(size, 0), predicted.get(size, 0)) for size in recorded.keys() | predicted.keys()}
    differing = [(size, real, asked) for size, (real, asked) in counts.items() if real != asked]
    differing.sort(key=lambda one: (-one[0] * abs(one[1] - one[2]), one[0]))
    return [{"bytes": size, "recorded": real, "predicted": asked} for size, real, asked in differing[:most]]


def file_name(name: str) -> str:
    """The name of a configuration in letters that any file system takes: ``ViT-B fp32, 8`` is ``vit-b-fp32-8``."""
    words = "".join(letter if letter.isascii() and letter.isalnum() else " " for letter in name.lower()).split()
    return "-".join(words)
