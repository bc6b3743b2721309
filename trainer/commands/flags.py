"""Command line and YAML files of a recipe, parsed by jsonargparse, with names checked first and errors in one line.

YAML is read as plain values: tags do not construct objects, and the expansion of aliases is limited."""

from __future__ import annotations

import types
from argparse import SUPPRESS, Action, ArgumentError
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from enum import Enum
from functools import cache, partial
from pathlib import Path, PurePath
from re import findall, fullmatch, search
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from docstring_parser import parse as parse_docstring
from jsonargparse import ArgumentParser, DefaultHelpFormatter, Namespace, get_loader, set_loader

from trainer.commands import NO_FLAGS, RECIPE_FLAGS, CommandFlags
from trainer.commands.classes import SWAPPABLE_SECTIONS, known_classes
from trainer.errors import RecipeError, require, suggest_name
from trainer.recipe import UNSUPPORTED_VALUES, VALUE_ALIASES, VALUE_SUGGESTIONS, Recipe
from trainer.settings import settings_of
from trainer.system.error_reports import describe_error
from trainer.system.files import read_regular
from trainer.system.names import did_you_mean, foreign_switch

SWITCHES = ("help", *RECIPE_FLAGS.switches)
UNIONS = (Union, types.UnionType)
MAX_YAML_BYTES = 1_000_000  # size limit of a YAML file; about 100 kB are parsed per second
MAX_DEPTH, MAX_FOR_C = 100, 2_000  # levels; characters that may open one: at 40,000, PyYAML's C code crashes
MAX_YAML_NODES = 100_000  # limit of nodes with aliases expanded: a few lines of aliases can expand to billions

SWEEP_FLAG_HINTS = dict.fromkeys(("folds", "n_folds", "num_folds", "k_folds", "kfold", "n_splits", "cv"), "folds")
SWEEP_FLAG_HINTS |= dict.fromkeys(("trials", "n_trials"), "trials")  # flags of ``sweep`` that users give to ``fit``
Flags = list[tuple[str, str | None]]  # names and values, in the order given; the value is ``None`` for a switch


def split_argv(argv: Sequence[str], own: CommandFlags = NO_FLAGS) -> tuple[list[str], Flags]:
    """Split a command line into positional words and flags, before the recipe and its flags are known."""
    positionals: list[str] = []
    flags: Flags = []
    rest = list(argv)
    while rest:
        name, equals, text = rest.pop(0).partition("=")
        if (name == "-h" or name[2:] in (*SWITCHES, *own.switches)) and not equals:
            flags.append(("help" if name == "-h" else name[2:], None))
        elif not name.startswith("-") or name + equals == "-":  # a dash alone is standard input
            positionals.append(name + equals + text)
        elif not name.startswith("--"):
            raise RecipeError(f"unknown flag {name}: flags start with two dashes")
        elif (meant := foreign_switch(name[2:])) is not None:
            raise RecipeError(f"unknown flag {name}: use --{meant}")
        elif equals:
            flags.append((name[2:], text))
        else:
            count = next((at for at, word in enumerate(rest) if word.startswith("--")), len(rest))
            values = rest[: count if name[2:] in own.multi_valued else min(count, 1)]
            require(bool(values), f"flag {name} needs a value")
            flags += [(name[2:], value) for value in values]
            del rest[: len(values)]
    return positionals, flags


class SettingError(RecipeError):
    """An invalid name or value of the setting ``key``."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


class RecipeParser:
    """Parses the flags and YAML keys of one recipe; its current values are the defaults."""

    def __init__(self, recipe: Recipe, usage: str | None = None, own: CommandFlags = NO_FLAGS) -> None:
        self.settings = settings_of(recipe)
        self.valued, self.switches = {**RECIPE_FLAGS.valued, **own.valued}, {**RECIPE_FLAGS.switches, **own.switches}
        # Without print_config: jsonargparse would print the given, not the resolved batch settings.
        own_settings: dict[str, Any] = {"print_config": None, "exit_on_error": False, "allow_abbrev": False}
        self.parser = ArgumentParser(usage=usage, formatter_class=_Formatter, parser_mode="strict_yaml", **own_settings)
        for name, text in self.valued.items():
            shown: dict[str, Any] = {"metavar": name.upper(), "help": text, "dest": name}  # --batch-size, --batch_size
            self.parser.add_argument(f"--{name}", action="append", default=SUPPRESS, **shown)
        for name, text in self.switches.items():
            self.parser.add_argument(f"--{name}", action="store_true", default=SUPPRESS, help=text)
        groups: dict[str, Any] = {}
        # add_class_arguments would execute the imports under TYPE_CHECKING, including torch.
        for key, setting in self.settings.items():
            section, _, name = key.rpartition(".")
            if section not in groups:
                title = f"{section}: {setting.owner.__name__}" if section else "recipe"
                known = ", ".join(known_classes(section)) if section in SWAPPABLE_SECTIONS else ""
                about = f"--{section} CLASS chooses the class: {known}; or a custom one, as module.Class"
                groups[section] = self.parser.add_argument_group(title, about if known else None)
            shown = {"metavar": _describe(setting.hint), "help": _documentation(setting.owner).get(name) or None}
            groups[section].add_argument(f"--{key}", default=setting.value, type=_parser_type(setting.hint), **shown)

    def read_yaml(self, nested: Mapping[Any, Any]) -> dict[str, Any]:
        """Return the changes of a YAML file."""
        flat: dict[str, Any] = {}
        sections = {key[:at] for key in self.settings for at, letter in enumerate(key) if letter == "."}
        for given_key, value in _flatten(nested, sections):
            key = self._canonical(given_key)
            if key not in self.settings:
                meant = self._find_owner(key) or did_you_mean(key, [*self.settings, *sections])
                raise SettingError(key, f"unknown key {key}{meant}")
            if key in flat:
                raise SettingError(key, f"duplicate key {key}: given both nested and with a dot")
            flat[key] = value
        tree = {key: self._normalize(key, value) for key, value in flat.items()}
        return self._convert(partial(self.parser.parse_object, tree, defaults=False), flat)

    def read_flags(self, flags: Flags, yaml_changes: Mapping[str, Any]) -> dict[str, Any]:
        """Return the changes of flags, which are applied after the changes ``yaml_changes`` of YAML files."""
        before = {key: setting.value for key, setting in self.settings.items()} | dict(yaml_changes)
        given: dict[str, Any] = {}
        entries: dict[str, dict[str, str]] = {}
        argv, start = [], Namespace()
        for given_name, text in flags:
            name = self._canonical(given_name)
            key, entry = self._key_of(name, text)
            if text is None:
                argv.append(f"--{name}")
            elif entry:
                entries.setdefault(key, {})[entry] = text
            else:
                given[key] = text
                if name.endswith("+"):  # jsonargparse's flag for appending to a list
                    start[key] = before[key]
                elif key in self.settings:
                    text = self._normalize(key, text)
                argv.append(f"--{name}={text}")
        changes = self._convert(partial(self.parser.parse_args, argv, start, defaults=False), given)
        for key, texts in entries.items():
            value = changes.get(key, before[key])
            named = {name: _parse_value(f"{key}.{name}", text) for name, text in texts.items()}
            tree = {key: {**(value if isinstance(value, dict) else {}), **named}}
            changes |= self._convert(partial(self.parser.parse_object, tree, defaults=False), tree)
        return changes

    def _canonical(self, name: str) -> str:
        """Return the setting for ``name``: ``data.train_file`` and ``data.train_files`` mean the same."""
        other = f"{name}s" if name.endswith("_file") else name.removesuffix("s")
        is_file = name.startswith("data.") and name.removesuffix("s").endswith("_file")
        return other if is_file and name not in self.settings and other in self.settings else name

    def _key_of(self, name: str, text: str | None) -> tuple[str, str]:
        """Return the setting of the flag ``name``, and the entry for one of a dict, such as ``model.config.dim``."""
        if name in self.settings or name in self.valued or name in ("help", *self.switches):
            return name, ""
        if name[:-1] in self.settings and name.endswith("+") and _accepts(self.settings[name[:-1]].hint, list):
            return name[:-1], ""
        owner, _, entry = name.rpartition(".")
        if owner in self.settings and entry and _accepts(self.settings[owner].hint, dict):
            return owner, entry
        hint = self._find_owner(name) or did_you_mean(name, [*self.settings, *self.valued], dashes="--")
        if not hint and f"{owner}.config" in self.settings:
            hint = f"; for an entry of its configuration, use --{owner}.config.{entry}"
        raise RecipeError(f"unknown flag --{name} (value {text!r}){hint or '; --help lists all flags'}")

    def _normalize(self, key: str, value: Any) -> Any:
        """Return the canonical value for common other spellings."""
        return VALUE_ALIASES.get((key, str(value)), _as_list(self.settings[key].hint, value))

    def _find_owner(self, key: str) -> str:
        """Format a hint about the owner of an unknown ``key``: another command, or classes of the same module."""
        section, _, name = key.rpartition(".")
        if (flag := SWEEP_FLAG_HINTS.get(name.replace("-", "_"))) and flag not in self.valued:
            return f"; it is a flag of another command: trainer sweep RECIPE --{flag}"
        if inner := next((known for known in self.settings if known.startswith(f"{key}.")), ""):
            return f"; {key} is a section: give its settings, such as --{inner}"
        if section not in SWAPPABLE_SECTIONS or not name:
            return ""
        own = next((one.owner for known, one in self.settings.items() if known.startswith(f"{section}.")), None)
        having = [kind for kind in known_classes(section).values() if name in {one.name for one in fields(kind)}]
        alike = [kind for kind in having if own is not None and kind.__module__ == own.__module__] or having
        kinds = [kind.__name__ for kind in alike]
        has = f"{' and '.join(kinds)} ha{'ve' if len(kinds) > 1 else 's'} it"
        whose = own.__name__ if own is not None else "it"
        return f"; {whose} has no {name}, {has}: take --{section} {kinds[-1]}" if kinds else ""

    def _convert(self, parse: Callable[[], Namespace], given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings from ``parse``, with jsonargparse's errors in one line."""
        for key in (key for key in given if key in self.settings):
            hint, value = self.settings[key].hint, given[key]
            counted = _accepts(hint, int, float) and isinstance(value, int | str)
            is_huge = counted and fullmatch(r"[-+]?\d{20,}", str(value))
            require(not is_huge, f"{key} has {len(str(value).lstrip('+-'))} digits: give a smaller number")
            tree = _parse_value(key, value) if _accepts(hint, dict) else None
            if isinstance(tree, Mapping) and any(isinstance(name, float) for name in tree):  # 0.5 would become 0
                raise SettingError(key, _explain(key, hint, value))
        try:
            found = vars(parse().as_flat())
        except RecursionError:
            raise RecipeError(f"the value of {' or '.join(map(str, given))} is nested too deeply") from None
        except ArgumentError as error:
            named = search(r'^Parser key "([^"]+)"', str(error))
            if named is None or named[1] not in given:
                raise RecipeError(" ".join(str(error).split())) from error
            key, duplicate = named[1], search(r"duplicate key .*", str(error))
            why = f"{key}={given[key]!r}: {duplicate[0]}" if duplicate else ""
            raise SettingError(key, why or _explain(key, self.settings[key].hint, given[key])) from error
        return {key: value for key, value in found.items() if key in self.settings}


def load_yaml_file(path: Path) -> dict[Any, Any]:
    """Return the nested settings of a YAML file; errors name the file."""
    try:
        tree = load_yaml(read_regular(path, MAX_YAML_BYTES).decode()) or {}
        require(isinstance(tree, dict), f"must hold a mapping of settings, not a {type(tree).__name__}")
    except FileNotFoundError:
        raise RecipeError(f"{path}: no such file") from None
    except RecipeError as error:
        raise RecipeError(f"{path} {error}") from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise RecipeError(f"{path} line {line}: not valid YAML: {error.problem}") from error
    except RecursionError:
        raise RecipeError(f"{path} is nested too deeply") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise RecipeError(f"{path} cannot be read: {getattr(error, 'strerror', error)}") from error
    return tree


def find_line(path: Path, key: str) -> int | None:
    """Return the line of ``key``, nested or with dots, in a valid YAML file."""
    node, line = yaml.compose(path.read_text(), yaml.SafeLoader), None
    while key and isinstance(node, yaml.MappingNode):
        near = [(name, value) for name, value in node.value if f"{key}.".startswith(f"{name.value}.")]
        if not near:
            return None
        name, node = near[0]
        key, line = key[len(name.value) + 1 :], name.start_mark.line + 1
    return line


def load_yaml(text: str) -> Any:
    """Parse YAML with jsonargparse's safe loader. Raises ``YAMLError`` for invalid YAML.

    Raises ``RecipeError`` for duplicate keys (the loader would silently keep the last), for keys that are not scalars,
    and for aliases that expand to more than :data:`MAX_YAML_NODES` entries.
    """
    root, seen = None, 0
    if yaml.__with_libyaml__ and sum(map(text.count, "[{-?:")) <= MAX_FOR_C:
        with suppress(yaml.YAMLError):  # the Python parser's error is more precise
            root = yaml.compose(text, yaml.CSafeLoader)
    nodes = [(0, root or yaml.compose(text, yaml.SafeLoader))]
    while nodes:
        depth, node = nodes.pop()
        seen += 1
        if seen > MAX_YAML_NODES:
            raise RecipeError(f"has more than {MAX_YAML_NODES:,} entries, with aliases expanded: shorten it")
        if depth > MAX_DEPTH:
            raise RecursionError  # like Python's loader
        lines: dict[str, int] = {}
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            line = key.start_mark.line + 1
            require(isinstance(key, yaml.ScalarNode), f"line {line}: a key must be a word or a number")
            first = lines.get(key.value)
            require(first is None, f"line {line}: duplicate key {key.value}, first given on line {first}")
            lines[key.value] = line
            nodes.append((depth + 1, value))
        nodes += [(depth + 1, item) for item in node.value] if isinstance(node, yaml.SequenceNode) else []
    try:
        return get_loader("yaml")(text)
    except (ValueError, AttributeError, TypeError, LookupError, OverflowError) as error:  # such as !!int x or !!bool x
        raise yaml.YAMLError(f"a value does not fit its tag ({describe_error(error)})") from error


def _value(text: Any) -> Any:
    """Parse a text as YAML; return other values, and texts that are not YAML, unchanged."""
    try:
        return load_yaml(text) if isinstance(text, str) else text
    except yaml.YAMLError:
        return text


def _parse_value(key: str, text: Any) -> Any:
    try:
        return _value(text)
    except RecipeError as error:  # a duplicate key, too many aliases
        raise RecipeError(f"{key}={text!r}: {error}") from None


set_loader("strict_yaml", load_yaml, exceptions=(yaml.YAMLError,))


class _Formatter(DefaultHelpFormatter):
    """jsonargparse's help page, with the type next to the flag instead of in its description."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, max_help_position=34, **options)

    def _get_type_str(self, action: Action) -> None:
        return None

    def _format_action_invocation(self, action: Action) -> str:
        return " ".join([", ".join(action.option_strings), *([str(action.metavar)] if action.metavar else [])])


@cache
def _documentation(owner: type) -> dict[str, str]:
    """Return the descriptions of fields by name, from the docstrings of a class and its base classes."""
    fields = [field for cls in reversed(owner.__mro__) for field in parse_docstring(cls.__doc__ or "").params]
    return {field.arg_name: " ".join((field.description or "").split()) for field in fields}


def _flatten(tree: Mapping[Any, Any], sections: set[str], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Yield the settings of a nested mapping with dotted names; a dict that is a value is not split."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if key not in sections:
            yield key, value
        elif isinstance(value, Mapping):
            yield from _flatten(value, sections, f"{key}.")
        elif value is not None:  # ``None`` is an empty section
            raise RecipeError(f"{key}={value!r} is a section: give it settings, such as {key}.NAME")


def _describe(hint: Any) -> str:
    """Format a type for help and messages: ``int|null``, ``dict[int,int]``, ``cosine|linear``."""
    if hint in (None, type(None)):
        return "null"
    if get_origin(hint) in (Literal, *UNIONS):
        return "|".join(map(str if get_origin(hint) is Literal else _describe, get_args(hint)))
    name = getattr(get_origin(hint) or hint, "__name__", str(hint))
    inner = ",".join("..." if argument is ... else _describe(argument) for argument in get_args(hint))
    return f"{name}[{inner}]" if inner else name


def _explain(key: str, hint: Any, value: Any) -> str:
    if (reason := UNSUPPORTED_VALUES.get((key, str(value)))) is not None:
        return f"{key}={value} is not supported: {reason}"
    wanted, choices = _describe(hint), _choices(hint)
    if (meant := VALUE_SUGGESTIONS.get((key, str(value).lower()))) is not None:  # YAML reads yes as a bool
        return f"{key}={value!r} must be {wanted}; did you mean {meant}?"
    words = [word for word in findall(r"[\w.-]+", str(value)) if word not in choices]
    return f"{key}={value!r} must be {wanted}" + (suggest_name(words[0], choices) if words else "")


def _choices(hint: Any) -> list[str]:
    inner = get_args(hint)
    return list(map(str, inner)) if get_origin(hint) is Literal else [word for one in inner for word in _choices(one)]


def _union_members(hint: Any) -> list[Any]:
    """Return the alternatives of ``hint`` other than null."""
    members = get_args(hint) if get_origin(hint) in UNIONS else (hint,)
    return [member for member in members if member is not type(None)]


def _accepts(hint: Any, *kinds: type) -> bool:
    return any((get_origin(member) or member) in kinds for member in _union_members(hint))


def _as_list(hint: Any, value: Any) -> Any:
    """Wrap one or several comma-separated words in brackets if the setting is a list: ``[tensorboard]``."""
    if len(_union_members(hint)) != 1 or not _accepts(hint, list, tuple) or not isinstance(value, str):
        return value
    return value if value == "null" or value.startswith(("[", "(")) else f"[{value}]"


def _parser_type(hint: Any) -> Any:
    """Return the type with which jsonargparse checks a value; ``_value`` (plain YAML) if it has other than plain types.

    For a class, a function or ``Any``, jsonargparse would import any module named by a text or a ``class_path``. For
    ``dict[str, Any]`` it would parse strings again, "2" as 2.
    """
    if get_origin(hint) in UNIONS:
        members = tuple(map(_parser_type, get_args(hint)))
        return _value if _value in members else Union[members]  # noqa: UP007
    if hint == dict[str, Any]:
        return dict
    return hint if _is_plain(hint) else _value


def _is_plain(hint: Any) -> bool:
    if get_origin(hint) in (list, tuple, dict, *UNIONS):
        return all(argument is ... or _is_plain(argument) for argument in get_args(hint))
    if get_origin(hint) is Literal or hint in (None, type(None), int, float, str, bool, list, tuple, dict):
        return True
    return isinstance(hint, type) and issubclass(hint, (Enum, PurePath))
