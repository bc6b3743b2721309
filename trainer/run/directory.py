"""The run directory: what a run writes, and what it prints of it."""

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
from trainer.checkpoint.manifest import MOST_BYTES, sealed
from trainer.engine.loop import count_steps
from trainer.engine.window import Windows, padding_share, share_of
from trainer.errors import RunError, Stopped, require
from trainer.memory.plan import Plan, idle_ranks, plan_warnings
from trainer.memory.stack import Stack
from trainer.planner.predict import faster
from trainer.recipe import Recipe
from trainer.report.card import Trained, card_of
from trainer.report.loggers import make_loggers
from trainer.report.metrics import EvaluationResult, classification_report
from trainer.report.mistakes import write_mistakes
from trainer.report.page import write_report
from trainer.report.plots import plot_curves, plot_memory
from trainer.report.progress import warn
from trainer.report.summary import Summary, summary_rows
from trainer.run.session import Session, from_all, from_first, on_first
from trainer.settings import dump_recipe
from trainer.system.files import default_folder, make_folder, read_object, staged_folder, write_atomic
from trainer.system.redact import redact
from trainer.system.reports import cause
from trainer.system.text import escaped
from trainer.values import FIGURES
from trainer.weights.nf4 import size_of


def with_run_dir(recipe: Recipe, fabric: Fabric, source: str | None) -> Recipe:
    """The recipe with the directory of this run, which is there then, the same on every rank; refused on all alike when
    it holds a run and that is not resumed, or cannot be made or written to. A collective."""
    wanted, resume = recipe.run.dir, recipe.run.resume
    missing = "run.resume=auto needs run.dir, the directory of the run to go on with"
    require(resume != "auto" or wanted is not None, missing)
    run_dir = Path(from_first(fabric, str(Path(wanted or default_folder(source)).absolute())))
    on_first(fabric, partial(_make, run_dir, resume))
    require_shared(fabric, run_dir)
    return recipe.replace(run=dataclasses.replace(recipe.run, dir=str(run_dir)))


def require_unused(run_dir: Path, resume: str) -> None:
    """Refuse a directory that holds a run which is not resumed."""
    from_within = resume != "none" and Path(os.path.realpath(resume)).is_relative_to(os.path.realpath(run_dir))
    require(
        not os.path.exists(run_dir / "recipe.yaml") or resume == "auto" or from_within,  # no OSError for absurd names
        f"run.dir={run_dir} already holds a run: go on with it by --run.resume auto, or choose another directory",
    )


def _make(run_dir: Path, resume: str) -> None:
    make_folder("run.dir", run_dir)
    require_unused(run_dir, resume)
    require(os.access(run_dir, os.W_OK), f"run.dir={run_dir} is not writable: choose another directory")


@contextmanager
def written_to(run_dir: Path) -> Iterator[None]:
    """Say of an error of the disk below ``run_dir`` which file it was about, and what stays."""
    try:
        yield
    except OSError as error:
        if not Path(str(error.filename)).is_relative_to(run_dir):
            raise
        kept = CheckpointFolder(run_dir / "checkpoints").newest_first()
        stays = f"older checkpoints stay, the newest is {kept[0]}" if kept else "no checkpoint was saved before"
        raise RunError(
            f"{error.filename}: {error.strerror}; {stays}. Mend the disk, or free some space, then go on with "
            f"--run.dir {run_dir} --run.resume auto"
        ) from error


@contextmanager
def status_kept(session: Session) -> Iterator[None]:
    """Keep ``status.json`` for as long as the run lasts, and leave in it how that has ended."""
    write_status(session, "running", begins=True)
    try:
        yield
    except BaseException as error:
        known = {Stopped: "stopped", KeyboardInterrupt: "interrupted"}
        with suppress(OSError):  # the disk may be what the run has died of
            write_status(session, known.get(type(error), "failed"))
        raise
    write_status(session, "finished")


def write_status(session: Session, status: str, begins: bool = False) -> None:
    """Write ``status.json``, on the first rank: the plan as it is now, for who finds the run dead. Its status is
    ``running`` or as in ``summary.json``; an attempt that ``begins`` is counted."""
    if not session.is_first:
        return
    path, first = session.run_dir / "status.json", session.plan.first_cut
    before = read_object(path, MOST_BYTES).get("attempt")
    cut = {"batch_size": first.batch_size, "micro_batch_size": first.micro_batch_size}
    content = {
        "plan": session.plan.describe(),
        "cut": None if isinstance(session.recipe.accumulate, dict) else cut,  # each epoch has one of its own
        "attempt": (before if type(before) is int else 0) + begins,
        "status": status,
    }
    write_atomic(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n", sync_folder=False)


def write_recipe(session: Session, source: str | None) -> None:
    """Write ``recipe.yaml``, so that it can be repeated and evaluated from anywhere: without the run directory, for a
    repetition is another run, and with paths that do not depend on where it starts."""
    recipe = session.recipe
    run = dataclasses.replace(recipe.run, dir=None, resume="none", allow_change=[])
    text = dump_recipe(with_absolute_paths(recipe.replace(run=run)), source)
    write_atomic(session.run_dir / "recipe.yaml", sealed(text))


NAMES = ("config", "revision", "encoding", "separator", "task")
"""Fields that name no file, though there may be one that is called so."""


def with_absolute_paths(recipe: Recipe) -> Recipe:
    """The recipe with every path in its model and data that exists as seen from the root."""
    return recipe.replace(model=_absolute(recipe.model), data=_absolute(recipe.data))


def _absolute(part: Any) -> Any:
    """A model or dataset whose text fields that name a file, a folder, or files by a pattern in one are absolute."""
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
    """The loggers that the recipe asks for, on the first rank, of the ``run`` that goes on from step ``resumed_at``."""
    if not session.is_first:
        return []
    recipe, names = session.recipe, session.recipe.model.loss_names
    extra = [f"loss_{name}" for name in names] if len(names) > 1 else []
    parts = {field.name: getattr(recipe, field.name) for field in dataclasses.fields(recipe)}
    # Sections as text, without their secrets.
    config = {name: redact(str(part)) if dataclasses.is_dataclass(part) else part for name, part in parts.items()}
    task = getattr(recipe.model, "task", "single_label")
    task = task if task == "language" or getattr(recipe.model, "num_classes", None) is not None else None
    asked = [figure if isinstance(figure, str) else figure.name for figure in recipe.run.asked_figures()]
    figures = [name for name in dict.fromkeys((*FIGURES[task], *asked)) if name != "loss"]
    return make_loggers(recipe.run.logger, session.run_dir, config, extra, figures, resumed_at, recipe.run, run)


def write_results(
    session: Session, module: nn.Module, state: Mapping[str, Tensor], summary: Summary, result: EvaluationResult | None
) -> None:
    """Write what there is to write; of a run that failed, its figures and no model."""
    run_dir = session.run_dir
    if summary.status == "finished":
        with staged_folder(run_dir / "model") as folder:
            save_model(session.recipe.model, module, folder, state)
            facts = {"plan": session.plan.describe(), **dict(summary_rows(summary))}
            trained = Trained(facts, summary.metrics, summary.data, summary.versions)
            card = card_of(session.recipe, run_dir, trained)
            write_atomic(folder / "README.md", card)  # a person may change it: it has no hash
    write_atomic(run_dir / "summary.json", summary.to_json())  # after the model, which "finished" promises
    if result is not None:
        write_evaluation(run_dir, result, session.recipe.data)
    try:
        if (run_dir / "metrics.csv").exists():
            best = summary.best["step"] if summary.best else None
            plot_curves(run_dir / "metrics.csv", run_dir / "curves.png", best)
        plot_memory(summary.memory, session.monitor.history, run_dir / "memory.png")
    except OSError:
        raise
    except Exception as error:  # figures that no axis can hold: a picture is not the end of a run
        warn(f"the figures of this run cannot be drawn ({cause(error)}): they are in metrics.csv and summary.json")
    write_report(run_dir, summary_rows(summary), session.plan.describe(), summary.data, summary.versions)


def write_evaluation(folder: Path, result: EvaluationResult, data: Any) -> None:
    """Write the report of the final evaluation to ``folder`` and, of a classifier, its mistakes."""
    write_atomic(folder / "classification_report.txt", report_text(result, data) + "\n")
    if result.confusion is not None:
        split = "val" if data.test is None else "test"
        samples, names = getattr(data, split), getattr(data, "class_names", None) or range(len(result.confusion))
        describe = getattr(samples, "describe", f"sample {{}} of {type(samples).__name__}".format)
        write_mistakes(folder, result.confusion, result.mistakes, list(map(str, names)), split, describe)


def report_text(result: EvaluationResult, data: Any) -> str:
    """The classification report, or the losses and figures of a model that says no class."""
    if result.confusion is None:
        figures = {**result.losses, **result.others}
        return "\n".join(f"{escaped(name)} {value:.6f}" for name, value in figures.items())
    names = getattr(data, "class_names", None)
    return classification_report(result.confusion, None if names is None else [escaped(name) for name in names])


def describe_run(session: Session, stack: Stack, windows: Windows) -> list[str]:
    """The plan, the size of the model and the run and, for texts, what cutting by length saves: a line each."""
    device, recipe = session.fabric.device, session.recipe
    on_gpu = device.type == "cuda"
    steps = count_steps(windows, recipe.epochs, recipe.max_steps)
    blocks = f" (blocks: {stack.blocks})" if stack.blocks else ""
    size = f"{size_of(stack.module)}{blocks}; {windows.size:,} samples, {steps:,} steps"
    lines = [
        f"plan: {session.plan.describe()} on {torch.cuda.get_device_name(device) if on_gpu else 'CPU'}",
        f"{type(recipe.model).__name__}: {size}",
    ]
    nonsense = unmeant(recipe, session.plan, windows.size, steps)
    warnings = [*plan_warnings(recipe, on_gpu), *nonsense, idle_ranks(session.plan), stack.warning]
    lines += [f"warning: {text}" for text in warnings if text is not None]
    if session.forecast is not None:
        lines += session.forecast.lines()
        lines += faster(recipe, session.plan.world_size, session.forecast.device, session.forecast.prediction)
    if windows.packs:  # streamed texts, too, whose lengths nobody knows
        lines.append("padding: none, the model computes on the tokens that are there (model.padding_free)")
    elif windows.lengths is not None:
        drawn, cut = (f"{100 * share:.1f} %" for share in padding_shares(windows))
        lines.append(f"padding: {cut} of the tokens, micro-batches cut by length ({drawn} in the order drawn)")
    return lines


def unmeant(recipe: Recipe, plan: Plan, samples: int, steps: int) -> list[str]:
    """What works, and is hardly what somebody wants of a run of ``steps`` on so many ``samples``; a line each."""
    found, batch, warmup = [], plan.first_cut.batch_size, recipe.optim.warmup_steps
    shares = share_of(recipe.memory, 0, plan.world_size)[1]
    if batch > samples:
        found.append(f"batch_size={batch} is more than the {samples:,} samples there are: every step takes all of them")
    if 0 < steps <= warmup:
        lr = f"the learning rate does not come to optim.lr={recipe.optim.lr:g}"
        found.append(f"optim.warmup_steps={warmup} is no less than the {steps:,} steps of the run: {lr}")
    if min(batch, samples) < shares:
        idle = f"{shares - min(batch, samples)} of {shares} have nothing to do in any step"
        found.append(f"batch_size={batch} has fewer samples than ranks: {idle}; use fewer of them, or a larger batch")
    if plan.memory.cpu_offload == "optimizer" and plan.strategy == "ddp" and shares > 1:
        found.append("cpu_offload optimizer with ddp: each rank has all masters; memory.strategy fsdp shares them")
    if recipe.run.evaluate and recipe.data.val is None and recipe.data.test is None:
        fix = "--data.val_fraction 0.1 holds out a tenth of the training set"
        fix = fix if hasattr(recipe.data, "val_fraction") else f"set {type(recipe.data).__name__}.val in prepare()"
        found.append(f"nothing is evaluated: there is neither a validation set nor a test set; {fix}")
    return found


def padding_shares(windows: Windows) -> tuple[float, float]:
    """The share of padding in the first epoch: with batches cut in the order drawn, and cut by length."""
    assert windows.lengths is not None
    shares = []
    for cut in (dataclasses.replace(windows, lengths=None), windows):
        pieces = [piece for step in range(windows.steps(0)) for piece in cut.pieces(0, step)]
        shares.append(padding_share(pieces, windows.lengths))
    return shares[0], shares[1]


# Whether all machines see the same run directory: found out before training, not when the first checkpoint fails.

PREFIX = ".shared-"
SECONDS_TO_SEE = 10.0  # how long a file may take to be seen on another machine
SECONDS_BETWEEN_LOOKS = 0.2


def require_shared(fabric: Fabric, run_dir: Path) -> None:
    """Have the first rank leave a file in ``run_dir`` that one rank of every other machine looks for and answers; a
    refusal, on all ranks alike, names the machines that see another directory, or cannot write to it. A collective."""
    on_other_machine = fabric.local_rank == 0 and fabric.global_rank != 0
    if not any(from_all(fabric, on_other_machine)):
        return
    token = on_first(fabric, partial(_leave, run_dir))
    problems = from_all(fabric, _answer(run_dir, token) if on_other_machine else None)
    if fabric.global_rank == 0:
        for path in run_dir.glob(f"{token}*"):
            path.unlink(missing_ok=True)
    found = "; ".join(problem for problem in problems if problem is not None)
    here = on_first(fabric, socket.gethostname)
    require(
        not found,
        f"run.dir={run_dir} is not one directory for all machines: {found}, where {here} has made it: choose a "
        "directory on a file system that all of them share",
    )


def _leave(run_dir: Path) -> str:
    """Make the file; its name."""
    token = PREFIX + secrets.token_hex(8)
    problem = _touch(run_dir / token)
    require(problem is None, f"run.dir={run_dir} cannot be written to ({problem}): choose another directory")
    return token


def _answer(run_dir: Path, token: str) -> str | None:
    """Look for the file, and leave one beside it; what is wrong, if anything is."""
    here, until = socket.gethostname(), time.monotonic() + SECONDS_TO_SEE
    while not _is_seen(run_dir, token):
        if time.monotonic() > until:
            return f"{here} does not see what the first rank wrote there"
        time.sleep(SECONDS_BETWEEN_LOOKS)
    problem = _touch(run_dir / f"{token}-{here}")
    return None if problem is None else f"{here} cannot write there ({problem})"


def _touch(path: Path) -> str | None:
    try:
        path.touch()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _is_seen(run_dir: Path, token: str) -> bool:
    """NFS asks its server when a directory is listed; a name that was not there it may believe missing for 30 s."""
    with suppress(OSError):
        return token in os.listdir(run_dir)
    with suppress(OSError):
        os.listdir(run_dir.parent)
    return False
