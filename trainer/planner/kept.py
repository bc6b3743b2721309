"""Predictions of before, given again while nothing that they came from has changed; a wrong one is worse than none.

A prediction is a function of code, settings, samples and surroundings. All of them are in its key: the settings of the
recipe but for its data, the plan, the target, the samples and the module that is traced, down to every attribute and
buffer; the environment; what is installed; and size, times and inode of the file of every module that is loaded. What
is loaded only while it is traced is noted beside the answer, and compared as well. What cannot be described (a local
function) or has no file (a notebook) is traced each time.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import pickle
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
MOST_BYTES = 64_000_000
"""Of all that is kept; what was used longest ago goes first. A prediction takes some 100 kB, for its timeline."""

OF_A_TERMINAL = ("_", "COLUMNS", "LINES", "OLDPWD", "PWD", "SHLVL", "TERM", "WINDOWID")
"""Variables that say where a command was typed, as do those that begin with ``SSH_``."""

Stamp = list[Any]  # [path, size, times of writing and of change, inode] of a file


class Unknown(Exception):
    """Something that the prediction depends on cannot be described."""


@dataclasses.dataclass(frozen=True)
class Keeper:
    """Where predictions are kept."""

    root: Path
    since: int  # nanoseconds since 1970: when this process had not yet read what a user may change

    @classmethod
    def here(cls, since: int) -> Keeper | None:
        """That of this user; ``None`` where ``TRAINER_PLANS=off``, which may also be a folder."""
        wanted = os.environ.get(VARIABLE) or os.path.join(
            os.environ.get("XDG_CACHE_HOME") or "~/.cache", "trainer", "plans"
        )
        return None if wanted == "off" else cls(Path(wanted).expanduser().absolute(), since)

    def note(self, recipe: Recipe, *asked: Any) -> Note:
        """The note on what was ``asked`` of a prepared recipe; of its data only the samples count that are among it."""
        settings = {field.name: getattr(recipe, field.name) for field in dataclasses.fields(recipe)}
        return Note(self, {**settings, "data": type(recipe.data)}, *asked)


class Note:
    """What is known of one prediction."""

    def __init__(self, keeper: Keeper, *asked: Any) -> None:
        self.keeper, self.path, self.key = keeper, None, ""
        self.asked = (*asked, _surroundings())  # before a trace changes them
        self.files: set[str] = set()

    def answer(self, module: nn.Module) -> dict[str, Any] | None:
        """What was kept of the prediction for this module, if anything was."""
        try:
            self.files = _files()
            self.key = _digest((self.asked, module, self._stamps(self.files)))
        except Exception:  # whatever a class of anybody's does when it is pickled: not kept
            return None
        self.path = self.keeper.root / f"{self.key}.json"
        known = read_note(self.path)
        with suppress(OSError, Unknown, LookupError, TypeError):
            if known["key"] == self.key and known["later"] == self._stamps(stamp[0] for stamp in known["later"]):
                os.utime(self.path)
                return {**known["answer"], "notes": [*known["answer"]["notes"], AGAIN]}
        return None

    def write(self, answer: dict[str, Any]) -> None:
        """Keep the answer, unless a file has changed since this process may have read it."""
        with suppress(OSError, Unknown):
            if self.path is not None and self._stamps(self.files) is not None:
                later = self._stamps(_files() - self.files)
                write_note(self.path, {"key": self.key, "later": later, "answer": answer})
                _tidy(self.keeper.root)

    def _stamps(self, files: Iterable[str]) -> list[Stamp]:
        stamps: list[Stamp] = []
        for path in sorted(files):
            try:
                found = os.stat(path)
            except FileNotFoundError:  # a module that another one has made up
                stamps.append([path])
                continue
            if found.st_ctime_ns > self.keeper.since - SETTLED_NS:
                raise Unknown(f"{path} was changed after this process began, or just before")
            stamps.append([path, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino])
        return stamps


def _files() -> set[str]:
    """Those of all modules that are loaded; an :class:`Unknown` where the program has none."""
    if not getattr(sys.modules["__main__"], "__file__", None):
        raise Unknown("the program is typed in")
    paths = {vars(module).get("__file__") for module in list(sys.modules.values()) if hasattr(module, "__dict__")}
    return {os.path.abspath(path) for path in paths if path}


def _surroundings() -> dict[str, Any]:
    """What code may ask for besides files of its own."""
    folders = [folder for folder in sys.path if os.path.isdir(folder)]
    installed = {folder: [name for name in os.listdir(folder) if name.endswith("-info")] for folder in folders}
    environment = {k: v for k, v in os.environ.items() if k not in OF_A_TERMINAL and not k.startswith("SSH_")}
    return {
        "environment": sorted(environment.items()),
        "path": [*sys.path, os.getcwd()],
        "installed": {folder: sorted(names) for folder, names in installed.items()},
        "system": (*os.uname(), sys.version),
        "torch": (torch.__version__, torch.version.git_version, torch.backends.cudnn.version()),
        "modes": (torch.get_default_dtype(), torch.get_float32_matmul_precision(), torch.is_grad_enabled()),
    }


class _Describer(pickle._Pickler):  # type: ignore[name-defined, misc]
    """Writes the same bytes for what is the same in another process: sets in order, texts without identity."""

    dispatch: ClassVar[dict[type, Any]] = dict(pickle._Pickler.dispatch)  # type: ignore[attr-defined]

    def __init__(self, file: Any) -> None:
        super().__init__(file, protocol=5)
        self.storages: dict[int, int] = {}

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
        content = None
        if not value.is_meta:
            content = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        shape = (tuple(value.shape), value.stride(), value.storage_offset(), shared)
        return type(value), (str(value.dtype), str(value.device), value.requires_grad, shape, vars(value), content)


def _digest(facts: Any) -> str:
    written = io.BytesIO()
    _Describer(written).dump(facts)
    return hashlib.sha256(written.getbuffer()).hexdigest()


def _tidy(root: Path) -> None:
    """Remove what was used longest ago, until the rest is small enough."""
    found = sorted(((stat := path.stat()).st_mtime_ns, stat.st_size, path) for path in root.iterdir())
    size = sum(bytes_ for _, bytes_, _ in found)
    for _, bytes_, path in found:
        if size <= MOST_BYTES:
            break
        path.unlink(missing_ok=True)
        size -= bytes_
