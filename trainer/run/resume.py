"""Resuming from a checkpoint: select and verify it, check that it fits the run, and restore all state."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.checkpoint.folder import CheckpointFolder, is_checkpoint
from trainer.checkpoint.manifest import (
    MAX_JSON_BYTES,
    STATE,
    CorruptCheckpointError,
    Manifest,
    UnknownFormatError,
    find_corruption,
    folder_name,
    read_manifest,
)
from trainer.checkpoint.tensor_parts import PartsReader
from trainer.checkpoint.writer import HISTORY, done_marker
from trainer.contract import Model, Streamable, capability, without_weights
from trainer.engine.loop import Engine
from trainer.engine.memory_rehearsal import longest_window, rehearse
from trainer.errors import RecipeError, RunError, require
from trainer.report.progress import warn
from trainer.run.collectives import all_gather_json, broadcast_json, run_on_rank_zero
from trainer.run.directory import write_status
from trainer.run.identity import RunIdentity, require_same_base, require_same_run
from trainer.run.session import Session
from trainer.run.state import RunState, TensorState
from trainer.system.files import read_json_object, read_regular, staged_folder, write_atomic
from trainer.weights.streaming import default_dtype

FOLDER = "checkpoints"


class ResumeState:
    """The checkpoint from which a run resumes, if any, and the folder of its checkpoints. All ranks create it together.
    Raise RecipeError if no checkpoint is valid, or the chosen one belongs to another recipe, dataset or tokenizer."""

    def __init__(self, session: Session) -> None:
        say, fabric = session.progress.notice, session.fabric
        self.session, self.folder = session, CheckpointFolder(session.run_dir / FOLDER)
        run_on_rank_zero(fabric, self.folder.require_not_linked)
        for problem in run_on_rank_zero(fabric, self.folder.clean):
            if session.is_first:
                warn(problem)
        self.found, problems = self._find()
        found = self.found
        self.step = found.manifest.step if found is not None else 0
        self.origin = RunIdentity(session, found.manifest.run if found is not None else None)
        if found is not None:
            if session.is_first:
                for problem in problems.values():
                    session.progress.warning(f"{problem}; resuming from {found.path.name} instead")
            same = partial(require_same_run, found.path, found.manifest, self.origin, session.recipe.run.allow_change)
            for line in run_on_rank_zero(fabric, same):  # other ranks need not compute a fingerprint
                say(f"changed since the checkpoint: {line}")
            if session.is_first:  # only after all checks: now the run certainly resumes from this checkpoint
                self._set_aside(found.path, {path.name for path in problems})
            say(f"resuming from {found.path}, after step {found.manifest.step:,}")
        elif session.recipe.run.resume == "auto":
            run_on_rank_zero(fabric, self._refuse_finished)
            say(f"no checkpoint in {self.folder.path}: starting from step 0")

    def _find(self) -> tuple[ValidCheckpoint | None, dict[Path, str]]:
        """Return the named or newest valid checkpoint, and the faults of newer ones. All ranks share the hashing."""
        wanted, problems = self.session.recipe.run.resume, dict[Path, str]()
        if wanted == "none":
            return None, problems
        if wanted != "auto" and is_checkpoint(Path(wanted)):
            candidates = [Path(os.path.realpath(wanted))]  # a link such as latest has not the name of a checkpoint
        else:
            folder, path = self.folder, Path(wanted)
            if wanted != "auto":
                folder = CheckpointFolder(path / FOLDER if os.path.isdir(path / FOLDER) else path)
            names = broadcast_json(self.session.fabric, list(map(str, folder.newest_first())))
            require(names or wanted == "auto", f"run.resume={wanted}: there is no checkpoint in {folder.path}")
            candidates = list(map(Path, names))
        for path in candidates:
            if (problem := self._find_problem(path)) is None:
                return ValidCheckpoint(path, read_manifest(path)), problems
            problems[path] = problem
        if problems:
            rest = f" ({len(problems) - 1} older checkpoints are not valid either)" if len(problems) > 1 else ""
            fix = "set run.resume to another checkpoint, or start from scratch in another run.dir"
            raise RecipeError(f"{problems[candidates[0]]}{rest}: {fix}")
        return None, problems

    def _find_problem(self, path: Path) -> str | None:
        """Return what is wrong with a checkpoint, if anything. Each rank checks some of its files."""
        fabric = self.session.fabric
        error = find_corruption(path, fabric.global_rank, fabric.world_size)
        found = all_gather_json(fabric, (None if error is None else str(error), isinstance(error, UnknownFormatError)))
        problem, is_unknown = next((one for one in found if one[0] is not None), (None, False))
        require(not is_unknown, f"{problem}: resume with the version that wrote it")
        return problem

    def _set_aside(self, chosen: Path, corrupt: set[str]) -> None:
        """Rename this run's checkpoints newer than ``chosen``, so that none counts as the newest again. ``corrupt``
        holds the names of those that are corrupt."""
        if os.path.realpath(chosen.absolute().parent) != os.path.realpath(self.folder.path):
            return
        for path in self.folder.newest_first():
            if path.name == chosen.name:
                break
            aside = self.folder.rename_aside(path, "corrupt" if path.name in corrupt else "abandoned")
            self.session.progress.notice(f"{path.name} is newer than the resumed checkpoint: renamed to {aside.name}")

    def _refuse_finished(self) -> None:
        """Reject a finished run without checkpoints: training again would overwrite its results."""
        run_dir = self.session.run_dir
        status = read_json_object(run_dir / "summary.json", MAX_JSON_BYTES).get("status")
        cause = f"run.dir={run_dir} holds a finished run without a checkpoint to resume from"
        require(status != "finished", f"{cause}: choose another directory")

    def restore_tensors(self, tensors: TensorState) -> None:
        """Restore model and optimizer and, on the first rank, ``metrics.csv``.

        The steps after the checkpoint are repeated and logged again. The tensors come first, because they may be
        rejected; nothing is changed until then.
        """
        if self.found is not None:
            restore_tensors(self.found, tensors)
        if self.session.is_first:
            if history := self.found.history() if self.found is not None else b"":
                write_atomic(self.session.run_dir / HISTORY, history)
            else:
                (self.session.run_dir / HISTORY).unlink(missing_ok=True)

    def _copy_best(self, best: int) -> None:
        """Copy the checkpoint of the ``best`` step to this run's folder, if the run resumes from another run."""
        assert self.found is not None
        source, name = self.found.path.parent, folder_name(best)
        if self.session.is_first and best and not (self.folder.path / name).exists() and (source / name).is_dir():
            with staged_folder(self.folder.path / name) as folder:
                shutil.copytree(source / name, folder, dirs_exist_ok=True)

    def restore_best(self, best: int, tensors: TensorState) -> str | None:
        """Load the model weights of the checkpoint of the step ``best``, after training. A collective. Return ``None``,
        or the reason why the checkpoint cannot be used; nothing is changed then."""
        path = self.folder.path / folder_name(best)
        if (problem := self._find_problem(path)) is None:
            restore_weights(ValidCheckpoint(path, read_manifest(path)), tensors)
        return problem

    def restore(self, engine: Engine, state: RunState) -> None:
        """Restore everything else. The random generators are set again when training starts."""
        if self.found is None:
            return
        session, stepper, windows, manifest = self.session, engine.stepper, engine.windows, self.found.manifest
        with self.found.name_errors(STATE):
            nothing = {"figure": "", "score": 0.0, "step": 0, "since": 0}  # earlier versions saved no best
            saved = {"best": nothing} | self.found.read_json(STATE)
            require_same_structure(saved, state.common(engine))
            state.load_common(engine, saved)
            stated = {name: getattr(manifest, name) for name in ("step", "epoch", "step_in_epoch")}
            if any(getattr(engine.counters, name) != number for name, number in stated.items()):
                raise ValueError(f"{engine.counters}, where the manifest has {stated}")
        self._copy_best(state.best.step)
        if windows.halvings:  # evaluations use the same micro-batch size
            session.set_cut(windows.cut(engine.counters.epoch))
            write_status(session, "running")
        session.monitor.step = engine.counters.step
        if stepper.sync.overlaps_update and session.fabric.world_size > 2 and engine.counters.step > 1:
            # DDP reorders its buckets after the first gradients, and sums over 3 ranks depend on the buckets.
            rehearse(stepper, longest_window(windows, session.recipe.epochs))
        if manifest.world_size == session.fabric.world_size:
            rank, copies = session.fabric.global_rank, session.recipe.memory.tensor_parallel
            sign = done_marker(rank - rank % copies)  # ranks of the same samples share it
            with self.found.name_errors(sign):
                state.generators.load_state_dict(self.found.read_json(sign)["random"])


# Fill model and optimizer from a checkpoint; each rank reads only the parts that it holds.

MAX_HISTORY_BYTES = 2 * 2**30  # bytes of metrics.csv, which has some hundred bytes per step


@dataclass(frozen=True)
class ValidCheckpoint:
    """A checkpoint whose files match their hashes."""

    path: Path
    manifest: Manifest

    def read_json(self, name: str) -> Any:
        with self.name_errors(name):
            return json.loads(read_regular(self.path / name, MAX_JSON_BYTES))

    @contextmanager
    def name_errors(self, name: str) -> Iterator[None]:
        """Turn an error in unusable content into one that names the file ``name``: a valid hash proves no origin."""
        try:
            yield
        except (RecipeError, RunError):
            raise
        except (ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
            what = f"holds content that no run wrote: {type(error).__name__}: {error}"
            raise CorruptCheckpointError(f"{self.path / name} {what}") from error

    def history(self) -> bytes:
        """Return ``metrics.csv`` as it was when the checkpoint was saved."""
        with self.name_errors(HISTORY):
            content = read_regular(self.path / HISTORY, MAX_HISTORY_BYTES)
            content.decode()  # the logger could not append to a file that is not text
            return content

    def open(self) -> tuple[PartsReader, dict[str, Any]]:
        """Return a reader of the tensors that all ranks saved, and the saved numbers."""
        reader, values = PartsReader(self.path), dict[str, Any]()
        for rank in range(self.manifest.world_size):
            with self.name_errors(done_marker(rank)):
                sign = self.read_json(done_marker(rank))
                reader.add_index(sign["tensors"])
                values.update(sign["values"])
        return reader, values


def restore_tensors(found: ValidCheckpoint, tensors: TensorState) -> None:
    """Fill the model and the optimizer from the checkpoint. Every rank reads what it holds, from any saved shards.
    Raise RecipeError for tensors that are missing, have another shape, or are not needed."""
    reader, values = found.open()
    tensors.make_state({*reader.shapes, *values})
    parts, numbers, averages = tensors.parts(reader.shapes), tensors.scalars(), tensors.stack.averages
    has_averages = any(name.startswith("ema/") for name in reader.shapes)  # or optim.ema was changed, as allowed
    parts = {name: part for name, part in parts.items() if has_averages or not name.startswith("ema/")}
    # With several ranks, each holds only some parts of quantised state, so only parts missing here can be detected.
    wanted = {part.source_name or name for name, part in parts.items()}
    missing = sorted(wanted - reader.shapes.keys())
    surplus = sorted(name for name in reader.shapes.keys() - wanted if "@" not in name)
    surplus = [name for name in surplus if averages is not None or not name.startswith("ema/")]
    other_shards = f"{found.path}: the 8-bit or 4-bit optimizer state was quantised in other shards"
    fix = f"the memory.strategy and the number of ranks ({found.manifest.world_size}) with which it was saved"
    require(not any("@" in name for name in missing), f"{other_shards}: resume with {fix}")
    faults = {"missing": missing, "not needed": surplus}
    text = "; ".join(f"{fault}: {', '.join(names[:3])}" for fault, names in faults.items() if names)
    require(not text, f"{found.path} does not fit the model and its optimizer: {text}")
    with torch.no_grad():
        for name, part in parts.items():
            reader.read_into(part.source_name or name, part)
    with found.name_errors(done_marker(0)):
        for name, own in numbers.items():
            if isinstance(own, int | float) and not isinstance(values[name], int | float):
                raise TypeError(f"{name} is {values[name]!r}")
            numbers[name] = values[name]
    tensors.load_state_dict(numbers)
    if averages is not None and not has_averages:
        averages.begin()


@torch.no_grad()
def restore_weights(found: ValidCheckpoint, tensors: TensorState) -> None:
    """Fill only the model, from a checkpoint of the same run."""
    reader, _ = found.open()
    averages = tensors.stack.averages
    has_averages = any(name.startswith("ema/") for name in reader.shapes)
    for name, part in tensors.parts().items():
        if not name.startswith("optimizer/") and (has_averages or not name.startswith("ema/")):
            reader.read_into(part.source_name or name, part)
    tensors.load_state_dict({})
    if averages is not None and not has_averages:
        averages.begin()


def load_whole_model(found: ValidCheckpoint, model: Model) -> nn.Module:
    """Build the module of ``model`` in CPU memory and fill it from the checkpoint, with the saved dtypes."""
    reader, _ = found.open()
    require_same_base(found.path, found.manifest, model)
    own = next((reader.read(name).dtype for name in reader.shapes if name.startswith("weights/")), None)
    with default_dtype(own if found.manifest.base else None):
        module = (model if found.manifest.base else without_weights(model)).build()
    misfit = f"{found.path} does not fit the model"
    base = capability(model, Streamable).in_base(module) if found.manifest.base else ()
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
        require(shape == tuple(tensor.shape), f"{misfit}: {name} has shape {shape}, not {tuple(tensor.shape)}")
        with found.name_errors(next((file for file, _ in reader.parts[name]), done_marker(0))):
            tensor.data = reader.read(name)
    return module


def require_same_structure(found: Any, expected: Any, where: str = "it") -> None:
    """Check that parsed JSON has the types that this run would write: a matching hash does not prove who wrote it. The
    first item of a list in ``expected`` is the template for all; ``None`` accepts anything. Raise ValueError for the
    first mismatch."""
    if expected is None or (isinstance(expected, Mapping) and found is None):  # only one of the two runs has this part
        return
    if isinstance(expected, Mapping):
        fits = isinstance(found, dict) and found.keys() >= expected.keys()
        for key in expected if fits else ():
            require_same_structure(found[key], expected[key], f"{where}.{key}" if where != "it" else key)
    elif isinstance(expected, list):
        fits = isinstance(found, list)
        for item in found if fits and expected else ():
            require_same_structure(item, expected[0], f"an item of {where}")
    elif isinstance(expected, float):
        fits = type(found) in (int, float) and math.isfinite(found)
    else:
        fits = type(found) is type(expected) and (type(found) is not int or 0 <= found < 2**63)
    if not fits:
        raise ValueError(f"{where} is {str(found)[:40]!r}, not {type(expected).__name__}")
