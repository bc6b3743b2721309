"""What a run is made of, as far as a checkpoint must be resumed with the same."""

from __future__ import annotations

import dataclasses
import json
import secrets
from functools import cached_property
from typing import Any

from trainer.agreement import from_first
from trainer.data.fingerprint import data_files, fingerprint, tokenizer_hash
from trainer.recipe import Recipe
from trainer.redact import redact_value
from trainer.rundir import with_absolute_paths
from trainer.session import Session
from trainer.settings import settings_of


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
