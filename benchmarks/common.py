"""Helpers of the benchmarks: machine and commit, files of results, tables, processes."""

from __future__ import annotations

import csv
import json
import os
import platform
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trainer
from trainer.contract import as_samples
from trainer.report.summary import versions
from trainer.system.files import write_atomic
from trainer.system.machine import cores

if TYPE_CHECKING:
    from trainer import Recipe

RESULTS = Path(__file__).parent / "results"
TIMES = ("samples_per_second", "tokens_per_second", "data_share", "mfu")
"""Columns of metrics.csv that no two runs have alike."""


def machine() -> dict[str, Any]:
    """What the figures depend on besides the software, and how busy it was when the benchmark started."""
    return {
        "cpu": _cpu_model(),
        "cores": cores(),
        "system": f"{platform.system()} {platform.machine()}",
        "load_average_1_min": round(os.getloadavg()[0], 2),
    }


def commit(checkout: Path = RESULTS.parent) -> str | None:
    """The commit of a checkout, with a plus when files differ from it; ``None`` without a repository, or git."""
    words = ["git", "-C", str(checkout), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def sample_data() -> Path:
    """The folder of real samples: $TRAINER_TEST_DATA, or shared/data beside the repository."""
    folder = Path(os.environ.get("TRAINER_TEST_DATA", RESULTS.parents[2] / "shared" / "data"))
    if not folder.is_dir():
        raise SystemExit(f"no sample data in {folder}: set TRAINER_TEST_DATA")
    return folder


class Record:
    """``benchmarks/results/NAME.json``, written anew whenever something was measured: a run cut short loses nothing.

    Args:
        name: of the file, without its ending.
        settings: what was asked for on the command line.
        folder: where it is written.
    """

    def __init__(self, name: str, settings: dict[str, Any], folder: Path = RESULTS) -> None:
        self.path = folder / f"{name}.json"
        self.content: dict[str, Any] = {
            "benchmark": name,
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
            "complete": False,
            "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
            "commit": commit(),
            "settings": settings,
            "machine": machine(),
            "versions": versions(),
        }

    def write(self, complete: bool = False, **measured: Any) -> None:
        """Add or replace entries and write the file."""
        self.content |= measured | {"complete": complete}
        write_atomic(self.path, json.dumps(self.content, indent=1, ensure_ascii=False) + "\n", sync_folder=False)


def fit_words(recipe: str, accelerator: str, settings: Mapping[str, Any]) -> list[str]:
    """The words of ``trainer fit`` for a file in benchmarks/recipes: one device, and nothing besides training unless
    ``settings`` has it."""
    chosen = {"run.accelerator": accelerator, "run.devices": 1}
    chosen |= dict.fromkeys(("run.evaluate", "run.recover", "run.predict"), "false") | dict(settings)
    return [str(RESULTS.parent / "recipes" / f"{recipe}.py"), *(f"--{key}={value}" for key, value in chosen.items())]


def resolve(arguments: Sequence[str]) -> Recipe:
    """The recipe that ``trainer fit`` would run with these arguments: a recipe and its flags."""
    from trainer.commands.flags import RecipeParser, split_argv
    from trainer.commands.recipes import load_recipe
    from trainer.settings import change

    (reference,), flags = split_argv(arguments)
    recipe, _ = load_recipe(reference)
    return change(recipe, RecipeParser(recipe).read_flags(flags, {}))


def curve(run_dir: Path) -> list[dict[str, str]]:
    """The rows of a run's metrics.csv, without those columns."""
    with (run_dir / "metrics.csv").open(newline="") as file:
        return [{name: text for name, text in row.items() if name not in TIMES} for row in csv.DictReader(file)]


@contextmanager
def workplace(folder: Path | None) -> Iterator[Path]:
    """A folder for runs: in memory where there is room, for every run saves its model, which is not kept."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        return
    shared = Path("/dev/shm")
    roomy = shared.is_dir() and shutil.disk_usage(shared).free > 16e9
    # No TemporaryDirectory: a forked run that calls exit handlers would remove it.
    made = Path(tempfile.mkdtemp(prefix="gpu-benchmark-", dir=shared if roomy else None))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


class Picked:
    """Some samples of a prepared split, in an order of their own."""

    augmented = False

    def __init__(self, split: Any, indices: Sequence[int]) -> None:
        self.split, self.indices = split, list(indices)
        if as_samples(split).lengths is not None:
            self.lengths = [int(split.lengths[index]) for index in self.indices]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self.split[self.indices[index]]

    def __getitems__(self, indices: Sequence[int]) -> Any:
        return self.split.__getitems__([self.indices[index] for index in indices])


def process_memory(key: str, pid: int | str = "self", file: str = "status") -> int:
    """VmRSS, VmHWM or another line of /proc/PID/status, or of another file there, in bytes."""
    lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def child_cpu_seconds() -> float:
    """CPU time of all children that this process has waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def environment_here() -> dict[str, str]:
    """The environment of this process, with the package that runs here first, whether it is installed or not."""
    here = str(Path(trainer.__file__).parent.parent)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))}


def torchrun_variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The variables that torchrun sets for a rank of one machine."""
    sizes = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_WORLD_SIZE": 1, "GROUP_RANK": 0}
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": port} | sizes
    texts = {"TORCHELASTIC_RUN_ID": "benchmark", "MASTER_ADDR": "127.0.0.1"}
    return {key: str(number) for key, number in numbers.items()} | texts


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table: the first column left-aligned, the others to the right."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        return "| " + " | ".join([cells[0].ljust(widths[0]), *padded[1:]]) + " |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([line(header), line(rule), *map(line, rows)])


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for entry in cpuinfo.read_text().splitlines():
            if entry.startswith("model name"):
                return entry.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
