"""What a run is made of, as far as a checkpoint must be resumed with the same."""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from trainer.checkpoint.manifest import Manifest
from trainer.data.fingerprint import data_files, fingerprint, tokenizer_hash
from trainer.errors import RecipeError, listed, require
from trainer.memory.knobs import KNOBS
from trainer.recipe import Recipe
from trainer.run.directory import with_absolute_paths
from trainer.run.session import Session, from_first
from trainer.settings import did_you_mean, settings_of
from trainer.system.redact import redact_value


class Origin:
    """Which run it is, which start of it, and the recipe, data and tokenizer that it was started with.

    Args:
        session: launched; all ranks make their origin at the same time.
        run: the name of the run that is resumed; ``None`` draws a new one.
    """

    def __init__(self, session: Session, run: str | None = None) -> None:
        drawn = from_first(session.fabric, [secrets.token_hex(8), secrets.token_hex(4)])
        self.run, self.attempt = run or drawn[0], drawn[1]
        self.recipe = flat_settings(session.recipe)
        self._data, self._tokenizer = session.recipe.data, session.recipe.model.tokenizer_or_none()

    @cached_property
    def dataset(self) -> str:
        """Fingerprint of the prepared data; takes seconds, so it is made when it is first needed, on the first rank."""
        return fingerprint(self._data)

    @cached_property
    def data_files(self) -> dict[str, str]:
        """A short hash of every file of the data, where those are kept apart."""
        return data_files(self._data)

    @cached_property
    def tokenizer(self) -> str | None:
        """Hash of the tokenizer; ``None`` without one."""
        return tokenizer_hash(self._tokenizer) if self._tokenizer is not None else None


def flat_settings(recipe: Recipe) -> dict[str, Any]:
    """Every setting by its dotted name, as JSON would give it back, and the classes of model and data.

    Paths are absolute: the same recipe, started from its file or from the run's ``recipe.yaml``, is the same. Secrets
    are redacted, so a URL may be signed anew.
    """
    recipe = with_absolute_paths(recipe)
    settings: dict[str, Any] = {}
    for part in ("model", "data"):
        chosen = getattr(recipe, part)
        settings[part] = type(chosen).__qualname__
        fields = [field.name for field in dataclasses.fields(chosen) if field.init]
        settings |= {f"{part}.{name}": _name_of(getattr(chosen, name)) for name in fields}
    settings |= {key: redact_value(setting.value, key) for key, setting in settings_of(recipe).items()}
    return json.loads(json.dumps(settings, default=str))


def _name_of(value: Any) -> Any:
    """For what YAML cannot hold, and settings leave out (a function, classes of blocks): its name, in every process."""
    if isinstance(value, list | tuple | set | frozenset):
        return [_name_of(item) for item in value]
    name = getattr(value, "__qualname__", None)
    return name if name is not None else type(value).__qualname__


# Whether what is resumed is what is asked for: recipe, data and tokenizer, those of the checkpoint against today's.

IGNORED = ("run.dir", "run.resume", "run.allow_change")
"""Settings that say how to resume."""

BINDING = ("run.deterministic", "run.max_skipped_steps", "run.evaluate")
"""Settings of the section run that change what is trained or found; the others of run and checkpoint do not."""

LOADING = ("data.workers", "data.worker_timeout", "data.max_bad_samples", "data.cache_dir")
"""Settings of the section data that do not change what is in a sample."""

PLANNED = tuple(f"memory.{knob.name}" for knob in KNOBS if knob.planned)
"""What the planner decides where there is a budget: for another machine it may decide otherwise, and changes nothing
but rounding."""


def require_same_run(
    path: Path,
    manifest: Manifest,
    now: Mapping[str, Any],
    dataset: str,
    tokenizer: str | None,
    allowed: list[str],
    data_files: Mapping[str, str] | None = None,
) -> list[str]:
    """Compare what is resumed with what is asked for now.

    Args:
        path: the checkpoint.
        now: the settings that are asked for, by their dotted names.
        dataset: fingerprint of the data as it is now.
        tokenizer: hash of the tokenizer as it is now.
        allowed: ``run.allow_change``.
        data_files: a short hash of every file of the data as it is now, by its name.

    Returns:
        A line for each difference.

    Raises:
        RecipeError: naming every difference that changes the training and was not allowed.
    """
    _require_known(allowed, now)
    lines, refused = [], []
    for key, old, new in _differences(manifest, now, dataset, tokenizer):
        line = f"{key}: {_short(old)} in the checkpoint, {_short(new)} now"
        if key == "data":
            line += _changed_files(manifest.data_files, data_files or {})
        lines.append(line)
        section = key.partition(".")[0]
        is_free = _is_free(key) or (key in PLANNED and _has_budget(manifest.recipe, now))
        if not is_free and key not in allowed and section not in allowed:
            refused.append((key, line))
    if refused:
        keys = json.dumps([key for key, _ in refused])
        raise RecipeError(
            f"{path} was saved by another recipe: {'; '.join(line for _, line in refused)}. Undo the change, or, "
            f"to train on with it, say --run.allow_change '{keys}'"
        )
    return lines


def _require_known(allowed: list[str], now: Mapping[str, Any]) -> None:
    sections = {key.partition(".")[0] for key in now}
    known = sorted({*now, *sections, "data", "tokenizer"})
    for key in allowed:
        require(key in known, f"run.allow_change={key!r} is no setting{did_you_mean(key, known)}")


def _is_free(key: str) -> bool:
    return key in LOADING or (key.partition(".")[0] in ("run", "checkpoint") and key not in BINDING)


def _has_budget(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether the planner decided then as now."""
    return all(settings.get("memory.budget") is not None for settings in (before, now))


def _differences(
    manifest: Manifest, now: Mapping[str, Any], dataset: str, tokenizer: str | None
) -> Iterator[tuple[str, Any, Any]]:
    for key in sorted({*manifest.recipe, *now} - {*IGNORED}):
        old, new = manifest.recipe.get(key, "nothing"), now.get(key, "nothing")
        if old != new:
            yield key, old, new
    if manifest.dataset != dataset:
        yield "data", manifest.dataset[:12], dataset[:12]
    if manifest.tokenizer != tokenizer:
        yield "tokenizer", (manifest.tokenizer or "none")[:12], (tokenizer or "none")[:12]


def _changed_files(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Which files of the data have changed, the first few of each kind."""
    kinds = {
        "changed": [name for name in before if name in now and before[name] != now[name]],
        "missing": [name for name in before if name not in now],
        "new": [name for name in now if name not in before],
    }
    told = [f"{kind}: {listed(names)}" for kind, names in kinds.items() if names]
    return f" ({'; '.join(told)})" if before and told else ""


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
