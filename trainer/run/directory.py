"""The run directory: the files that a run writes, and the description that it prints at the start."""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from trainer.checkpoint.export import save_model
from trainer.checkpoint.folder import CheckpointFolder
from trainer.checkpoint.manifest import MAX_JSON_BYTES, append_hash
from trainer.contract import splits_of
from trainer.engine.cut import data_parallel_rank, padding_share
from trainer.engine.loop import count_steps
from trainer.engine.window import Windows
from trainer.errors import RecipeError, RunError, RunStoppedError, require
from trainer.memory.plan import Plan, idle_ranks, plan_warnings
from trainer.memory.stack import PreparedModel
from trainer.planner.predict import faster
from trainer.recipe import Recipe
from trainer.report.html_report import write_report
from trainer.report.loggers import make_loggers
from trainer.report.metrics import EvaluationResult, classification_report
from trainer.report.mistakes import write_mistakes
from trainer.report.model_card import TrainingFacts, build_model_card
from trainer.report.plots import plot_curves, plot_memory
from trainer.report.progress import warn
from trainer.report.summary import Summary, summary_rows
from trainer.run.session import Session, all_gather_json, broadcast_json, run_on_rank_zero
from trainer.settings import dump_recipe
from trainer.system.error_reports import describe_error
from trainer.system.files import default_folder, make_folder, read_json_object, staged_folder, write_atomic
from trainer.system.redact import redact
from trainer.system.text import escaped
from trainer.values import TASK_METRICS
from trainer.weights.nf4 import count_weights


def create_run_dir(recipe: Recipe, fabric: Fabric, source: str | None) -> Recipe:
    """Create the run directory and return the recipe with its path, the same on every rank. A collective. RecipeError
    on all ranks, if the directory holds a run that is not resumed, or cannot be created or written to."""
    wanted, resume = recipe.run.dir, recipe.run.resume
    if resume == "auto" and wanted is None:
        raise RecipeError("run.resume=auto needs run.dir, the directory of the run to resume")
    run_dir = Path(broadcast_json(fabric, str(Path(wanted or default_folder(source)).absolute())))
    run_on_rank_zero(fabric, partial(_make, run_dir, resume))
    require_shared_filesystem(fabric, run_dir)
    return recipe.replace(run=dataclasses.replace(recipe.run, dir=str(run_dir)))


def require_unused(run_dir: Path, resume: str) -> None:
    """Reject a directory that holds a run, unless that run is resumed."""
    from_within = resume != "none" and Path(os.path.realpath(resume)).is_relative_to(os.path.realpath(run_dir))
    require(
        not os.path.exists(run_dir / "recipe.yaml") or resume == "auto" or from_within,  # no OSError for absurd names
        f"run.dir={run_dir} already holds a run: resume it with --run.resume auto, or choose another directory",
    )


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
        raise RunError(
            f"{error.filename}: {error.strerror}; {stays}. Fix the disk or free some space, then resume with "
            f"--run.dir {run_dir} --run.resume auto"
        ) from error


@contextmanager
def status_file(session: Session) -> Iterator[None]:
    """Write ``status.json`` when the run starts, and again, with the outcome, when it ends."""
    write_status(session, "running", new_attempt=True)
    try:
        yield
    except BaseException as error:
        known = {RunStoppedError: "stopped", KeyboardInterrupt: "interrupted"}
        with suppress(OSError):  # the disk may be the reason why the run failed
            write_status(session, known.get(type(error), "failed"))
        raise
    write_status(session, "finished")


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


NAMES = ("config", "revision", "encoding", "separator", "task")
"""Fields whose text is never a path, even if a file has that name."""


def with_absolute_paths(recipe: Recipe) -> Recipe:
    """Return the recipe with every existing path in its model and data made absolute."""
    return recipe.replace(model=_absolute(recipe.model), data=_absolute(recipe.data))


def _absolute(part: Any) -> Any:
    """Make absolute every text field of a model or dataset that names a file, a folder or a pattern in a folder."""
    paths = {}
    for field in dataclasses.fields(part):
        text = getattr(part, field.name) if field.init else None
        is_name = field.name in NAMES or field.name.endswith(("_column", "_split"))
        if isinstance(text, str) and text and not is_name:
            path = Path(text)
            if field.name == "name" and not (field.type in ("str", str) and path.is_dir()):  # a size, a model type
                continue
            if path.exists() or ("*" in text and path.parent.is_dir()):
                paths[field.name] = str(path.absolute())
    return dataclasses.replace(part, **paths)


def open_loggers(session: Session, resumed_at: int, run: str) -> list[Any]:
    """Return the loggers of the recipe for ``run``, which starts at step ``resumed_at``; only on the first rank."""
    if not session.is_first:
        return []
    recipe, names = session.recipe, session.recipe.model.loss_names
    extra = [f"loss_{name}" for name in names] if len(names) > 1 else []
    parts = {field.name: getattr(recipe, field.name) for field in dataclasses.fields(recipe)}
    # Sections as text, without secrets.
    config = {name: redact(str(part)) if dataclasses.is_dataclass(part) else part for name, part in parts.items()}
    task = recipe.model.task or "single_label"
    has_metrics = task == "language" or recipe.model.num_classes is not None
    asked = [metric if isinstance(metric, str) else metric.name for metric in recipe.run.requested_metrics()]
    metrics = [name for name in dict.fromkeys((*TASK_METRICS[task if has_metrics else None], *asked)) if name != "loss"]
    return make_loggers(recipe.run.logger, session.run_dir, config, extra, metrics, resumed_at, recipe.run, run)


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
    if result is not None:
        write_evaluation(run_dir, result, session.recipe.data)
    try:
        if (run_dir / "metrics.csv").exists():
            best = summary.best["step"] if summary.best else None
            plot_curves(run_dir / "metrics.csv", run_dir / "curves.png", best)
        plot_memory(summary.memory, session.monitor.history, run_dir / "memory.png")
    except OSError:
        raise
    except Exception as error:  # values that no axis can show must not fail the run
        warn(f"the metrics of this run cannot be plotted ({describe_error(error)}): see metrics.csv and summary.json")
    write_report(run_dir, summary_rows(summary), session.plan.describe(), summary.data, summary.versions)


def write_evaluation(folder: Path, result: EvaluationResult, data: Any) -> None:
    """Write the report of the final evaluation to ``folder`` and, for a classifier, its mistakes."""
    write_atomic(folder / "classification_report.txt", report_text(result, data) + "\n")
    if result.confusion is not None:
        split = "val" if data.test is None else "test"
        samples, names = splits_of(data)[split], data.class_names or range(len(result.confusion))
        write_mistakes(folder, result.confusion, result.mistakes, list(map(str, names)), split, samples.describe)


def report_text(result: EvaluationResult, data: Any) -> str:
    """Return the classification report, or the losses and metrics if the model does not classify."""
    if result.confusion is None:
        metrics = {**result.losses, **result.custom_metrics}
        return "\n".join(f"{escaped(name)} {value:.6f}" for name, value in metrics.items())
    names = data.class_names
    return classification_report(result.confusion, None if names is None else [escaped(name) for name in names])


def describe_run(session: Session, stack: PreparedModel, windows: Windows) -> list[str]:
    """Return one line each for the plan, the size of model and run, warnings, the estimate and padding."""
    device, recipe = session.fabric.device, session.recipe
    on_gpu = device.type == "cuda"
    steps = count_steps(windows, recipe.epochs, recipe.max_steps)
    blocks = f" (blocks: {stack.blocks})" if stack.blocks else ""
    size = f"{count_weights(stack.module)}{blocks}; {windows.size:,} samples, {steps:,} steps"
    lines = [
        f"plan: {session.plan.describe()} on {torch.cuda.get_device_name(device) if on_gpu else 'CPU'}",
        f"{type(recipe.model).__name__}: {size}",
    ]
    nonsense = suspicious_settings(recipe, session.plan, windows.size, steps)
    warnings = [*plan_warnings(recipe, on_gpu), *nonsense, idle_ranks(session.plan), stack.warning]
    lines += [f"warning: {text}" for text in warnings if text is not None]
    if session.forecast is not None:
        lines += session.forecast.warnings()
        lines += faster(recipe, session.plan.world_size, session.forecast.device, session.forecast.prediction)
    if windows.packs:  # also for streamed texts, whose lengths are unknown
        lines.append("padding: none, the model computes on real tokens only (model.padding_free)")
    elif windows.lengths is not None:
        drawn, cut = (f"{100 * share:.1f} %" for share in padding_shares(windows))
        lines.append(f"{cut} of the tokens are padding ({drawn} without grouping by length)")
    return lines


def suspicious_settings(recipe: Recipe, plan: Plan, samples: int, steps: int) -> list[str]:
    """Return warnings, one line each, about settings that work but are probably not intended."""
    found, batch, warmup = [], plan.initial_cut.batch_size, recipe.optim.warmup_steps
    shares = data_parallel_rank(recipe.memory, 0, plan.world_size)[1]
    if batch > samples:
        found.append(f"batch_size={batch} is larger than the {samples:,} training samples: every step uses all of them")
    if 0 < steps <= warmup:
        lr = f"the learning rate never reaches optim.lr={recipe.optim.lr:g}"
        found.append(f"optim.warmup_steps={warmup}, but the run ends after {steps:,} steps: {lr}")
    if min(batch, samples) < shares:
        idle = f"{shares - min(batch, samples)} of {shares} ranks are idle in every step"
        found.append(f"batch_size={batch} has fewer samples than ranks: {idle}; use fewer ranks or a larger batch")
    if plan.memory.cpu_offload == "optimizer" and plan.strategy == "ddp" and shares > 1:
        found.append("cpu_offload=optimizer with ddp: every rank holds all masters; memory.strategy fsdp shards them")
    if recipe.run.evaluate and recipe.data.val is None and recipe.data.test is None:
        fix = "--data.val_fraction 0.1 holds out a tenth of the training set"
        fix = fix if recipe.data.val_fraction is not None else f"set {type(recipe.data).__name__}.val in prepare()"
        found.append(f"no evaluation: the data has neither a validation set nor a test set; {fix}")
    return found


def padding_shares(windows: Windows) -> tuple[float, float]:
    """Return the share of padding in the first epoch without and with grouping by length."""
    assert windows.lengths is not None
    shares = []
    for cut in (dataclasses.replace(windows, lengths=None), windows):
        pieces = [piece for step in range(windows.steps(0)) for piece in cut.pieces(0, step)]
        shares.append(padding_share(pieces, windows.lengths))
    return shares[0], shares[1]


# Check before training, not when the first checkpoint fails, that all machines see the same run directory.

PREFIX = ".shared-"
PROBE_TIMEOUT = 10.0  # how long a file may take to appear on another machine
POLL_INTERVAL = 0.2


def require_shared_filesystem(fabric: Fabric, run_dir: Path) -> None:
    """Check that all machines share ``run_dir``. A collective. The first rank writes a file, which one rank of every
    other machine answers with another. Raise RecipeError on all ranks if a machine sees another directory or cannot
    write to it."""
    on_other_machine = fabric.local_rank == 0 and fabric.global_rank != 0
    if not any(all_gather_json(fabric, on_other_machine)):
        return
    token = run_on_rank_zero(fabric, partial(_leave, run_dir))
    problems = all_gather_json(fabric, _answer(run_dir, token) if on_other_machine else None)
    if fabric.global_rank == 0:
        for path in run_dir.glob(f"{token}*"):
            path.unlink(missing_ok=True)
    found = "; ".join(problem for problem in problems if problem is not None)
    here = run_on_rank_zero(fabric, socket.gethostname)
    require(
        not found,
        f"run.dir={run_dir} is not one directory for all machines: {found}; {here} created it: choose a directory on a "
        "file system that all machines share",
    )


def _leave(run_dir: Path) -> str:
    token = PREFIX + secrets.token_hex(8)
    problem = _touch(run_dir / token)
    require(problem is None, f"run.dir={run_dir} cannot be written to ({problem}): choose another directory")
    return token


def _answer(run_dir: Path, token: str) -> str | None:
    here, until = socket.gethostname(), time.monotonic() + PROBE_TIMEOUT
    while not _is_seen(run_dir, token):
        if time.monotonic() > until:
            return f"{here} does not see what the first rank wrote there"
        time.sleep(POLL_INTERVAL)
    problem = _touch(run_dir / f"{token}-{here}")
    return None if problem is None else f"{here} cannot write there ({problem})"


def _touch(path: Path) -> str | None:
    try:
        path.touch()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _is_seen(run_dir: Path, token: str) -> bool:
    """List the directory, because NFS then asks its server; it may cache a missing name for 30 s."""
    with suppress(OSError):
        return token in os.listdir(run_dir)
    with suppress(OSError):
        os.listdir(run_dir.parent)
    return False
