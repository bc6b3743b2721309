"""Cells of one trainer, in its environment: ``python -m conformance.cell TRAINER SECONDS FOLDER CASE ...``.

The trainer is imported once. Each cell runs in processes that are forked from there, one per rank.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # torch.set_num_threads would start a thread pool, which no fork can use
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from torch import distributed

from conformance.cases import CASES, FEATURES, MODELS, Case
from conformance.job import Job, UnsupportedError
from conformance.record import Recorder
from conformance.verdict import Reference, Run, Verdict, as_row, judge


def adapter(trainer: str) -> ModuleType:
    """Return the module of a trainer."""
    return importlib.import_module("conformance.planted" if trainer == "planted" else f"conformance.trainers.{trainer}")


def measure(trainer: str, case: Case, folder: Path, defect: str = "") -> Verdict:
    """Train a case with a trainer, and judge what its optimizer steps were given."""
    module = adapter(trainer)
    if missing := case.needs - module.FEATURES:
        return Verdict("unsupported", None, f"not used: {', '.join(FEATURES[one] for one in sorted(missing))}")
    if case.dtype == torch.float64:
        case = replace(case, dtype=getattr(module, "DTYPE", torch.float64))
    job, recorder = Job(case, folder), None
    try:
        job.module  # noqa: B018 # is built here
    except ImportError as error:
        reason = str(error).partition(" (/")[0][:200]  # without the path of a module
        return Verdict("unsupported", None, f"the pins of the trainer do not fit the model's: {reason}")
    try:
        job.recorder = recorder = Recorder(job.module)
        torch.manual_seed(1000 + job.rank)  # as in processes that nobody seeded
        with recorder:
            module.train(job, **{"defect": defect} if defect else {})
    except UnsupportedError as reason:
        return Verdict("unsupported", None, str(reason))
    except Exception as error:
        return failed(error, bool(recorder and recorder.steps))
    passes = [step.passes for step in recorder.steps]
    if case.ranks > 1:
        everywhere: list[Any] = [None] * case.ranks
        distributed.all_gather_object(everywhere, passes)
        if len({len(one) for one in everywhere}) > 1:
            return Verdict("samples", None, "ranks take different numbers of optimizer steps")
        passes = [[one for rank in ranks for one in rank] for ranks in zip(*everywhere, strict=True)]
    shuffles = getattr(module, "SHUFFLES", False)
    run = Run(recorder.steps, passes, recorder.last_weights(), shuffles, job.average, job.evaluation_loss)
    return judge(case, Reference(case, case.build()), run)


def failed(error: Exception, has_begun: bool) -> Verdict:
    """Return the verdict on an exception: a message before the first step is a rejection, but not one of torch."""
    traceback.print_exception(error)
    text = f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
    is_message = isinstance(error, ValueError | NotImplementedError) or "Misconfiguration" in type(error).__name__
    is_torch = "/torch/" in traceback.extract_tb(error.__traceback__)[-1].filename
    return Verdict("rejected" if is_message and not has_begun and not is_torch else "crashed", None, text)


def train_and_judge(trainer: str, case: Case, defect: str, rank: int, port: int, out: Path) -> None:
    """Measure one cell as one of its ranks, in a process of its own, and write it as JSON."""
    world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": case.ranks, "LOCAL_WORLD_SIZE": case.ranks}
    if case.ranks > 1:  # as torchrun sets them
        more = {"GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1, "ROLE_RANK": rank, "ROLE_WORLD_SIZE": case.ranks}
        more |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "conformance"}
        more |= {"TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0}
        os.environ.update({name: str(value) for name, value in (world | more).items()})
        distributed.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        verdict = measure(trainer, case, Path(folder), defect)
    if rank == 0:
        part = out.with_suffix(".part")
        part.write_text(json.dumps(as_row(verdict)))
        part.replace(out)


def in_processes(trainer: str, name: str, out: Path, limit: float) -> None:
    """Fork a process for each rank of a cell, and wait for at most ``limit`` seconds.

    ``name`` is that of a case; a colon and a name of ``planted.DEFECTS`` may follow.
    """
    case, defect = CASES[name.partition(":")[0]], name.partition(":")[2]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ranks = []
    for rank in range(case.ranks):
        if (process := os.fork()) == 0:
            os.setsid()
            try:
                train_and_judge(trainer, case, defect, rank, port, out)
            except BaseException as error:
                traceback.print_exception(error)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(0)  # threads of gloo may abort at the end of the interpreter
        ranks.append(process)
    end = time.monotonic() + limit
    while time.monotonic() < end and not out.exists() and any(is_alive(one) for one in ranks):
        time.sleep(0.05)
    ended = time.monotonic() < end
    for process in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process, 0)
    if not out.exists():
        detail = "a process ended without a result" if ended else f"no end within {limit:g} s"
        out.write_text(json.dumps(as_row(Verdict("crashed", None, detail))))


def is_alive(process: int) -> bool:
    """Return whether a child has not ended."""
    with contextlib.suppress(ChildProcessError):
        return os.waitpid(process, os.WNOHANG) == (0, 0)
    return False


def main() -> None:
    """Import a trainer once, and measure cells one after another, each in forked processes."""
    trainer, limit, folder, *names = sys.argv[1:]
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    module = adapter(trainer)
    found = getattr(module, "VERSION", None) or version(module.VERSION_OF)
    Path(folder, "versions.json").write_text(json.dumps({"version": found, "torch": torch.__version__}))
    for model in {CASES[name.partition(":")[0]].model for name in names}:
        with contextlib.suppress(Exception):  # what is imported here is not imported in every process
            MODELS[model]()
    for name in names:
        in_processes(trainer, name, Path(folder, f"{name}.json"), float(limit))


if __name__ == "__main__":
    main()
