"""Predicted and measured GPU memory: ``python benchmarks/gpu.py planner``. At most eight minutes on an H200.

Every configuration of ``planner_configs.py`` is predicted by a process that sees no GPU. The predictions are written,
with their time and their hash, before anything is measured; then each is run in a fresh process, a few at once, and
the peaks of torch's allocator are compared. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from common import RESULTS, Record, workplace
from planner_configs import CASES, TINY, Case
from planner_report import compared, report, summed_up
from planner_runs import AT_ONCE, Runs, file_name, other_requests, probe_gpu

from trainer.fakegpu.gpus import gpu_named


def choose(cases: Sequence[Case], only: str | None) -> list[Case]:
    """All cases, or those that have one of the words, with commas between them, in their name or as that of their
    files."""
    words = [word.strip() for word in only.split(",")] if only else [""]
    return [case for case in cases if any(word in case.name or word == file_name(case.name) for word in words)]


def predict_all(runs: Runs, cases: Sequence[Case], gpu: Mapping[str, Any], record: Record) -> dict[str, Any]:
    """Predict, and write it down with the time and a hash before anything is measured."""
    began = time.monotonic()
    predictions = runs.predict(cases, gpu)
    text = json.dumps(predictions, sort_keys=True, separators=(",", ":"))
    record.write(
        predicted_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        predictions_sha256=hashlib.sha256(text.encode()).hexdigest(),
        prediction_seconds=round(time.monotonic() - began, 1),
        predictions=predictions,
    )
    return predictions


def measure_all(runs: Runs, cases: Sequence[Case], predictions: Mapping[str, Any], record: Record) -> dict[str, Any]:
    """Measure, a few at once; what is measured is written at once."""
    measured: dict[str, Any] = {}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        pending = {pool.submit(runs.measure, case): case for case in cases}
        try:
            for number, future in enumerate(as_completed(pending), 1):
                name, found = pending[future].name, future.result()
                if found.get("recording") and "requests" in found["recording"]:
                    requests = found["recording"].pop("requests")
                    asked = predictions.get(name, {}).get("requests", {})
                    found["recording"]["other_requests"] = other_requests(requests, asked)
                measured[name] = found
                record.write(measured=measured, **_results(cases, predictions, measured))
                said = found["status"] if found["reason"] is None else f"{found['status']}: {found['reason']}"
                print(f"  measured {number}/{len(cases)} {name}: {said}", flush=True)
        finally:
            pool.shutdown(cancel_futures=True)
    return measured


def _results(cases: Sequence[Case], predictions: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, Any]:
    rows = compared([case.name for case in cases], predictions, measured)
    return {"rows": rows, "summary": summed_up(rows, measured)}


def main(argv: Sequence[str]) -> int:
    """The command line, after the word planner; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="gpu.py planner", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "planner.json", help="file of results")
    parser.add_argument("--minutes", type=float, default=8, help="after which no run is begun any more")
    parser.add_argument("--only", help="configurations whose name contains one of these words, with commas")
    parser.add_argument(
        "--work", type=Path, help="folder for the runs and their logs, kept; by default one that is not"
    )
    parser.add_argument("--accelerator", choices=["cuda", "cpu"], default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    end = time.monotonic() + 60 * arguments.minutes
    if arguments.minutes <= 0 or arguments.out.suffix != ".json":
        parser.error("--minutes must be more than 0, and --out a file that ends in .json")
    if arguments.accelerator == "cpu" and not arguments.tiny:
        parser.error("--accelerator cpu is there to test this file: use it with --tiny")
    cases = choose(TINY if arguments.tiny else CASES, arguments.only)
    if not cases:
        parser.error(f"--only {arguments.only}: no configuration has such a name")
    on_cpu = {"gpu": asdict(gpu_named("h200")), "name": None, "devices": 0, "driver": None}
    found = on_cpu if arguments.accelerator == "cpu" else probe_gpu()
    if found is None:
        print("torch sees no CUDA device here: there is nothing to measure")
        return 0
    return _run(arguments, cases, found, end)


def _run(arguments: argparse.Namespace, cases: Sequence[Case], found: Mapping[str, Any], end: float) -> int:
    out: Path = arguments.out
    record = Record(
        out.stem, {"minutes": arguments.minutes, "only": arguments.only, "tiny": arguments.tiny}, out.parent
    )
    record.content |= {"benchmark": "planner", "gpu": found, "configurations": [asdict(case) for case in cases]}
    with workplace(arguments.work) as work:
        runs = Runs(arguments.accelerator, work.absolute(), out.parent / "traces", end)
        runs.prepare(cases)
        try:
            predictions = predict_all(runs, cases, found["gpu"], record)
        except subprocess.CalledProcessError as problem:
            print(f"the predictions failed: {problem}")
            return 1
        measured = measure_all(runs, cases, predictions, record)
    results = _results(cases, predictions, measured)
    record.write(complete=True, **results)
    print(report(results["rows"], results["summary"], measured))
    print(f"written: {record.path}")
    return 0
