"""The identity of a run: what must not change between saving a checkpoint and resuming from it."""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Iterator, Mapping
from functools import cached_property, reduce
from pathlib import Path
from typing import Any

from trainer.checkpoint.manifest import Manifest, truncate
from trainer.contract import Model, Preparable, Streamable, capability
from trainer.data.fingerprint import data_files, fingerprint, tokenizer_hash
from trainer.errors import format_list, require
from trainer.memory.knobs import KNOBS
from trainer.recipe import Recipe
from trainer.run.collectives import broadcast_json
from trainer.run.session import Session
from trainer.settings import settings_of
from trainer.system.files import hash_file
from trainer.system.names import did_you_mean
from trainer.system.redact import redact_value
from trainer.system.status_line import show_status


class RunIdentity:
    """The id of the run (``run`` if it is resumed), the id of this start, and its recipe, data and tokenizer. Created
    by all ranks at the same time."""

    def __init__(self, session: Session, run: str | None = None) -> None:
        drawn = broadcast_json(session.fabric, [secrets.token_hex(8), secrets.token_hex(4)])
        self.run, self.attempt = run or drawn[0], drawn[1]
        self.recipe, self.defaults = flat_settings(session.recipe), default_settings(session.recipe)
        self._model, self._data = session.recipe.model, session.recipe.data
        self._tokenizer = capability(self._model, Preparable).tokenizer_or_none()

    @cached_property
    def dataset(self) -> str:
        """Fingerprint of the prepared data. It takes seconds, so it is computed on first use, on the first rank."""
        return fingerprint(self._data)

    @property
    def known_dataset(self) -> str | None:
        """The fingerprint of the data if :attr:`dataset` has been computed."""
        return vars(self).get("dataset")

    @cached_property
    def data_files(self) -> dict[str, str]:
        """A short hash of every data file, if the dataset lists its files."""
        return data_files(self._data)

    @cached_property
    def base(self) -> dict[str, str]:
        """The sha256 of every file of frozen weights that checkpoints leave out; takes 0.5 s per GB."""
        return base_hashes(self._model)

    @cached_property
    def tokenizer(self) -> str | None:
        """Hash of the tokenizer; ``None`` without one."""
        return tokenizer_hash(self._tokenizer) if self._tokenizer is not None else None


def base_hashes(model: Model) -> dict[str, str]:
    """Return the sha256 of every file of ``model`` that checkpoints leave out, by file name."""
    if files := capability(model, Streamable).base_files():
        show_status("hashing the frozen weights")
    return {path.name: hash_file(path) for path in files}


def require_same_base(path: Path, manifest: Manifest, model: Model) -> None:
    """Reject frozen weights that differ from those of the checkpoint ``path``, if it leaves out frozen weights."""
    changed = _changed_files(manifest.base, base_hashes(model)) if manifest.base else ""
    require(not changed, f"{path} needs frozen weights that model.weights no longer has{changed}: restore them")


def flat_settings(recipe: Recipe) -> dict[str, Any]:
    """Return every setting as JSON values by its dotted name, and the class names of model and data. Paths are
    absolute, so that all forms of a recipe agree. Secrets are redacted, because the signature of a URL may change."""
    recipe = with_absolute_paths(recipe)
    settings: dict[str, Any] = {}
    for part, chosen in (("model", recipe.model), ("data", recipe.data)):
        settings[part] = type(chosen).__qualname__
        names = [field.name for field in dataclasses.fields(chosen) if field.init]  # type: ignore[arg-type]
        settings |= {f"{part}.{name}": _name_of(getattr(chosen, name)) for name in names}
    settings |= {key: redact_value(setting.value, key) for key, setting in settings_of(recipe).items()}
    settings |= {"optim.factory": _name_of(recipe.optim.factory)} if recipe.optim.factory is not None else {}
    return json.loads(json.dumps(settings, default=str))


def default_settings(recipe: Recipe) -> dict[str, Any]:
    """Return the default of every setting that has one: its value in a checkpoint older than the setting."""
    plain, defaults = settings_of(recipe), dict[str, Any]()
    for key in flat_settings(recipe):
        *sections, name = key.split(".")
        field = {field.name: field for field in dataclasses.fields(reduce(getattr, sections, recipe))}[name]
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if default is not dataclasses.MISSING:
            defaults[key] = default if key in plain else _name_of(default)
    return json.loads(json.dumps(defaults, default=str))


def _name_of(value: Any) -> Any:
    """Return a name for a value that YAML cannot hold (a function, block classes), the same in every process."""
    if isinstance(value, list | tuple | set | frozenset):
        return [_name_of(item) for item in value]
    return getattr(value, "__qualname__", type(value).__qualname__)


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
            is_kind = field.name == "name" and not (field.type in ("str", str) and path.is_dir())  # size or model type
            if not is_kind and (path.exists() or ("*" in text and path.parent.is_dir())):
                paths[field.name] = str(path.absolute())
    return dataclasses.replace(part, **paths)


# Compare recipe, data and tokenizer of the checkpoint with those of the run that resumes it.

IGNORED = ("run.dir", "run.resume", "run.allow_change")  # settings that control how to resume

RESULT_SETTINGS = ("run.deterministic", "run.max_skipped_steps", "run.evaluate", "run.best", "run.patience")
"""Settings of the section run that change training or its result; other settings of run and checkpoint do not."""

LOADING = ("data.workers", "data.worker_timeout", "data.max_bad_samples", "data.cache_dir")
"""Settings of the section data that do not change the samples."""

PLANNED = tuple(f"memory.{knob.name}" for knob in KNOBS if knob.planned)
"""Settings that the planner chooses if there is a budget. They may differ on another machine and change only rounding.
"""


def require_same_run(path: Path, manifest: Manifest, now: RunIdentity, allowed: list[str]) -> list[str]:
    """Compare the checkpoint ``path``, which is resumed, with the current run; return one line per difference. Raise
    RecipeError for one that changes the training, unless its name or section is ``allowed``."""
    sections = {key.partition(".")[0] for key in now.recipe}
    known = sorted({*now.recipe, *sections, "data", "tokenizer", "base"})
    for key in allowed:
        require(key in known, f"run.allow_change={key!r} is not a setting{did_you_mean(key, known)}")
    is_planned = all(recipe.get("memory.budget") is not None for recipe in (manifest.recipe, now.recipe))
    free = {*LOADING, *allowed, *(PLANNED if is_planned else ())}
    lines: list[str] = []
    rejected: dict[str, str] = {}
    files = now.data_files  # read before training, so that the next checkpoint's hashes match its fingerprint
    for key, old, new in _differences(manifest, now):
        before, after = (truncate(json.dumps(value, ensure_ascii=False)) for value in (old, new))
        keep = f" (--{key} {old} keeps it)" if key == "memory.precision" else ""  # auto differs on another GPU
        line = f"{key}: {before} in the checkpoint, {after} now{keep}"
        if key == "data":
            line += _changed_files(manifest.data_files, files)
        if key == "base":
            line = f"base: the files of model.weights have changed{_changed_files(manifest.base, now.base)}"
        lines.append(line)
        is_free = key.startswith(("run.", "checkpoint.")) and key not in RESULT_SETTINGS
        if not is_free and key not in free and key.partition(".")[0] not in allowed:
            rejected[key] = line
    fix = f"Revert the change, or allow it with --run.allow_change '{json.dumps([*allowed, *rejected])}'"
    require(not rejected, f"{path} was saved with a different recipe: {'; '.join(rejected.values())}. {fix}")
    return lines


def _differences(manifest: Manifest, now: RunIdentity) -> Iterator[tuple[str, Any, Any]]:
    for key in sorted({*manifest.recipe, *now.recipe} - {*IGNORED}):
        old = manifest.recipe.get(key, now.defaults.get(key, "nothing"))
        new = now.recipe.get(key, "nothing")
        if old != new:
            yield key, old, new
    if manifest.dataset != now.dataset:
        yield "data", manifest.dataset[:12], now.dataset[:12]
    if manifest.base and manifest.base != now.base:  # a checkpoint without base files holds all weights
        yield "base", manifest.base, now.base
    if manifest.tokenizer != now.tokenizer:
        yield "tokenizer", (manifest.tokenizer or "none")[:12], (now.tokenizer or "none")[:12]


def _changed_files(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Describe the changed, missing and new files, the first few of each kind; empty if there are none."""
    kinds = {
        "changed": [name for name in before if name in now and before[name] != now[name]],
        "missing": [name for name in before if name not in now],
        "new": [name for name in now if name not in before],
    }
    found = [f"{kind}: {format_list(names)}" for kind, names in kinds.items() if names]
    return f" ({'; '.join(found)})" if before and found else ""
