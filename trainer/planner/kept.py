"""Predictions of before, given again while nothing that they came from has changed; a wrong one is worse than none.

All that a prediction comes from is in its key: the settings but those of the data, the plan, the target, the samples,
the module down to every attribute and buffer, the environment, what is installed, and the file of every module that is
loaded; of those that are loaded while it is traced the answer has a list. What cannot be described is not kept.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import pickle
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from trainer.data.cache import SETTLED_NS, read_note, write_note
from trainer.recipe import Recipe

VARIABLE = "TRAINER_PLANS"
AGAIN = f"predictions of before are given again, as nothing that they come from has changed ({VARIABLE}=off: none is)"
MOST_BYTES = 64_000_000  # of all that is kept; a prediction takes some 100 kB, for its timeline
OF_A_TERMINAL = ("_", "COLUMNS", "LINES", "OLDPWD", "PWD", "SHLVL", "TERM", "WINDOWID")  # where a command was typed


class Unknown(Exception):
    """Something that the prediction depends on cannot be described."""


class Known(Exception):
    """The answer is known: nothing needs to be traced."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self.answer = answer


@dataclasses.dataclass(frozen=True)
class Keeper:
    """Where predictions are kept, and when (in nanoseconds) this process had not read what a user may change."""

    root: Path
    since: int

    @classmethod
    def here(cls, since: int) -> Keeper | None:
        """In the user's cache, or in the folder that ``TRAINER_PLANS`` names; ``None`` where that is ``off``."""
        usual = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "trainer", "plans")
        wanted = os.environ.get(VARIABLE) or usual
        return None if wanted == "off" else cls(Path(wanted).expanduser().absolute(), since)


class Note:
    """What is known of one prediction, of a prepared recipe and whatever else is ``asked``, the samples among it."""

    def __init__(self, keeper: Keeper, recipe: Recipe, *asked: Any) -> None:
        settings = {field.name: getattr(recipe, field.name) for field in dataclasses.fields(recipe)}
        self.asked = ({**settings, "data": type(recipe.data)}, *asked, _surroundings())  # before a trace changes them
        self.keeper, self.path, self.files = keeper, keeper.root, set[str]()

    def look(self, module: nn.Module, capacity: int | None = None) -> None:
        """Raise :class:`Known` if the prediction for this module is; but not where the allocator must be asked how it
        does with ``capacity`` bytes."""
        try:
            self.files = _files()
            key = _digest((self.asked, module, self._stamps(self.files)))
        except Exception:  # whatever a class of anybody's does when it is pickled
            return
        self.path = self.keeper.root / f"{key}.json"
        known = read_note(self.path)
        with suppress(OSError, Unknown, LookupError, TypeError):
            if (known["key"], known["later"]) == (key, self._stamps(stamp[0] for stamp in known["later"])):
                answer, too_much = known["answer"], capacity is not None and known["answer"]["reserved"] > capacity
                if not too_much or answer["allocated"] > (capacity or 0):
                    os.utime(self.path)
                    notes = [*answer["notes"], AGAIN]
                    raise Known({**answer, "notes": notes, "retries": None if too_much else 0})

    def write(self, answer: dict[str, Any]) -> None:
        """Keep the answer, unless a file has changed since this process may have read it."""
        with suppress(OSError, Unknown):
            if self.path != self.keeper.root and self._stamps(self.files):
                later = self._stamps(_files() - self.files)
                write_note(self.path, {"key": self.path.stem, "later": later, "answer": answer})
                _tidy(self.keeper.root)

    def _stamps(self, files: Iterable[str]) -> list[list[Any]]:
        """Path, size, times of writing and of change and inode of each; a path alone is of a module that is made up."""
        stamps: list[list[Any]] = []
        for path in sorted(files):
            found = os.stat(path) if os.path.lexists(path) else None
            if found and found.st_ctime_ns > self.keeper.since - SETTLED_NS:
                raise Unknown(f"{path} was changed after this process began, or just before")
            of = (found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino) if found else ()
            stamps.append([path, *of])
        return stamps


def _files() -> set[str]:
    if not getattr(sys.modules["__main__"], "__file__", None):
        raise Unknown("a program that is typed in has no file")
    paths = {vars(module).get("__file__") for module in list(sys.modules.values()) if hasattr(module, "__dict__")}
    return {os.path.abspath(path) for path in paths if path}


def _surroundings() -> Any:
    variables = sorted(pair for pair in os.environ.items() if pair[0] not in OF_A_TERMINAL and pair[0][:4] != "SSH_")
    folders = [folder for folder in sys.path if os.path.isdir(folder)]
    installed = [sorted(name for name in os.listdir(folder) if name.endswith("-info")) for folder in folders]
    version = (torch.__version__, torch.version.git_version, torch.backends.cudnn.version(), sys.version, *os.uname())
    modes = (torch.get_default_dtype(), torch.get_float32_matmul_precision(), torch.is_grad_enabled())
    return variables, sys.path, os.getcwd(), folders, installed, version, modes


_Pickler: Any = pickle._Pickler  # in Python: what it writes for texts and sets can be changed


class _Describer(_Pickler):
    """Writes the same bytes for what is the same in another process: sets in order, texts without identity."""

    dispatch: ClassVar[dict[type, Any]] = dict(_Pickler.dispatch)
    storages: dict[int, int]

    def memoize(self, value: Any) -> None:
        if not isinstance(value, str):
            super().memoize(value)

    def save_set(self, value: Any) -> None:
        self.save_reduce(type(value), (sorted(value, key=repr),), obj=value)

    dispatch[set] = dispatch[frozenset] = save_set

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        if type(value) not in (Tensor, nn.Parameter) or value.layout != torch.strided:
            raise Unknown(f"a {type(value).__name__}")
        shared = self.storages.setdefault(value.untyped_storage()._cdata, len(self.storages))
        real = None if value.is_meta else value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        layout = (*value.shape, *value.stride(), value.storage_offset(), shared)
        return type(value), (str(value.dtype), str(value.device), layout, value.requires_grad, vars(value), real)


def _digest(facts: Any) -> str:
    describer = _Describer(written := io.BytesIO(), protocol=5)
    describer.storages = {}
    describer.dump(facts)
    return hashlib.sha256(written.getbuffer()).hexdigest()


def _tidy(root: Path) -> None:
    """Remove what was used longest ago, until the rest is small enough; what else is in the folder is somebody's."""
    own = (path for path in root.iterdir() if re.fullmatch(r"[0-9a-f]{64}\.json", path.name) and path.is_file())
    found = sorted(((stat := path.stat()).st_mtime_ns, stat.st_size, path) for path in own)
    size = sum(bytes_ for _, bytes_, _ in found)
    while size > MOST_BYTES:
        _, bytes_, path = found.pop(0)
        path.unlink(missing_ok=True)
        size -= bytes_
