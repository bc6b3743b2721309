"""One cell of the table in a process of its own: ``python -m conformance.cell TRAINER CASE OUT``, or under torchrun."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import sys
import tempfile
import traceback
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from torch import distributed

from conformance.cases import CASES, Case
from conformance.job import Job, UnsupportedError
from conformance.record import Recorder
from conformance.verdict import Reference, Verdict, as_row, judge


def adapter(trainer: str) -> tuple[ModuleType, dict[str, Any]]:
    """Return the module of a trainer, and what follows a colon in its name: ``planted:mean-of-means``."""
    name, _, defect = trainer.partition(":")
    module = importlib.import_module("conformance.planted" if name == "planted" else f"conformance.trainers.{name}")
    return module, {"defect": defect} if defect else {}


def measure(trainer: str, case: Case, folder: Path) -> Verdict:
    """Train a case with a trainer, and judge what its optimizer steps were given."""
    module, settings = adapter(trainer)
    if missing := case.needs - module.FEATURES:
        return Verdict("unsupported", None, f"the adapter has no {', '.join(sorted(missing))}")
    job, recorder = Job(case, folder), None
    try:
        job.recorder = recorder = Recorder(job.module)
        with recorder:
            module.train(job, **settings)
    except UnsupportedError as reason:
        return Verdict("unsupported", None, str(reason))
    except Exception as error:
        return failed(error, bool(recorder and recorder.steps))
    seen = [step.samples for step in recorder.steps]
    if case.ranks > 1:
        everywhere: list[Any] = [None] * case.ranks
        distributed.all_gather_object(everywhere, seen)
        if len({len(one) for one in everywhere}) > 1:
            return Verdict("samples", None, "ranks take different numbers of optimizer steps")
        seen = [[passed for rank in ranks for passed in rank] for ranks in zip(*everywhere, strict=True)]
    return judge(case, Reference(case, case.build()), recorder.steps, seen, getattr(module, "SHUFFLES", False))


def failed(error: Exception, has_begun: bool) -> Verdict:
    """Return the verdict on an exception: a message before the first step is a rejection."""
    traceback.print_exception(error)
    text = f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
    is_message = isinstance(error, ValueError | NotImplementedError) or "Misconfiguration" in type(error).__name__
    return Verdict("rejected" if is_message and not has_begun else "crashed", None, text)


def main() -> None:
    """Measure one cell, and write it as JSON."""
    trainer, name, out = sys.argv[1:]
    case = CASES[name]
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    if case.ranks > 1:
        distributed.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        verdict = measure(trainer, case, Path(folder))
    if int(os.environ.get("RANK", "0")) == 0:
        package = adapter(trainer)[0].VERSION_OF
        try:
            found = version(package)
        except PackageNotFoundError:
            found = None
        Path(out).write_text(json.dumps(as_row(verdict) | {"version": found, "torch": torch.__version__}))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of gloo may abort at the end of the interpreter


if __name__ == "__main__":
    main()
