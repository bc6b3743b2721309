"""The command line: ``python -m conformance run`` and ``report``."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from conformance.environments import HERE, python_of

RESULTS = HERE / "results.json"
TIME_LIMIT = 180
"""Seconds of a cell: a trainer that waits for a rank that has ended would wait for ever."""


def trainers() -> list[str]:
    """Return the names of all trainers."""
    return sorted(path.stem for path in (HERE / "trainers").glob("*.py") if path.stem != "__init__")


def cases() -> dict[str, Any]:
    """Return all cases; imports torch."""
    from conformance.cases import CASES

    return CASES


def chosen(kind: str, text: str, known: Iterable[str]) -> list[str]:
    """Return the names in ``text``, separated by commas; ``all`` is every one."""
    names = list(known)
    asked = names if text == "all" else text.split(",")
    for name in asked:
        if name.partition(":")[0] not in (*names, "planted"):
            near = get_close_matches(name, names, 1)
            hint = f"; did you mean {near[0]}?" if near else f": one of {', '.join(names)}"
            raise SystemExit(f"conformance: error: no {kind} {name!r}{hint}")
    return asked


def run(arguments: argparse.Namespace) -> None:
    """Measure cells, a few at a time, and write each result as it comes."""
    known = cases()
    asked = [
        (trainer, case)
        for trainer in chosen("trainer", arguments.trainers, trainers())
        for case in chosen("case", arguments.cases, known)
    ]
    content = json.loads(arguments.out.read_text()) if arguments.out.exists() else {"cells": {}}
    content |= {"machine": f"{platform.machine()} {platform.system()}, Python {platform.python_version()}"}
    todo = [cell for cell in asked if arguments.again or "/".join(cell) not in content["cells"]]
    print(f"{len(todo)} cells of {len(asked)}", flush=True)
    begin = time.monotonic()
    with ThreadPoolExecutor(arguments.jobs) as pool:
        running = {pool.submit(measure, trainer, case, known[case].ranks): (trainer, case) for trainer, case in todo}
        for number, future in enumerate(as_completed(running), 1):
            trainer, case = running[future]
            content["cells"][f"{trainer}/{case}"] = row = future.result()
            content["seconds"] = content.get("seconds", 0) + row["seconds"]
            write(arguments.out, content)
            left = (len(todo) - number) * (time.monotonic() - begin) / number
            print(f"{number}/{len(todo)} · {left:.0f} s left · {trainer} {case}: {describe(row)}", flush=True)


def write(path: Path, content: dict[str, Any]) -> None:
    """Replace a file atomically."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    part.replace(path)


def measure(trainer: str, case: str, ranks: int) -> dict[str, Any]:
    """Return the result of one cell, which a process of its own has measured in the trainer's environment."""
    name, begin = trainer.partition(":")[0], time.monotonic()
    row: dict[str, Any] = {"date": datetime.now(UTC).strftime("%Y-%m-%d")}
    try:
        python = python_of(name)
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or ["pip failed"])[-1][:200]
        return row | {"verdict": "unsupported", "detail": f"cannot be installed: {reason}", "seconds": 0}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
        command = [str(python), *torchrun, "-m", "conformance.cell", trainer, case, str(out)]
        environment = os.environ | {"PYTHONPATH": str(HERE.parent), "TMPDIR": folder}
        try:
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIME_LIMIT, check=False
            )
        except subprocess.TimeoutExpired:
            found: dict[str, Any] = {"verdict": "crashed", "detail": f"no end within {TIME_LIMIT} s"}
        else:
            lines = [line for line in done.stderr.strip().splitlines() if "Error" in line] or done.stderr.splitlines()
            ended = {"verdict": "crashed", "detail": f"exit code {done.returncode}: {(lines or [''])[-1][:200]}"}
            found = json.loads(out.read_text()) if out.exists() else ended
    return row | found | {"seconds": round(time.monotonic() - begin, 1)}


def describe(row: dict[str, Any]) -> str:
    """Return one line about a result."""
    error = "" if row.get("error") is None else f" ({row['error']:.1e})"
    return f"{row['verdict']}{error} {row.get('detail', '')}".strip()


def report(arguments: argparse.Namespace) -> None:
    """Build the page of the results."""
    from conformance.page import build

    build(json.loads(arguments.out.read_text()))


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command."""
    parser = argparse.ArgumentParser(prog="python -m conformance", description="Measures the gradients of trainers.")
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("run", help="measure cells and write them to a file as they come")
    one.add_argument("--trainers", default="all", help="names separated by commas; planted:DEFECT plants a defect")
    one.add_argument("--cases", default="all", help="names separated by commas")
    one.add_argument("--jobs", type=int, default=2, help="cells at once")
    one.add_argument("--again", action="store_true", help="also measure cells that the file has")
    one.set_defaults(do=run)
    two = commands.add_parser("report", help="build the page of the documentation")
    two.set_defaults(do=report)
    for command in (one, two):
        command.add_argument("--out", type=Path, default=RESULTS, help="file of results")
    arguments = parser.parse_args(argv)
    arguments.do(arguments)


if __name__ == "__main__":
    main()
