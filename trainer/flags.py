"""The words of a command line taken apart, and the help page of a recipe's flags."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from trainer.recipe import Recipe, RecipeError
from trainer.settings import Setting, settings_of
from trainer.values import describe
from trainer.yaml_text import format_yaml, plain

SWITCHES = ("help", "print_config")


@dataclass(frozen=True)
class Arguments:
    """A command line taken apart.

    Args:
        positionals: words that belong to no flag.
        flags: ``(name, text)`` in the order given; the text is ``None`` for a flag without a value.
        switches: the flags without a value that were given.
        configs: the YAML files given with ``--config``.
        lists: the values of the flags that take several.
    """

    positionals: list[str] = field(default_factory=list)
    flags: list[tuple[str, str | None]] = field(default_factory=list)
    switches: set[str] = field(default_factory=set)
    configs: list[str] = field(default_factory=list)
    lists: dict[str, list[str]] = field(default_factory=dict)


def scan(argv: Sequence[str], several: Collection[str] = ()) -> Arguments:
    """Take a command line apart, before it is known which flags the recipe has.

    Every flag takes one value (``--name value`` or ``--name=value``), so nothing need be known about it. Argparse would
    need the recipe's flags first, while the recipe may stand after them.

    Args:
        argv: the words after the command.
        several: names of the flags that take all words up to the next flag.
    """
    found = Arguments()
    words = list(argv)
    while words:
        word = words.pop(0)
        if word == "-h":
            found.switches.add("help")
        elif word.startswith("--"):
            _take_flag(word[2:], words, several, found)
        elif word.startswith("-"):
            raise RecipeError(f"unknown flag {word}: flags start with two dashes")
        else:
            found.positionals.append(word)
    return found


def _take_flag(word: str, words: list[str], several: Collection[str], found: Arguments) -> None:
    """Put the flag ``word``, with its values from the front of ``words``, where it belongs in ``found``."""
    name, equals, text = word.partition("=")
    if name in SWITCHES:
        if equals:
            raise RecipeError(f"flag --{name} takes no value, not {text!r}")
        found.switches.add(name)
        return
    values = [text] if equals else _take_values(words, len(words) if name in several else 1)
    if name not in several and name != "config":  # whether a value is missing or the name is wrong is seen later
        found.flags.append((name, values[0] if values else None))
    elif not values:
        raise RecipeError(f"flag --{name} needs a value")
    elif name == "config":
        found.configs.extend(values)
    else:
        found.lists.setdefault(name, []).extend(values)


def _take_values(words: list[str], limit: int) -> list[str]:
    """Remove up to ``limit`` words from the front of ``words``, but no flag."""
    count = next((at for at, word in enumerate(words) if word.startswith("--")), len(words))
    values = words[: min(count, limit)]
    del words[: len(values)]
    return values


def format_flags(recipe: Recipe, usage: str) -> str:
    """The help page: every field of ``recipe`` as a flag, with its type, meaning and value."""
    parser = argparse.ArgumentParser(usage=usage, add_help=False, formatter_class=_formatter, allow_abbrev=False)
    general = parser.add_argument_group("options")
    general.add_argument("-h", "--help", action="store_true", help="show this page")
    general.add_argument("--config", metavar="FILE.yaml", help="read settings from a YAML file; flags override it")
    general.add_argument("--print_config", action="store_true", help="print the resolved recipe as YAML and exit")
    groups: dict[str, argparse._ArgumentGroup] = {}
    for setting in sorted(settings_of(recipe).values(), key=lambda setting: "." in setting.key):
        section = setting.key.rpartition(".")[0]
        if section not in groups:
            title = f"{section}: {setting.owner.__name__}" if section else "recipe"
            groups[section] = parser.add_argument_group(title)
        groups[section].add_argument(f"--{setting.key}", metavar=describe(setting.hint), help=_help(setting))
    return parser.format_help()


def _formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.HelpFormatter(prog, max_help_position=34)


def _help(setting: Setting) -> str:
    default = format_yaml(plain(setting.value), one_line=True)
    text = f"{_documentation(setting.owner, setting.key.rpartition('.')[2])} (default: {default})".lstrip()
    return text.replace("%", "%%")  # argparse formats help texts with %


def _documentation(owner: type, name: str) -> str:
    """What the docstring of the class, or of the base class that has the field, says about the field ``name``."""
    from docstring_parser import parse

    for cls in owner.__mro__:
        for parameter in parse(cls.__doc__ or "").params:
            if parameter.arg_name == name:
                return " ".join((parameter.description or "").split())
    return ""
