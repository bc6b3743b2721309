"""Going on from a checkpoint: which one, whether it is what was saved, whether it fits, and putting everything back."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.checkpoint.folder import CheckpointFolder, is_checkpoint
from trainer.checkpoint.manifest import (
    MOST_BYTES,
    STATE,
    CorruptCheckpoint,
    Manifest,
    UnknownFormat,
    fault_of,
    folder_name,
    read_manifest,
)
from trainer.checkpoint.parts import PartsReader
from trainer.checkpoint.writer import HISTORY, sign_of
from trainer.contract import Model, Streamable, capability, without_weights
from trainer.engine.loop import Engine
from trainer.engine.rehearsal import rehearse
from trainer.errors import RecipeError, RunError, require
from trainer.report.progress import Progress, warn
from trainer.run.directory import write_status
from trainer.run.identity import Origin, require_same_base, require_same_run
from trainer.run.session import Session, from_all, from_first, on_first
from trainer.run.state import State, Tensors
from trainer.system.files import read_object, read_regular, staged_folder, write_atomic
from trainer.weights.streaming import default_dtype

FOLDER = "checkpoints"


class Resumption:
    """What a run goes on from, if it does, and what its own checkpoints say of it. Made by all ranks together, and
    refused when there is nothing valid to resume from, or it is of another recipe, dataset or tokenizer."""

    def __init__(self, session: Session, progress: Progress) -> None:
        say, fabric = progress.notice, session.fabric
        self.session, self.folder = session, CheckpointFolder(session.run_dir / FOLDER)
        on_first(fabric, self.folder.require_own)
        for problem in on_first(fabric, self.folder.clean):
            if session.is_first:
                warn(problem)
        self.found, problems = self._find()
        found = self.found
        self.step = found.manifest.step if found is not None else 0
        self.origin = Origin(session, found.manifest.run if found is not None else None)
        if found is not None:
            if session.is_first:
                for problem in problems.values():
                    progress.warning(f"{problem}; resuming from {found.path.name} instead")
            same = partial(require_same_run, found.path, found.manifest, self.origin, session.recipe.run.allow_change)
            for line in on_first(fabric, same):  # the others need make no fingerprint
                say(f"changed since the checkpoint: {line}")
            if session.is_first:  # only now is it certain that the run goes on from there
                self._set_aside(found.path, {path.name for path in problems}, say)
            say(f"resuming from {found.path}, after step {found.manifest.step:,}")
        elif session.recipe.run.resume == "auto":
            on_first(fabric, self._refuse_finished)
            say(f"no checkpoint in {self.folder.path}: starting from step 0")

    def _find(self) -> tuple[Found | None, dict[Path, str]]:
        """Named or newest valid checkpoint and faults of newer ones; the same on all ranks, which share the hashing."""
        wanted, problems = self.session.recipe.run.resume, dict[Path, str]()
        if wanted == "none":
            return None, problems
        if wanted != "auto" and is_checkpoint(Path(wanted)):
            candidates = [Path(os.path.realpath(wanted))]  # a link such as latest has another name than what it is
        else:
            folder, path = self.folder, Path(wanted)
            if wanted != "auto":
                folder = CheckpointFolder(path / FOLDER if os.path.isdir(path / FOLDER) else path)
            names = from_first(self.session.fabric, list(map(str, folder.newest_first())))
            require(bool(names) or wanted == "auto", f"run.resume={wanted}: there is no checkpoint in {folder.path}")
            candidates = list(map(Path, names))
        for path in candidates:
            problem = self._problem(path)
            if problem is None:
                return Found(path, read_manifest(path)), problems
            problems[path] = problem
        if problems:
            rest = f" (and {len(problems) - 1} older ones are not valid, either)" if len(problems) > 1 else ""
            fix = "give another checkpoint to run.resume, or start anew in another run.dir"
            raise RecipeError(f"{problems[candidates[0]]}{rest}: {fix}")
        return None, problems

    def _problem(self, path: Path) -> str | None:
        """What is wrong with a checkpoint, if anything: the files are dealt out to the ranks."""
        fabric = self.session.fabric
        error = fault_of(path, fabric.global_rank, fabric.world_size)
        found = from_all(fabric, (None if error is None else str(error), isinstance(error, UnknownFormat)))
        problem, is_unknown = next((one for one in found if one[0] is not None), (None, False))
        require(not is_unknown, f"{problem}: resume with the version that has written it")
        return problem

    def _set_aside(self, chosen: Path, corrupt: set[str], say: Callable[[str], None]) -> None:
        """Keep checkpoints after ``chosen`` from being taken for the newest again; ``corrupt`` are names."""
        if os.path.realpath(chosen.absolute().parent) != os.path.realpath(self.folder.path):
            return
        for path in self.folder.newest_first():
            if path.name == chosen.name:
                break
            aside = self.folder.set_aside(path, "corrupt" if path.name in corrupt else "abandoned")
            say(f"{path.name} is after the checkpoint that is resumed: renamed to {aside.name}")

    def _refuse_finished(self) -> None:
        """Training all of it again would write over what a finished run has left."""
        run_dir = self.session.run_dir
        unfinished = read_object(run_dir / "summary.json", MOST_BYTES).get("status") != "finished"
        what = "holds a run that has finished, and no checkpoint to go on from: choose another directory"
        require(unfinished, f"run.dir={run_dir} {what}")

    def restore_tensors(self, tensors: Tensors) -> None:
        """Put model and optimizer back, and on the first rank ``metrics.csv``: the steps after the checkpoint are
        taken, and logged, again. The tensors first, for they may be refused: nothing is changed until then."""
        if self.found is not None:
            restore_tensors(self.found, tensors)
        if self.session.is_first:
            if history := self.found.history() if self.found is not None else b"":
                write_atomic(self.session.run_dir / HISTORY, history)
            else:
                (self.session.run_dir / HISTORY).unlink(missing_ok=True)

    def _take_along(self, best: int, is_first: bool) -> None:
        """Copy the checkpoint of the ``best`` step to this run's own, where another run's is gone on with."""
        assert self.found is not None
        source, name = self.found.path.parent, folder_name(best)
        if is_first and best and not (self.folder.path / name).exists() and (source / name).is_dir():
            with staged_folder(self.folder.path / name) as folder:
                shutil.copytree(source / name, folder, dirs_exist_ok=True)

    def restore_best(self, best: int, tensors: Tensors) -> str | None:
        """Put the model, for which training is over, into the state of the checkpoint of the step ``best``; why not, if
        so, and nothing is changed then. A collective."""
        path = self.folder.path / folder_name(best)
        problem = self._problem(path)
        if problem is None:
            restore_weights(Found(path, read_manifest(path)), tensors)
        return problem

    def restore(self, engine: Engine, state: State) -> None:
        """Put everything else back; the random generators when training starts."""
        if self.found is None:
            return
        session, stepper, windows, manifest = self.session, engine.stepper, engine.windows, self.found.manifest
        with self.found.explained(STATE):
            nothing = {"figure": "", "score": 0.0, "step": 0, "since": 0}  # earlier versions knew of no best
            saved = {"best": nothing} | self.found.json(STATE)
            require_alike(saved, state.common(engine))
            state.load_common(engine, saved)
            stated = {name: getattr(manifest, name) for name in ("step", "epoch", "step_in_epoch")}
            if any(getattr(engine.counters, name) != number for name, number in stated.items()):
                raise ValueError(f"{engine.counters}, where the manifest has {stated}")
        self._take_along(state.best.step, session.is_first)
        if windows.halvings:  # evaluations are cut as small
            session.recut(windows.cut(engine.counters.epoch))
            write_status(session, "running")
        session.monitor.step = engine.counters.step
        if stepper.sync.overlapped and session.fabric.world_size > 2 and engine.counters.step > 1:
            # DDP orders its buckets anew after the first gradients, and sums of three depend on what shares a bucket.
            rehearse(stepper, windows.longest(session.recipe.epochs))
        if manifest.world_size == session.fabric.world_size:
            rank = session.fabric.global_rank
            sign = sign_of(rank - rank % session.recipe.memory.tensor_parallel)  # alike where samples are alike
            with self.found.explained(sign):
                state.generators.load_state_dict(self.found.json(sign)["random"])


# Model and optimizer filled from a checkpoint, each rank with what it holds.

MOST_HISTORY = 2 * 2**30  # bytes of metrics.csv: some hundred a step


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
        """Say that the file ``name`` is what cannot be used. Its hash is right, but anybody can write a manifest."""
        try:
            yield
        except (RecipeError, RunError):
            raise
        except (ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
            what = f"holds something else than a run has written: {type(error).__name__}: {error}"
            raise CorruptCheckpoint(f"{self.path / name} {what}") from error

    def history(self) -> bytes:
        """``metrics.csv`` as it was then."""
        with self.explained(HISTORY):
            content = read_regular(self.path / HISTORY, MOST_HISTORY)
            content.decode()  # what is no text could not be gone on with
            return content

    def open(self) -> tuple[PartsReader, dict[str, Any]]:
        """A reader of the tensors of all ranks that saved it, and the numbers beside them."""
        reader, values = PartsReader(self.path), dict[str, Any]()
        for rank in range(self.manifest.world_size):
            with self.explained(sign_of(rank)):
                sign = self.json(sign_of(rank))
                reader.add(sign["tensors"])
                values.update(sign["values"])
        return reader, values


def restore_tensors(found: Found, tensors: Tensors) -> None:
    """Fill the model and the optimizer from the checkpoint: every rank reads what it holds, wherever that was saved; a
    ``RecipeError`` names the tensor that is missing, of another shape, or not needed."""
    reader, values = found.open()
    tensors.make_state({*reader.shapes, *values})
    parts, numbers, averages = tensors.parts(reader.shapes), tensors.numbers(), tensors.stack.averages
    has_averages = any(name.startswith("ema/") for name in reader.shapes)  # or optim.ema was changed, as allowed
    parts = {name: part for name, part in parts.items() if has_averages or not name.startswith("ema/")}
    # Under several ranks each holds some parts of quantised state, so only what is missing here can be told of that.
    wanted = {part.of or name for name, part in parts.items()}
    missing = sorted(wanted - reader.shapes.keys())
    surplus = sorted(name for name in reader.shapes.keys() - wanted if "@" not in name)
    surplus = [name for name in surplus if averages is not None or not name.startswith("ema/")]
    require(
        not any("@" in name for name in missing),
        f"{found.path}: the optimizer's state of 8 or 4 bits was quantised in other shards: resume with the "
        f"memory.strategy and the number of ranks ({found.manifest.world_size}) that it was saved with",
    )
    faults = {"missing": missing, "left over": surplus}
    text = "; ".join(f"{fault}: {', '.join(names[:3])}" for fault, names in faults.items() if names)
    require(not text, f"{found.path} does not fit the model and its optimizer: {text}")
    with torch.no_grad():
        for name, part in parts.items():
            reader.read_into(part.of or name, part)
    with found.explained(sign_of(0)):
        for name, own in numbers.items():
            if isinstance(own, int | float) and not isinstance(values[name], int | float):
                raise TypeError(f"{name} is {values[name]!r}")
            numbers[name] = values[name]
    tensors.load_state_dict(numbers)
    if averages is not None and not has_averages:
        averages.begin()


@torch.no_grad()
def restore_weights(found: Found, tensors: Tensors) -> None:
    """Fill the model alone, likewise, from a checkpoint of the same run."""
    reader, _ = found.open()
    averages = tensors.stack.averages
    has_averages = any(name.startswith("ema/") for name in reader.shapes)
    for name, part in tensors.parts().items():
        if not name.startswith("optimizer/") and (has_averages or not name.startswith("ema/")):
            reader.read_into(part.of or name, part)
    tensors.load_state_dict({})
    if averages is not None and not has_averages:
        averages.begin()


def load_whole_model(found: Found, model: Model) -> nn.Module:
    """The module of ``model`` in host memory, with what the checkpoint has of it in the types saved there."""
    reader, _ = found.open()
    require_same_base(found.path, found.manifest, model)
    own = next((reader.read(name).dtype for name in reader.shapes if name.startswith("weights/")), None)
    with default_dtype(own if found.manifest.base else None):
        module = (model if found.manifest.base else without_weights(model)).build()
    base, misfit = (
        capability(model, Streamable).in_base(module) if found.manifest.base else (),
        f"{found.path} does not fit the model",
    )
    wanted: dict[str, Tensor] = {
        f"ema/{name}" if f"ema/{name}" in reader.shapes else f"weights/{name}": parameter
        for name, parameter in module.named_parameters()
        if name not in base
    }
    wanted |= {f"buffers/{name}": buffer for name, buffer in module.named_buffers()}
    missing = sorted(wanted.keys() - reader.shapes.keys())
    require(not missing, f"{misfit}: missing: {', '.join(missing[:3])}")
    for name, tensor in wanted.items():
        shape = reader.shapes[name]
        require(shape == tuple(tensor.shape), f"{misfit}: {name} is of shape {shape}, not {tuple(tensor.shape)}")
        with found.explained(next((file for file, _ in reader.parts[name]), sign_of(0))):
            tensor.data = reader.read(name)
    return module


def require_alike(found: Any, own: Any, where: str = "it") -> None:
    """Check that JSON is of the kinds that this run would write: a valid hash does not say who has made it. In ``own``
    a list's first item stands for all, ``None`` for anything. A ``ValueError`` names what is not."""
    if own is None or (isinstance(own, Mapping) and found is None):  # of a part that only one of the two runs has
        return
    if isinstance(own, Mapping):
        fits = isinstance(found, dict) and found.keys() >= own.keys()
        if fits:
            for key in own:
                require_alike(found[key], own[key], f"{where}.{key}" if where != "it" else key)
    elif isinstance(own, list):
        fits = isinstance(found, list)
        if fits and own:
            for item in found:
                require_alike(item, own[0], f"an item of {where}")
    elif isinstance(own, float):
        fits = type(found) in (int, float) and math.isfinite(found)
    else:
        fits = type(found) is type(own) and (type(found) is not int or 0 <= found < 2**63)
    if not fits:
        raise ValueError(f"{where} is {str(found)[:40]!r}, not {type(own).__name__}")
