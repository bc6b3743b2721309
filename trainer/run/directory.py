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
from lightning.fabric import Fabric
from torch import Tensor, nn

from trainer.checkpoint.export import save_model
from trainer.checkpoint.folder import CheckpointFolder
from trainer.checkpoint.manifest import MOST_BYTES
from trainer.checkpoint.seal import sealed
from trainer.engine.events import Counters
from trainer.engine.loop import count_steps
from trainer.engine.window import Windows, padding_share
from trainer.errors import RecipeError, RunError, Stopped, require
from trainer.memory.plan import idle_ranks, plan_warnings
from trainer.memory.stack import Stack
from trainer.recipe import Recipe
from trainer.report.loggers import close_loggers, make_loggers
from trainer.report.metrics import EvaluationResult, classification_report
from trainer.report.plots import plot_curves, plot_memory
from trainer.report.progress import warn
from trainer.report.summary import Summary, summary_text, versions
from trainer.run.listeners import Stopwatch
from trainer.run.session import Session, from_all, from_first, on_first
from trainer.settings import dump_recipe
from trainer.system.files import default_folder, make_folder, read_object, staged_folder, write_atomic
from trainer.system.redact import redact
from trainer.system.reports import cause
from trainer.system.text import escaped


def with_run_dir(recipe: Recipe, fabric: Fabric, source: str | None) -> Recipe:
    """The recipe with the directory of this run, which is there then, the same on every rank. A collective.

    Raises:
        RecipeError: on all ranks alike, when it holds a run and that is not resumed, or cannot be made or written to.
    """
    wanted, resume = recipe.run.dir, recipe.run.resume
    require(
        resume != "auto" or wanted is not None, "run.resume=auto needs run.dir, the directory of the run to go on with"
    )
    run_dir = Path(from_first(fabric, str(Path(wanted or default_folder(source)).absolute())))
    on_first(fabric, partial(_make, run_dir, resume))
    require_shared(fabric, run_dir)
    return recipe.replace(run=dataclasses.replace(recipe.run, dir=str(run_dir)))


def _make(run_dir: Path, resume: str) -> None:
    make_folder("run.dir", run_dir)
    require(
        not (run_dir / "recipe.yaml").exists() or _is_resumed(run_dir, resume),
        f"run.dir={run_dir} already holds a run: go on with it by --run.resume auto, or choose another directory",
    )
    require(os.access(run_dir, os.W_OK), f"run.dir={run_dir} is not writable: choose another directory")


@contextmanager
def written_to(run_dir: Path) -> Iterator[None]:
    """Say of an error of the disk below ``run_dir`` what it was about, and what stays.

    Raises:
        RunError: naming the file.
    """
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


def _is_resumed(run_dir: Path, resume: str) -> bool:
    inside = Path(os.path.realpath(resume)).is_relative_to(os.path.realpath(run_dir))
    return resume == "auto" or (resume != "none" and inside)


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
    path = Path(str(session.recipe.run.dir)) / "status.json"
    before, plan = read_object(path, MOST_BYTES).get("attempt"), session.plan
    cut = {"batch_size": plan.first_cut.batch_size, "micro_batch_size": plan.first_cut.micro_batch_size}
    content = {
        "plan": plan.describe(),
        "cut": None if isinstance(session.recipe.accumulate, dict) else cut,  # each epoch has one of its own
        "attempt": (before if type(before) is int else 0) + begins,
        "status": status,
    }
    write_atomic(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n", sync_folder=False)


def write_recipe(session: Session, run_dir: Path, source: str | None) -> None:
    """Write ``recipe.yaml``, so that it can be repeated and evaluated from anywhere.

    Without the run directory, for a repetition is another run, and with paths that do not depend on where it starts.
    """
    recipe = session.recipe
    run = dataclasses.replace(recipe.run, dir=None, resume="none", allow_change=[])
    text = dump_recipe(with_absolute_paths(recipe.replace(run=run)), source)
    write_atomic(run_dir / "recipe.yaml", sealed(text))


def with_absolute_paths(recipe: Recipe) -> Recipe:
    """The recipe with every path in its model and data that exists as seen from the root."""
    return recipe.replace(model=_absolute(recipe.model), data=_absolute(recipe.data))


def _absolute(part: Any) -> Any:
    """A model or dataset whose text fields that name an existing file or folder name it from the root."""
    texts = {field.name: getattr(part, field.name) for field in dataclasses.fields(part) if field.init}
    named = {name: text for name, text in texts.items() if name != "name" and not name.endswith("_column")}
    paths = {name: text for name, text in named.items() if isinstance(text, str) and text and _is_here(text)}
    return dataclasses.replace(part, **{name: str(Path(text).absolute()) for name, text in paths.items()})


def _is_here(text: str) -> bool:
    """Whether it names something: a file, a folder, or files by a pattern within a folder."""
    return Path(text).exists() or ("*" in text and Path(text).parent.is_dir())


def open_loggers(session: Session, run_dir: Path, resumed_at: int) -> list[Any]:
    """The loggers that the recipe asks for, on the first rank; none on the others.

    Args:
        session: launched.
        run_dir: where they write.
        resumed_at: the step that the run goes on from, 0 for a new one.
    """
    if not session.is_first:
        return []
    names = session.recipe.model.loss_names
    extra = [f"loss_{name}" for name in names] if len(names) > 1 else []
    config = {field.name: _shown(getattr(session.recipe, field.name)) for field in dataclasses.fields(session.recipe)}
    return make_loggers(session.recipe.run.logger, run_dir, config, extra, resumed_at)


def _shown(part: Any) -> Any:
    """A field of a recipe as the loggers keep it: sections as text, without their secrets."""
    return redact(str(part)) if dataclasses.is_dataclass(part) else part


def read_history(run_dir: Path) -> bytes:
    """``metrics.csv`` as it is on disk; empty when nothing was logged yet."""
    path = run_dir / "metrics.csv"
    return path.read_bytes() if path.exists() else b""


def restore_history(run_dir: Path, history: bytes) -> None:
    """Make ``metrics.csv`` what it was at a checkpoint: the steps after it are taken, and logged, again."""
    if history:
        write_atomic(run_dir / "metrics.csv", history)
    else:
        (run_dir / "metrics.csv").unlink(missing_ok=True)


def summarise(
    session: Session,
    status: str,
    counters: Counters,
    stopwatch: Stopwatch,
    result: EvaluationResult | None,
    recoveries: int,
    all_ranks: bool,
) -> Summary:
    """What ``summary.json`` will hold; a collective if ``all_ranks`` of the run are known to come here."""
    recipe, plan = session.recipe, session.plan
    final_split = "val" if recipe.data.test is None else "test"
    memory = session.monitor.report(all_ranks)
    if session.forecast is not None:
        memory |= session.forecast.beside(memory)
    return Summary(
        status=status,
        steps=counters.step,
        skipped_steps=counters.skipped_steps,
        recoveries=recoveries,
        world_size=plan.world_size,
        launcher=session.world.launcher,
        nodes=session.world.nodes,
        backend=session.world.backend,
        batch_size=plan.first_cut.batch_size,
        micro_batch_size=plan.first_cut.micro_batch_size,
        accumulate=recipe.accumulate if isinstance(recipe.accumulate, dict) else plan.first_cut.accumulate,
        metrics={final_split: {"accuracy": result.accuracy, "loss": result.loss}} if result else {},
        memory=memory,
        samples_per_second=stopwatch.samples_per_second,
        seconds=stopwatch.seconds,
        versions=versions(),
    )


def write_results(
    session: Session,
    run_dir: Path,
    module: nn.Module,
    state: Mapping[str, Tensor],
    summary: Summary,
    result: EvaluationResult | None,
    loggers: list[Any],
) -> None:
    """Write what there is to write; of a run that failed, its figures and no model."""
    close_loggers(loggers, summary.status)
    if summary.status == "finished":
        with staged_folder(run_dir / "model") as folder:
            save_model(session.recipe.model, module, folder, state)
    write_atomic(run_dir / "summary.json", summary.to_json())  # after the model, which "finished" promises
    if result is not None:
        write_atomic(run_dir / "classification_report.txt", report_text(result, session.recipe.data) + "\n")
    try:
        if (run_dir / "metrics.csv").exists():
            plot_curves(run_dir / "metrics.csv", run_dir / "curves.png")
        plot_memory(summary.memory, session.monitor.history, run_dir / "memory.png")
    except OSError:
        raise
    except Exception as error:  # figures that no axis can hold: a picture is not the end of a run
        warn(f"the figures of this run cannot be drawn ({cause(error)}): they are in metrics.csv and summary.json")


def print_results(session: Session, run_dir: Path, summary: Summary, result: EvaluationResult | None) -> None:
    """Print the report and the summary."""
    if result is not None:
        print(report_text(result, session.recipe.data))
    print(summary_text(summary, run_dir))


def report_text(result: EvaluationResult, data: Any) -> str:
    """The classification report, or the losses of a model that does not classify."""
    if result.confusion is None:
        return "\n".join(f"{escaped(name)} {value:.6f}" for name, value in result.losses.items())
    names = getattr(data, "class_names", None)
    return classification_report(result.confusion, None if names is None else [escaped(name) for name in names])


def describe_run(session: Session, stack: Stack, windows: Windows) -> list[str]:
    """The plan, the size of the model and the run and, for texts, what cutting by length saves: a line each."""
    parameters = sum(p.numel() for p in stack.module.parameters())
    trained = sum(p.numel() for p in stack.module.parameters() if p.requires_grad)
    steps = count_steps(windows, session.recipe.epochs, session.recipe.max_steps)
    frozen = f" ({trained:,} trained)" if trained < parameters else ""
    blocks = f" (blocks: {stack.blocks})" if stack.blocks else ""
    name = type(session.recipe.model).__name__
    lines = [
        f"plan: {session.plan.describe()} on {_device_name(session.fabric.device)}",
        f"{name}: {parameters:,} parameters{frozen}{blocks}; {windows.size:,} samples, {steps:,} steps",
    ]
    on_gpu = session.fabric.device.type == "cuda"
    warnings = [*plan_warnings(session.recipe, on_gpu), idle_ranks(session.plan), stack.warning]
    lines += [f"warning: {text}" for text in warnings if text is not None]
    if session.forecast is not None:
        lines += session.forecast.lines()
    if windows.lengths is not None:
        before, after = padding_shares(windows)
        lines.append(
            f"padding: {100 * after:.1f} % of the tokens, micro-batches cut by length "
            f"({100 * before:.1f} % in the order drawn)"
        )
    return lines


def padding_shares(windows: Windows) -> tuple[float, float]:
    """The share of padding in the first epoch: with batches cut in the order drawn, and cut by length."""
    assert windows.lengths is not None
    unsorted = dataclasses.replace(windows, lengths=None)
    shares = []
    for cut in (unsorted, windows):
        pieces = [piece for step in range(windows.steps(0)) for piece in cut.pieces(0, step)]
        shares.append(padding_share(pieces, windows.lengths))
    return shares[0], shares[1]


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


# Whether all machines see the same run directory: found out before training, not when the first checkpoint fails.

PREFIX = ".shared-"
SECONDS_TO_SEE = 10.0
"""How long a file may take to be seen on another machine."""

SECONDS_BETWEEN_LOOKS = 0.2


def require_shared(fabric: Fabric, run_dir: Path) -> None:
    """Have the first rank leave a file in ``run_dir`` that every other machine looks for and answers. A collective.

    One rank of each machine looks; on a single machine there is nothing to find out.

    Raises:
        RecipeError: on all ranks alike, naming the machines that see another directory, or cannot write to it.
    """
    is_first = fabric.global_rank == 0
    on_other_machine = fabric.local_rank == 0 and not is_first
    if not any(from_all(fabric, on_other_machine)):
        return
    token = on_first(fabric, partial(_leave, run_dir))
    problem = _answer(run_dir, token) if on_other_machine else None
    problems = from_all(fabric, problem)
    if is_first:
        for path in run_dir.glob(f"{token}*"):
            path.unlink(missing_ok=True)
    found = [problem for problem in problems if problem is not None]
    here = on_first(fabric, socket.gethostname)
    require(
        not found,
        f"run.dir={run_dir} is not one directory for all machines: {'; '.join(found)}, where {here} has made it: "
        "choose a directory on a file system that all of them share",
    )


def _leave(run_dir: Path) -> str:
    """Make the file; its name."""
    token = PREFIX + secrets.token_hex(8)
    try:
        (run_dir / token).touch()
    except OSError as error:
        raise RecipeError(
            f"run.dir={run_dir} cannot be written to ({error.strerror}): choose another directory"
        ) from error
    return token


def _answer(run_dir: Path, token: str) -> str | None:
    """Look for the file, and leave one beside it; what is wrong, if anything is."""
    here = socket.gethostname()
    until = time.monotonic() + SECONDS_TO_SEE
    while not _is_seen(run_dir, token):
        if time.monotonic() > until:
            return f"{here} does not see what the first rank wrote there"
        time.sleep(SECONDS_BETWEEN_LOOKS)
    try:
        (run_dir / f"{token}-{here}").touch()
    except OSError as error:
        return f"{here} cannot write there ({error.strerror})"
    return None


def _is_seen(run_dir: Path, token: str) -> bool:
    """NFS asks its server when a directory is listed; a name that was not there it may believe missing for 30 s."""
    with suppress(OSError):
        return token in os.listdir(run_dir)
    with suppress(OSError):
        os.listdir(run_dir.parent)
    return False
