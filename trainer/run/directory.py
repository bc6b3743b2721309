"""The run directory: the files that a run writes."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from lightning_fabric import Fabric
from torch import Tensor, nn

from trainer.checkpoint.export import save_model
from trainer.checkpoint.folder import CheckpointFolder
from trainer.checkpoint.manifest import MAX_JSON_BYTES, append_hash
from trainer.contract import splits_of
from trainer.errors import RunError, RunStoppedError, require
from trainer.recipe import Recipe
from trainer.report.html_report import write_report
from trainer.report.metrics import EvaluationResult, classification_report
from trainer.report.mistakes import write_mistakes
from trainer.report.model_card import TrainingFacts, build_model_card
from trainer.report.plots import plot_curves, plot_memory
from trainer.report.progress import warn
from trainer.report.summary import Summary, summary_rows
from trainer.run.collectives import broadcast_json, require_shared_filesystem, run_on_rank_zero
from trainer.run.identity import with_absolute_paths
from trainer.run.session import Session
from trainer.settings import dump_recipe
from trainer.system.error_reports import describe_error
from trainer.system.files import default_folder, make_folder, read_json_object, staged_folder, write_atomic
from trainer.system.text import escaped


def create_run_dir(recipe: Recipe, fabric: Fabric, source: str | None) -> Recipe:
    """Create the run directory and return the recipe with its path, the same on every rank. A collective. RecipeError
    on all ranks, if the directory holds a run that is not resumed, or cannot be created or written to."""
    wanted, resume = recipe.run.dir, recipe.run.resume
    require(resume != "auto" or wanted is not None, "run.resume=auto needs run.dir, the directory of the run to resume")
    run_dir = Path(broadcast_json(fabric, str(Path(wanted or default_folder(source)).absolute())))
    run_on_rank_zero(fabric, partial(_make, run_dir, resume))
    require_shared_filesystem(fabric, run_dir)
    return recipe.replace(run=dataclasses.replace(recipe.run, dir=str(run_dir)))


def require_unused(run_dir: Path, resume: str) -> None:
    """Reject a directory that holds a run, unless that run is resumed."""
    from_within = resume != "none" and Path(os.path.realpath(resume)).is_relative_to(os.path.realpath(run_dir))
    is_used = os.path.exists(run_dir / "recipe.yaml")  # no OSError for absurd names
    fix = "resume it with --run.resume auto, or choose another directory"
    require(not is_used or resume == "auto" or from_within, f"run.dir={run_dir} already holds a run: {fix}")


def _make(run_dir: Path, resume: str) -> None:
    make_folder("run.dir", run_dir)
    require_unused(run_dir, resume)
    require(os.access(run_dir, os.W_OK), f"run.dir={run_dir} is not writable: choose another directory")


@contextmanager
def explain_disk_errors(run_dir: Path) -> Iterator[None]:
    """Turn an OSError below ``run_dir`` into a RunError that names the file and the newest checkpoint."""
    try:
        yield
    except OSError as error:
        if not Path(str(error.filename)).is_relative_to(run_dir):
            raise
        kept = CheckpointFolder(run_dir / "checkpoints").newest_first()
        stays = f"older checkpoints stay, the newest is {kept[0]}" if kept else "no checkpoint was saved before"
        fix = f"Fix the disk or free some space, then resume with --run.dir {run_dir} --run.resume auto"
        raise RunError(f"{error.filename}: {error.strerror}; {stays}. {fix}") from error


@contextmanager
def status_file(session: Session) -> Iterator[None]:
    """Write ``status.json`` when the run starts, and again, with the outcome, when it ends."""
    write_status(session, "running", new_attempt=True)
    try:
        yield
    except BaseException as error:
        with suppress(OSError):  # the disk may be the reason why the run failed
            write_status(session, status_after(error))
        raise
    write_status(session, "finished")


def status_after(error: BaseException) -> str:
    """Return the status of a run that ended with ``error``."""
    return {RunStoppedError: "stopped", KeyboardInterrupt: "interrupted"}.get(type(error), "failed")


def write_status(session: Session, status: str, new_attempt: bool = False) -> None:
    """Write ``status.json`` on the first rank: the current plan and ``running``, or the status of ``summary.json``. It
    shows what a run that was killed was doing. ``new_attempt`` counts a new attempt."""
    if not session.is_first:
        return
    path, first = session.run_dir / "status.json", session.plan.initial_cut
    before = read_json_object(path, MAX_JSON_BYTES).get("attempt")
    cut = {"batch_size": first.batch_size, "micro_batch_size": first.micro_batch_size}
    content = {
        "plan": session.plan.describe(),
        "cut": None if isinstance(session.recipe.accumulate, dict) else cut,  # None: the cut depends on the epoch
        "attempt": (before if type(before) is int else 0) + new_attempt,
        "status": status,
    }
    write_atomic(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n", sync_folder=False)


def write_recipe(session: Session, source: str | None) -> None:
    """Write ``recipe.yaml``, with which the run can be repeated and evaluated from any folder. It has absolute paths,
    and no run directory, because a repetition is another run."""
    recipe = session.recipe
    run = dataclasses.replace(recipe.run, dir=None, resume="none", allow_change=[])
    text = dump_recipe(with_absolute_paths(recipe.replace(run=run)), source)
    write_atomic(session.run_dir / "recipe.yaml", append_hash(text))


def write_results(
    session: Session, module: nn.Module, state: Mapping[str, Tensor], summary: Summary, result: EvaluationResult | None
) -> None:
    """Write the summary, evaluation, plots and report, and the model unless the run failed."""
    run_dir = session.run_dir
    if summary.status == "finished":
        with staged_folder(run_dir / "model") as folder:
            save_model(session.recipe.model, module, folder, state)
            facts = {"plan": session.plan.describe(), **dict(summary_rows(summary))}
            trained = TrainingFacts(facts, summary.metrics, summary.data, summary.versions)
            card = build_model_card(session.recipe, run_dir, trained)
            write_atomic(folder / "README.md", card)  # not hashed: the user may edit it
    write_atomic(run_dir / "summary.json", summary.to_json())  # after the model: "finished" promises that it exists
    names = [] if result is None else write_evaluation(run_dir, result, session.recipe.data)
    try:
        if (run_dir / "metrics.csv").exists():
            plot_curves(run_dir / "metrics.csv", run_dir / "curves.png", summary.best["step"] if summary.best else None)
        plot_memory(summary.memory, session.monitor.history, run_dir / "memory.png")
    except OSError:
        raise
    except Exception as error:  # values that no axis can show must not fail the run
        warn(f"the metrics of this run cannot be plotted ({describe_error(error)}): see metrics.csv and summary.json")
    write_report(run_dir, summary, session.plan.describe(), None if result is None else result.confusion, names)


def write_evaluation(folder: Path, result: EvaluationResult, data: Any) -> list[str]:
    """Write the report of the final evaluation and, for a classifier, its mistakes; return the names of its classes."""
    write_atomic(folder / "classification_report.txt", report_text(result, data) + "\n")
    if result.confusion is None:
        return []
    split = "val" if data.test is None else "test"
    names = list(map(str, data.class_names or range(len(result.confusion))))
    write_mistakes(folder, result.confusion, result.mistakes, names, split, splits_of(data)[split].describe)
    return names


def report_text(result: EvaluationResult, data: Any) -> str:
    """Return the classification report, or the losses and metrics if the model does not classify."""
    if result.confusion is None:
        metrics = {**result.losses, **result.custom_metrics}
        return "\n".join(f"{escaped(name)} {value:.6f}" for name, value in metrics.items())
    names = data.class_names
    return classification_report(result.confusion, None if names is None else [escaped(name) for name in names])
