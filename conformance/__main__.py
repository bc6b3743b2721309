"""The command line: ``python -m conformance run``, ``check``, ``report`` and ``show``."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime, timezone
from difflib import get_close_matches
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from conformance.environments import HERE, python_of

RESULTS = HERE / "results.json"
TIME_LIMIT = 60
"""Seconds of a cell: some trainers wait for a rank that has ended."""


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
        require_name(kind, name, names)
    return asked


def require_name(kind: str, name: str, names: Sequence[str]) -> None:
    """Reject a name that is not one of ``names``."""
    if name not in names:
        near = get_close_matches(name, names, 1)
        hint = f"; did you mean {near[0]}?" if near else f": one of {', '.join(names)}"
        raise SystemExit(f"conformance: error: no {kind} {name!r}{hint}")


def read(path: Path) -> dict[str, Any]:
    """Return the content of a file of results."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        content["cells"].items()
    except FileNotFoundError:
        raise SystemExit(f"conformance: error: {path} does not exist: python -m conformance run writes it") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise SystemExit(f"conformance: error: {path} has no results: delete it, or name another file") from None
    return content


def run(arguments: argparse.Namespace) -> None:
    """Measure cells, the trainers a few at a time, and write each result as it comes."""
    wanted = chosen("case", arguments.cases, cases())
    content = read(arguments.out) if arguments.out.exists() else {"cells": {}, "seconds": 0}
    content["machine"] = f"{platform.machine()} {platform.system()}, {os.cpu_count()} cores"
    todo = {
        trainer: [case for case in wanted if arguments.again or f"{trainer}/{case}" not in content["cells"]]
        for trainer in chosen("trainer", arguments.trainers, trainers())
    }
    count, begin = sum(map(len, todo.values())), time.monotonic()
    print(f"{count} cells of {len(todo)} trainers", flush=True)
    for number, (cell, row) in enumerate(measured(list(todo.items()), arguments.jobs), 1):
        content["cells"][cell] = row
        write(arguments.out, content)
        print(f"{number}/{count} · {cell}: {describe(row)}", flush=True)
    content["seconds"] = round(content.get("seconds", 0) + time.monotonic() - begin)
    write(arguments.out, content)


def write(path: Path, content: dict[str, Any]) -> None:
    """Replace a file atomically."""
    part = path.with_suffix(".part")
    lines = [
        f"  {json.dumps(name)}: {json.dumps(row, sort_keys=True)}" for name, row in sorted(content["cells"].items())
    ]
    facts = json.dumps({name: value for name, value in content.items() if name != "cells"}, sort_keys=True)
    cells = ",\n".join(lines)  # one line for each
    part.write_text(f'{facts[:-1]}, "cells": {{\n{cells}\n}}}}\n')
    part.replace(path)


def measured(todo: Sequence[tuple[str, Sequence[str]]], jobs: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the cells of trainers and their results as they come, ``jobs`` trainers at once."""
    rows: Queue[tuple[str, dict[str, Any]]] = Queue()
    with ThreadPoolExecutor(jobs) as pool:
        running = [pool.submit(measure, trainer, names, rows) for trainer, names in todo]
        while not all(one.done() for one in running) or not rows.empty():
            with suppress(Empty):
                yield rows.get(timeout=0.1)
    for one in running:
        one.result()  # raises what a thread has raised


def measure(trainer: str, names: Sequence[str], rows: Queue) -> None:
    """Put the result of each case into ``rows``; one process in the trainer's environment measures them."""
    facts: dict[str, Any] = {"date": datetime.now(timezone.utc).strftime("%Y-%m-%d")}
    left = list(names)
    try:
        python = python_of(trainer)
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or ["pip failed"])[-1][:200]
        facts |= {"verdict": "unsupported", "detail": f"cannot be installed: {reason}"}
        for name in left:
            rows.put((f"{trainer}/{name}", facts))
        return
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "log", "w+", encoding="utf-8") as log:
        command = [str(python), "-m", "conformance.cell", trainer, str(TIME_LIMIT), folder, *names]
        environment = os.environ | {"PYTHONPATH": str(HERE.parent), "TMPDIR": folder}
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
        while left:
            has_ended, found = process.poll() is not None, Path(folder, f"{left[0]}.json")
            if found.exists():
                versions = json.loads(Path(folder, "versions.json").read_text())
                rows.put((f"{trainer}/{left.pop(0)}", facts | versions | json.loads(found.read_text())))
            elif has_ended:
                log.seek(0)
                lines = [line for line in log.read().splitlines() if line.strip()]
                detail = f"exit code {process.returncode}: {(lines or [''])[-1][:200]}"
                rows.put((f"{trainer}/{left.pop(0)}", facts | {"verdict": "crashed", "detail": detail}))
            else:
                time.sleep(0.05)
        process.wait()


def describe(row: dict[str, Any]) -> str:
    """Return one line about a result."""
    error = "" if row.get("error") is None else f" ({row['error']:.1e})"
    return f"{row['verdict']}{error} {row.get('detail', '')}".strip()


def check(arguments: argparse.Namespace) -> None:
    """Measure a plain loop, correct in every case and with each planted defect: the suite must tell them apart."""
    from conformance.planted import DEFECTS, FEATURES

    wanted = {f"{case}:{defect}": verdict for defect, (case, verdict) in DEFECTS.items()}
    wanted |= {name: "exact" for name, case in cases().items() if case.needs <= FEATURES}
    wanted["batch-norm"] = "other"  # no sum over samples
    names, jobs = list(wanted), arguments.jobs
    found = dict(measured([("planted", names[start::jobs]) for start in range(jobs)], jobs))
    wrong = [
        f"{name}: {describe(found[f'planted/{name}'])} instead of {verdict}"
        for name, verdict in wanted.items()
        if found[f"planted/{name}"]["verdict"] != verdict
    ]
    print(*wrong, sep="\n")
    right = len(wanted) - len(wrong)
    print(f"{right} of {len(wanted)} verdicts are right: {len(DEFECTS)} planted defects, and a correct loop")
    sys.exit(bool(wrong))


def report(arguments: argparse.Namespace) -> None:
    """Build the page of the results."""
    from conformance.page import build

    build(read(arguments.out))


def show(arguments: argparse.Namespace) -> None:
    """Print a reproduction of a wrong cell that needs only the trainer's own package."""
    from conformance.known import known

    trainer, case = arguments.trainer, arguments.case
    require_name("trainer", trainer, trainers())
    require_name("case", case, list(cases()))
    entry = known(trainer, case)
    if entry is None or not entry.page:
        measured = f"python -m conformance run --trainers {trainer} --cases {case} --again"
        raise SystemExit(
            f"conformance: error: {trainer}/{case} has no reproduction in docs/upstream; measure it with `{measured}`, "
            f"and see conformance/trainers/{trainer}.py"
        )
    page = (HERE.parent / "docs" / "upstream" / entry.page).read_text(encoding="utf-8")
    print(page.split("```python\n")[1].split("```")[0], end="")


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command."""
    parser = argparse.ArgumentParser(prog="python -m conformance", description="Measures the gradients of trainers.")
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("run", help="measure cells and write them to a file as they come")
    one.add_argument("--trainers", default="all", help="names separated by commas")
    one.add_argument("--cases", default="all", help="names separated by commas")
    one.add_argument("--again", action="store_true", help="also measure cells that the file has")
    one.set_defaults(do=run)
    check_parser = commands.add_parser("check", help="validate the suite with planted defects")
    check_parser.set_defaults(do=check)
    two = commands.add_parser("report", help="build the page of the documentation")
    two.set_defaults(do=report)
    three = commands.add_parser("show", help="print a reproduction of a cell that runs on its own")
    three.add_argument("trainer")
    three.add_argument("case")
    three.set_defaults(do=show)
    for command in (one, check_parser):
        command.add_argument("--jobs", type=int, choices=range(1, 65), metavar="N", default=2, help="trainers at once")
    for command in (one, two):
        command.add_argument("--out", type=Path, default=RESULTS, help="file of results")
    arguments = parser.parse_args(argv)
    arguments.do(arguments)


if __name__ == "__main__":
    main()
