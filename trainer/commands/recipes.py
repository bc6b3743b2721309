"""Loading of recipes: packaged names, Python files, and YAML files, such as those written by runs."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.commands import NO_FLAGS, RECIPE_FLAGS, TRUST_RECIPE, CommandFlags
from trainer.commands.classes import SWAPPABLE_SECTIONS, require_settings, split_classes, with_classes
from trainer.commands.own_data import TABLES, infer, is_own_data
from trainer.contract import Data, Model
from trainer.errors import MissingArgumentError, RecipeError, require, safe_message
from trainer.recipe import Optim, Recipe
from trainer.settings import CLASS, change, dump_recipe, settings_of
from trainer.system.environment import is_first_process
from trainer.system.files import default_folder, make_folder, write_atomic
from trainer.system.names import did_you_mean
from trainer.system.redact import redact_value, refuse_redacted
from trainer.system.text import escaped, wrapped

if TYPE_CHECKING:
    from trainer.commands.flags import Flags, RecipeParser

MAX_COUNT = 1_000_000  # limit of integer flags of commands: devices, nodes, steps, trials


def recipes_folder() -> Path:
    """Return the folder of the packaged recipes: inside the installed package, or next to it in a checkout."""
    package = Path(__file__).parents[1]
    return package / "recipes" if (package / "recipes").is_dir() else package.parent / "recipes"


def packaged_recipes() -> list[str]:
    """Return the names of the packaged recipes."""
    return sorted(path.stem for path in recipes_folder().glob("*.py") if not path.stem.startswith("_"))


def load_recipe(reference: str, *, trusted: bool = False) -> tuple[Recipe, str | None]:
    """Return the recipe ``reference`` and its source: a packaged name or the absolute path of a Python file.

    ``reference`` is a packaged name, a ``.py`` file that defines ``recipe``, or a ``.yaml`` file. The YAML file names a
    recipe, or the classes of model and data, in which case the source is ``None``; its other settings are applied. A
    ``.py`` file that it names is executed only if ``trusted`` (``--trust-recipe``). Raises ``RecipeError`` if there is
    no such recipe, or it does not load.
    """
    if not reference.endswith((".yaml", ".yml")):
        source = source_of(reference)
        return import_recipe(_source_path(source)), source
    from trainer.commands.flags import RecipeParser, load_yaml_file  # jsonargparse: not needed for `trainer --help`

    path = Path(reference)
    tree = load_yaml_file(path)
    named = yaml_source(path, tree)
    if named is not None and os.path.isabs(named) and not trusted:
        code = f"{path}: recipe={str(tree['recipe'])!r} is Python code, {os.path.realpath(named)!r}"
        raise RecipeError(f"{code}, and is not executed: add --{TRUST_RECIPE} if you trust the file")
    tree, classes = split_classes(tree)
    fix = "add a line `recipe: NAME` with a packaged recipe or a .py file, or give model.class and data.class"
    require(named is not None or classes.keys() == SWAPPABLE_SECTIONS.keys(), f"{path} names no recipe: {fix}")
    base = import_recipe(_source_path(named)) if named is not None else Recipe(model=Model(), data=Data(), batch_size=1)
    recipe, needed = _with_classes_of(path, base, classes, trusted)
    changes = yaml_changes(RecipeParser(recipe), path, tree, trusted)
    if named is None and changes.keys().isdisjoint({"batch_size", "accumulate"}):
        raise RecipeError(f"{path}: batch_size is missing: give it, or accumulate and memory.micro_batch_size")
    require_settings(recipe, needed, changes)
    return change(recipe, changes), named


def source_of(reference: str, folder: Path | None = None) -> str:
    """Return a packaged name, or the absolute path of a file relative to ``folder`` (default: working directory)."""
    names = packaged_recipes()
    if reference in names:
        return reference
    path = Path(os.path.abspath((folder or Path()) / reference))
    if path.suffix != ".py":
        known = f"packaged recipes: {', '.join(names)}; or the path of a .py or .yaml file"
        meant = did_you_mean(reference, names)
        if os.path.isfile(path / "recipe.yaml"):  # a run directory
            meant = f"; did you mean {Path(reference, 'recipe.yaml')}?"
        elif os.path.isfile(path / "config.json"):
            meant = f": it is a model; use --model.name {reference} of a recipe, or trainer plan hf:{reference}"
        require(path.suffix not in TABLES, f"data {reference!r}: no such file")
        raise RecipeError(f"unknown recipe {reference!r}{meant} ({known})")
    # Unlike Path.is_file, also for an invalid name.
    require(os.path.isfile(path), f"recipe {reference!r}: no such file")
    return path.stem if path.stem in names and path.samefile(recipes_folder() / path.name) else str(path)


def yaml_source(path: Path, tree: Mapping[Any, Any]) -> str | None:
    """Return the recipe named by a YAML file, or ``None``."""
    try:
        return None if (reference := tree.get("recipe")) is None else source_of(str(reference), path.parent)
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from error


def yaml_changes(parser: RecipeParser, path: Path, tree: Mapping[Any, Any], trusted: bool) -> dict[str, Any]:
    """Return the settings of a YAML file, without the name of its recipe; errors name the file.

    A custom optimizer is code, like a class: it is rejected unless the file is ``trusted``."""
    try:
        changes = parser.read_yaml({key: value for key, value in tree.items() if key != "recipe"})
        name = changes.get("optim.name", "adamw")
        unsafe = f"optim.name={name!r} is Python code named by a file and is not imported"
        require(trusted or not Optim(name).is_code, f"{unsafe}: add --{TRUST_RECIPE} if you trust the file")
    except RecipeError as error:
        from trainer.commands.flags import find_line

        line = find_line(path, key) if (key := getattr(error, "key", "")) else None
        raise RecipeError(f"{path}{f' line {line}' if line else ''}: {error}") from error
    return changes


def import_recipe(path: Path) -> Recipe:
    """Run a Python file like ``python FILE``, but not as ``__main__``, and return its ``recipe``."""
    if path.parent != recipes_folder() and str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # a recipe may import modules of its folder
    name = path.stem
    while name in sys.modules and getattr(sys.modules[name], "__file__", None) != str(path):
        name += "_"  # a file that is read again keeps its name: recipes with its classes compare equal
    spec: Any = spec_from_file_location(name, path)
    module = sys.modules[name] = module_from_spec(spec)  # dataclasses look up their module here
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, KeyboardInterrupt):
            raise
        what = ("" if isinstance(error, RecipeError) else f"{type(error).__name__}: ") + safe_message(error)
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        if isinstance(error, SyntaxError) and error.filename == str(path):
            lines = [error.lineno]
        raise RecipeError(f"recipe {path}{f' line {lines[-1]}' if lines else ''}: {what}") from error
    recipe: Any = getattr(module, "recipe", None)
    require(recipe is not None, f"recipe {path} defines no recipe: add a line `recipe = Recipe(...)`")
    require(isinstance(recipe, Recipe), f"recipe {path}: recipe is a {type(recipe).__name__}, not a trainer.Recipe")
    return recipe


def _source_path(source: str) -> Path:
    return Path(source) if os.path.isabs(source) else recipes_folder() / f"{source}.py"


class ParsedCommand(NamedTuple):
    """The recipe with YAML files and flags applied, its source, the word that named it, and all given flags."""

    recipe: Recipe
    source: str | None
    reference: str
    flags: Flags


def parse_command(
    command: str,
    expected: str,
    argv: Sequence[str],
    own: CommandFlags = NO_FLAGS,
    named: Callable[[str], str] = str,
    make_recipe: Callable[[str, Flags], Recipe | None] = lambda reference, flags: None,
) -> ParsedCommand | None:
    """Parse a command line of RECIPE or RUN_DIR (``expected``) and flags; ``None`` after printing help or the recipe.

    ``named`` returns the recipe file for a RUN_DIR; ``make_recipe`` may build a recipe from flags instead."""
    from trainer.commands.flags import split_argv

    positionals, flags = split_argv(argv, own)
    if not positionals and own.description and ("help", None) in flags:
        print(_command_help(command, expected, own))
        return None
    if not positionals and expected == "RECIPE":
        positionals = [text for name, text in flags if name == "config" and text][:1]  # the YAML file names its recipe
    if not positionals:
        known = f" (packaged recipes: {', '.join(packaged_recipes())})" if expected == "RECIPE" else ""
        raise MissingArgumentError(f"{command} needs a {expected}{known}: see trainer --help")
    reference, *others = positionals
    flags += [(own.positional, word) for word in others if own.positional]
    if others and not own.positional:
        name, equals, value = others[0].partition("=")
        value = value if equals else next(iter(others[1:]), "")
        meant = f"; did you mean --{name} {value}?" if value and name.replace(".", "").isidentifier() else ""
        raise RecipeError(f"unexpected {others[0]!r}: {command} takes one {expected}, then flags{meant}")
    if expected == "RECIPE" and reference not in packaged_recipes() and is_own_data(reference):
        reference, inferred = _infer(command, reference, flags)
        flags = [*inferred, *flags]
    if (recipe := make_recipe(reference, flags)) is not None:
        source: str | None = reference
    else:
        recipe, source = load_recipe(named(reference), trusted=(TRUST_RECIPE, None) in flags)
    resolved = resolve(recipe, source, flags, f"trainer {command} {reference} [flags]", own)
    return None if resolved is None else ParsedCommand(resolved, source, reference, flags)


def _infer(command: str, reference: str, flags: Flags) -> tuple[str, Flags]:
    """Return the recipe and the flags for the user's data in ``reference``, and print the equivalent command."""
    found = infer(reference, {name: text for name, text in flags if text is not None}, command)
    if is_first_process():
        print(escaped(f"{reference}: {found.data}"), file=sys.stderr)  # stdout is for --print_config
        print(escaped(f"same as: {found.command(command)}"), file=sys.stderr, flush=True)
    return found.recipe, list(found.flags.items())


def _command_help(command: str, what: str, own: CommandFlags) -> str:
    rows: dict[str, str] = {}
    for flags in (own, RECIPE_FLAGS):
        several = dict.fromkeys(flags.multi_valued, " ...")
        rows |= {f"--{name} {name.upper()}{several.get(name, '')}": text for name, text in flags.valued.items()}
        rows |= {f"--{name}": text for name, text in flags.switches.items()}
    width = max(map(len, rows))
    words = f" [{own.positional.upper()} ...]" if own.positional else ""
    lines = [f"usage: trainer {command} {what}{words} [flags]\n", wrapped(own.description, "") + "\n"]
    lines += [wrapped(f"  {flag:<{width}}  {text}", " " * (width + 4)) for flag, text in rows.items()]
    lines += [f"\nEach setting of the recipe is also a flag: trainer {command} {what} --help lists them."]
    return "\n".join(lines)


def resolve(
    recipe: Recipe, source: str | None, flags: Flags, usage: str, own: CommandFlags = NO_FLAGS
) -> Recipe | None:
    """Return ``recipe`` with YAML files and flags applied; ``None`` after printing help or the recipe."""
    from trainer.commands.flags import RecipeParser, load_yaml_file

    named = {name.removesuffix(f".{CLASS}"): text for name, text in flags if text and _names_class(name)}
    recipe, needed = with_classes(recipe, named, trusted=True)
    trees: list[tuple[Path, dict[Any, Any]]] = []
    for path in [Path(text) for name, text in flags if name == "config" and text]:  # later files over earlier ones
        tree = load_yaml_file(path)
        if yaml_source(path, tree) not in (None, source):
            raise RecipeError(f"{path}: recipe={tree['recipe']!r} differs from the given recipe {source!r}")
        rest, classes = split_classes(tree)
        classes = {part: name for part, name in classes.items() if part not in named}
        recipe, missing = _with_classes_of(path, recipe, classes, (TRUST_RECIPE, None) in flags)
        needed |= missing
        trees.append((path, rest))
    parser = RecipeParser(recipe, usage, own)
    if ("help", None) in flags:
        parser.parser.print_help()
        return None
    in_yaml: dict[str, Any] = {}
    for path, rest in trees:
        in_yaml |= yaml_changes(parser, path, rest, (TRUST_RECIPE, None) in flags)
    by_flags = parser.read_flags([(name, text) for name, text in flags if not _names_class(name)], in_yaml)
    require_settings(recipe, needed, in_yaml, by_flags)
    resolved, asked = change(recipe, in_yaml, by_flags), {**in_yaml, **by_flags}
    if "model.name" in asked and "data.max_length" not in asked:
        resolved = _fit_max_length(resolved)
    refuse_redacted({key: setting.value for key, setting in settings_of(resolved).items()})
    if ("print_config", None) in flags:
        print(dump_recipe(resolved, source), end="")
        return None
    return resolved


def _fit_max_length(recipe: Recipe) -> Recipe:
    """Lower ``data.max_length``, which the recipe chose for another model, to the maximum of this one."""
    from trainer.models.hub import max_tokens

    settings = settings_of(recipe)
    length, name = (settings[key].value if key in settings else None for key in ("data.max_length", "model.name"))
    limit = max_tokens(str(name)) if isinstance(length, int) else None
    if length is None or limit is None or length <= limit:
        return recipe
    if is_first_process():
        print(escaped(f"data.max_length is {limit} instead of {length}: {name} supports no more"), file=sys.stderr)
    return change(recipe, {"data.max_length": limit})


def _names_class(flag: str) -> bool:
    return flag.removesuffix(f".{CLASS}") in SWAPPABLE_SECTIONS


def _with_classes_of(
    path: Path, recipe: Recipe, classes: Mapping[str, str], trusted: bool
) -> tuple[Recipe, dict[str, list[str]]]:
    try:
        return with_classes(recipe, classes, trusted)
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from error


def parse_count(name: str, text: str) -> int:
    """Parse the value of ``--name``, an integer of at least 1."""
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and 0 < int(text) <= MAX_COUNT):
        raise RecipeError(f"--{name}={text[:40]!r} must be an integer from 1 to {MAX_COUNT:,}")
    return int(text)


def write_content(path: Path, subject: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Write the result of a command as JSON, and return it: ``subject``, the date, ``found``, and versions."""
    from trainer.report.summary import versions

    content = {**subject, "date": time.strftime("%Y-%m-%d %H:%M:%S %z"), **redact_value(found), "versions": versions()}
    write_atomic(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    return content


def create_output_folder(command: str, wanted: str | None, reference: str) -> Path:
    """Create the folder for ``command.json``: ``wanted`` (``--out``) or a default; reject one with such a file."""
    out = Path(wanted or default_folder(reference, f"{command}-")).absolute()
    make_folder("--out", out)
    require(not (out / f"{command}.json").exists(), f"--out={out} already holds a {command}: choose another folder")
    return out
