"""``trainer migrate``: a recipe from the settings of another trainer, by the tables in ``migrations/``."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from trainer.commands import CommandFlags
from trainer.commands.classes import split_classes, with_classes
from trainer.commands.flags import MAX_YAML_BYTES, RecipeParser, load_yaml, load_yaml_file, split_argv
from trainer.commands.recipes import parse_count
from trainer.contract import Data, Model
from trainer.errors import MissingArgumentError, RecipeError, require, require_positive, suggest_name
from trainer.recipe import Recipe
from trainer.settings import change, dump_settings
from trainer.system.files import read_json_object
from trainer.system.names import OUR_NAMES, foreign_switch
from trainer.system.redact import redact_value
from trainer.system.text import escaped

LIBRARIES = ("transformers", "lightning", "accelerate", "timm")
COUNTS = ("micro", "accumulate", "ranks", "nodes", "warmup_epochs")  # what tables give for _derive
UNSET: tuple[Any, ...] = (None, "", [], {})


def migrate(argv: Sequence[str]) -> None:
    """Print a recipe with the settings of another trainer's file, and on stderr what it lacks."""
    positionals, flags = split_argv(argv, CommandFlags({"from": "", "ranks": ""}))
    asked = {name: text or "" for name, text in flags}
    if len(positionals) != 1 or "help" in asked:
        raise MissingArgumentError("migrate takes one FILE: see trainer --help")
    unknown = ", ".join(f"--{name}" for name in asked if name not in ("from", "ranks"))
    require(not unknown, f"migrate has no flag {unknown}: it has --from and --ranks")
    path, ranks = Path(positionals[0]), parse_count("ranks", asked["ranks"]) if "ranks" in asked else None
    tree = read_json_object(path, MAX_YAML_BYTES) or load_yaml_file(path)
    tables = {library: read_table(library) for library in LIBRARIES}
    library = asked.get("from") or recognize(path, tree, tables)
    require(library in tables, f"--from={library!r} must be one of {', '.join(tables)}")
    Migration(path, tables[library], tree).print(ranks)


def read_table(library: str) -> dict[str, Any]:
    """Return the table of ``library``: cases for each key, and the first that applies counts."""
    content = (Path(__file__).parent / "migrations" / f"{library}.yaml").read_text(encoding="utf-8")
    tree = yaml.load(content, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return {**tree, "keys": {key: row if isinstance(row, list) else [row] for key, row in tree["keys"].items()}}


def recognize(path: Path, tree: Mapping[Any, Any], tables: Mapping[str, Any]) -> str:
    """Return the only library that has keys of ``tree`` which the others do not have."""
    names = {library: {key.partition(".")[0] for key in table["keys"]} for library, table in tables.items()}
    owners = {key: [library for library, known in names.items() if key in known] for key in tree}
    fits = {libraries[0]: f"{libraries[0]} ({key})" for key, libraries in owners.items() if len(libraries) == 1}
    why = f"may be of {' or '.join(fits.values())}" if fits else f"has no key that only one of {', '.join(tables)} has"
    require(len(fits) == 1, f"{path} {why}: add --from {'|'.join(tables)}")
    return next(iter(fits))


def matches(pattern: Any, value: Any) -> bool:
    """Return whether ``value`` is ``pattern``: wildcards, ``fraction``, null (not set) or a value."""
    if isinstance(pattern, str) and isinstance(value, str | list):
        return bool(value) and fnmatchcase(str(value), pattern)
    if pattern is None or pattern == "fraction":
        return value in UNSET if pattern is None else isinstance(value, float) and not value.is_integer()
    return pattern == value and isinstance(pattern, bool) == isinstance(value, bool)


def fill(template: Any, values: Mapping[str, Any]) -> Any:
    """Return ``template``, a list or a value, with ``{KEY}`` at its end replaced by the value of KEY."""
    if isinstance(template, list):
        return [fill(one, values) for one in template]
    start, brace, key = str(template).partition("{")
    value = values[key.rstrip("}")] if brace else template
    return f"{start}{value}" if brace and start else value


class Migration:
    """The settings of a recipe for those in ``tree``, and what has no counterpart."""

    def __init__(self, path: Path, table: Mapping[str, Any], tree: Mapping[Any, Any]) -> None:
        self.path, self.table, self.keys = path, table, table["keys"]
        self.settings, self.origins = dict[str, Any](), dict[str, str]()
        self.lost, self.unknown = list[str](), list[str]()
        given = {key: value for key, value in self._flatten(tree) if value is not None}
        self.values = {key: cases[0].get("default") for key, cases in self.keys.items()} | given
        for key in self.values:
            self._convert(key)

    def _flatten(self, tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
        for key, value in [(f"{prefix}{name}", value) for name, value in tree.items()]:
            inner = dict(enumerate(value)) if isinstance(value, list) and f"{key}.0" in self.keys else value
            nested = isinstance(inner, Mapping) and any(known.startswith(f"{key}.") for known in self.keys)
            yield from self._flatten(inner, f"{key}.") if nested else [(key, value)]

    def _convert(self, key: str) -> None:
        """Set what the value of ``key`` becomes, or list it as lost."""
        names = (name for name in (key, *self.keys) if name in self.keys and fnmatchcase(key, name))
        cases = self.keys.get(next(names, ""), [])
        if not cases:
            self.unknown.append(f"{key}{suggest_name(key, self.keys)}")
        value, default = self.values[key], cases[0].get("default") if cases else None
        case = next((case for case in cases if self._applies(case)), None)
        if case is None:
            return
        items = value.split() if isinstance(value, str) else value
        for item in items if "each" in case and isinstance(items, list) else [value]:
            outcome = self._outcome(key, item, case)
            if isinstance(outcome, dict):
                self._set(key, outcome, extends="each" in case)
            elif item not in (*UNSET, default) and (item or default):
                self.lost.append(f"{key}={str(redact_value(item, key))[:60]}: {outcome}")

    def _set(self, key: str, outcome: Mapping[str, Any], extends: bool) -> None:
        """Set what ``key`` becomes; with ``extends``, a list is appended to what earlier items have set."""
        for ours, new in outcome.items():
            if not new and new is not False and ours.startswith(("model.", "data.")):
                continue  # not every model or dataset has the setting
            whole = int(new) if isinstance(new, float) and new.is_integer() else new
            earlier = self.settings.get(ours, []) if extends and isinstance(new, list) else []
            self.settings[ours] = [*earlier, *new] if isinstance(new, list) else whole
            self.origins[ours] = key

    def _applies(self, case: Mapping[str, Any]) -> bool:
        wanted = case.get("when", {}).items()
        return all(any(matches(one, self.values.get(key)) for one in patterns) for key, patterns in wanted)

    def _outcome(self, key: str, value: Any, case: Mapping[str, Any]) -> dict[str, Any] | str:
        """Return our settings for ``key=value``, or the reason why there are none."""
        value = str(value["class_path"]) if isinstance(value, Mapping) and "class_path" in value else value
        outcomes = [one for pattern, one in case.get("values", {}).items() if matches(pattern, value)]
        name = key.rpartition(".")[2]
        if value is True and not outcomes and (switch := foreign_switch(name)):
            return dict(re.findall(r"([\w.]+) (\S+)", switch))
        to = case.get("to") if "to" in case or "why" in case else OUR_NAMES.get(name)
        if outcomes or value in UNSET:
            to = outcomes[0] if outcomes else {}
        elif isinstance(to, str):
            return {to: value}
        to = case.get("why", "not a known value") if to is None else to
        return to if isinstance(to, str) else {ours: fill(new, self.values) for ours, new in to.items()}

    def print(self, ranks: int | None) -> None:
        """Print the recipe, checked as ``trainer fit`` checks it, and what the user must know."""
        report = {"computed": list(self._derive(ranks)), "no counterpart": self.lost, "unknown keys": self.unknown}
        classes = {part: self.settings.get(f"{part}.class", name) for part, name in self.table["classes"].items()}
        base, needed = with_classes(Recipe(model=Model(), data=Data(), batch_size=1), classes, trusted=False)
        checked = {key: "x" for keys in needed.values() for key in keys} | self.settings
        try:
            tree, _ = split_classes(load_yaml(dump_settings(checked)))
            change(base, RecipeParser(base).read_yaml(tree))
        except RecipeError as error:
            key = getattr(error, "key", "") or re.split("[= ]", str(error))[0]
            raise RecipeError(f"{self.path}: {self.origins.get(key, key)}: {error}") from error
        whole = {"model.class", "data.class"} <= self.settings.keys()
        use = "FILE.yaml" if whole else "RECIPE --config FILE.yaml, where RECIPE has your model and data"
        print(f"# {escaped(self.path.name)}: {self.table['title']}\n# Use: trainer fit {use}")
        print(dump_settings(self.settings), end="")
        for title in [title for title, lines in report.items() if lines]:
            print(f"{title}:", *(f"  {escaped(line)}" for line in report[title]), sep="\n", file=sys.stderr)

    def _derive(self, asked: int | None) -> Iterator[str]:
        """Replace counts, which the tables give other names, by what follows from them; describe it."""
        counts = {name: self.settings.pop(name) for name in COUNTS if name in self.settings}
        for name in counts:
            require_positive(f"{self.path}: {self.origins[name]}", counts[name])
        stated = counts["ranks"] * counts.get("nodes", 1) if "ranks" in counts else None
        fits = asked is None or stated in (None, asked)
        require(fits, f"--ranks={asked}: {self.path} has {stated}, by {self.origins.get('ranks')}: leave out --ranks")
        source = "--ranks" if asked else "ranks of the file" if stated else "ranks, not in the file: give --ranks N"
        factors = {self.origins[name]: counts[name] for name in ("micro", "accumulate") if name in counts}
        factors[source] = asked or stated or 1
        text = " × ".join(f"{count} ({name})" for name, count in factors.items())
        if "micro" in counts:
            batch = math.prod(factors.values())
            self.settings = {"batch_size": batch, "memory.micro_batch_size": counts["micro"], **self.settings}
            yield f"batch_size = {text} = {batch}"
        else:
            self.settings |= {"accumulate": counts["accumulate"]} if "accumulate" in counts else {}
            yield f"batch_size is not in the file: give it, samples per pass × {text}"
        if "warmup_epochs" in counts:
            epochs = self.settings.get("epochs")
            require_positive(f"{self.path}: epochs", epochs)
            self.settings["optim.warmup_ratio"] = counts["warmup_epochs"] / epochs
            yield f"optim.warmup_ratio = {counts['warmup_epochs']} (warmup_epochs) / {epochs} (epochs)"
