"""Going on from a checkpoint: which one, whether it is what was saved, whether it fits, and putting everything back."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.checkpoint.folder import CheckpointFolder, is_checkpoint
from trainer.checkpoint.manifest import MOST_BYTES, CorruptCheckpoint, Manifest, UnknownFormat, fault_of, read_manifest
from trainer.checkpoint.parts import Part, PartsReader
from trainer.checkpoint.writer import HISTORY, STATE, sign_of
from trainer.contract import Model
from trainer.engine.loop import Engine
from trainer.engine.rehearsal import rehearse
from trainer.errors import RecipeError, RunError, require
from trainer.report.progress import Progress, warn
from trainer.run.directory import restore_history, write_status
from trainer.run.identity import Origin, require_same_run
from trainer.run.session import Session, from_all, from_first, on_first
from trainer.run.state import State, Tensors
from trainer.system.files import read_object, read_regular

FOLDER = "checkpoints"


def find_checkpoint(session: Session, own: CheckpointFolder) -> tuple[Found | None, list[tuple[Path, str]]]:
    """The checkpoint that ``run.resume`` names, or the newest valid one; the same on all ranks, all of which call it.

    Every rank checks the hashes of a share of the files. A checkpoint that is not what was saved is passed over for the
    one before it.

    Args:
        session: launched.
        own: the checkpoints in the run directory.

    Returns:
        The checkpoint, and those that were passed over: what is wrong with each.

    Raises:
        RecipeError: when there is none to resume from, or none that is valid.
    """
    wanted = session.recipe.run.resume
    if wanted == "none":
        return None, []
    if wanted != "auto" and is_checkpoint(Path(wanted)):
        candidates = [Path(os.path.realpath(wanted))]  # a link such as latest has another name than what it is
    else:
        folder = own if wanted == "auto" else CheckpointFolder(_checkpoints_of(Path(wanted)))
        candidates = [Path(path) for path in from_first(session.fabric, list(map(str, folder.newest_first())))]
        require(bool(candidates) or wanted == "auto", f"run.resume={wanted}: there is no checkpoint in {folder.path}")
    problems: list[tuple[Path, str]] = []
    for path in candidates:
        problem = _problem(session, path)
        if problem is None:
            return Found(path, read_manifest(path)), problems
        problems.append((path, problem))
    if problems:
        raise RecipeError(_none_valid(problems))
    return None, []


def _checkpoints_of(path: Path) -> Path:
    return path / FOLDER if os.path.isdir(path / FOLDER) else path


def _none_valid(problems: list[tuple[Path, str]]) -> str:
    rest = f" (and {len(problems) - 1} older ones are not valid, either)" if len(problems) > 1 else ""
    return f"{problems[0][1]}{rest}: give another checkpoint to run.resume, or start anew in another run.dir"


def _problem(session: Session, path: Path) -> str | None:
    """What is wrong with the checkpoint ``path``, if anything: the files are dealt out to the ranks."""
    rank, size = session.fabric.global_rank, session.fabric.world_size
    error = fault_of(path, rank, size)
    found = from_all(session.fabric, (None if error is None else str(error), isinstance(error, UnknownFormat)))
    problem, is_unknown = next((one for one in found if one[0] is not None), (None, False))
    require(not is_unknown, f"{problem}: resume with the version that has written it")
    return problem


def _set_aside(own: CheckpointFolder, chosen: Path, corrupt: set[str], say: Callable[[str], None]) -> None:
    """Keep those after ``chosen`` in the run's own directory from being taken for the newest again.

    Args:
        corrupt: the names of those that are not what was saved.
    """
    if os.path.realpath(chosen.absolute().parent) != os.path.realpath(own.path):
        return
    for path in own.newest_first():
        if path.name == chosen.name:
            break
        aside = own.set_aside(path, "corrupt" if path.name in corrupt else "abandoned")
        say(f"{path.name} is after the checkpoint that is resumed: renamed to {aside.name}")


def _refuse_finished(run_dir: Path) -> None:
    """Training all of it again would write over what a finished run has left."""
    require(
        read_object(run_dir / "summary.json", MOST_BYTES).get("status") != "finished",
        f"run.dir={run_dir} holds a run that has finished, and no checkpoint to go on from: choose another directory",
    )


class Resumption:
    """What a run goes on from, if it does, and what its own checkpoints say of it. Made by all ranks together.

    Args:
        session: launched.
        run_dir: of this run.
        progress: tells the person.

    Raises:
        RecipeError: when there is nothing valid to resume from, or it is of another recipe, dataset or tokenizer.
    """

    def __init__(self, session: Session, run_dir: Path, progress: Progress) -> None:
        say = progress.notice
        self.session, self.folder = session, CheckpointFolder(run_dir / FOLDER)
        on_first(session.fabric, self.folder.require_own)
        for problem in on_first(session.fabric, self.folder.clean):
            if session.is_first:
                warn(problem)
        self.found, problems = find_checkpoint(session, self.folder)
        self.origin = Origin(session, self.found.manifest.run if self.found is not None else None)
        if self.found is not None:
            for _, problem in problems if session.is_first else []:
                progress.warning(f"{problem}; resuming from {self.found.path.name} instead")
            for line in on_first(session.fabric, partial(self._compare, self.found)):
                say(f"changed since the checkpoint: {line}")
            if session.is_first:  # only now is it certain that the run goes on from there
                _set_aside(self.folder, self.found.path, {path.name for path, _ in problems}, say)
            say(f"resuming from {self.found.path}, after step {self.found.manifest.step:,}")
        elif session.recipe.run.resume == "auto":
            on_first(session.fabric, partial(_refuse_finished, run_dir))
            say(f"no checkpoint in {self.folder.path}: starting from step 0")

    def _compare(self, found: Found) -> list[str]:
        """On the first rank: what is different now, a line each. The others need make no fingerprint."""
        return require_same_run(
            found.path,
            found.manifest,
            self.origin.recipe,
            self.origin.dataset,
            self.origin.tokenizer,
            self.session.recipe.run.allow_change,
            self.origin.data_files,
        )

    @property
    def step(self) -> int:
        """The last one that was taken before; 0 when training begins."""
        return self.found.manifest.step if self.found is not None else 0

    def restore_history(self, run_dir: Path) -> None:
        """Put ``metrics.csv`` back, on the first rank."""
        if self.session.is_first:
            restore_history(run_dir, self.found.history() if self.found is not None else b"")

    def restore_tensors(self, tensors: Tensors) -> None:
        """Put model and optimizer back. First, for it may refuse: nothing of an earlier run is changed until then."""
        if self.found is not None:
            restore_tensors(self.found, tensors)

    def restore(self, engine: Engine, state: State) -> None:
        """Put everything else back; the random generators when training starts."""
        if self.found is None:
            return
        session, stepper, windows = self.session, engine.stepper, engine.windows
        with self.found.explained(STATE):
            saved = self.found.json(STATE)
            require_alike(saved, state.common(engine))
            state.load_common(engine, saved)
            stated = {name: getattr(self.found.manifest, name) for name in ("step", "epoch", "step_in_epoch")}
            if any(getattr(engine.counters, name) != number for name, number in stated.items()):
                raise ValueError(f"{engine.counters}, where the manifest has {stated}")
        if windows.halvings:  # evaluations are cut as small
            session.recut(windows.cut(engine.counters.epoch))
            write_status(session, "running")
        session.monitor.step = engine.counters.step
        if stepper.sync.overlapped and session.fabric.world_size > 2 and engine.counters.step > 1:
            # DDP orders its buckets anew after the first gradients, and sums of three depend on what shares a bucket.
            rehearse(stepper, windows.longest(session.recipe.epochs))
        if self.found.manifest.world_size == session.fabric.world_size:
            sign = sign_of(session.fabric.global_rank)
            with self.found.explained(sign):
                state.generators.load_state_dict(self.found.json(sign)["random"])


# Model and optimizer filled from a checkpoint, each rank with what it holds.

MOST_HISTORY = 2 * 2**30
"""Bytes of ``metrics.csv``: some hundred a step."""


@dataclass(frozen=True)
class Found:
    """A checkpoint that was found to be what was saved."""

    path: Path
    manifest: Manifest

    def json(self, name: str) -> Any:
        """The content of one of its JSON files."""
        with self.explained(name):
            return json.loads(read_regular(self.path / name, MOST_BYTES))

    @contextmanager
    def explained(self, name: str) -> Iterator[None]:
        """Say that the file ``name`` is what cannot be used. Its hash is right, but anybody can write a manifest.

        Raises:
            CorruptCheckpoint: naming the file.
        """
        try:
            yield
        except (RecipeError, RunError):
            raise
        except (ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
            what = f"{type(error).__name__}: {error}"
            raise CorruptCheckpoint(
                f"{self.path / name} holds something else than a run has written: {what}"
            ) from error

    def history(self) -> bytes:
        """``metrics.csv`` as it was then."""
        with self.explained(HISTORY):
            content = read_regular(self.path / HISTORY, MOST_HISTORY)
            content.decode()  # what is no text could not be gone on with
            return content


def restore_tensors(found: Found, tensors: Tensors) -> None:
    """Fill the model and the optimizer from the checkpoint: every rank reads what it holds, wherever that was saved.

    Raises:
        RecipeError: naming the tensor that is missing, of another shape, or not needed.
    """
    reader, values = _open(found)
    tensors.make_state({*reader.shapes, *values})
    parts, numbers = tensors.parts(), tensors.numbers()
    _require_all(found, reader, parts)
    with torch.no_grad():
        for name, part in parts.items():
            reader.read_into(name, part)
    with found.explained(sign_of(0)):
        for name, own in numbers.items():
            if isinstance(own, int | float) and not isinstance(values[name], int | float):
                raise TypeError(f"{name} is {values[name]!r}")
            numbers[name] = values[name]
    tensors.load_state_dict(numbers)


def load_whole_model(found: Found, model: Model) -> nn.Module:
    """The module of ``model`` in host memory, with the weights and buffers of the checkpoint in the types saved there.

    Raises:
        RecipeError: naming what is missing.
    """
    reader, _ = _open(found)
    module = model.unloaded().build()
    wanted: dict[str, Tensor] = {f"weights/{name}": parameter for name, parameter in module.named_parameters()}
    wanted |= {f"buffers/{name}": buffer for name, buffer in module.named_buffers()}
    missing = sorted(wanted.keys() - reader.shapes.keys())
    require(not missing, f"{found.path} does not fit the model: missing: {', '.join(missing[:3])}")
    for name, tensor in wanted.items():
        require(
            reader.shapes[name] == tuple(tensor.shape),
            f"{found.path} does not fit the model: {name} is of shape {reader.shapes[name]}, not {tuple(tensor.shape)}",
        )
        with found.explained(reader.parts[name][0]["file"] if reader.parts.get(name) else sign_of(0)):
            tensor.data = reader.read(name)
    return module


def _open(found: Found) -> tuple[PartsReader, dict[str, Any]]:
    """A reader of the tensors of all ranks that saved the checkpoint, and the numbers beside them."""
    reader, values = PartsReader(found.path), dict[str, Any]()
    for rank in range(found.manifest.world_size):
        with found.explained(sign_of(rank)):
            sign = found.json(sign_of(rank))
            reader.add(sign["tensors"])
            values.update(sign["values"])
    return reader, values


def _require_all(found: Found, reader: PartsReader, wanted: Mapping[str, Part]) -> None:
    """Under several ranks each holds some parts of quantised state, so only what is missing here can be told."""
    missing = sorted(wanted.keys() - reader.shapes.keys())
    quantised = [name for name in missing if "@" in name]
    require(
        not quantised,
        f"{found.path}: the optimizer's state of 8 or 4 bits was quantised in other shards: resume with the "
        f"memory.strategy and the number of ranks ({found.manifest.world_size}) that it was saved with",
    )
    surplus = sorted(name for name in reader.shapes.keys() - wanted.keys() if "@" not in name)
    require(
        not missing and not surplus,
        f"{found.path} does not fit the model and its optimizer: "
        + "; ".join(
            f"{what}: {', '.join(names[:3])}" for what, names in (("missing", missing), ("left over", surplus)) if names
        ),
    )


def require_alike(found: Any, own: Any, where: str = "it") -> None:
    """Check that JSON is of the kinds that this run would write: a hash that fits does not say who has made it.

    Args:
        found: what was read.
        own: what this run would write in its place; of a list the first item stands for all, and ``None`` for anything.
        where: its name, for the message.

    Raises:
        ValueError: naming what is of another kind.
    """
    if own is None or (isinstance(own, Mapping) and found is None):  # of a part that only one of the two runs has
        return
    if isinstance(own, Mapping):
        fits = isinstance(found, dict) and found.keys() >= own.keys()
        for key in own if fits else ():
            require_alike(found[key], own[key], f"{where}.{key}" if where != "it" else key)
    elif isinstance(own, list):
        fits = isinstance(found, list)
        for item in found if fits and own else ():
            require_alike(item, own[0], f"an item of {where}")
    elif isinstance(own, float):
        fits = type(found) in (int, float) and math.isfinite(found)
    else:
        fits = type(found) is type(own) and (type(found) is not int or 0 <= found < 2**63)
    if not fits:
        raise ValueError(f"{where} is {str(found)[:40]!r}, not {type(own).__name__}")
