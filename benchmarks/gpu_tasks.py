"""The rows of ``gpu.py first`` and ``gpu.py faults``: run within a time limit, written after each row."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from common import RESULTS, Record
from gpu_judge import NOT_RUN, Found

MIN_SECONDS = 5.0
"""With less left, a row is not begun."""


@dataclass(frozen=True)
class Task:
    """A row: its name, its limit in seconds, and what to do in at most the seconds that it is given."""

    name: str
    seconds: float
    work: Callable[[float], Found]
    needs_gpu: bool = False


def command_line(part: str, description: str | None, seconds: float) -> argparse.ArgumentParser:
    """The flags that the two parts share."""
    parser = argparse.ArgumentParser(
        prog=f"gpu.py {part}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help=f"folder for gpu_{part}.json")
    parser.add_argument("--only", default="", help="rows whose name contains one of these words, with semicolons")
    parser.add_argument("--time", type=float, default=1.0, help=f"factor on the {seconds:.0f} seconds, and each limit")
    parser.add_argument("--work", type=Path, help="folder for the runs and their logs, kept")
    return parser


def read_arguments(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse the flags; refuse a time that is no limit, and models of full size without a GPU."""
    asked = parser.parse_args(argv)
    if getattr(asked, "device", "cuda") == "cpu" and not asked.tiny:
        parser.error("--device cpu is there to test this file: use it with --tiny")
    if not 0 < asked.time < math.inf:
        parser.error("--time must be more than 0")
    return asked


def chosen(tasks: Sequence[Task], only: str) -> list[Task]:
    """The tasks whose name contains one of the words of ``only``."""
    return [task for task in tasks if any(word in task.name for word in only.split(";"))]


def measure(
    groups: Sequence[tuple[int, Sequence[Task]]],
    record: Record,
    end: float,
    has_gpu: bool,
    factor: float = 1.0,
    after: Callable[[Sequence[Found]], None] = lambda rows: None,
) -> list[Found]:
    """Row by row, in groups; whatever becomes of one, it is a row, and all are written after each.

    Args:
        groups: how many rows of each at a time, and the rows.
        record: what is written.
        end: ``time.monotonic()`` at which nothing is begun any more.
        has_gpu: without one, rows that need a GPU are left out.
        factor: on the limit of each row.
        after: called with all rows so far, before they are written.
    """
    results: dict[str, Found] = {}
    names = [task.name for _, tasks in groups for task in tasks]
    record.write(rows=[])
    for at_once, tasks in groups:
        pool = ThreadPoolExecutor(at_once)
        try:
            for done in as_completed([pool.submit(_do, task, end, has_gpu, factor) for task in tasks]):
                found = done.result()
                results[found["name"]] = found
                rows = [results[name] for name in names if name in results]
                after(rows)
                record.write(rows=rows)
                print(f"{found['name']}: {found['status']} in {found['wall_seconds']} s: {found['reason']}", flush=True)
        finally:
            pool.shutdown(cancel_futures=True)  # Ctrl-C begins no further row
    record.write(complete=True, rows=list(rows))
    return rows


def _do(task: Task, end: float, has_gpu: bool, factor: float) -> Found:
    began = time.monotonic()
    left = end - began
    if task.needs_gpu and not has_gpu:
        found: Found = {"status": NOT_RUN, "reason": "needs a GPU", "met": None}
    elif left < MIN_SECONDS:
        found = {"status": NOT_RUN, "reason": "late: the time of all rows is used up", "met": None}
    else:
        try:
            found = task.work(min(left, factor * task.seconds))
        except Exception as error:  # the rows after it are worth having
            found = {"status": "failed", "reason": f"{type(error).__name__}: {error}", "met": False}
    return {"name": task.name, **found, "wall_seconds": round(time.monotonic() - began, 1)}
